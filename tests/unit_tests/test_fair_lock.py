"""Waiters are served in the order of their coming, and one that leaves holds up nobody."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from specguard_chains.decoding import fair_lock
from specguard_chains.decoding.fair_lock import FairLock
from specguard_chains.errors import DecodingCancelled
from tests.toy_engine import ToyEngine, random_policy

PATIENCE_S = 5.0


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_lock, "POLL_S", 0.001)


class Queue:
    """Threads that queue at a lock one after the other, and what became of them."""

    def __init__(self, lock: FairLock) -> None:
        self.lock = lock
        self.served: list[str] = []
        self.left: list[str] = []
        self._threads: list[threading.Thread] = []

    def join(self, name: str, cancelled: Callable[[], bool] | None = None) -> None:
        """Let a thread queue; return when it is in the queue."""
        before = self.lock.waiting
        self._threads.append(
            threading.Thread(target=self._run, args=(name, cancelled), daemon=True)
        )
        self._threads[-1].start()
        wait_until(lambda: self.lock.waiting == before + 1)

    def finish(self) -> None:
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()

    def _run(self, name: str, cancelled: Callable[[], bool] | None) -> None:
        try:
            self.lock.acquire(cancelled)
        except DecodingCancelled:
            self.left.append(name)
            return
        self.served.append(name)
        self.lock.release()


@pytest.fixture
def queue() -> Iterator[Queue]:
    queue = Queue(FairLock())
    yield queue
    queue.finish()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def assert_free(lock: FairLock) -> None:
    assert lock.waiting == 0
    lock.acquire(lambda: True)  # would raise if others held it
    lock.release()


def test_first_come_first_served(queue: Queue) -> None:
    names = [f"request {n}" for n in range(20)]
    queue.lock.acquire()
    for name in names:
        queue.join(name)
    assert queue.lock.waiting == 20
    assert queue.served == []
    queue.lock.release()
    queue.finish()
    assert queue.served == names
    assert_free(queue.lock)


def test_a_newcomer_does_not_overtake(queue: Queue) -> None:
    queue.lock.acquire()
    queue.join("first")
    queue.join("second")
    queue.lock.release()  # goes to "first" at once, even if that sleeps still
    queue.lock.acquire()
    assert queue.served == ["first", "second"]
    queue.lock.release()


def test_one_at_a_time() -> None:
    lock, inside, most = FairLock(), 0, 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(50):
            lock.acquire()
            inside += 1
            most = max(most, inside)
            inside -= 1
            lock.release()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert (inside, most) == (0, 1)
    assert_free(lock)


def test_a_cancelled_waiter_leaves_the_queue(queue: Queue) -> None:
    cancelled = threading.Event()
    queue.lock.acquire()
    queue.join("first", lambda: False)
    queue.join("impatient", cancelled.is_set)
    queue.join("last")
    cancelled.set()
    wait_until(lambda: queue.left == ["impatient"])
    assert queue.lock.waiting == 2
    queue.lock.release()
    queue.finish()
    assert queue.served == ["first", "last"]
    assert_free(queue.lock)


def test_a_waiter_that_leaves_when_its_turn_has_come_passes_it_on() -> None:
    lock = FairLock()
    lock.acquire()

    def cancelled() -> bool:
        lock.release()  # its turn comes while it makes up its mind
        return True

    with pytest.raises(DecodingCancelled, match="waited for its turn"):
        lock.acquire(cancelled)
    assert_free(lock)


def test_a_waiter_that_is_interrupted_holds_up_nobody(queue: Queue) -> None:
    def interrupted() -> bool:
        raise KeyboardInterrupt

    queue.lock.acquire()
    queue.join("other")
    with pytest.raises(KeyboardInterrupt):
        queue.lock.acquire(interrupted)
    assert queue.lock.waiting == 1
    queue.lock.release()
    queue.finish()
    assert queue.served == ["other"]
    assert_free(queue.lock)


def test_a_lock_with_places_admits_as_many_and_the_others_in_order() -> None:
    queue = Queue(FairLock(2))
    for _ in range(2):
        queue.lock.acquire(lambda: True)  # it would raise if it had to wait
    names = [f"request {n}" for n in range(5)]
    for name in names:
        queue.join(name)
    assert queue.served == []
    queue.lock.release()
    queue.finish()
    assert queue.served == names
    queue.lock.release()
    for _ in range(2):
        queue.lock.acquire(lambda: True)
    with pytest.raises(DecodingCancelled):
        queue.lock.acquire(lambda: True)


def test_a_free_lock_asks_nobody() -> None:
    def never() -> bool:
        raise AssertionError

    lock = FairLock()
    lock.acquire(never)
    lock.release()


def test_an_engine_admits_one_request_and_the_next_when_it_fails() -> None:
    engine = ToyEngine(random_policy(0))
    with pytest.raises(ZeroDivisionError), engine.exclusive():
        with pytest.raises(DecodingCancelled), engine.exclusive(lambda: True):
            pytest.fail("the engine was entered twice")
        raise ZeroDivisionError
    with engine.exclusive(lambda: True):
        pass
