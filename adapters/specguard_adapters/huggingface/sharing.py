"""Loaded models and tokenizers, shared within the process and freed with their last user."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import torch

T = TypeVar("T")
_loaded: weakref.WeakValueDictionary[Hashable, Any] = weakref.WeakValueDictionary()
_loading = threading.RLock()


def shared(key: Hashable, load: Callable[[], T]) -> T:
    """Return what was loaded under this key and is still in use; else load it, one at a time."""
    with _loading:
        value: T | None = _loaded.get(key)
        if value is None:
            value = _loaded[key] = load()
        return value


def key_of(options: Mapping[str, Any]) -> Hashable:
    """Return options as a key. Numbers, names and mappings of them are told apart by value.

    Everything else, such as a quantisation's settings, is told apart by identity.
    """
    return frozenset((name, _part(value)) for name, value in options.items())


def _part(value: Any) -> Any:
    if isinstance(value, Mapping):
        return key_of({str(name): part for name, part in value.items()})
    if isinstance(value, (str, int, float, torch.dtype, torch.device)):
        return str(value).removeprefix("torch.")
    return _Itself(value)


class _Itself:
    """An object that equals nothing but itself; held, so that no later one gets its id."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)
