"""The verified step, which every decoder yields and everything else is made of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Any

from specguard_chains.decoding.boundaries import Phase
from specguard_chains.errors import ConfigurationError

if TYPE_CHECKING:
    from pydantic import TypeAdapter


class FinishReason(StrEnum):
    """Why the answer ends."""

    STOP = "stop"
    """The model ended it, or a stop string was found."""
    LENGTH = "length"
    """max_tokens or a context is exhausted."""


class Source(StrEnum):
    """Which model wrote a step."""

    DRAFT = "draft"
    TARGET = "target"


class Verdict(StrEnum):
    """What verification said of the drafted step."""

    ACCEPTED = "accepted"
    REJECTED = "rejected"
    UNVERIFIED = "unverified"
    """The decoder does not verify."""


class Review(StrEnum):
    """What a reviewer says of a step before it becomes part of the answer."""

    KEEP = "keep"
    REGENERATE = "regenerate"
    """The target writes it anew."""
    STOP = "stop"
    """Keep it, and end the answer with it."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verifier's decision on one candidate."""

    verdict: Verdict
    score: float | None = None
    confidence: float | None = None
    grounding: float | None = None
    threshold: float | None = None
    value: float | None = None
    """What a reward model or value head says."""
    rejected_early: bool = False
    """Drafting stopped, as no candidate could pass any more; the figures are upper bounds."""
    critical: bool = False
    """The step was the target's to write: it was not drafted, or would have been accepted."""
    paused: bool = False
    """Nothing was drafted: too many of the steps before were rejected, or answers are too slow."""
    doubtful: bool = False
    """The score is so near to the threshold that another look may change the verdict."""
    target_confidence: float | None = None
    """Mean token log-probability by the target, which was asked in doubt and decided."""


UNVERIFIED = Judgement(Verdict.UNVERIFIED)


@dataclass(frozen=True, slots=True)
class StepTokens:
    """A step's cost in tokens."""

    drafted: int = 0
    """Sampled from the draft, over all candidates."""
    kept: int = 0
    """Of the drafted ones, those that became part of the answer."""
    regenerated: int = 0
    """Sampled from the target, over all candidates."""
    salvaged: int = 0
    """Of these, the ones that the rejected step had right: computed several at a time. With
    `speculate_rewrites` also proposed ones."""
    proposed: int = 0
    """Proposed to the target while it wrote the step (`speculate_rewrites`)."""
    draft_read: int = 0
    """Read by the draft without writing them: the prompt, the target's steps."""
    target_read: int = 0
    """Read by the target without writing them: the prompt, the draft's steps. In speculative
    decoding also drafted tokens, and its own ones together with the next of them."""
    draft_reused: int = 0
    """Prompt tokens that the draft did not have to read: cached by an earlier request."""
    target_reused: int = 0
    """Prompt tokens that the target did not have to read: cached by an earlier request."""
    target_passes: int = 0
    """Passes of the target that wrote the step (speculative decoding)."""


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """A step's cost in seconds of wall time.

    A pass that is computed for several requests at a time counts in full for each of them.
    """

    draft: float = 0.0
    verify: float = 0.0
    select: float = 0.0
    """Comparing candidates."""
    target: float = 0.0


@dataclass(frozen=True, slots=True)
class Step:
    """One step of an answer, and where it comes from. `to_dict` is ready for JSON."""

    number: int
    """Counts from 1."""
    text: str
    """What the step adds to the answer; the texts of all steps are the answer."""
    source: Source
    verdict: Verdict
    score: float | None
    confidence: float | None
    """Lowest token log-probability of the drafted step."""
    grounding: float | None
    """Lowest token grounding of the drafted step."""
    threshold: float | None
    rejected_early: bool
    """Drafting stopped, as no candidate could pass; the three figures are upper bounds."""
    num_candidates: int
    chosen: int
    """Index of the candidate that was judged."""
    candidates: tuple[str, ...]
    """The texts that the draft proposed (without a draft: the only model's)."""
    tokens: StepTokens
    seconds: StepSeconds
    span: tuple[int, int]
    """The step's first character and the one after its last, in the answer."""
    answer_tokens: int
    """Tokens that the step has in the answer."""
    phase: Phase = Phase.REASONING
    critical: bool = False
    """It was the target's to write: it was not drafted, or would have been accepted."""
    paused: bool = False
    """Nothing was drafted, as too many of the steps before were rejected, or answers too slow."""
    target_confidence: float | None = None
    """The target's mean log-probability of the drafted step's tokens, where it was asked in doubt:
    then that decided, and not the score."""
    reviews: tuple[Review, ...] = ()
    """What the reviewer said of each version of the step, the last one being this one."""
    passages: tuple[float, ...] = ()
    """How much this text leans on each of the prompt's passages: the share of its attention that is
    paid to the passage's tokens, a mean over the step's tokens and the layers that grounding is
    read from. In [0, 1]; a long passage has more than a short one of the same weight. By the model
    that grounding is read from, whoever wrote the step. Empty if no passages were given or no
    attention is read, and for a last step that does not fit into that model's context."""
    value: float | None = None
    """What a reward model or value head says of the drafted step, in [0, 1]."""
    finish_reason: FinishReason | None = None
    """Set on the last step."""

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Step:
        """Return the step that `to_dict` has made plain.

        Raises:
            ConfigurationError: It is not such a step.
        """
        try:
            return _adapter().validate_python(dict(plain))
        except ValueError as error:
            raise ConfigurationError(f"this is not a step: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """Return the step as JSON's own types, which every serialiser knows."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain


@cache
def _adapter() -> TypeAdapter[Step]:
    from pydantic import TypeAdapter

    return TypeAdapter(Step)
