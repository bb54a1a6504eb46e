"""What a plan is made for: an answer's sizes, the ways to write it, and how verification goes."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Method = Literal["target", "draft", "specguard", "rsd", "speculative"]


class _Record(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


class Workload(_Record):
    """The sizes of a typical answer, in tokens."""

    prompt_tokens: float = Field(default=150, gt=0)
    answer_tokens: float = Field(default=200, gt=0)
    step_tokens: float = Field(default=30, gt=0)

    @property
    def steps(self) -> float:
        """Steps of the answer."""
        return max(1.0, self.answer_tokens / self.step_tokens)


class Acceptance(_Record):
    """How verification goes, on the average."""

    rate: float = Field(ge=0, le=1)
    """Share of the answer's steps that are the draft's."""
    length: float = Field(default=1.0, gt=0)
    """Tokens of an accepted step, as a share of those of one of the target's."""
    drafted_of_rejected: float = Field(default=1.0, ge=0)
    """Tokens that were drafted of a rejected step before it was given up, as a share of those of
    the step that replaces it."""
    salvaged: float = Field(default=0.0, ge=0, le=1)
    """Share of the tokens of the target's steps that the draft had right, if that is made use of
    (`salvage`)."""
    undrafted: float = Field(default=0.0, ge=0, lt=1)
    """Share of the target's steps of which nothing was drafted (`patience`, `critical_steps`): the
    draft reads such ones together with the next."""
    untouched: float | None = Field(default=None, ge=0, le=1)
    """Share of answers in which every step is accepted; None if steps are accepted independently
    of each other: the rate of drafted ones to the power of the number of steps."""

    @property
    def of_drafted(self) -> float:
        """Share of the drafted steps that are accepted, as a run's metrics have it."""
        drafted = self.rate + (1 - self.rate) * (1 - self.undrafted)
        return self.rate / drafted


class Speculating(_Record):
    """How token-level speculative decoding goes, on the average."""

    drafted: float = Field(gt=0)
    """Tokens that are proposed at a time (gamma)."""
    tokens_per_pass: float = Field(ge=1)
    """Tokens of the answer per pass of the target."""
    pending: float = Field(default=1.0, ge=1)
    """Tokens that the draft reads before it proposes some: the target's own one, and the last that
    was proposed if all were right."""

    @classmethod
    def at(cls, acceptance: float, drafted: int) -> Speculating:
        """Return what to expect if each proposed token is accepted with a probability.

        (1 - a^(gamma + 1)) / (1 - a) tokens per pass, Leviathan et al. 2211.17192.
        """
        expected = sum(acceptance**accepted for accepted in range(drafted + 1))
        return cls(drafted=drafted, tokens_per_pass=expected, pending=1 + acceptance**drafted)


class Setting(_Record):
    """One way to write answers."""

    label: str
    method: Method
    candidates: int = Field(default=1, ge=1)
    """Drafted at a time; greedy decoding draws one."""
    target_candidates: int | None = Field(default=None, ge=1)
    """That the target draws at a time; None is as many as the draft."""
    one_first: bool = False
    """Whether the draft begins with one candidate and draws the others in doubt."""
    drafted_candidates: float | None = Field(default=None, ge=1)
    """Of the draft, on the average, where it does not always draw all of them."""
    verify_with: Literal["draft", "target"] = "draft"
    looks: bool = False
    """Whether the target, as the judge, reads a step while it is drafted, to give it up early."""
    attention_of: Literal["draft", "target"] | None = None
    """Whose attention is read for grounding."""
    acceptance: Acceptance | None = None
    """Of the methods that judge steps."""
    speculating: Speculating | None = None
    """Of speculative decoding."""
    threshold: float | None = None
    """Of the score, where the acceptance is that of one."""
    assumed: bool = True
    """Whether acceptance is assumed; else it comes from recorded runs."""

    @property
    def rewrites(self) -> int:
        """Candidates that the target draws at a time."""
        return self.target_candidates or self.candidates

    @property
    def judges(self) -> bool:
        """Whether steps are accepted or rejected."""
        return self.method in ("specguard", "rsd")
