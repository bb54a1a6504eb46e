"""Speculative decoding: the target's text at fewer passes of the target. Lossless.

The draft proposes a few tokens, a chain or a tree of them; the target computes all of them in one
pass, keeps a path of them by the rules of `acceptance`, and adds one token of its own. Whatever the
draft is like, the text has the target's law (Leviathan et al. 2211.17192; trees: SpecInfer,
2305.09781). A weak draft costs time, never quality.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from math import exp, prod
from typing import Literal, cast, get_args

import numpy as np

from specguard_chains.decoding.acceptance import (
    Branching,
    Choose,
    Independent,
    Law,
    Likeliest,
    WithoutReplacement,
    chooser,
    likeliest,
)
from specguard_chains.decoding.answer import Answer, Ledger, Proposal
from specguard_chains.decoding.arrays import FloatArray
from specguard_chains.decoding.boundaries import Boundary, Ending, StepShape
from specguard_chains.decoding.decoder import Request
from specguard_chains.decoding.engine import Candidate, Engine, LogitSession, Reading, Watch
from specguard_chains.decoding.sampling import Sampling, distribution, generators, logprob
from specguard_chains.decoding.step_writer import StepWriter
from specguard_chains.decoding.steps import UNVERIFIED, Source, Step
from specguard_chains.decoding.token_tree import TokenTree
from specguard_chains.errors import ConfigurationError, ContextOverflowError

Children = Literal["independent", "without-replacement", "likeliest"]
LIKELIEST = Likeliest()
BRANCHINGS: dict[Children, Branching] = {
    "independent": Independent(),
    "without-replacement": WithoutReplacement(),
    "likeliest": LIKELIEST,
}


@dataclass(frozen=True, slots=True)
class Speculation:
    """What the draft proposes at a time."""

    widths: tuple[int, ...] = (1, 1, 1, 1)
    """Children of every node, by depth; a chain of n tokens has n times 1."""
    children: Children = "independent"
    """How they are drawn. At temperature 0 they are always the likeliest ones."""
    adaptive: bool = True
    """Propose fewer tokens after a rejection and more after none, up to the full depth, and nothing
    after a token that the draft itself finds unlikely."""
    min_confidence: float = 0.4
    """Nothing follows a token that is less likely than this to the draft, if adaptive."""

    def __post_init__(self) -> None:
        """Validate."""
        if not self.widths or not all(width >= 1 for width in self.widths):
            raise ConfigurationError(
                f"a draft proposes one token or more at every depth, not {self.widths}"
            )
        if self.children not in get_args(Children):
            raise ConfigurationError(
                f"unknown children {self.children!r}; use one of {', '.join(get_args(Children))}"
            )
        if not 0 <= self.min_confidence <= 1:
            raise ConfigurationError(
                f"min_confidence must lie in [0, 1], not {self.min_confidence}"
            )

    @property
    def depth(self) -> int:
        """Most tokens that are proposed one after the other."""
        return len(self.widths)

    def next_depth(self, depth: int, accepted: int) -> int:
        """Return how deep to draft next, after `accepted` of `depth` tokens were accepted."""
        if not self.adaptive:
            return self.depth
        return min(self.depth, depth + 2) if accepted >= depth else max(1, depth - 1)

    def goes_on_after(self, probability: float) -> bool:
        """Whether to draft on after tokens of which the likeliest is this likely to the draft."""
        return not self.adaptive or probability >= self.min_confidence


@dataclass(frozen=True, slots=True)
class _Block:
    """A proposal of the draft, and the laws that the children of its nodes were drawn from."""

    tree: TokenTree
    laws: dict[int, Law] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Ahead:
    """What both sessions hold beyond the sequence: the step that was written last."""

    step: Candidate | None = None
    tokens: int = 0
    depth: int = 0
    """How deep to draft after the step."""


class SpeculativeSession:
    """A `Session` of the target that a draft speeds up.

    A step that was written is mostly accepted next. Until something else is asked for, both
    sessions keep what they have computed of it.
    """

    def __init__(
        self,
        draft: LogitSession,
        target: LogitSession,
        speculation: Speculation,
        ledger: Ledger | None = None,
    ) -> None:
        """Start where both sessions are; what they compute is booked in the ledger."""
        self.counters = target.counters
        self._draft = draft
        self._target = target
        self._speculation = speculation
        self._ledger = ledger or Ledger()
        self._depth = speculation.depth
        self._ahead = _Ahead()

    @property
    def length(self) -> int:
        """See `Session.length`."""
        return self._target.length - self._ahead.tokens

    @property
    def room(self) -> int:
        """See `Session.room`."""
        return min(self._draft.room, self._target.room) + self._ahead.tokens

    def sample(
        self,
        n: int,
        boundary: Boundary,
        sampling: Sampling,
        *,
        seed: Sequence[int],
        watch: Watch | None = None,
    ) -> list[Candidate]:
        """See `Session.sample`. Candidates are written one after the other."""
        if boundary.max_tokens > self.room:
            raise ContextOverflowError(
                f"{boundary.max_tokens} more tokens do not fit: the contexts have room for "
                f"{self.room}; raise n_ctx or shorten the prompt"
            )
        distinct = 1 if sampling.greedy else n
        candidates = [
            self.write(boundary, sampling, likeliest if sampling.greedy else chooser(rng), watch)
            for rng in generators(seed, distinct)
        ]
        return candidates if distinct == n else candidates * n

    def write(
        self, boundary: Boundary, sampling: Sampling, choose: Choose, watch: Watch | None = None
    ) -> Candidate:
        """Return a step whose tokens have the target's law, if `choose` draws fairly."""
        self._go_back()
        step, depth = self._target.writer(boundary), self._depth
        while step.ending is None:
            left = boundary.max_tokens - len(step.tokens)
            block = self._propose(min(depth, left - 1), sampling, choose)
            accepted = self._verify(block, step, sampling, choose)
            if block.tree.depth:
                depth = self._speculation.next_depth(block.tree.depth, accepted)
            if watch is not None and not watch(min(step.logprobs), None):
                step.ending = Ending.REJECTED_EARLY
        self._ahead = _Ahead(step.candidate(), len(step.tokens), depth)
        return step.candidate()

    def read(self, candidate: Candidate) -> Reading:
        """See `Session.read`."""
        self._go_back()
        return self._target.read(candidate)

    def fits(self, candidate: Candidate) -> bool:
        """See `Session.fits`."""
        if self._is_ahead(candidate):
            return True
        self._go_back()
        return self._draft.fits(candidate) and self._target.fits(candidate)

    def accept(self, candidate: Candidate) -> None:
        """See `Session.accept`."""
        if self._is_ahead(candidate):
            self._depth, self._ahead = self._ahead.depth, _Ahead()
            return
        if not self.fits(candidate):
            raise ContextOverflowError(
                f"a step of {len(candidate.tokens)} tokens does not fit: the contexts have room "
                f"for {self.room}; raise n_ctx or shorten the prompt"
            )
        self._draft.accept(candidate)
        self._target.accept(candidate)

    def rollback(self, length: int) -> None:
        """See `Session.rollback`."""
        self._go_back()
        tokens = self.length - length
        self._target.rollback(length)
        self._draft.rollback(self._draft.length - tokens)

    def close(self) -> None:
        """See `Session.close`."""
        self._draft.close()
        self._target.close()

    def _propose(self, depth: int, sampling: Sampling, choose: Choose) -> _Block:
        """Let the draft grow a tree, level by level."""
        block = _Block(TokenTree(self._speculation.widths[:depth]))
        nodes, level = block.tree.nodes, range(1)
        with self._ledger.charge(Source.DRAFT, self._draft):
            for width in block.tree.widths:
                rows = self._draft.logits(block.tree)
                first, surest = len(nodes), 0.0
                for parent, row in zip(level, rows, strict=True):
                    block.laws[parent] = _draft_law(row, sampling)
                    for token in self._branching(sampling).draw(block.laws[parent], width, choose):
                        block.tree.add(token, parent)
                        surest = max(surest, exp(logprob(row, token)))
                level = range(first, len(nodes))
                self._draft.counters.written += len(level)
                if not self._speculation.goes_on_after(surest):
                    break
        return block

    def _verify(self, block: _Block, step: StepWriter, sampling: Sampling, choose: Choose) -> int:
        """Append what the target makes of a proposal; return how many tokens it accepted."""
        with self._ledger.charge(Source.TARGET, self._target):
            rows = self._target.logits(block.tree)
            nodes, last = _walk(block, rows, sampling, self._branching(sampling), choose)
            tokens = [block.tree.nodes[node].token for node in nodes] + [last]
            written = 0
            for node, token in zip([0, *nodes], tokens, strict=True):
                step.write(token, logprob(rows[node], token))
                written += 1
                if step.ending is not None:
                    break
            self._target.counters.read += len(block.tree.nodes) - 1
            self._target.counters.written += 1
            self._target.extend(tokens[:written])
        self._draft.extend(tokens[:written])
        self._ahead = _Ahead(tokens=self._ahead.tokens + written)
        self._ledger.count(Source.DRAFT, "kept", min(written, len(nodes)))
        self._ledger.count(Source.TARGET, "passes", 1)
        return len(nodes)

    def _branching(self, sampling: Sampling) -> Branching:
        """At temperature 0 all laws are one token: then its rivals are worth a try, not itself."""
        return LIKELIEST if sampling.greedy else BRANCHINGS[self._speculation.children]

    def _is_ahead(self, candidate: Candidate) -> bool:
        """Whether both sessions hold this step already."""
        step = self._ahead.step
        return step is not None and (step.tokens, step.vocabulary) == (
            candidate.tokens,
            candidate.vocabulary,
        )

    def _go_back(self) -> None:
        """Take back what was written ahead."""
        tokens, self._ahead = self._ahead.tokens, _Ahead()
        for session in (self._draft, self._target):
            session.rollback(session.length - tokens)


def _walk(
    block: _Block, rows: FloatArray, sampling: Sampling, branching: Branching, choose: Choose
) -> tuple[list[int], int]:
    """Return the nodes that the target accepts, one below the other, and its own token after them.

    `rows` are the target's logits after every node of the tree.
    """
    path: list[int] = []
    node = 0
    while True:
        r = distribution(rows[node], sampling).astype(np.float64)
        r, q = _same_length(r, block.laws.get(node, r))
        for child in block.tree.nodes[node].children:
            token = block.tree.nodes[child].token
            accepted = branching.acceptance(r, q, token)
            if choose(np.array([accepted, 1 - accepted])) == 0:
                path.append(child)
                node = child
                break
            r, q = branching.reject(r, q, token)
        else:
            return path, choose(r)


def _draft_law(row: FloatArray, sampling: Sampling) -> Law:
    """Return the law to draw children from; at temperature 0 it only ranks them."""
    soft = Sampling(temperature=1.0, top_p=1.0) if sampling.greedy else sampling
    return distribution(row, soft).astype(np.float64)


def _same_length(p: Law, q: Law) -> tuple[Law, Law]:
    """Pad the shorter law: models of one vocabulary may have more rows than it has tokens."""
    missing = len(p) - len(q)
    return np.pad(p, (0, max(-missing, 0))), np.pad(q, (0, max(missing, 0)))


@dataclass(frozen=True, slots=True)
class SpeculativeDecoder:
    """The target's text, drafted by a model of the same vocabulary. Lossless."""

    draft: Engine
    target: Engine
    speculation: Speculation = field(default_factory=Speculation)
    shape: StepShape = field(default_factory=StepShape)

    def __post_init__(self) -> None:
        """Validate."""
        for engine in self.engines:
            _check_engine(engine, self.speculation)
        if self.draft.vocabulary != self.target.vocabulary:
            raise ConfigurationError(
                f"speculative decoding needs models of one vocabulary, and {self.draft.name} and "
                f"{self.target.name} have different ones; take decoder='specguard', which hands "
                "whole steps over as text, or a draft of the target's family"
            )

    @property
    def engines(self) -> tuple[Engine, ...]:
        """See `Decoder.engines`."""
        return (self.draft,) if self.draft is self.target else (self.draft, self.target)

    def decode(self, request: Request) -> Iterator[Step]:
        """See `Decoder.decode`. Steps are the target's own, cut where SpecGuard cuts them."""
        with ExitStack() as stack:
            draft, target = (
                stack.enter_context(
                    closing(engine.open(request.prompt, cancelled=request.cancelled))
                )
                for engine in (self.draft, self.target)
            )
            ledger = Ledger()
            session = SpeculativeSession(
                cast("LogitSession", draft), cast("LogitSession", target), self.speculation, ledger
            )
            answer = Answer(request, self.shape, session, ledger=ledger)
            while not answer.finished:
                candidates = session.sample(
                    1,
                    answer.boundary(),
                    request.sampling,
                    seed=(request.seed, answer.number, True),
                )
                proposal = Proposal(candidates, 0, UNVERIFIED)
                yield answer.extend(proposal.candidate, Source.TARGET, proposal)


def _check_engine(engine: Engine, speculation: Speculation) -> None:
    has = engine.capabilities
    if not has.logits:
        raise ConfigurationError(
            f"speculative decoding needs logits, which {engine.name} does not give; take an engine "
            "that runs in this process, without logits processors"
        )
    leaves = prod(speculation.widths)
    if leaves > has.max_candidates:
        raise ConfigurationError(
            f"a tree of widths {speculation.widths} has {leaves} branches, more than the "
            f"{has.max_candidates} that {engine.name} has room for; load it with a larger "
            "max_candidates, or make the tree narrower"
        )
