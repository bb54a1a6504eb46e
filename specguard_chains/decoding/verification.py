"""Deciding whether a drafted step is kept (paper sections 3.3 and 3.4).

Two signals that the model holds anyway, each the *minimum* over the step's tokens, are brought to
[0, 1] by calibrated bounds and mixed:

    score = beta * confidence' + (1 - beta) * grounding',        accept if score >= tau.

beta is `confidence_weight`, tau is `threshold`. As both minima can only fall while a step is being
written, so can the score: once it is below tau, the step is rejected already.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from specguard_chains.decoding.boundaries import Ending
from specguard_chains.decoding.calibration import Calibration
from specguard_chains.decoding.decoder import Request
from specguard_chains.decoding.engine import Candidate, Reading, Session
from specguard_chains.decoding.steps import Judgement, Verdict
from specguard_chains.errors import AttentionUnavailableError, ConfigurationError


@dataclass(frozen=True, slots=True)
class Situation:
    """Where the answer stands when a step is judged, for verifiers that look beyond the step."""

    request: Request
    number: int
    """Of the step in progress."""
    answer: str
    """What was accepted before it."""
    draft: Session
    target: Session


class Verifier(Protocol):
    """Judges drafted steps. Holds no state of a request, so that requests can share it."""

    @property
    def needs_grounding(self) -> bool:
        """Whether readings must carry grounding."""
        ...

    def can_accept(self, confidence: float, grounding: float | None) -> bool:
        """Whether a step whose signals are this low so far can still be accepted."""
        ...

    def judge(self, candidate: Candidate, reading: Reading, situation: Situation) -> Judgement:
        """Decide on a candidate by a reading of it."""
        ...


@dataclass(frozen=True, slots=True)
class EnsembleVerifier:
    """The paper's verifier: the weighted mean of confidence and grounding against a threshold."""

    calibration: Calibration
    confidence_weight: float = 0.3
    threshold: float = 0.7

    def __post_init__(self) -> None:
        """Validate."""
        for name in ("confidence_weight", "threshold"):
            if not 0 <= (value := getattr(self, name)) <= 1:
                raise ConfigurationError(f"{name} must lie in [0, 1], not {value}")

    @property
    def needs_grounding(self) -> bool:
        """Whether grounding has any weight."""
        return self.confidence_weight < 1

    def score(self, confidence: float, grounding: float | None) -> float:
        """Return the ensemble score in [0, 1]; a grounding not known yet counts as the best."""
        mixed = self.confidence_weight * self.calibration.confidence.normalise(confidence)
        if self.needs_grounding:
            mixed += (1 - self.confidence_weight) * (
                1.0 if grounding is None else self.calibration.grounding.normalise(grounding)
            )
        return mixed

    def can_accept(self, confidence: float, grounding: float | None) -> bool:
        """See `Verifier.can_accept`."""
        return self.score(confidence, grounding) >= self.threshold

    def judge(self, candidate: Candidate, reading: Reading, situation: Situation) -> Judgement:
        """See `Verifier.judge`."""
        confidence, grounding = reading.confidence, reading.min_grounding
        early = candidate.ending is Ending.REJECTED_EARLY
        if self.needs_grounding and grounding is None and not early:
            raise AttentionUnavailableError(
                "the reading carries no grounding; open the session with a GroundingSpec or set "
                "confidence_weight=1"
            )
        score = self.score(confidence, grounding)
        accepted = score >= self.threshold and not early
        return Judgement(
            Verdict.ACCEPTED if accepted else Verdict.REJECTED,
            score,
            confidence,
            grounding,
            self.threshold,
            rejected_early=early,
        )
