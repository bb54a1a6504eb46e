"""A lock whose waiters are served in the order in which they came, and may give up waiting."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from specguard_chains.errors import DecodingCancelled

POLL_S = 0.05
"""How often a waiter asks whether it should give up."""

_patience: ContextVar[Callable[[], bool] | None] = ContextVar("patience", default=None)


@contextmanager
def give_up_when(cancelled: Callable[[], bool]) -> Iterator[None]:
    """Within the block, this context stops waiting for a FairLock once `cancelled` is true.

    It travels in a ContextVar, as whoever queues (`Engine.exclusive`) need not know of locks.
    """
    token = _patience.set(cancelled)
    try:
        yield
    finally:
        _patience.reset(token)


class FairLock:
    """First come, first served; `threading.Lock` promises no order."""

    def __init__(self) -> None:
        """Start unlocked."""
        self._guard = threading.Lock()
        self._held = False
        self._waiters: deque[threading.Event] = deque()

    @property
    def waiting(self) -> int:
        """How many threads are queueing."""
        return len(self._waiters)

    def acquire(self) -> None:
        """Wait for the turn and take the lock.

        Raises:
            DecodingCancelled: The wait was given up, see `give_up_when`.
        """
        with self._guard:
            if not self._held:
                self._held = True
                return
            turn = threading.Event()
            self._waiters.append(turn)
        try:
            self._wait(turn)
        except BaseException:
            with self._guard:
                if turn in self._waiters:
                    self._waiters.remove(turn)
                    raise
            self.release()  # the turn had come already: pass it on
            raise

    def release(self) -> None:
        """Hand the lock to the longest waiter, if there is one."""
        with self._guard:
            if self._waiters:
                self._waiters.popleft().set()
            else:
                self._held = False

    def __enter__(self) -> FairLock:
        """Acquire."""
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        """Release."""
        self.release()

    @staticmethod
    def _wait(turn: threading.Event) -> None:
        cancelled = _patience.get()
        while not turn.wait(None if cancelled is None else POLL_S):
            if cancelled is not None and cancelled():
                raise DecodingCancelled("the request was cancelled while it waited for its turn")
