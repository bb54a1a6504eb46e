"""Speculative decoding: the target's text at fewer passes of the target. Lossless."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from math import prod
from typing import cast

from specguard_chains.decoding.answer import Answer, Proposal
from specguard_chains.decoding.boundaries import StepShape
from specguard_chains.decoding.decoder import Request
from specguard_chains.decoding.engine import Engine, LogitSession
from specguard_chains.decoding.ledger import Ledger
from specguard_chains.decoding.prompt_lookup import PromptText
from specguard_chains.decoding.speculation import Speculation
from specguard_chains.decoding.speculative_session import SpeculativeSession
from specguard_chains.decoding.steps import UNVERIFIED, Review, Source, Step
from specguard_chains.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class SpeculativeDecoder:
    """The target's text, drafted token by token."""

    draft: Engine | None
    """A model of the same vocabulary; None copies from the prompt and from the answer so far."""
    target: Engine
    speculation: Speculation = field(default_factory=Speculation)
    shape: StepShape = field(default_factory=StepShape)

    def __post_init__(self) -> None:
        """Validate."""
        for engine in self.engines:
            check_speculation(
                engine,
                self.speculation,
                "take an engine that runs in this process, without logits processors",
            )
        if self.draft is None:
            check_chain(self.speculation)
        else:
            check_vocabulary(
                self.draft,
                self.target,
                "take decoder='specguard', which hands whole steps over as text",
            )

    @property
    def engines(self) -> tuple[Engine, ...]:
        """See `Decoder.engines`."""
        if self.draft is None or self.draft is self.target:
            return (self.target,)
        return (self.draft, self.target)

    @property
    def asks_others(self) -> bool:
        """See `Decoder.asks_others`."""
        return False

    def decode(self, request: Request) -> Iterator[Step]:
        """See `Decoder.decode`. Steps are the target's own, cut where SpecGuard cuts them."""
        if request.prompt.passages:
            raise ConfigurationError(
                "speculative decoding reads no attention, which passages need; take "
                "decoder='specguard', or give no passages"
            )
        ledger = Ledger()
        with ExitStack() as stack:
            opened = [
                stack.enter_context(closing(_open(engine, request)))
                for engine in (self.draft, self.target)
                if engine is not None
            ]
            target = opened[-1]
            draft = PromptText(target) if self.draft is None else opened[0]
            session = SpeculativeSession(draft, target, self.speculation, ledger)
            answer = Answer(request, self.shape, session, ledger=ledger)
            while not answer.finished:
                written = self._write(session, answer)
                while answer.review(written.candidate, Source.TARGET, written) is Review.REGENERATE:
                    written = self._write(session, answer)
                yield answer.extend(written.candidate, Source.TARGET, written)

    def _write(self, session: SpeculativeSession, answer: Answer) -> Proposal:
        return Proposal(answer.sample(session, Source.TARGET, 1), 0, UNVERIFIED)


def _open(engine: Engine, request: Request) -> LogitSession:
    return cast("LogitSession", request.open(engine))  # as its capabilities say


def check_vocabulary(draft: Engine, target: Engine, remedy: str) -> None:
    """Refuse models whose tokens differ."""
    if draft.vocabulary != target.vocabulary:
        raise ConfigurationError(
            f"speculative decoding needs models of one vocabulary, and {draft.name} and "
            f"{target.name} have different ones; {remedy}, or take a draft of the target's family"
        )


def check_chain(speculation: Speculation) -> None:
    """Refuse a tree where tokens are copied from the prompt."""
    if prod(speculation.widths) > 1:
        raise ConfigurationError(
            "what is copied from the prompt is a chain, not a tree of widths "
            f"{speculation.widths}; leave speculative_tree out, or take a draft"
        )


def check_speculation(engine: Engine, speculation: Speculation, remedy: str) -> None:
    """Refuse an engine that has no logits, or no room for the draft's trees."""
    has, leaves = engine.capabilities, prod(speculation.widths)
    if not has.logits:
        raise ConfigurationError(
            f"speculative decoding needs logits, which {engine.name} does not give; {remedy}"
        )
    if leaves > has.max_candidates:
        raise ConfigurationError(
            f"a tree of widths {speculation.widths} has {leaves} branches, more than the "
            f"{has.max_candidates} that {engine.name} has room for; load it with a larger "
            "max_candidates, or make the tree narrower"
        )
    reserved = has.max_candidate_tokens
    if leaves > 1 and reserved is not None and speculation.depth > reserved:
        raise ConfigurationError(
            f"a tree of depth {speculation.depth} is deeper than the {reserved} tokens that "
            f"{engine.name} has room for on each branch; load it with larger candidate_tokens"
        )
