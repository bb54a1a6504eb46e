"""What ends a running decode before its time: nobody wants it any more, or Python exits."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable
from typing import Protocol

import llama_cpp

EXIT_S = 10.0
"""Longest wait for a running decode when Python exits."""

exiting = threading.Event()
"""Set once Python exits: from then on nothing is computed."""


class AbortCheck:
    """Has a context ask between the nodes of a graph whether to go on."""

    def __init__(self) -> None:
        """Start without a question."""
        self._cancelled: Callable[[], bool] | None = None
        self._error: BaseException | None = None
        self._callback = llama_cpp.ggml_abort_callback(self._aborts)

    def ask(self, handle: int, cancelled: Callable[[], bool] | None) -> None:
        """Have a context ask `cancelled` in the coming decodes; None asks nothing."""
        if cancelled is not self._cancelled:
            self._cancelled = cancelled
            check = self._callback if cancelled else llama_cpp.ggml_abort_callback()
            llama_cpp.llama_set_abort_callback(handle, check, None)

    def raise_error(self) -> None:
        """Raise what the question ran into, if it ran into anything."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _aborts(self, _: int | None) -> bool:
        try:
            return exiting.is_set() or (self._cancelled is not None and self._cancelled())
        except BaseException as error:  # llama.cpp would swallow it
            self._error = error
            return True


class Stoppable(Protocol):
    """What computes, and must not when Python has gone."""

    def stop(self, timeout_s: float) -> None:
        """Close for good, if what is running ends in time."""
        ...


def stop_at_exit(context: Stoppable) -> None:
    """Have a context stopped while Python still runs, if it is still there.

    A thread that goes on decoding after that would end the process with a segmentation fault.
    """
    _contexts.add(context)


_contexts: weakref.WeakSet[Stoppable] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    exiting.set()
    for context in list(_contexts):
        context.stop(EXIT_S)
