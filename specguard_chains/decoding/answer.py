"""The answer while it is being written: numbering, length, stop strings, and what it costs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter

from specguard_chains.decoding.boundaries import Boundary, StopCutter
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
from specguard_chains.errors import ConfigurationError, ContextOverflowError


@dataclass(frozen=True, slots=True)
class StepShape:
    """What counts as a step: the paper cuts at a blank line."""

    delimiter: str = "\n\n"
    max_tokens: int = 256
    """A longer step is cut there and goes on as the next one."""

    def __post_init__(self) -> None:
        """Validate."""
        if not self.delimiter:
            raise ConfigurationError('the step delimiter is empty; use for example "\\n\\n"')
        if self.max_tokens < 1:
            raise ConfigurationError(f"max_step_tokens must be at least 1, not {self.max_tokens}")


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

    def settle(self, kept: int) -> tuple[StepTokens, StepSeconds]:
        """Return the step's costs, of which `kept` drafted tokens are in the answer; start anew."""
        tokens, seconds = self._tokens, self._seconds
        self._tokens, self._seconds = Counter(), defaultdict(float)
        return StepTokens(
            drafted=tokens[Source.DRAFT, "written"],
            kept=kept,
            regenerated=tokens[Source.TARGET, "written"],
            draft_read=tokens[Source.DRAFT, "read"],
            target_read=tokens[Source.TARGET, "read"],
            draft_reused=tokens[Source.DRAFT, "reused"],
            target_reused=tokens[Source.TARGET, "reused"],
        ), StepSeconds(
            draft=seconds[Source.DRAFT], verify=seconds["verify"], target=seconds[Source.TARGET]
        )


class Answer:
    """Turns the candidates that a decoder settles on into the steps of one answer."""

    def __init__(self, request: Request, shape: StepShape, *sessions: Session) -> None:
        """Start an answer that all the sessions must have room for.

        Raises:
            ContextOverflowError: The request's max_tokens exceed the room in a context.
        """
        room = min(session.room for session in sessions)
        if request.max_tokens is not None and request.max_tokens > room:
            raise ContextOverflowError(
                f"max_tokens={request.max_tokens} does not fit: the prompt leaves {room} tokens "
                "of the context; lower max_tokens, shorten the prompt or raise n_ctx"
            )
        self.ledger = Ledger()
        self.finish_reason: FinishReason | None = None
        self._sessions = sessions
        self._shape = shape
        self._max_tokens = request.max_tokens
        self._stop = request.stop
        self._cutter = StopCutter(request.stop)
        self._steps = 0
        self._tokens = 0
        self._characters = 0

    @property
    def finished(self) -> bool:
        """Whether the answer is complete."""
        return self.finish_reason is not None

    @property
    def next_number(self) -> int:
        """The number of the step in progress, from 1."""
        return self._steps + 1

    def boundary(self) -> Boundary:
        """Return where the step in progress must end."""
        return Boundary(
            delimiter=self._shape.delimiter,
            max_tokens=min(self._shape.max_tokens, self._tokens_left()),
            stop=self._stop,
            preceding=self._cutter.held,
        )

    def add(
        self,
        candidate: Candidate,
        source: Source,
        judgement: Judgement,
        proposed: Sequence[Candidate],
        chosen: int,
    ) -> Step:
        """Append a candidate that the sessions have accepted; return it as a step."""
        self._steps += 1
        self._tokens += len(candidate.tokens)
        exhausted = self._tokens_left() < 1
        last = candidate.ends_sequence or exhausted
        text = self._cutter.add(candidate.text, last=last)
        if candidate.ends_sequence or self._cutter.stopped:
            self.finish_reason = "stop"
        elif exhausted:
            self.finish_reason = "length"
        start, self._characters = self._characters, self._characters + len(text)
        tokens, seconds = self.ledger.settle(
            kept=len(candidate.tokens) if source is Source.DRAFT else 0
        )
        return Step(
            number=self._steps,
            text=text,
            source=source,
            verdict=judgement.verdict,
            score=judgement.score,
            confidence=judgement.confidence,
            grounding=judgement.grounding,
            threshold=judgement.threshold,
            withdrawn=judgement.withdrawn,
            num_candidates=len(proposed),
            chosen=chosen,
            candidates=tuple(other.text for other in proposed),
            tokens=tokens,
            seconds=seconds,
            span=(start, self._characters),
            answer_tokens=len(candidate.tokens),
            phase=Phase.ANSWER if self.finished else Phase.REASONING,
            finish_reason=self.finish_reason,
        )

    def _tokens_left(self) -> int:
        room = min(session.room for session in self._sessions)
        if self._max_tokens is None:
            return room
        return min(room, self._max_tokens - self._tokens)
