"""Bounds that bring the signals of a model pair to [0, 1].

The paper normalises by min and max and does not say over what; over the k candidates of one step
it would be 0/0 for k = 1. Here the bounds are fixed per pair: the 1st and 99th percentile of each
signal over the drafted steps of some training problems.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, model_validator

from specguard_chains.errors import CalibrationError


class Bounds(BaseModel):
    """A signal's range: `low` becomes 0, `high` becomes 1, everything else is clipped."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    low: float
    high: float

    @model_validator(mode="after")
    def _ordered(self) -> Bounds:
        if not self.low < self.high:
            raise ValueError(f"bounds need low < high, not {self.low} and {self.high}")
        return self

    def normalise(self, value: float) -> float:
        """Return the value's place between the bounds, in [0, 1]."""
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))

    @classmethod
    def of(cls, values: Sequence[float], percentiles: tuple[float, float] = (1, 99)) -> Bounds:
        """Return the percentiles of a sample as bounds."""
        low, high = np.percentile(values, percentiles) if len(values) else (0.0, 0.0)
        if not low < high:
            raise CalibrationError(
                f"no bounds can be drawn from {len(values)} values of about {low:.4g}; calibrate "
                "on more problems"
            )
        return cls(low=float(low), high=float(high))


class Calibration(BaseModel):
    """The bounds of both signals for one pair of models, and where they come from.

    They are drawn from free text. Steps that are held to a grammar (structured output, required
    tool calls) have log-probs among the tokens that it allows, which are never lower than in free
    text and are 0 where it leaves no choice: their confidence is the same or higher, and a
    threshold keeps more of them. Who wants them stricter raises the threshold for such calls, or
    leaves tool calls and the last step to the target (`critical_steps`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    confidence: Bounds
    grounding: Bounds
    draft: str = ""
    target: str = ""
    verify_with: str = "draft"
    grounding_form: str = "sparse"
    grounding_layers: int = 3
    problems: int = 0
    steps: int = 0
    source: str = "calibrated"
    """"calibrated", or "fallback" where no bounds of the pair are known."""

    @classmethod
    def load(cls, path: Path) -> Calibration:
        """Read a calibration file."""
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CalibrationError(
                f"cannot read the calibration {path}: {error}; write it anew with "
                "`specguard calibrate`"
            ) from error

    def save(self, path: Path) -> None:
        """Write a calibration file."""
        path.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")


FALLBACK = Calibration(
    confidence=Bounds(low=-5.0, high=0.0),
    grounding=Bounds(low=0.0, high=1.0),
    source="fallback",
)
"""Wide bounds for pairs that were never calibrated. A step's score then says little: calibrate."""
