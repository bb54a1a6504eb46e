"""Candidates while a local model writes them, each on a branch of the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from specguard_chains.decoding.arrays import FloatArray
from specguard_chains.decoding.boundaries import Ending
from specguard_chains.decoding.cache import Rows
from specguard_chains.decoding.constraint import Matcher
from specguard_chains.decoding.engine import Candidate, Look, Reading, Watch
from specguard_chains.decoding.sampling import logprob
from specguard_chains.decoding.step_writer import StepWriter
from specguard_chains.decoding.trail import Row, row_of
from specguard_chains.errors import EngineError

LOOK_TOKENS = 16
"""How often a step is looked at while it is drafted: reading fewer tokens at a time is dear."""
DOUBT_TOKENS = 4
"""How often it is if the draft itself finds one of these tokens unlikely: what is drafted after a
token that is to be rejected is in vain."""
DOUBT = float(np.log(0.5))
"""Log-probability below which it does."""


@dataclass(slots=True)
class Branch:
    """A continuation that the cache holds beside the sequence."""

    index: int = 0
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    """How many of the tokens the cache holds."""
    logits: FloatArray | None = None
    """For the token after the last one, once the branch has ended."""


@dataclass(slots=True)
class Read(Branch):
    """A candidate as far as it was read, and what was read of it."""

    matcher: Matcher | None = field(kw_only=True)
    logprobs: list[float] = field(default_factory=list, kw_only=True)
    grounding: list[float] = field(default_factory=list, kw_only=True)
    passages: list[FloatArray] = field(default_factory=list, kw_only=True)
    state: FloatArray | None = field(default=None, kw_only=True)
    rows: list[Row] = field(default_factory=list, kw_only=True)
    """After its first tokens."""

    def take(self, block: Sequence[int], rows: Rows, *, most_rows: int) -> None:
        """Take in what the model says of the next tokens; keep the rows of the first."""
        assert self.logits is not None
        logits = np.concatenate([self.logits[None], rows.logits])
        self.logprobs += map(logprob, allowed_rows(logits[:-1], block, self.matcher), block)
        self.grounding += [] if rows.grounding is None else rows.grounding.tolist()
        self.passages += [] if rows.passages is None else [rows.passages]
        self.state = None if rows.states is None else rows.states[-1].copy()
        kept = replace(rows, logits=logits[1:])
        self.rows += [row_of(kept, i) for i in range(min(len(block), most_rows - len(self.rows)))]
        self.tokens += block
        self.computed += len(block)
        self.logits = logits[-1].copy()

    def reading(self, *, grounded: bool) -> Reading:
        """Return the signals of all its tokens."""
        return Reading(
            np.array(self.logprobs, dtype=np.float32),
            np.array(self.grounding, dtype=np.float32) if grounded else None,
            np.concatenate(self.passages) if self.passages else None,
            self.state,
        )


@dataclass(slots=True)
class Draft(Branch):
    """A candidate in progress, on a branch of its own."""

    step: StepWriter = field(kw_only=True)
    matcher: Matcher | None = field(kw_only=True)
    passages: list[FloatArray] = field(default_factory=list, kw_only=True)
    """The attention that each token pays to each passage, if that is read."""
    state: FloatArray | None = field(default=None, kw_only=True)
    """Hidden state of the last token, if that is read and the step is complete."""
    on_trail: bool = field(default=False, kw_only=True)
    """Whether all of its tokens are those of a guess."""
    looked_at: int = field(default=0, kw_only=True)
    """How many of its tokens a look has seen."""

    def __post_init__(self) -> None:
        self.tokens = self.step.tokens

    def take(self, row: Row) -> None:
        """Take in what the model says of the newest token."""
        self.computed = len(self.tokens)
        if row.grounding is not None:
            self.step.grounding.append(row.grounding)
        if row.passages is not None:
            self.passages.append(row.passages)
        if self.step.ending is not None:
            self.logits = row.logits.copy()
            if row.state is not None:
                self.state = row.state.copy()

    def candidate(self, *, grounded: bool) -> Candidate:
        """Return the step, once it has ended."""
        candidate = self.step.candidate(grounded=grounded)
        if not self.passages and self.state is None:
            return candidate
        passages = np.stack(self.passages) if self.passages else None
        reading = replace(candidate.reading, passages=passages, state=self.state)
        return replace(candidate, reading=reading)


def masked_like(logits: FloatArray, allowed: FloatArray) -> FloatArray:
    """Return logits with -inf wherever `allowed` has it.

    Raises:
        EngineError: A logits processor has left nothing that is allowed.
    """
    masked = np.where(np.isneginf(allowed), allowed, logits)
    if np.isneginf(masked).all():
        raise EngineError(
            "the logits processor forbids every token that the constraint allows here; change "
            "one of them"
        )
    return masked


def allowed_rows(
    rows: FloatArray, tokens: Sequence[int], matcher: Matcher | None
) -> Sequence[FloatArray]:
    """Return logits with forbidden tokens at -inf, for tokens that follow each other.

    A token that another model wrote in another way than this one may counts by its own logit.
    """
    if matcher is None:
        return list(rows)
    allowed = []
    for row, token in zip(rows, tokens, strict=True):
        masked = matcher.allowed(row)
        allowed.append(masked if np.isfinite(masked[token]) else row)
        matcher.advance([token])
    return allowed


def give_up(draft: Draft, look: Look) -> bool:
    """Stop drafting if a look at the step so far denies it; say whether it did."""
    step, unseen = draft.step, draft.step.logprobs[draft.looked_at :]
    pause = DOUBT_TOKENS if unseen and min(unseen) < DOUBT else LOOK_TOKENS
    if step.ending is not None or len(unseen) < pause:
        return False
    draft.looked_at = len(step.tokens)
    if look(step.so_far()):
        return False
    step.ending = Ending.REJECTED_EARLY
    return True


def reject_early(drafts: Sequence[Draft], watch: Watch | None) -> bool:
    """Stop drafting if the watch denies every candidate; say whether it did."""
    if watch is None:
        return False
    for draft in drafts:
        grounding = min(draft.step.grounding) if draft.step.grounding else None
        if watch(min(draft.step.logprobs), grounding):
            return False
    for draft in drafts:
        if draft.step.ending is None or draft.computed < len(draft.tokens):
            draft.step.ending = Ending.REJECTED_EARLY
    return True
