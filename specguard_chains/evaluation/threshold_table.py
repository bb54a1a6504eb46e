"""What a threshold keeps: of the drafted steps, of the good ones, and of the bad ones.

A step is kept if its confidence, brought to [0, 1] by the pair's bounds, is at least the threshold.
Choose by the even half of the problems, and report the odd one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specguard_chains.decoding.calibration import Bounds
from specguard_chains.evaluation.signal_table import LabelledStep, halves

THRESHOLDS = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)


@dataclass(frozen=True, slots=True)
class Kept:
    """How many steps of one half pass."""

    good: int
    good_kept: int
    bad: int
    bad_kept: int

    @property
    def share(self) -> float | None:
        """Of all steps, those that are kept."""
        steps = self.good + self.bad
        return (self.good_kept + self.bad_kept) / steps if steps else None

    @property
    def good_share(self) -> float | None:
        """Of those that are kept, the good ones."""
        kept = self.good_kept + self.bad_kept
        return self.good_kept / kept if kept else None


@dataclass(frozen=True, slots=True)
class ThresholdRow:
    """A threshold, and what it keeps of each half."""

    threshold: float
    nats: float
    """Of the lowest token log-probability that it keeps."""
    even: Kept
    odd: Kept


def threshold_table(
    steps: Sequence[LabelledStep], signal: str, bounds: Bounds
) -> list[ThresholdRow]:
    """Return what each of a few thresholds keeps.

    Args:
        steps: Drafted ones, with the signal.
        signal: Name of the confidence, such as `target.confidence_min`.
        bounds: Of that confidence on this pair.
    """
    even, odd = halves(steps)
    rows = []
    for threshold in THRESHOLDS:
        nats = bounds.low + threshold * (bounds.high - bounds.low)
        rows.append(ThresholdRow(threshold, nats, *(_kept(h, signal, nats) for h in (even, odd))))
    return rows


def _kept(steps: Sequence[LabelledStep], signal: str, nats: float) -> Kept:
    good, bad = ([step for step in steps if step.good is label] for label in (True, False))
    good_kept, bad_kept = (sum(s.signals[signal] >= nats for s in part) for part in (good, bad))
    return Kept(len(good), good_kept, len(bad), bad_kept)
