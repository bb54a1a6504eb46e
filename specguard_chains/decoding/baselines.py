"""Decoders to compare with: one model alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field

from specguard_chains.decoding.answer import Answer, Proposal
from specguard_chains.decoding.boundaries import StepShape
from specguard_chains.decoding.decoder import Request
from specguard_chains.decoding.engine import Engine
from specguard_chains.decoding.grounding import GroundingSpec
from specguard_chains.decoding.steps import UNVERIFIED, Source, Step


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

    @property
    def engines(self) -> tuple[Engine, ...]:
        """See `Decoder.engines`."""
        return (self.engine,)

    def decode(self, request: Request) -> Iterator[Step]:
        """See `Decoder.decode`."""
        session = self.engine.open(
            request.prompt, grounding=self.grounding, cancelled=request.cancelled
        )
        with closing(session):
            answer = Answer(request, self.shape, session)
            while not answer.finished:
                with answer.ledger.charge(self.source, session):
                    candidates = session.sample(
                        1,
                        answer.boundary(),
                        request.sampling,
                        seed=(request.seed, answer.number, self.source is Source.TARGET),
                    )
                proposal = Proposal(candidates, 0, UNVERIFIED)
                yield answer.extend(proposal.candidate, self.source, proposal)
