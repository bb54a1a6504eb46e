"""What an evaluation records: how an arm has solved a problem, one line of results.jsonl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from specguard_chains.decoding.steps import Step, Verdict
from specguard_chains.errors import EvaluationError
from specguard_chains.metrics import Metrics

if TYPE_CHECKING:
    from pydantic import TypeAdapter

Key = tuple[str, str, str]
"""Data set, problem, arm."""
OPTIONAL = frozenset(
    {
        *("error", "controls", "acceptance_rate", "max_accepted_tokens"),
        *("started", "problem_digest"),
    }
)
"""Fields of a result that do not concern all of them, or that older versions have not recorded."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Where a step comes from and what it has cost, without its text."""

    source: str
    verdict: str
    score: float | None
    confidence: float | None
    grounding: float | None
    threshold: float | None
    rejected_early: bool
    num_candidates: int
    answer_tokens: int
    drafted: int
    kept: int
    regenerated: int
    seconds: dict[str, float]
    phase: str
    value: float | None = None
    """Of a reward model or value head; results of older versions have none, and none of these:"""
    salvaged: int = 0
    paused: bool = False
    critical: bool = False
    target_confidence: float | None = None

    @classmethod
    def of(cls, step: Step) -> StepResult:
        """Return what is recorded of a step."""
        return cls(
            source=str(step.source),
            verdict=str(step.verdict),
            score=step.score,
            confidence=step.confidence,
            grounding=step.grounding,
            threshold=step.threshold,
            rejected_early=step.rejected_early,
            num_candidates=step.num_candidates,
            answer_tokens=step.answer_tokens,
            drafted=step.tokens.drafted,
            kept=step.tokens.kept,
            regenerated=step.tokens.regenerated,
            seconds=asdict(step.seconds),
            phase=str(step.phase),
            value=step.value,
            salvaged=step.tokens.salvaged,
            paused=step.paused,
            critical=step.critical,
            target_confidence=step.target_confidence,
        )

    @property
    def judged(self) -> bool:
        """Whether the decoder has verified it."""
        return self.verdict != Verdict.UNVERIFIED

    @property
    def accepted(self) -> bool:
        """Whether the draft's step was kept."""
        return self.verdict == Verdict.ACCEPTED


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How an arm has solved a problem."""

    problem: str
    data: str
    arm: str
    right: bool
    extracted: str | None
    timed_out: bool
    """The comparison of the answer took too long and counts as wrong."""
    seconds: float
    tokens: int
    """Of the answer."""
    finish_reason: str | None
    seed: int
    metrics: dict[str, Any]
    peak_rss_mb: float
    steps: tuple[StepResult, ...]
    text: str
    error: str | None = None
    """Why there is no complete answer; what there is of it counts as wrong."""
    controls: str | None = None
    """The arm that this one is matched to."""
    acceptance_rate: float | None = None
    """What a control by chance was matched to."""
    max_accepted_tokens: int | None = None
    """What a control by length was matched to."""
    started: float | None = None
    """When it began, in seconds since 1970."""
    problem_digest: str | None = None
    """Of its question, its answer and its choices."""

    @property
    def key(self) -> Key:
        """What it is the result of."""
        return (self.data, self.problem, self.arm)

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Result:
        """Return the result that `to_dict` has made plain.

        Raises:
            EvaluationError: It is not such a result.
        """
        try:
            return _adapter().validate_python(dict(plain))
        except ValueError as error:
            raise EvaluationError(f"this is not a result: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain values; what does not concern it is left out."""
        plain = asdict(self)
        return {k: v for k, v in plain.items() if v is not None or k not in OPTIONAL}


@dataclass(frozen=True, slots=True)
class Attempt:
    """What an arm has written."""

    steps: Sequence[Step] = ()
    seconds: float = 0.0
    peak_rss_mb: float = 0.0
    error: str | None = None

    @property
    def text(self) -> str:
        """The answer, as far as there is one."""
        return "".join(step.text for step in self.steps)

    def figures(self) -> dict[str, Any]:
        """Return the fields of a result that do not depend on the right answer."""
        ended = bool(self.steps) and self.error is None
        return {
            "seconds": self.seconds,
            "tokens": sum(step.answer_tokens for step in self.steps),
            "finish_reason": str(self.steps[-1].finish_reason) if ended else None,
            "metrics": Metrics.of(self.steps).to_dict(),
            "peak_rss_mb": round(self.peak_rss_mb, 1),
            "steps": tuple(map(StepResult.of, self.steps)),
            "text": self.text,
            "error": self.error,
        }


@cache
def _adapter() -> TypeAdapter[Result]:
    from pydantic import TypeAdapter

    return TypeAdapter(Result)
