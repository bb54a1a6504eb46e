"""The exact law of a random result: every way its choices can fall, with its probability."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from specguard_chains.decoding.acceptance import Choose, Law

T = TypeVar("T")


class _Replay:
    """Repeats the choices that it is given, then takes the first possible one each time."""

    def __init__(self, decisions: tuple[int, ...]) -> None:
        self.decisions = decisions
        self.made: list[int] = []
        self.probability = 1.0
        self.others: list[tuple[int, ...]] = []
        """Beginnings of the runs in which a choice falls otherwise."""

    def __call__(self, law: Law) -> int:
        assert abs(law.sum() - 1) < 1e-6, "the choice is not drawn from a law"
        if len(self.made) < len(self.decisions):
            index = self.decisions[len(self.made)]
        else:
            index, *others = map(int, np.flatnonzero(law))
            self.others += [(*self.made, other) for other in others]
        self.made.append(index)
        self.probability *= float(law[index])
        return index


def law_of(run: Callable[[Choose], T]) -> dict[T, float]:
    """Return the probability of every result of `run`."""
    law: defaultdict[T, float] = defaultdict(float)
    pending: list[tuple[int, ...]] = [()]
    while pending:
        replay = _Replay(pending.pop())
        law[run(replay)] += replay.probability
        pending += replay.others
    assert abs(sum(law.values()) - 1) < 1e-6
    return law
