"""How many steps are drafted if the target goes on alone after rejections (`decoding.pacing`)."""

from __future__ import annotations

from collections import defaultdict
from functools import partial

from specguard_chains.decoding.pacing import Patience


def paced(rate: float, patience: Patience | None, steps: int) -> tuple[float, float]:
    """Return how many of an answer's steps are accepted, and how many drafted, in the mean.

    That is if each drafted one is accepted with a probability, whatever became of the others.
    """
    if patience is None:
        return rate * steps, float(steps)
    kept = drafted = 0.0
    reached: defaultdict[int, defaultdict[int, float]] = defaultdict(partial(defaultdict, float))
    reached[0][0] = 1.0  # steps that there are -> rejections in a row so far -> probability
    for step in range(steps):
        for rejected, probability in reached.pop(step, {}).items():
            drafted += probability
            kept += rate * probability
            reached[step + 1][0] += rate * probability
            after = step + 1 + _pause_after(rejected + 1, patience)
            reached[after][rejected + 1] += (1 - rate) * probability
    return kept, drafted


def _pause_after(rejected: int, patience: Patience) -> int:
    """Return how many steps the target writes alone after so many rejections in a row."""
    beyond = rejected - patience.rejections
    return patience.steps * 2**beyond if beyond >= 0 else 0
