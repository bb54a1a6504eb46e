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

from specguard_chains.decoding.answer import Answer, Proposal
from specguard_chains.decoding.boundaries import StepShape
from specguard_chains.decoding.decoder import Request
from specguard_chains.decoding.drafting import Drafter, choose, with_passages
from specguard_chains.decoding.engine import Candidate, Engine, Session
from specguard_chains.decoding.engine_checks import (
    check_candidates,
    check_confidence,
    check_scoring,
)
from specguard_chains.decoding.grounding import GroundingSpec
from specguard_chains.decoding.ledger import Ledger
from specguard_chains.decoding.pacing import Pacing, Patience
from specguard_chains.decoding.rewriting import SpeculativeRewriting
from specguard_chains.decoding.selection import Selector
from specguard_chains.decoding.slowdown import Slowdown
from specguard_chains.decoding.steps import Review, Source, Step, Verdict
from specguard_chains.decoding.verification import Verifier
from specguard_chains.errors import ConfigurationError

VerifyWith = Literal["draft", "target"]


@dataclass(frozen=True, slots=True)
class SpecGuardDecoder:
    """Draft -> select -> verify -> keep or regenerate -> emit.

    Its defaults are the paper's form; those of `SpecGuardOptions` follow what was measured.
    """

    draft: Engine
    target: Engine
    verifier: Verifier
    num_candidates: int = 4
    num_target_candidates: int | None = None
    """How many the target samples of a step that it rewrites or writes alone; None is as many as
    the draft (the paper's)."""
    one_first: bool = False
    """Draft one candidate, and the others only if the verifier finds it doubtful."""
    target_confidence: float | None = None
    """Let the target read a step that the verifier finds doubtful, and keep it if the mean
    log-probability of its tokens is at least this; None asks it nothing."""
    select: Selector = field(default_factory=Selector)
    verify_with: VerifyWith = "draft"
    """Whose confidence is judged: the draft's own, taken while it drafts, or the target's, which
    costs the target one pass over the chosen step."""
    grounding_from: VerifyWith | None = None
    """Whose attention grounding is read from; None takes the model whose confidence is judged."""
    grounding: GroundingSpec = field(default_factory=GroundingSpec)
    shape: StepShape = field(default_factory=StepShape)
    early_rejection: bool = True
    """Stop drafting once no candidate can be accepted. Changes time, never the text, unless
    `hand_back` goes by how much was drafted."""
    salvage: bool = True
    """Let the target compute several tokens at a time where it writes what was rejected anyway.
    Changes time, never the text (with `rewriting`, never its law)."""
    hand_back: int | None = None
    """After a rejection let the target write on for so many tokens beyond what the draft had
    written, and give the rest of the step back to the draft; None lets it finish the step."""
    patience: Patience | None = None
    """When to let the target go on without a draft; None always drafts."""
    slowdown: Slowdown | None = None
    """How much slower than the target alone all answers together may be; None is no limit. For
    steps that the target reads and writes one version of: else its own pace is not to be told."""
    rewriting: SpeculativeRewriting | None = None
    """How the target writes several tokens at a time; None lets it write one by one."""

    def __post_init__(self) -> None:
        """Validate."""
        for name in ("num_candidates", "num_target_candidates"):
            if (n := getattr(self, name)) is not None and n < 1:
                raise ConfigurationError(f"{name} must be 1 or more, not {n}")
        if self.hand_back is not None and self.hand_back < 1:
            raise ConfigurationError(f"hand_back must be 1 or more tokens, not {self.hand_back}")
        if self.hand_back is not None and self.draft.vocabulary != self.target.vocabulary:
            raise ConfigurationError(
                f"hand_back={self.hand_back} counts tokens, and {self.draft.name} and "
                f"{self.target.name} do not have the same ones; leave it out"
            )
        check_candidates(self.draft, self.num_candidates, self.shape)
        asked = "num_target_candidates" if self.num_target_candidates else "num_candidates"
        check_candidates(self.target, self._rewrites, self.shape, asked)
        if self.verify_with == "draft":
            check_confidence(self.draft, self.verifier)
        else:
            check_scoring(self.target, "set verify_with='draft'")
        if self.target_confidence is not None:
            check_scoring(self.target, "leave out target_confidence")
        if self.rewriting is not None:
            self.rewriting.check(self.draft, self.target, self.verifier)
        if self.slowdown is not None:
            self._check_slowdown()

    def _check_slowdown(self) -> None:
        """Refuse a limit where the target alone would not do what it does where nothing is drafted.

        The draft's own verdicts are refused, too: the target need not have read the prompt then.
        """
        wrong = {
            "verify_with='target'": self.verify_with != "target",
            "num_target_candidates=1": self._rewrites > 1,
            "speculate_rewrites=False": self.rewriting is not None,
            "two models": self.draft is self.target,
        }
        if needed := [what for what, lacks in wrong.items() if lacks]:
            raise ConfigurationError(
                "max_slowdown holds answers against those of the target alone, which needs "
                f"{' and '.join(needed)}; leave it out, or change that"
            )

    @property
    def engines(self) -> tuple[Engine, ...]:
        """See `Decoder.engines`."""
        return (self.draft,) if self.draft is self.target else (self.draft, self.target)

    @property
    def asks_others(self) -> bool:
        """See `Decoder.asks_others`."""
        selects = max(self.num_candidates, self._rewrites) > 1
        return self.verifier.asks_others or (selects and self.select.asks_others)

    @property
    def reader(self) -> VerifyWith:
        """Whose attention is read."""
        return self.grounding_from or self.verify_with

    def target_reads(self, request: Request) -> bool:
        """Whether the target computes a drafted step before it is judged."""
        read_for_attention = self._reads_attention(request) and self.reader == "target"
        return self.verify_with == "target" or read_for_attention

    def decode(self, request: Request) -> Iterator[Step]:
        """See `Decoder.decode` (paper, algorithm 1)."""
        with ExitStack() as stack:
            draft, target = self._open(request, stack)
            answer, writer = self._begin(request, draft, target)
            prompt_tokens = self.target.context_length - target.room
            time = None
            if self.slowdown is not None:
                time = self.slowdown.begin(prompt_tokens)
                stack.callback(time.end)
            pacing = Pacing(self.patience, time)
            drafter = Drafter(self, draft, target, answer)
            while not answer.finished:
                proposal = drafter.propose(pacing)
                pacing.note(proposal.judgement)
                if proposal.judgement.verdict is Verdict.ACCEPTED:
                    step, source = proposal.candidate, Source.DRAFT
                else:
                    step, source = self._regenerate(draft, writer, answer, proposal), Source.TARGET
                while answer.review(step, source, proposal) is Review.REGENERATE:
                    step, source = self._regenerate(draft, writer, answer, proposal), Source.TARGET
                done = answer.extend(step, source, proposal)
                pacing.note_time(done)
                yield done

    def _regenerate(
        self, draft: Session, writer: Session, answer: Answer, proposal: Proposal
    ) -> Candidate:
        """Let the target write the step from the context; the draft's text is no more than a guess.

        It draws every token itself, so that the text is the same without the guess. With
        `rewriting` a guess is a proposal that no law is known of. (Accepting its tokens by
        min(1, p / q), as if the draft had just drawn them, would not have the target's law: those
        that are left over from a rejection do not have the draft's.)
        """
        drafted = proposal.candidate if proposal.candidates else None
        guess = drafted if self.salvage else None
        most = None
        if drafted is not None and self.hand_back is not None:
            most = len(drafted.tokens) + self.hand_back
        with answer.ledger.charge(Source.TARGET, writer):
            candidates = answer.sample(
                writer, Source.TARGET, self._rewrites, guess=guess, max_tokens=most
            )
        with answer.ledger.time("select"):
            step = candidates[choose(self.select, candidates)]
        if not answer.request.prompt.passages or self.reader == "target" or draft is writer:
            return step
        # The draft is about to read this step anyway; all steps' passages are told by one model.
        if not draft.fits(step):
            return step
        with answer.ledger.charge(Source.DRAFT, draft, verify=True):
            return with_passages(step, draft.read(step))

    def _begin(self, request: Request, draft: Session, target: Session) -> tuple[Answer, Session]:
        """Return an empty answer, and what the target writes its steps of it with."""
        if self.rewriting is None:
            return Answer(request, self.shape, draft, target), target
        ledger = Ledger()
        writer = self.rewriting.writer(draft, target, ledger)
        followers = self.rewriting.followers(draft, writer)
        return Answer(request, self.shape, *followers, ledger=ledger), writer

    def _open(self, request: Request, stack: ExitStack) -> tuple[Session, Session]:
        """Open both sequences; a model that is draft and target at once has one."""
        if self.rewriting is not None and request.prompt.passages:
            raise ConfigurationError(
                "passages need attention, which tokens that are proposed to the target have not; "
                "leave out speculate_rewrites, or give no passages"
            )
        spec = self.grounding if self._reads_attention(request) else None

        def open_session(engine: Engine, *, reads: bool, state_layer: int | None = None) -> Session:
            session = request.open(engine, spec if reads else None, state_layer)
            return stack.enter_context(closing(session))

        layer = self.verifier.state_layer
        if self.draft is self.target:
            session = open_session(self.draft, reads=True, state_layer=layer)
            return session, session
        return (
            open_session(self.draft, reads=self.reader == "draft", state_layer=layer),
            open_session(self.target, reads=self.reader == "target"),
        )

    @property
    def _rewrites(self) -> int:
        """How many candidates the target samples."""
        return self.num_target_candidates or self.num_candidates

    def _reads_attention(self, request: Request) -> bool:
        """Whether somebody asks for grounding, or for the passages that a step leans on."""
        return self.verifier.needs_grounding or bool(request.prompt.passages)
