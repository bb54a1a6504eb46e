"""A lock whose waiters are served in the order in which they came."""

from __future__ import annotations

import threading
from collections import deque


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
        """Wait for the turn and take the lock."""
        with self._guard:
            if not self._held:
                self._held = True
                return
            turn = threading.Event()
            self._waiters.append(turn)
        try:
            turn.wait()
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
