"""A session whose steps the target writes at the draft's pace.

A few tokens are proposed, a chain or a tree of them: by a draft, or copied from the text so far.
The target computes all of them in one pass, keeps a path of them by the rules of `acceptance`, and
adds one token of its own. Whatever is proposed, the text has the target's law (Leviathan et al.
2211.17192; trees: SpecInfer, 2305.09781). A weak draft costs time, never quality.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from specguard_chains.decoding.acceptance import Choose, chooser, likeliest
from specguard_chains.decoding.arrays import FloatArray
from specguard_chains.decoding.boundaries import Boundary, Ending
from specguard_chains.decoding.engine import Candidate, LogitSession, Look, Reading, Watch
from specguard_chains.decoding.ledger import Ledger
from specguard_chains.decoding.prompt_lookup import PromptText
from specguard_chains.decoding.proposals import Block, chain, copied, drafted
from specguard_chains.decoding.sampling import Sampling, distribution, generators, logprob
from specguard_chains.decoding.speculation import Speculation
from specguard_chains.decoding.step_writer import StepWriter
from specguard_chains.decoding.steps import Source
from specguard_chains.errors import ContextOverflowError

GUESSED_TOKENS = 16
"""Tokens of a guess that are checked at once: what is rejected mostly differs soon."""


@dataclass(frozen=True, slots=True)
class _Ahead:
    """The step that was written last, which both sessions hold beyond the sequence."""

    step: Candidate
    depth: int
    """How deep to draft after the step."""
    kept: int
    """Tokens of it that were proposed."""


class SpeculativeSession:
    """A `Session` of the target that a draft speeds up.

    A step that was written is mostly accepted next. Until something else is asked for, both
    sessions keep what they have computed of it. A guess, such as a rejected step, is proposed
    before anything else, for as long as the step goes the same way.
    """

    def __init__(
        self,
        draft: LogitSession | PromptText,
        target: LogitSession,
        speculation: Speculation,
        ledger: Ledger | None = None,
        *,
        rewrites: bool = False,
    ) -> None:
        """Start where both sessions are; what they compute is booked in the ledger.

        `rewrites` says that the draft writes steps of its own too: its proposals are booked as
        proposals, and those that the target keeps as its own tokens, salvaged ones.
        """
        self.counters = target.counters
        self._draft = draft
        self._target = target
        self._speculation = speculation
        self._ledger = ledger or Ledger()
        self._rewrites = rewrites
        self._depth = speculation.depth
        self._ahead: _Ahead | None = None
        self._settle()

    @property
    def length(self) -> int:
        """See `Session.length`."""
        return self._lengths[1]

    @property
    def room(self) -> int:
        """See `Session.room`."""
        draft, target = self._lengths
        return min(
            self._draft.room + self._draft.length - draft,
            self._target.room + self._target.length - target,
        )

    def sample(
        self,
        n: int,
        boundary: Boundary,
        sampling: Sampling,
        *,
        seed: Sequence[int],
        watch: Watch | None = None,
        guess: Candidate | None = None,
        look: Look | None = None,
    ) -> list[Candidate]:
        """See `Session.sample`. Candidates are written, and given up, one after the other."""
        if boundary.max_tokens > self.room:
            raise ContextOverflowError(
                f"{boundary.max_tokens} more tokens do not fit: the contexts have room for "
                f"{self.room}; raise n_ctx or shorten the prompt"
            )
        distinct = 1 if sampling.greedy else n
        tokens = self._target.tokens_of(guess)[: boundary.max_tokens] if guess else ()
        candidates = []
        for rng in generators(seed, distinct):
            choose = likeliest if sampling.greedy else chooser(rng)
            candidates.append(self.write(boundary, sampling, choose, watch, tokens))
        return candidates if distinct == n else candidates * n

    def write(
        self,
        boundary: Boundary,
        sampling: Sampling,
        choose: Choose,
        watch: Watch | None = None,
        guess: Sequence[int] = (),
    ) -> Candidate:
        """Return a step whose tokens have the target's law, if `choose` draws fairly."""
        self._go_back()
        step, depth, kept = self._target.writer(boundary), self._depth, 0
        while step.ending is None:
            left = boundary.max_tokens - len(step.tokens)
            guessed = self._guessed(guess, step.tokens, left - 1)
            block = guessed or self._propose(min(depth, left - 1), sampling, choose)
            before = len(step.tokens)
            accepted = self._verify(block, step, sampling, choose)
            kept += min(accepted, len(step.tokens) - before)
            by_draft = not guessed and not isinstance(self._draft, PromptText)
            if block.depth and by_draft:  # what is copied goes by the text
                depth = self._speculation.next_depth(depth, block.depth, accepted)
            if watch is not None and not watch(min(step.logprobs), None):
                step.ending = Ending.REJECTED_EARLY
        candidate = step.candidate()
        if self._rewrites:  # the target's own tokens, of which these were proposed to it
            self.counters.written += kept
            self.counters.guessed += kept
        self._ahead = _Ahead(candidate, depth, kept)
        return candidate

    def read(self, candidate: Candidate) -> Reading:
        """See `Session.read`."""
        self._go_back()
        return self._target.read(candidate)

    def fits(self, candidate: Candidate) -> bool:
        """See `Session.fits`. Another step than the one written last takes that one back."""
        if self._holds(candidate):
            return True
        self._go_back()
        return self._draft.fits(candidate) and self._target.fits(candidate)

    def accept(self, candidate: Candidate) -> None:
        """See `Session.accept`."""
        if self._ahead is not None and self._holds(candidate):
            self._depth = self._ahead.depth
            if not self._rewrites:
                self._ledger.count(Source.DRAFT, "kept", self._ahead.kept)
        elif self.fits(candidate):
            self._draft.accept(candidate)
            self._target.accept(candidate)
        else:
            raise ContextOverflowError(
                f"a step of {len(candidate.tokens)} tokens does not fit: the contexts have room "
                f"for {self.room}; raise n_ctx or shorten the prompt"
            )
        self._settle()

    def rollback(self, length: int) -> None:
        """See `Session.rollback`."""
        self._go_back()
        tokens = self.length - length
        self._target.rollback(length)
        self._draft.rollback(self._draft.length - tokens)
        self._settle()

    def close(self) -> None:
        """See `Session.close`."""
        self._draft.close()
        self._target.close()

    def _guessed(self, guess: Sequence[int], written: Sequence[int], most: int) -> Block | None:
        """Return the next tokens of a guess that the step has followed so far, if there are any."""
        if list(guess[: len(written)]) != list(written):
            return None
        tokens = guess[len(written) : len(written) + min(most, GUESSED_TOKENS)]
        tokens = tokens[: self._target.admits(tokens)]
        return chain(tokens) if tokens else None

    def _propose(self, depth: int, sampling: Sampling, choose: Choose) -> Block:
        """Return what the target is to check."""
        booked: Literal["written", "proposed"] = "proposed" if self._rewrites else "written"
        with self._ledger.charge(Source.DRAFT, self._draft, written_as=booked):
            if isinstance(self._draft, PromptText):
                return copied(self._draft, self._speculation, depth)
            return drafted(self._draft, self._speculation, depth, sampling, choose)

    def _verify(self, block: Block, step: StepWriter, sampling: Sampling, choose: Choose) -> int:
        """Append what the target makes of a proposal; return how many tokens it accepted."""
        nodes, before = block.tree.nodes, len(step.tokens)
        with self._ledger.charge(Source.TARGET, self._target):
            rows = self._target.logits(block.tree)
            path, last = _walk(block, rows, sampling, choose)
            tokens = [*(nodes[node].token for node in path), last]
            for node, token in zip([0, *path], tokens, strict=True):
                step.write(token, logprob(rows[node], token))
                if step.ending is not None:
                    break
            written = step.tokens[before:]
            self._target.counters.read += len(nodes) - 1
            self._target.counters.written += len(written) > len(path)
            self._target.extend(written)
        self._draft.extend(written)
        self._ledger.count(Source.TARGET, "passes", 1)
        return len(path)

    def _holds(self, candidate: Candidate) -> bool:
        """Whether both sessions hold this step already."""
        if self._ahead is None:
            return False
        step = self._ahead.step
        return (step.tokens, step.vocabulary) == (candidate.tokens, candidate.vocabulary)

    def _settle(self) -> None:
        """Let the sequence be what both sessions hold."""
        self._ahead = None
        self._lengths = self._draft.length, self._target.length

    def _go_back(self) -> None:
        """Take back what was written ahead: a step, or the beginning of one.

        Where nothing was, the sessions keep what they hold beside the sequence.
        """
        self._ahead = None
        for session, length in zip((self._draft, self._target), self._lengths, strict=True):
            if session.length != length:
                session.rollback(length)


def _walk(
    block: Block, rows: FloatArray, sampling: Sampling, choose: Choose
) -> tuple[list[int], int]:
    """Return the nodes that the target accepts, one below the other, and its own token after them.

    `rows` are the target's logits after every node of the tree.
    """
    path: list[int] = []
    while True:
        node = path[-1] if path else 0
        child, token = _follow(block, node, rows[node], sampling, choose)
        if child is None:
            return path, token
        path.append(child)


def _follow(
    block: Block, node: int, row: FloatArray, sampling: Sampling, choose: Choose
) -> tuple[int | None, int]:
    """Return the child of a node that is accepted, None if none is, and the token that follows."""
    nodes = block.tree.nodes
    if sampling.greedy:  # a law of one token is not written down for the whole vocabulary
        best = int(row.argmax())
        same = (child for child in nodes[node].children if nodes[child].token == best)
        return next(same, None), best
    r = distribution(row, sampling).astype(np.float64)
    q = block.laws.get(node, r)
    for child in nodes[node].children:
        token = nodes[child].token
        accepted = block.branching.acceptance(r, q, token)
        if choose(np.array([accepted, 1 - accepted])) == 0:
            return child, token
        r, q = block.branching.reject(r, q, token)
    return None, choose(r)
