"""The answer while it is being written: numbering, length, stop strings, and what it costs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Literal

from specguard_chains.decoding.boundaries import Boundary, StepShape, StopCutter
from specguard_chains.decoding.decoder import Request
from specguard_chains.decoding.engine import Candidate, Session
from specguard_chains.decoding.steps import (
    FinishReason,
    Judgement,
    Phase,
    Source,
    Step,
    StepSeconds,
    StepTokens,
)
from specguard_chains.errors import ContextOverflowError


@dataclass(frozen=True, slots=True)
class Proposal:
    """The candidates for a step, the one of them that was selected, and what was said of it."""

    candidates: Sequence[Candidate]
    chosen: int
    judgement: Judgement

    @property
    def candidate(self) -> Candidate:
        """The selected one."""
        return self.candidates[self.chosen]


class Ledger:
    """What the step in progress has cost so far, by who did the work."""

    def __init__(self) -> None:
        """Start at nothing."""
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._tokens: Counter[tuple[Source, str]] = Counter()

    @contextmanager
    def charge(self, source: Source, session: Session, *, verify: bool = False) -> Iterator[None]:
        """Book the block's wall time, and the session's work in it as that model's."""
        start, before = perf_counter(), replace(session.counters)
        try:
            yield
        finally:
            self._seconds["verify" if verify else source] += perf_counter() - start
            for what in ("written", "read", "reused"):
                spent = getattr(session.counters, what) - getattr(before, what)
                self._tokens[source, what] += spent

    def count(self, source: Source, what: Literal["kept", "passes"], n: int) -> None:
        """Book drafted tokens that were kept, or passes over drafted tokens."""
        self._tokens[source, what] += n

    def settle(self) -> tuple[StepTokens, StepSeconds]:
        """Return the step's costs and start anew."""
        tokens, seconds = self._tokens, self._seconds
        self._tokens, self._seconds = Counter(), defaultdict(float)
        return StepTokens(
            drafted=tokens[Source.DRAFT, "written"],
            kept=tokens[Source.DRAFT, "kept"],
            regenerated=tokens[Source.TARGET, "written"],
            draft_read=tokens[Source.DRAFT, "read"],
            target_read=tokens[Source.TARGET, "read"],
            draft_reused=tokens[Source.DRAFT, "reused"],
            target_reused=tokens[Source.TARGET, "reused"],
            target_passes=tokens[Source.TARGET, "passes"],
        ), StepSeconds(
            draft=seconds[Source.DRAFT], verify=seconds["verify"], target=seconds[Source.TARGET]
        )


class Answer:
    """Grows by the candidates that a decoder settles on, and says when it is complete."""

    def __init__(
        self,
        request: Request,
        shape: StepShape,
        *sessions: Session,
        ledger: Ledger | None = None,
    ) -> None:
        """Start an answer that all the sessions must have room for and will follow.

        Raises:
            ContextOverflowError: The request's max_tokens exceed the room in a context.
        """
        self.request = request
        self.ledger = ledger or Ledger()
        self.text = ""
        """What is certain of the answer so far."""
        self.number = 1
        """Of the step in progress."""
        self.finish_reason: FinishReason | None = None
        self._sessions = tuple(dict.fromkeys(sessions))
        self._shape = shape
        self._cutter = StopCutter(request.stop)
        self._tokens = 0
        room = self._room()
        if request.max_tokens is not None and request.max_tokens > room:
            raise ContextOverflowError(
                f"max_tokens={request.max_tokens} does not fit: the prompt leaves {room} tokens "
                "of the context; lower max_tokens, shorten the prompt or raise n_ctx"
            )

    @property
    def finished(self) -> bool:
        """Whether the answer is complete."""
        return self.finish_reason is not None

    def boundary(self) -> Boundary:
        """Return where the step in progress must end, in tokens of whoever writes it."""
        return Boundary(
            delimiter=self._shape.delimiter,
            max_tokens=min(self._shape.max_tokens, self._tokens_left()),
            stop=self.request.stop,
            preceding=self._cutter.held,
        )

    def extend(self, candidate: Candidate, source: Source, proposal: Proposal) -> Step:
        """Append a candidate, in all sessions too, and return it as a step.

        The step tells of the proposal, whoever wrote the candidate in the end.
        """
        fits = all(session.fits(candidate) for session in self._sessions)
        if fits:
            for session in self._sessions:
                session.accept(candidate)
        self._tokens += len(candidate.tokens)
        exhausted = not fits or self._tokens_left() < 1
        released = self._cutter.add(candidate.text, last=candidate.ends_sequence or exhausted)
        if candidate.ends_sequence or self._cutter.stopped:
            self.finish_reason = FinishReason.STOP
        elif exhausted:
            self.finish_reason = FinishReason.LENGTH
        step = self._step(released, candidate, source, proposal)
        self.text += released
        self.number += 1
        return step

    def _step(self, text: str, candidate: Candidate, source: Source, proposal: Proposal) -> Step:
        judgement, written = proposal.judgement, len(candidate.tokens)
        if source is Source.DRAFT:
            self.ledger.count(source, "kept", written)
        tokens, seconds = self.ledger.settle()
        return Step(
            number=self.number,
            text=text,
            source=source,
            verdict=judgement.verdict,
            score=judgement.score,
            confidence=judgement.confidence,
            grounding=judgement.grounding,
            threshold=judgement.threshold,
            rejected_early=judgement.rejected_early,
            num_candidates=len(proposal.candidates),
            chosen=proposal.chosen,
            candidates=tuple(other.text for other in proposal.candidates),
            tokens=tokens,
            seconds=seconds,
            span=(len(self.text), len(self.text) + len(text)),
            answer_tokens=written,
            phase=Phase.ANSWER if self.finished else Phase.REASONING,
            finish_reason=self.finish_reason,
        )

    def _room(self) -> int:
        return min(session.room for session in self._sessions)

    def _tokens_left(self) -> int:
        limit = self.request.max_tokens
        return self._room() if limit is None else min(self._room(), limit - self._tokens)
