"""The answer while it is being written: numbering, length, stop strings, and what it costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace

from specguard_chains.decoding.boundaries import (
    Boundary,
    Phase,
    SectionTracker,
    StepShape,
    StopCutter,
    phase_within,
)
from specguard_chains.decoding.decoder import Request
from specguard_chains.decoding.engine import Candidate, Look, Session, Watch
from specguard_chains.decoding.ledger import Ledger
from specguard_chains.decoding.steps import (
    FinishReason,
    Judgement,
    Review,
    Source,
    Step,
    StepSeconds,
    StepTokens,
)
from specguard_chains.errors import ConfigurationError, ContextOverflowError

CRITICAL = frozenset({Phase.TOOL_CALL, Phase.ANSWER})
"""Phases in which an error is an action or the result."""
SECOND_TEMPERATURE = 0.7
"""At temperature 0 another version of a step is drawn at this one: it would be the same again."""


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


@dataclass(frozen=True, slots=True)
class _Outlook:
    """What a candidate would make of the answer, as far as is known before it is appended."""

    text: str
    """What is certain of the answer then, beyond what is certain now."""
    finish_reason: FinishReason | None
    """Room in a context is counted in the candidate's own tokens here."""
    phase: Phase
    cutter: StopCutter


FREE, NO_TIME = StepTokens(), StepSeconds()


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
        self.steps: list[str] = []
        """What is certain of the answer so far, step by step."""
        self.written: list[str] = []
        """The steps as they were written: with what may be the beginning of a stop string."""
        self.number = 1
        """Of the step in progress."""
        self.finish_reason: FinishReason | None = None
        self._sessions = tuple(dict.fromkeys(sessions))
        self._shape = shape
        self._cutter = StopCutter(request.stop)
        self._place = SectionTracker(  # of the step in progress
            request.sections,
            request.opened,
            memory=max((len(stop) - 1 for stop in request.stop), default=0),
        )
        self._versions: Counter[Source] = Counter()  # of the step in progress
        self._reviews: list[Review] = []
        self._tokens = 0
        room = self._room()
        if request.max_tokens is not None and request.max_tokens > room:
            raise ContextOverflowError(
                f"max_tokens={request.max_tokens} does not fit: the prompt leaves {room} tokens "
                "of the context; lower max_tokens, shorten the prompt or raise n_ctx"
            )

    @property
    def text(self) -> str:
        """What is certain of the answer so far."""
        return "".join(self.steps)

    @property
    def finished(self) -> bool:
        """Whether the answer is complete."""
        return self.finish_reason is not None

    @property
    def tokens_left(self) -> int:
        """How many more it may have, by the request and by the room in every context."""
        limit = self.request.max_tokens
        return self._room() if limit is None else min(self._room(), limit - self._tokens)

    def boundary(self) -> Boundary:
        """Return where the step in progress must end, in tokens of whoever writes it."""
        return Boundary(
            delimiter=self._shape.delimiter,
            max_tokens=min(self._shape.max_tokens, self.tokens_left),
            stop=self.request.stop,
            preceding=self._place.tail,
            sections=self.request.sections,
            inside=self._place.inside,
            marks_from=self._place.marks_from,
        )

    def sample(
        self,
        session: Session,
        source: Source,
        n: int,
        watch: Watch | None = None,
        guess: Candidate | None = None,
        max_tokens: int | None = None,
        look: Look | None = None,
    ) -> list[Candidate]:
        """Let a session write n candidates for the step in progress, other ones each time.

        A step that is cut after `max_tokens` goes on as the next one.
        """
        version, sampling = self._versions[source], self.request.sampling
        boundary = self.boundary()
        if max_tokens is not None:
            boundary = replace(boundary, max_tokens=min(max_tokens, boundary.max_tokens))
        self._versions[source] += 1
        if version and sampling.greedy:
            sampling = replace(sampling, temperature=SECOND_TEMPERATURE, top_k=0)
        return session.sample(
            n,
            boundary,
            sampling,
            seed=(self.request.seed, self.number, source is Source.TARGET, *[version][:version]),
            watch=watch,
            guess=guess,
            look=look,
        )

    def is_critical(self, candidate: Candidate | None = None) -> bool:
        """Whether the step is the target's to write, as a candidate or the place so far shows."""
        if self.request.critical_steps == "verify":
            return False
        if candidate is not None:
            return self._outlook(candidate).phase in CRITICAL
        inside = self._place.inside
        return self._reasoned if inside is None else inside.phase in CRITICAL

    def review(self, candidate: Candidate, source: Source, proposal: Proposal) -> Review:
        """Return what the request's reviewer says of a version of the step.

        Raises:
            ConfigurationError: It says something else than a reviewer may.
        """
        if self.request.review is None:
            return Review.KEEP
        outlook = self._outlook(candidate)
        shown = self._step(outlook, candidate, source, proposal)
        said = self.request.review(replace(shown, finish_reason=outlook.finish_reason))
        try:
            self._reviews.append(Review(said))
        except ValueError:
            raise ConfigurationError(
                f"a reviewer must return {', '.join(map(repr, map(str, Review)))}, not {said!r}"
            ) from None
        last = len(self._reviews) == self.request.max_reviews
        return Review.KEEP if last else self._reviews[-1]

    def extend(self, candidate: Candidate, source: Source, proposal: Proposal) -> Step:
        """Append a candidate, in all sessions too, and return it as a step.

        The step tells of the proposal, whoever wrote the candidate in the end.
        """
        outlook = self._outlook(candidate)
        fits = all(session.fits(candidate) for session in self._sessions)
        if fits:
            for session in self._sessions:
                session.accept(candidate)
        self._tokens += len(candidate.tokens)
        self._cutter, self.finish_reason = outlook.cutter, None
        if outlook.finish_reason is FinishReason.STOP or self._reviews[-1:] == [Review.STOP]:
            self.finish_reason = FinishReason.STOP
        elif not fits or self.tokens_left < 1:
            self.finish_reason = FinishReason.LENGTH
        if source is Source.DRAFT:
            self.ledger.count(source, "kept", len(candidate.tokens))
        step = self._step(outlook, candidate, source, proposal, *self.ledger.settle())
        if not self.finished and self.request.stop_when is not None:
            self.finish_reason = FinishReason.STOP if self.request.stop_when(step) else None
        step = self._finished(step)
        self.steps.append(step.text)
        self.written.append(candidate.text)
        self.number += 1
        self._place.add(candidate.text)
        self._versions.clear()
        self._reviews = []
        return step

    def _outlook(self, candidate: Candidate) -> _Outlook:
        """Return what a candidate would make of the answer."""
        cutter = copy(self._cutter)
        text, reason = cutter.add(candidate.text, last=candidate.ends_sequence), None
        if candidate.ends_sequence or cutter.stopped:
            reason = FinishReason.STOP
        elif len(candidate.tokens) >= self.tokens_left:
            reason = FinishReason.LENGTH
        phase = phase_within(self.boundary(), candidate.text)
        if phase is None:  # outside of sections, the answer comes last
            phase = Phase.ANSWER if reason or self._reasoned else Phase.REASONING
        return _Outlook(text, reason, phase, cutter)

    def _finished(self, step: Step) -> Step:
        """Return a step with the reason why the answer ends with it, if it does."""
        held = self._cutter.add("", last=True) if self.finished else ""
        text, (start, end) = step.text + held, step.span
        span = (start, end + len(held))
        return replace(step, text=text, span=span, finish_reason=self.finish_reason)

    def _step(
        self,
        outlook: _Outlook,
        candidate: Candidate,
        source: Source,
        proposal: Proposal,
        tokens: StepTokens = FREE,
        seconds: StepSeconds = NO_TIME,
    ) -> Step:
        judgement = proposal.judgement
        return Step(
            number=self.number,
            text=outlook.text,
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
            span=(start := sum(map(len, self.steps)), start + len(outlook.text)),
            answer_tokens=len(candidate.tokens),
            phase=outlook.phase,
            value=judgement.value,
            critical=judgement.critical,
            paused=judgement.paused,
            target_confidence=judgement.target_confidence,
            reviews=tuple(self._reviews),
            passages=candidate.reading.passage_shares,
        )

    @property
    def _reasoned(self) -> bool:
        """Whether there was a section of reasoning: what follows is the answer."""
        return Phase.REASONING in self._place.seen

    def _room(self) -> int:
        return min(session.room for session in self._sessions)
