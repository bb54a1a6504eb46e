"""SpecGuard: draft a step, check it with signals that the model already holds, keep or rewrite it.

Purohit, Narayanam, Pal: From Tokens to Steps (arXiv 2604.15244). The paper's symbols, once: k is
`num_candidates`, tau the verifier's `threshold`, beta its `confidence_weight`, C the sequence in
both sessions. Lossy by design: an accepted step is the draft's and need not be what the target
would have written.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Literal

from specguard_chains.decoding.answer import Answer, StepShape
from specguard_chains.decoding.decoder import Request
from specguard_chains.decoding.engine import Candidate, Engine, Reading, Session
from specguard_chains.decoding.grounding import GroundingSpec
from specguard_chains.decoding.selection import Selector
from specguard_chains.decoding.steps import Source, Step, Verdict
from specguard_chains.decoding.verification import Verifier
from specguard_chains.errors import ConfigurationError

VerifyWith = Literal["draft", "target"]


@dataclass(frozen=True, slots=True)
class SpecGuardDecoder:
    """Draft -> select -> verify -> keep or regenerate -> emit."""

    draft: Engine
    target: Engine
    verifier: Verifier
    num_candidates: int = 4
    select: Selector = field(default_factory=Selector)
    verify_with: VerifyWith = "draft"
    """Whose signals are judged: the draft's own, taken while it drafts, or the target's, which
    costs the target one pass over the chosen step."""
    grounding: GroundingSpec = field(default_factory=GroundingSpec)
    shape: StepShape = field(default_factory=StepShape)
    early_rejection: bool = True
    """Stop drafting once no candidate can be accepted. Changes time, never the text."""

    def __post_init__(self) -> None:
        """Validate."""
        if self.num_candidates < 1:
            raise ConfigurationError(f"num_candidates must be 1 or more, not {self.num_candidates}")

    @property
    def engines(self) -> tuple[Engine, ...]:
        """See `Decoder.engines`."""
        return (self.draft,) if self.draft is self.target else (self.draft, self.target)

    def decode(self, request: Request) -> Iterator[Step]:
        """See `Decoder.decode` (paper, algorithm 1)."""
        with ExitStack() as stack:
            draft, target = self._open(request, stack)
            answer = Answer(request, self.shape, draft, target)
            while not answer.finished:
                with answer.ledger.charge(Source.DRAFT, draft):
                    candidates = self._sample(draft, answer, request, Source.DRAFT)
                    chosen = self._choose(candidates)
                reading = self._read(candidates[chosen], target, answer)
                judgement = self.verifier.judge(candidates[chosen], reading)
                if judgement.verdict is Verdict.ACCEPTED:
                    step, source = candidates[chosen], Source.DRAFT
                else:
                    step, source = self._regenerate(target, answer, request), Source.TARGET
                for session in dict.fromkeys((draft, target)):
                    session.accept(step)  # foreign steps are read when they are next needed
                yield answer.add(step, source, judgement, candidates, chosen)

    def _open(self, request: Request, stack: ExitStack) -> tuple[Session, Session]:
        """Open both sequences; a model that is draft and target at once has one."""
        spec = self.grounding if self.verifier.needs_grounding else None
        by_draft = spec if self.verify_with == "draft" or self.draft is self.target else None
        draft = self.draft.open(request.prompt, grounding=by_draft, cancelled=request.cancelled)
        stack.enter_context(closing(draft))
        if self.draft is self.target:
            return draft, draft
        by_target = spec if self.verify_with == "target" else None
        target = self.target.open(request.prompt, grounding=by_target, cancelled=request.cancelled)
        return draft, stack.enter_context(closing(target))

    def _sample(
        self, session: Session, answer: Answer, request: Request, source: Source
    ) -> list[Candidate]:
        """Let a model write k candidates for the step in progress."""
        watch = source is Source.DRAFT and self.verify_with == "draft" and self.early_rejection
        return session.sample(
            self.num_candidates,
            answer.boundary(),
            request.sampling,
            seed=(request.seed, answer.next_number, source is Source.TARGET),
            watch=self.verifier.can_accept if watch else None,
        )

    def _choose(self, candidates: list[Candidate]) -> int:
        """Select by self-consistency; withdrawn candidates are all rejected, whichever it is."""
        if any(candidate.ending == "withdrawn" for candidate in candidates):
            return 0
        return self.select([candidate.text for candidate in candidates])

    def _read(self, chosen: Candidate, target: Session, answer: Answer) -> Reading:
        """Return the signals to judge by."""
        if self.verify_with == "draft":
            return chosen.reading
        with answer.ledger.charge(Source.TARGET, target, verify=True):
            return target.read(chosen)

    def _regenerate(self, target: Session, answer: Answer, request: Request) -> Candidate:
        """Let the target write the step from the context, not from the draft's text."""
        with answer.ledger.charge(Source.TARGET, target):
            candidates = self._sample(target, answer, request, Source.TARGET)
            return candidates[self._choose(candidates)]
