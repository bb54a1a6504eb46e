"""Functions and chains of the user that take part in decoding: when to stop, what to keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from specguard_chains.decoding.steps import Step
from specguard_chains.errors import ConfigurationError

Hook = Callable[[Step], Any]
"""Returns what it says of a step, or an awaitable of that."""


@dataclass(frozen=True, slots=True)
class Hooks:
    """What an answer's decoding asks the user."""

    stop_when: Hook | None = None
    review: Hook | None = None

    @classmethod
    def of(cls, stop_when: Any, review: Any, *, asynchronous: bool = False) -> Hooks:
        """Return the hooks of one call.

        Args:
            stop_when: A function or Runnable from a step to a truth value, sync or async; or None.
            review: The same from a step to keep, regenerate or stop.
            asynchronous: Ask Runnables by `ainvoke`.

        Raises:
            ConfigurationError: One of them cannot be called.
        """
        method = "ainvoke" if asynchronous else "invoke"
        return cls(_hook("stop_when", stop_when, method), _hook("review", review, method))


def _hook(name: str, given: Any, method: str) -> Hook | None:
    if given is None:
        return None
    ask = getattr(given, method, given)
    if not callable(ask):
        raise ConfigurationError(
            f"{name} must be a function or a Runnable that takes a step, not {given!r}"
        )
    hook: Hook = ask
    return hook


NO_HOOKS = Hooks()
