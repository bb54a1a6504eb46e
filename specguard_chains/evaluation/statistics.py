"""Figures with their uncertainty: shares, ratios of paired sums, and AUROC.

Decoders are compared on the same problems, so a resample of the bootstrap draws problems, and with
a problem all that belongs to it: both decoders' figures, or all of its steps. Intervals are
percentile intervals. Of few problems there are none: they would be the range of the data, no more.
A figure that does not exist is None, never NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specguard_chains.errors import EvaluationError

Floats = NDArray[np.float64]

RESAMPLES = 10_000
CLUSTER_RESAMPLES = 2_000
FEWEST = 8
"""So many problems have an interval by resampling."""
_BLOCK = 1 << 21
"""Numbers held at a time while resampling."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and its interval."""

    value: float
    interval: tuple[float, float] | None
    """None if the data are too few to draw one."""


def wilson_interval(
    correct: int, n: int, *, confidence: float = 0.95
) -> tuple[float, float] | None:
    """Return the Wilson score interval of a share, None if n is 0."""
    if not 0 <= correct <= n:
        raise EvaluationError(f"{correct} of {n} is no share; count each problem once")
    if n == 0:
        return None
    z = NormalDist().inv_cdf((1 + _checked(confidence)) / 2)
    centre = (correct + z * z / 2) / (n + z * z)
    half = z * math.sqrt(correct * (n - correct) / n + z * z / 4) / (n + z * z)
    # In exact arithmetic no share at all reaches to 0, and a whole one to 1.
    low = 0.0 if correct == 0 else max(centre - half, 0.0)
    high = 1.0 if correct == n else min(centre + half, 1.0)
    return low, high


def mcnemar_p(first: Sequence[bool], second: Sequence[bool]) -> float | None:
    """Return the exact two-sided p of McNemar's test that both are right equally often.

    Args:
        first: Whether one decoder is right, by problem.
        second: Whether the other is, on the same problems in the same order.

    None if there are no problems; 1 if both are right on the same ones.
    """
    a, b = _paired(first, second)
    if not a.size:
        return None
    return sign_test_p(int(np.sum((a > 0) & (b == 0))), int(np.sum((a == 0) & (b > 0))))


def sign_test_p(wins: int, losses: int) -> float:
    """Return the exact two-sided p of so many wins and losses of equals."""
    n = wins + losses
    tail = sum(math.comb(n, k) for k in range(min(wins, losses) + 1))
    return min(1.0, float(2 * tail / 2**n))


def ratio_of_sums(
    numerator: ArrayLike,
    denominator: ArrayLike,
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
    confidence: float = 0.95,
) -> Estimate | None:
    """Return the ratio of two sums over the same problems, such as the seconds of two decoders.

    None if the denominator is 0; without an interval if it is 0 in a resample, or of few problems.
    """
    a, b = _paired(numerator, denominator)
    if (a < 0).any() or (b < 0).any():
        raise EvaluationError("a ratio of sums needs amounts, such as seconds; one is negative")
    if not b.sum():
        return None
    drawn = []
    for counts in _draws(a.size, seed, resamples):
        sums = counts @ b
        if not sums.all():
            return Estimate(float(a.sum() / b.sum()), None)
        drawn.append(counts @ a / sums)
    return _estimate(float(a.sum() / b.sum()), drawn, a.size, confidence)


def auroc(scores: ArrayLike, labels: ArrayLike) -> float | None:
    """Return how often a score of label true is above one of label false; ties count half.

    None if all labels are the same.
    """
    values, right = _paired(scores, labels)
    return _Ranked(values, right > 0).plain()


def auroc_estimate(
    scores: ArrayLike,
    labels: ArrayLike,
    problems: Sequence[Any],
    *,
    seed: int = 0,
    resamples: int = CLUSTER_RESAMPLES,
    confidence: float = 0.95,
) -> Estimate | None:
    """Return the AUROC of a score over steps, with an interval that draws whole problems.

    Args:
        scores: High ones are to mean true.
        labels: Whether each step is right.
        problems: The problem of each step; steps of one problem depend on each other.
        seed: Of the resampling.
        resamples: How many; those whose labels are all the same say nothing and are left out.
        confidence: Of the interval.

    None if all labels are the same; without an interval if 40 % of the resamples are left out, or
    of few problems.
    """
    values, right = _paired(scores, labels)
    ranked = _Ranked(values, right > 0)
    if (value := ranked.plain()) is None:
        return None
    of_step, n = _clusters(problems, values.size)
    drawn = [ranked.auroc(counts[:, of_step]) for counts in _draws(n, seed, resamples, values.size)]
    return _estimate(value, drawn, n, confidence)


def auroc_difference(
    first: ArrayLike,
    second: ArrayLike,
    labels: ArrayLike,
    problems: Sequence[Any],
    *,
    seed: int = 0,
    resamples: int = CLUSTER_RESAMPLES,
    confidence: float = 0.95,
) -> Estimate | None:
    """Return by how much the AUROC of the first score exceeds the second's on the same steps.

    See `auroc_estimate`; a resample draws the same problems for both.
    """
    a, right = _paired(first, labels)
    b, _ = _paired(second, labels)
    one, other = _Ranked(a, right > 0), _Ranked(b, right > 0)
    left, minus = one.plain(), other.plain()
    if left is None or minus is None:
        return None
    of_step, n = _clusters(problems, a.size)
    drawn = []
    for counts in _draws(n, seed, resamples, a.size):
        weights = counts[:, of_step]
        drawn.append(one.auroc(weights) - other.auroc(weights))
    return _estimate(left - minus, drawn, n, confidence)


class _Ranked:
    """Steps in the order of their scores, to find the AUROC under many weightings at once."""

    def __init__(self, scores: Floats, labels: NDArray[np.bool_]) -> None:
        self._order = np.argsort(scores, kind="stable")
        ordered = scores[self._order]
        self._starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]][: ordered.size])
        self._labels = labels[self._order].astype(np.float64)

    def auroc(self, weights: Floats) -> Floats:
        """Return the AUROC of each weighting, shape (R,), NaN where one label has no weight.

        Args:
            weights: How often each step counts, shape (R, steps).
        """
        ordered = weights[:, self._order]
        true = np.add.reduceat(ordered * self._labels, self._starts, axis=1)
        false = np.add.reduceat(ordered * (1 - self._labels), self._starts, axis=1)
        below = np.cumsum(false, axis=1) - false / 2  # of equal scores, half
        pairs = true.sum(axis=1) * false.sum(axis=1)
        wins = (true * below).sum(axis=1)
        found = np.full(wins.shape, np.nan)
        np.divide(wins, pairs, out=found, where=pairs > 0)
        return found

    def plain(self) -> float | None:
        """Return the AUROC of the steps as they are, None if one label is missing."""
        if not self._labels.size:
            return None
        value = float(self.auroc(np.ones((1, self._labels.size)))[0])
        return None if math.isnan(value) else value


def _draws(n: int, seed: int, resamples: int, width: int = 0) -> Iterator[Floats]:
    """Yield how often each of n is drawn, in blocks of resamples of shape (R, n).

    Args:
        n: Each resample draws n of n.
        seed: Equal seeds draw equally.
        resamples: In all.
        width: Numbers that the caller needs for each resample, if more than n.
    """
    if resamples < 1:
        raise EvaluationError(f"resamples is {resamples}; it must be at least 1, better thousands")
    rng = np.random.default_rng(seed)
    rows = max(1, _BLOCK // max(n, width))
    for start in range(0, resamples, rows):
        size = min(rows, resamples - start)
        cells = rng.integers(n, size=(size, n)) + n * np.arange(size)[:, None]
        yield np.bincount(cells.ravel(), minlength=size * n).reshape(size, n).astype(np.float64)


def _estimate(value: float, drawn: Sequence[Floats], n: int, confidence: float) -> Estimate:
    tail = (1 - _checked(confidence)) / 2
    values = np.concatenate(drawn)
    known = values[~np.isnan(values)]
    if n < FEWEST or known.size < 0.6 * values.size:
        return Estimate(value, None)
    low, high = np.quantile(known, [tail, 1 - tail])
    return Estimate(value, (float(low), float(high)))


def _paired(first: ArrayLike, second: ArrayLike) -> tuple[Floats, Floats]:
    """Return both as numbers once it is sure that they belong together."""
    a, b = (np.asarray(values, dtype=np.float64) for values in (first, second))
    if a.shape != b.shape or a.ndim != 1:
        raise EvaluationError(
            f"figures of shapes {a.shape} and {b.shape}; there must be one for each, in one order"
        )
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise EvaluationError("a figure is not a finite number; leave out what has none, in both")
    return a, b


def _clusters(problems: Sequence[Any], n: int) -> tuple[NDArray[np.intp], int]:
    """Return the number of each step's problem, and how many problems there are."""
    if len(problems) != n:
        raise EvaluationError(f"{len(problems)} problems for {n} steps; name each step's problem")
    numbers: dict[Any, int] = {}
    of_step = [numbers.setdefault(problem, len(numbers)) for problem in problems]
    return np.array(of_step, dtype=np.intp), len(numbers)


def _checked(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise EvaluationError(f"confidence is {confidence}; it must be between 0 and 1")
    return confidence
