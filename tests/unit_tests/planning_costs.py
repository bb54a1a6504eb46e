"""Costs for tests of plans: in whole milliseconds, so that sums can be done by hand."""

from __future__ import annotations

from specguard_chains.planning.costs import Costs, Curve, Machine, PairCosts
from tests.toy_engine import Policy, ToyEngine, random_policy

MACHINE = Machine(
    cpu="a processor",
    cores=2,
    threads=None,
    versions={},
    measured="2026-01-01T00:00:00+00:00",
    took_s=1.0,
)


def line(base_ms: float, token_ms: float, *sizes: int) -> Curve:
    return Curve.of({n: (base_ms + token_ms * n) / 1000 for n in sizes})


def costs(
    name: str, token_ms: float, *, read_ms: float, verify_ms: float, more_ms: float = 0.0
) -> Costs:
    """A model that takes so long for a token, for one that it reads, and for one of a block.

    Every candidate beyond the first adds `more_ms`.
    """
    return Costs(
        engine=name,
        context_tokens=300,
        decode=line(token_ms - more_ms, more_ms, 1, 2, 4, 8),
        read=line(0, read_ms, 1, 64),
        verify=line(0, verify_ms, 1, 64),
    )


DRAFT = costs("small", 20, read_ms=7, verify_ms=10, more_ms=15)
TARGET = costs("large", 32, read_ms=12, verify_ms=20, more_ms=20)
PAIR = PairCosts(draft=DRAFT, target=TARGET, machine=MACHINE)
CHEAP = PAIR.at_ratio(20)
"""The same with a draft that takes 1.6 ms a token."""


class Clock:
    """Stands still but for what toys compute."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class TimedToy(ToyEngine):
    """A toy whose passes take a time of their own and more for each token, by its clock."""

    def __init__(
        self,
        clock: Clock,
        pass_ms: float,
        token_ms: float,
        *,
        policy: Policy | None = None,
        name: str = "timed toy",
    ) -> None:
        super().__init__(policy or random_policy(1, end=-30.0), name=name)
        self.clock = clock
        self.pass_ms, self.token_ms = pass_ms, token_ms

    def count(self, tokens: int) -> None:
        super().count(tokens)
        self.clock.now_s += (self.pass_ms + self.token_ms * tokens) / 1000
