"""When a merged pass begins, who is waited for, and who is not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from specguard_chains.decoding import batcher, compute_thread
from specguard_chains.decoding.batcher import Batcher, Outcome, Part
from specguard_chains.decoding.cache import Rows
from specguard_chains.errors import DecodingCancelled

PATIENCE_S = 10.0


class Passes:
    """Computes each part's one token as its logits, and remembers who was in a pass."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.error: BaseException | None = None

    def compute(self, parts: Sequence[Part]) -> Sequence[Outcome]:
        assert compute_thread.is_current()
        numbers = [part.tokens[0] for part in parts]
        self.seen.append(sorted(numbers))
        assert self.gate.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        rows = [Rows(np.full((1, 1), n, dtype=np.float32), None) for n in numbers]
        return [
            ValueError("thirteen") if n == 13 else row for n, row in zip(numbers, rows, strict=True)
        ]


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batcher, "POLL_S", 0.002)


@pytest.fixture
def passes() -> Passes:
    return Passes()


@pytest.fixture
def together(passes: Passes) -> Batcher:
    return Batcher(passes.compute)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def part(number: int) -> Part:
    cache: Any = None
    return Part(cache, [number], [0], [(0,)], context=False, all_logits=True)


def never() -> None:
    """Go on waiting."""


def forward(together: Batcher, number: int, check: Callable[[], None] = never) -> int:
    rows = together.forward(part(number), check)
    return int(rows.logits[0, 0])


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_one_alone_is_computed_at_once(together: Batcher, passes: Passes) -> None:
    with together.computing():
        assert [forward(together, n) for n in (3, 4)] == [3, 4]
    assert passes.seen == [[3], [4]]
    assert not together.shared


def test_those_who_compute_are_waited_for(
    together: Batcher, passes: Passes, pool: ThreadPoolExecutor
) -> None:
    barrier = threading.Barrier(4)

    def work(number: int) -> list[int]:
        with together.computing():
            barrier.wait(PATIENCE_S)
            return [forward(together, number) for _ in range(20)]

    for number, rows in enumerate(pool.map(work, range(4), timeout=PATIENCE_S)):
        assert rows == [number] * 20
    assert passes.seen[:20] == [[0, 1, 2, 3]] * 20


def test_who_leaves_or_is_away_is_not_waited_for(
    together: Batcher, passes: Passes, pool: ThreadPoolExecutor
) -> None:
    with together.computing(), together.computing():
        assert together.shared
        waiting = pool.submit(lambda: _computing(together, 1))
        time.sleep(0.02)
        assert not passes.seen
        with together.away():
            time.sleep(0.02)
            assert not passes.seen
            with together.away():
                assert waiting.result(PATIENCE_S) == 1
    waiting = pool.submit(lambda: _computing(together, 2))
    assert waiting.result(PATIENCE_S) == 2


def _computing(together: Batcher, number: int, check: Callable[[], None] = never) -> int:
    with together.computing():
        return forward(together, number, check)


def test_who_comes_during_a_pass_is_part_of_the_next_one(
    together: Batcher, passes: Passes, pool: ThreadPoolExecutor
) -> None:
    passes.gate.clear()
    first = pool.submit(_computing, together, 1)
    until(lambda: bool(passes.seen))
    others = [pool.submit(_computing, together, n) for n in (2, 3)]
    until(lambda: len(together._waiting) == 2)
    passes.gate.set()
    assert [each.result(PATIENCE_S) for each in (first, *others)] == [1, 2, 3]
    assert passes.seen == [[1], [2, 3]]


def test_an_error_of_one_part_is_that_sessions_alone(
    together: Batcher, pool: ThreadPoolExecutor
) -> None:
    results = [pool.submit(_computing, together, n) for n in (12, 13, 14)]
    assert results[0].result(PATIENCE_S) == 12
    assert results[2].result(PATIENCE_S) == 14
    with pytest.raises(ValueError, match="thirteen"):
        results[1].result(PATIENCE_S)


def test_a_pass_that_fails_as_a_whole_fails_for_all_and_the_next_one_works(
    together: Batcher, passes: Passes, pool: ThreadPoolExecutor
) -> None:
    passes.error = ZeroDivisionError()
    for failed in [pool.submit(_computing, together, n) for n in (1, 2)]:
        with pytest.raises(ZeroDivisionError):
            failed.result(PATIENCE_S)
    passes.error = None
    assert _computing(together, 3) == 3


def test_who_gives_up_before_the_pass_leaves_and_the_others_are_computed(
    together: Batcher, passes: Passes, pool: ThreadPoolExecutor
) -> None:
    stop = threading.Event()

    def check() -> None:
        if stop.is_set():
            raise DecodingCancelled("enough")

    with together.computing():
        impatient = pool.submit(_computing, together, 1, check)
        patient = pool.submit(_computing, together, 2)
        until(lambda: len(together._waiting) == 2)
        stop.set()
        with pytest.raises(DecodingCancelled):
            impatient.result(PATIENCE_S)
        assert not passes.seen
    assert patient.result(PATIENCE_S) == 2
    assert passes.seen == [[2]]


def test_on_the_compute_thread_nobody_is_waited_for(together: Batcher, passes: Passes) -> None:
    with together.computing():
        assert compute_thread.run(lambda: _computing(together, 5)) == 5
    assert passes.seen == [[5]]
