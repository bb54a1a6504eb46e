"""The drafted half of a step: candidates, the one of them that is selected, and its verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from specguard_chains.decoding.answer import Answer, Proposal
from specguard_chains.decoding.boundaries import Ending
from specguard_chains.decoding.engine import Candidate, Look, Reading, Session
from specguard_chains.decoding.pacing import Pacing
from specguard_chains.decoding.selection import Selector
from specguard_chains.decoding.steps import Judgement, Source, Verdict
from specguard_chains.decoding.verification import Situation

if TYPE_CHECKING:
    from specguard_chains.decoding.specguard import SpecGuardDecoder


@dataclass(frozen=True, slots=True)
class Drafter:
    """Drafts an answer's next step and judges it, as a decoder is set up to."""

    decoder: SpecGuardDecoder
    draft: Session
    target: Session
    answer: Answer

    def propose(self, pacing: Pacing) -> Proposal:
        """Draft candidates, select one of them and judge it, or leave the step to the target."""
        decoder, answer = self.decoder, self.answer
        if answer.is_critical():  # nothing that the draft could write would be kept
            return Proposal((), 0, Judgement(Verdict.UNVERIFIED, critical=True))
        if pacing.pauses():
            return Proposal((), 0, Judgement(Verdict.UNVERIFIED, paused=True))
        k = 1 if decoder.one_first else decoder.num_candidates
        proposal = self._judge(self._first(k))
        if not proposal.judgement.doubtful:
            return proposal
        if decoder.target_confidence is not None:
            return self._escalate(proposal, decoder.target_confidence)
        if k == decoder.num_candidates or answer.request.sampling.greedy:  # all would be the same
            return proposal
        with answer.ledger.charge(Source.DRAFT, self.draft):  # selecting needs all of them complete
            more = answer.sample(self.draft, Source.DRAFT, decoder.num_candidates - k)
        return self._judge([*proposal.candidates, *more])

    def _first(self, n: int) -> list[Candidate]:
        """Draft candidates, until none of them can be accepted (early rejection)."""
        decoder = self.decoder
        own_signals = decoder.early_rejection and decoder.verify_with == "draft"
        watch = decoder.verifier.can_accept if own_signals else None
        with self.answer.ledger.charge(Source.DRAFT, self.draft):
            return self.answer.sample(self.draft, Source.DRAFT, n, watch, look=self._look())

    def _look(self) -> Look | None:
        """Let the target read a step while it is drafted, to stop as soon as it must be rejected.

        What it has read so far it does not read again.
        """
        decoder, target = self.decoder, self.target
        one_text = decoder.draft.vocabulary == decoder.target.vocabulary
        apart = decoder.draft is not decoder.target and one_text
        if not (decoder.early_rejection and decoder.verify_with == "target" and apart):
            return None

        def can_be_accepted(step: Candidate) -> bool:
            if not target.fits(step):
                return True
            with self.answer.ledger.charge(Source.TARGET, target, verify=True):
                reading = target.read(step)
            return decoder.verifier.can_accept(reading.confidence, reading.min_grounding)

        return can_be_accepted

    def _judge(self, candidates: Sequence[Candidate]) -> Proposal:
        """Select a candidate and judge it."""
        answer, drafted = self.answer, list(candidates)
        with answer.ledger.time("select"):
            chosen = choose(self.decoder.select, drafted)
        reading = self._read(drafted[chosen])
        if reading is None:
            return Proposal(drafted, chosen, Judgement(Verdict.REJECTED))
        drafted[chosen] = with_passages(drafted[chosen], reading)
        situation = Situation(
            *(answer.request, answer.number, answer.written),
            *(self.draft, self.target, answer.tokens_left),
        )
        with answer.ledger.charge(Source.TARGET, self.target, verify=True):
            judgement = self.decoder.verifier.judge(drafted[chosen], reading, situation)
        accepted = judgement.verdict is Verdict.ACCEPTED
        if accepted and answer.is_critical(drafted[chosen]):
            judgement = replace(judgement, verdict=Verdict.REJECTED, critical=True)
        return Proposal(drafted, chosen, judgement)

    def _read(self, chosen: Candidate) -> Reading | None:
        """Return the signals to judge by: the draft's own, the target's, or some of each.

        None if the target is to read a step that its context has no room for: in another vocabulary
        a step may have more tokens.
        """
        decoder, own = self.decoder, chosen.reading
        by_draft = chosen.ending is Ending.REJECTED_EARLY and decoder.verify_with == "draft"
        if by_draft or not decoder.target_reads(self.answer.request):
            return own
        if not self.target.fits(chosen):
            return None
        with self.answer.ledger.charge(Source.TARGET, self.target, verify=True):
            read = self.target.read(chosen)
        confidence, attention = (
            own if source == "draft" else read for source in (decoder.verify_with, decoder.reader)
        )
        return Reading(confidence.logprobs, attention.grounding, attention.passages, own.state)

    def _escalate(self, proposal: Proposal, least: float) -> Proposal:
        """Let the target decide on a doubtful step by its own confidence.

        What it has read of a step that is kept it need not read later.
        """
        answer, target = self.answer, self.target
        if answer.is_critical(proposal.candidate) or not target.fits(proposal.candidate):
            return proposal
        with answer.ledger.charge(Source.TARGET, target, verify=True):
            logprobs = target.read(proposal.candidate).logprobs
        if not len(logprobs):  # what is no token of its own yet says nothing
            return proposal
        mean = float(logprobs.mean())
        verdict = Verdict.ACCEPTED if mean >= least else Verdict.REJECTED
        judged = replace(proposal.judgement, verdict=verdict, target_confidence=mean)
        return replace(proposal, judgement=judged)


def choose(select: Selector, candidates: Sequence[Candidate]) -> int:
    """Select by self-consistency. After early rejection there is nothing to choose."""
    for index, candidate in enumerate(candidates):
        if candidate.ending is Ending.REJECTED_EARLY:
            return index
    return select([candidate.text for candidate in candidates])


def with_passages(step: Candidate, read: Reading) -> Candidate:
    """Return a step that tells of passages what a reading of it does."""
    return replace(step, reading=replace(step.reading, passages=read.passages))
