"""Decoders to compare with: one model alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace

from specguard_chains.decoding.answer import Answer, Proposal
from specguard_chains.decoding.boundaries import StepShape
from specguard_chains.decoding.decoder import Request
from specguard_chains.decoding.engine import Engine, Session
from specguard_chains.decoding.grounding import GroundingSpec
from specguard_chains.decoding.rewards import TextReward
from specguard_chains.decoding.steps import UNVERIFIED, Review, Source, Step, Verdict
from specguard_chains.decoding.verification import Situation, Verifier


@dataclass(frozen=True, slots=True)
class SoloDecoder:
    """One model writes everything; its text is cut into the same steps, unverified.

    Lossless: the text is the model's own.
    """

    engine: Engine
    source: Source
    shape: StepShape = field(default_factory=StepShape)
    grounding: GroundingSpec | None = None
    """Read grounding too: for calibration and analyses."""
    passage_grounding: GroundingSpec = field(default_factory=GroundingSpec)
    """The form in which attention is read where a prompt has passages, if grounding is not."""
    scorer: Verifier | None = None
    """Tells its signals of every step, whose verdict has no consequence: for best of n."""
    rating: TextReward | None = None
    """Rates the complete answer, which is the value of its last step. To rate every step would cost
    as many calls of the reward model."""

    @property
    def engines(self) -> tuple[Engine, ...]:
        """See `Decoder.engines`."""
        return (self.engine,)

    @property
    def asks_others(self) -> bool:
        """See `Decoder.asks_others`."""
        asked = [part for part in (self.scorer, self.rating) if part is not None]
        return any(part.asks_others for part in asked)

    def decode(self, request: Request) -> Iterator[Step]:
        """See `Decoder.decode`."""
        if self.rating is not None:  # before an answer is written in vain
            self.rating.check(request.prompt)
        spec = self.grounding or (self.passage_grounding if request.prompt.passages else None)
        layer = self.scorer.state_layer if self.scorer else None
        with closing(request.open(self.engine, spec, layer)) as session:
            answer = Answer(request, self.shape, session)
            while not answer.finished:
                written = self._write(session, answer)
                while answer.review(written.candidate, self.source, written) is Review.REGENERATE:
                    written = self._write(session, answer)
                step = answer.extend(written.candidate, self.source, written)
                yield self._rated(step, answer) if answer.finished else step

    def _write(self, session: Session, answer: Answer) -> Proposal:
        with answer.ledger.charge(self.source, session):
            candidates = answer.sample(session, self.source, 1)
        if self.scorer is None:
            return Proposal(candidates, 0, UNVERIFIED)
        situation = Situation(
            answer.request, answer.number, answer.written, session, session, answer.tokens_left
        )
        with answer.ledger.charge(self.source, session, verify=True):
            judgement = self.scorer.judge(candidates[0], candidates[0].reading, situation)
        judgement = replace(judgement, verdict=Verdict.UNVERIFIED, threshold=None)
        return Proposal(candidates, 0, judgement)

    def _rated(self, last: Step, answer: Answer) -> Step:
        """Return the last step with the answer's value, and what it has cost to rate it."""
        if self.rating is None:
            return last
        with answer.ledger.time("verify"):
            value = self.rating.value(answer.request.prompt, [*answer.steps])
        _, spent = answer.ledger.settle()
        seconds = replace(last.seconds, verify=last.seconds.verify + spent.verify)
        return replace(last, score=value, value=value, seconds=seconds)
