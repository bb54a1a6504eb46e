"""Models that this process loads once by name for whoever needs them, beside its engines."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class Closable(Protocol):
    """A model that can be freed."""

    def close(self) -> None:
        """Free the model, whoever still holds it."""
        ...


T = TypeVar("T", bound=Closable)


class Loaded(Generic[T]):
    """What is loaded, by name."""

    def __init__(self, load: Callable[[str], T]) -> None:
        """Start with nothing; `load` is called once a name."""
        self._load = load
        self._models: dict[str, T] = {}
        self._loading = threading.Lock()

    def get(self, name: str) -> T:
        """Return a model, loaded unless it is here already."""
        with self._loading:
            if name not in self._models:
                self._models[name] = self._load(name)
            return self._models[name]

    def peek(self, name: str) -> T | None:
        """Return a model if it is loaded."""
        return self._models.get(name)

    def unload(self) -> None:
        """Free all of them."""
        with self._loading:
            while self._models:
                self._models.popitem()[1].close()
