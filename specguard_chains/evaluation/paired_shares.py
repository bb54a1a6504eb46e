"""Whether one of two is right as often as the other on the same problems, from few problems too.

A bootstrap of the differences has no width where both are right on the same problems, so that four
problems would show anything. These are Tango's score interval and test (Statistics in Medicine
17:891, 1998), which have one there: none of n lost still leaves room for a loss of z² / (n + z²).

A win is a problem that only the first has solved, a loss one that only the second has. Counts may
be fractions, for what a share would amount to on more problems.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from statistics import NormalDist

from specguard_chains.errors import EvaluationError

CONFIDENCE = 0.95
_HALVINGS = 50
"""Until an end of the interval is sure to more digits than a float has."""
_ROUNDING = 1e-9
"""Shares that differ by less are equal: 0.07 of 100 problems is a little more than 7 of them."""


def difference_interval(
    wins: float, losses: float, n: float, *, confidence: float = CONFIDENCE
) -> tuple[float, float] | None:
    """Return the interval of (wins − losses) / n, None if n is 0."""
    _check(wins, losses, n)
    if n == 0:
        return None
    z = _z(confidence)
    return _lower(wins, losses, n, z), -_lower(losses, wins, n, z)


def is_above(
    difference: float, wins: float, losses: float, n: float, *, confidence: float = CONFIDENCE
) -> bool:
    """Whether the whole interval of (wins − losses) / n is above a difference."""
    _check(wins, losses, n)
    return n > 0 and _rejects(difference, wins, losses, n, _z(confidence))


def problems_needed(
    difference: float, wins: int, losses: int, n: int, *, confidence: float = CONFIDENCE
) -> int | None:
    """Return on how many problems the interval would be above a difference, at these shares.

    None if it never would: the shares themselves do not differ by more.
    """
    _check(wins, losses, n)
    if n == 0 or wins - losses <= (difference + _ROUNDING) * n:
        return None

    def enough(problems: int) -> bool:
        won, lost = (count / n * problems for count in (wins, losses))
        return is_above(difference, won, lost, problems, confidence=confidence)

    most = 1
    while not enough(most):
        most *= 2
    return bisect_left(range(most), True, key=enough)


def _lower(wins: float, losses: float, n: float, z: float) -> float:
    low, high = -1.0, (wins - losses) / n
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _rejects(middle, wins, losses, n, z):
            low = middle
        else:
            high = middle
    return low


def _rejects(difference: float, wins: float, losses: float, n: float, z: float) -> bool:
    """Whether there are too many wins for so low a true difference."""
    # The likeliest share of losses if that is the true difference, by a quadratic equation.
    b = (2 * n - wins + losses) * difference - wins - losses
    c = -losses * difference * (1 - difference)
    lost = (math.sqrt(max(b * b - 8 * n * c, 0.0)) - b) / (4 * n)
    variance = n * (2 * lost + difference * (1 - difference))
    return wins - losses - n * difference > z * math.sqrt(max(variance, 0.0))


def _z(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise EvaluationError(f"confidence is {confidence}; it must be between 0 and 1")
    return NormalDist().inv_cdf((1 + confidence) / 2)


def _check(wins: float, losses: float, n: float) -> None:
    # Sums of fractions may exceed the whole in the last digit.
    if wins < 0 or losses < 0 or wins + losses > n * (1 + _ROUNDING):
        raise EvaluationError(
            f"{wins} wins and {losses} losses of {n} problems; count each problem once"
        )
