"""Forward passes of several sessions of one engine, merged into one.

Each request decodes on a thread of its own and hands its part of a pass in. A pass begins when all
sessions that are computing have done so: nobody waits for a session whose request selects, asks a
hook or waits for a server meanwhile, and there is no waiting for a fixed time. Who comes while a
pass is computed is part of the next one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from specguard_chains.decoding import compute_thread
from specguard_chains.decoding.cache import Cache, Rows

POLL_S = 0.05
"""How often a session that waits for its pass asks whether it should give up."""
Outcome = Rows | BaseException


@dataclass(frozen=True, slots=True)
class Part:
    """What one session computes in a pass; see `Cache.forward`."""

    cache: Cache
    tokens: Sequence[int]
    positions: Sequence[int]
    branches: Sequence[Sequence[int]]
    context: bool
    all_logits: bool

    def alone(self) -> Outcome:
        """Compute it in a pass of its own; return the rows or the error."""
        try:
            return self.cache.forward(
                self.tokens,
                self.positions,
                self.branches,
                context=self.context,
                all_logits=self.all_logits,
            )
        except BaseException as error:
            return error


@dataclass(slots=True, eq=False)
class _Job:
    part: Part
    outcome: Outcome | None = None
    done: threading.Event = field(default_factory=threading.Event)


class Batcher:
    """Collects the parts of an engine's sessions and has them computed together."""

    def __init__(self, compute: Callable[[Sequence[Part]], Sequence[Outcome]]) -> None:
        """Start idle; `compute` is called on the compute thread."""
        self._compute = compute
        self._lock = threading.Lock()
        self._computing = 0
        self._waiting: list[_Job] = []
        self._under_way = False

    @property
    def shared(self) -> bool:
        """Whether several sessions are computing."""
        return self._computing > 1

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Within it the others wait for this session's part."""
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    @contextmanager
    def away(self) -> Iterator[None]:
        """Within it, inside of `computing`, they do not."""
        self._count(-1)
        try:
            yield
        finally:
            self._count(1)

    def forward(self, part: Part, check: Callable[[], None]) -> Rows:
        """Return what the next pass gives for a part; to be called while `computing`.

        Raises:
            BaseException: What the pass raises for this part, or `check` while it has not begun.
        """
        if compute_thread.is_current():  # nobody else could compute it
            return _rows(self._compute([part])[0])
        job = _Job(part)
        with self._lock:
            self._waiting.append(job)
            self._begin()
        while not job.done.wait(POLL_S):
            self._leave_if_told(job, check)
        assert job.outcome is not None
        return _rows(job.outcome)

    def _leave_if_told(self, job: _Job, check: Callable[[], None]) -> None:
        try:
            check()
        except BaseException:
            with self._lock:
                if job in self._waiting:
                    self._waiting.remove(job)
                    raise

    def _count(self, change: int) -> None:
        with self._lock:
            self._computing += change
            self._begin()

    def _begin(self) -> None:
        """Have a pass computed if all parts are here."""
        if not self._under_way and self._waiting and len(self._waiting) >= self._computing:
            self._under_way = True
            compute_thread.submit(self._pass)

    def _pass(self) -> None:
        with self._lock:
            jobs, self._waiting = self._waiting, []
        try:
            outcomes = self._compute([job.part for job in jobs])
        except BaseException as error:
            outcomes = [error] * len(jobs)
        with self._lock:
            self._under_way = False
            for job, outcome in zip(jobs, outcomes, strict=True):
                job.outcome = outcome
                job.done.set()
            self._begin()


def _rows(outcome: Outcome) -> Rows:
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome
