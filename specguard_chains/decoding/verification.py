"""Deciding whether a drafted step is kept (paper sections 3.3 and 3.4).

Two signals that the model holds anyway, each the *minimum* over the step's tokens, are brought to
[0, 1] by calibrated bounds and mixed:

    score = beta * confidence' + (1 - beta) * grounding',        accept if score >= tau.

beta is `confidence_weight`, tau is `threshold`. As both minima can only fall while a step is being
written, so can the score: once it is below tau, the step is rejected already. A third signal can
join them with a weight of its own, known at the step's end, the value head's:

    score = value_weight * value + (1 - value_weight) * (the above).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from specguard_chains.decoding.boundaries import Ending
from specguard_chains.decoding.calibration import Calibration
from specguard_chains.decoding.decoder import Request
from specguard_chains.decoding.engine import Candidate, Reading, Session
from specguard_chains.decoding.rewards import ValueHead
from specguard_chains.decoding.steps import Judgement, Verdict
from specguard_chains.errors import AttentionUnavailableError, ConfigurationError


@dataclass(frozen=True, slots=True)
class Situation:
    """Where the answer stands when a step is judged, for verifiers that look beyond the step."""

    request: Request
    number: int
    """Of the step in progress."""
    steps: Sequence[str]
    """What was accepted before it."""
    draft: Session
    target: Session
    tokens_left: int
    """How many tokens the answer may still have, the step in progress included."""


class Verifier(Protocol):
    """Judges drafted steps. Holds no state of a request, so that requests can share it."""

    @property
    def needs_confidence(self) -> bool:
        """Whether readings must carry log-probs."""
        ...

    @property
    def needs_grounding(self) -> bool:
        """Whether readings must carry grounding."""
        ...

    @property
    def state_layer(self) -> int | None:
        """The layer of the draft whose hidden state readings must carry, None for none."""
        ...

    @property
    def asks_others(self) -> bool:
        """Whether it waits for what is no engine of the decoder: a function, a server, a person.

        No other model of this process has to wait meanwhile, and it may even be one that is asked.
        """
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
    value_head: ValueHead | None = None
    value_weight: float = 0.0
    """Weight of the value head against the two others together."""
    doubt_margin: float = 0.0
    """Scores less than this away from the threshold are doubtful."""

    def __post_init__(self) -> None:
        """Validate."""
        for name in ("confidence_weight", "threshold", "value_weight", "doubt_margin"):
            if not 0 <= (value := getattr(self, name)) <= 1:
                raise ConfigurationError(f"{name} must lie in [0, 1], not {value}")
        if self.value_weight and self.value_head is None:
            raise ConfigurationError(
                f"value_weight={self.value_weight} needs a value head; train one with "
                "`specguard train-reward`, or set value_weight=0"
            )

    @property
    def needs_confidence(self) -> bool:
        """Whether confidence has any weight."""
        return self.confidence_weight > 0 and self.value_weight < 1

    @property
    def needs_grounding(self) -> bool:
        """Whether grounding has any weight."""
        return self.confidence_weight < 1 and self.value_weight < 1

    @property
    def state_layer(self) -> int | None:
        """See `Verifier.state_layer`."""
        return self.value_head.layer if self.value_head and self.value_weight else None

    @property
    def asks_others(self) -> bool:
        """See `Verifier.asks_others`."""
        return False

    def score(
        self, confidence: float, grounding: float | None, value: float | None = None
    ) -> float:
        """Return the ensemble score in [0, 1]; what is not known yet counts as the best."""
        mixed = self.confidence_weight * self.calibration.confidence.normalise(confidence)
        if self.needs_grounding:
            mixed += (1 - self.confidence_weight) * (
                1.0 if grounding is None else self.calibration.grounding.normalise(grounding)
            )
        rest = 1.0 if value is None else value
        return self.value_weight * rest + (1 - self.value_weight) * mixed

    def can_accept(self, confidence: float, grounding: float | None) -> bool:
        """See `Verifier.can_accept`. What is doubtful may still be accepted."""
        return self.score(confidence, grounding) >= self.threshold - self.doubt_margin

    def judge(self, candidate: Candidate, reading: Reading, situation: Situation) -> Judgement:
        """See `Verifier.judge`."""
        confidence, grounding = reading.confidence, reading.min_grounding
        early = candidate.ending is Ending.REJECTED_EARLY
        if self.needs_grounding and grounding is None and not early:
            raise AttentionUnavailableError(
                "the reading carries no grounding; open the session with a GroundingSpec or set "
                "confidence_weight=1"
            )
        value = None
        if self.value_head is not None and self.value_weight and not early:
            value = self.value_head.value(reading)
        score = self.score(confidence, grounding, value)
        accepted = score >= self.threshold and not early
        return Judgement(
            Verdict.ACCEPTED if accepted else Verdict.REJECTED,
            score,
            confidence if reading.logprobs.size else None,  # a server may give none
            grounding,
            self.threshold,
            value=value,
            rejected_early=early,
            doubtful=not early and abs(score - self.threshold) < self.doubt_margin,
        )
