"""A lock whose waiters are served in the order in which they came, and may give up waiting."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from specguard_chains.errors import DecodingCancelled, QueueFullError

POLL_S = 0.05
"""How often a waiter asks whether it should give up."""


class FairLock:
    """First come, first served; `threading.Lock` promises no order."""

    def __init__(self, places: int = 1) -> None:
        """Start unlocked; so many threads may hold it at a time."""
        self._guard = threading.Lock()
        self._free = places
        self._waiters: deque[threading.Event] = deque()

    @property
    def waiting(self) -> int:
        """How many threads are queueing."""
        return len(self._waiters)

    @contextmanager
    def held(
        self, cancelled: Callable[[], bool] | None = None, *, max_waiting: int | None = None
    ) -> Iterator[None]:
        """Hold the lock within a block; see `acquire`."""
        self.acquire(cancelled, max_waiting=max_waiting)
        try:
            yield
        finally:
            self.release()

    def acquire(
        self, cancelled: Callable[[], bool] | None = None, *, max_waiting: int | None = None
    ) -> None:
        """Wait for the turn and take the lock.

        Raises:
            DecodingCancelled: `cancelled` said so while others held all places.
            QueueFullError: `max_waiting` others are waiting already.
        """
        with self._guard:
            if self._free:
                self._free -= 1
                return
            if max_waiting is not None and len(self._waiters) >= max_waiting:
                raise QueueFullError(
                    f"{len(self._waiters)} requests are waiting for this model, and max_queue="
                    f"{max_waiting} allows no more; try again later, raise max_queue, or send "
                    "fewer at a time (max_concurrency)"
                )
            turn = threading.Event()
            self._waiters.append(turn)
        try:
            _wait(turn, cancelled)
        except BaseException:
            with self._guard:
                if turn in self._waiters:
                    self._waiters.remove(turn)
                    raise
            self.release()  # the turn had come already: pass it on
            raise

    def release(self) -> None:
        """Hand the place to the longest waiter, if there is one."""
        with self._guard:
            if self._waiters:
                self._waiters.popleft().set()
            else:
                self._free += 1


def _wait(turn: threading.Event, cancelled: Callable[[], bool] | None) -> None:
    while not turn.wait(None if cancelled is None else POLL_S):
        if cancelled is not None and cancelled():
            raise DecodingCancelled("the request was cancelled while it waited for its turn")
