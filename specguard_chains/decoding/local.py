"""Sessions of models that run in this process: continuations of a sequence, written or read.

Everything that local engines share is here and in `local_sequence`: sampling k candidates that
share their prefix, early rejection, keeping what was computed for an accepted step, and reading
foreign steps only when they are needed. An engine adds the forward pass and its tokenizer
(`cache`); `local_engine` hands out the sessions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from specguard_chains.decoding.arrays import FloatArray
from specguard_chains.decoding.boundaries import Boundary
from specguard_chains.decoding.cache import common_prefix
from specguard_chains.decoding.engine import Candidate, Look, Reading, Watch
from specguard_chains.decoding.local_drafts import (
    Draft,
    Read,
    give_up,
    masked_like,
    reject_early,
)
from specguard_chains.decoding.local_sequence import LocalSequence, computes
from specguard_chains.decoding.sampling import Sampling, draw, generators, logprob
from specguard_chains.decoding.trail import Row, Trail, row_of

READ_BLOCK = 32
"""Tokens of a step that are read at once: their logits are held together."""


class LocalSession(LocalSequence):
    """A `Session` over a `Cache`."""

    @computes
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
        """See `Session.sample`. Equal candidates (greedy sampling) are computed once."""
        self._require_room(boundary.max_tokens)
        distinct = 1 if sampling.greedy else n
        trail = self._trail(guess, boundary.max_tokens)
        seen = self._held(trail) if distinct == 1 else []
        logits = self._logits if seen else self._next_logits()
        assert logits is not None
        if not seen:
            self._cache.fork(distinct, len(self._tokens))
        drafts = [
            Draft(i, step=self.writer(boundary), matcher=self._fork(), on_trail=True)
            for i in range(distinct)
        ]
        self._branches = [*drafts]
        rngs = generators(seed, distinct)
        rows: Iterable[FloatArray] = [logits] * distinct
        while live := [draft for draft in drafts if draft.step.ending is None]:
            for draft, row in zip(live, rows, strict=True):
                draft.step.write(*self._draw(draft, row, sampling, rngs[draft.index]))
            self.counters.written += len(live)
            if reject_early(drafts, watch):
                break
            rows = self._compute(live, trail)
            if reject_early(drafts, watch):
                break
            if look is not None and len(drafts) == 1:
                with self._away():
                    given_up = give_up(drafts[0], look)
                if given_up:
                    break
        self.counters.read += trail.reach - trail.walked - len(seen)
        candidates = [draft.candidate(grounded=self._grounded) for draft in drafts]
        return candidates if distinct == n else candidates * n

    @computes
    def read(self, candidate: Candidate) -> Reading:
        """See `Session.read`."""
        if not self._leaves_unfinished(candidate):
            return self._read(candidate)
        before = list(self._tokens)
        self._drop_unfinished()
        reading = self._read(candidate)
        self.rollback(common_prefix(before, self._tokens))
        self.extend(before[len(self._tokens) :])
        return reading

    def _read(self, candidate: Candidate) -> Reading:
        tokens = self.tokens_of(candidate)
        self._require_room(len(tokens))
        branch = self._last_read()
        if branch is None or branch.tokens != tokens[: len(branch.tokens)]:
            logits = self._next_logits()
            self._cache.fork(1, len(self._tokens))
            branch = Read(logits=logits, matcher=self._fork())
            self._branches = [branch]
        self.counters.read += len(tokens) - branch.computed
        for start in range(branch.computed, len(tokens), READ_BLOCK):
            block = tokens[start : start + READ_BLOCK]
            first = len(self._tokens) + start
            rows = self._forward(block, range(first, first + len(block)), context=False)
            branch.take(block, rows, most_rows=READ_BLOCK)
        return branch.reading(grounded=self._grounded)

    def _last_read(self) -> Read | None:
        """Return the candidate that was read last, if the cache holds it yet."""
        branch = self._branches[0] if self._branches else None
        return branch if isinstance(branch, Read) else None

    def fits(self, candidate: Candidate) -> bool:
        """See `Session.fits`."""
        return len(self.tokens_of(candidate)) <= self.room

    def accept(self, candidate: Candidate) -> None:
        """See `Session.accept`."""
        if self._leaves_unfinished(candidate):
            self._drop_unfinished()
        self.extend(self.tokens_of(candidate))

    def tokens_of(self, candidate: Candidate) -> list[int]:
        """The candidate's tokens in this session's vocabulary."""
        if candidate.vocabulary == self._tokenizer.vocabulary:
            return list(candidate.tokens)
        end = [self._tokenizer.end_token] if candidate.ends_sequence else []
        return self._tokenizer.encode_text(candidate.text) + end

    def _trail(self, guess: Candidate | None, max_tokens: int) -> Trail:
        """Return the way that candidates may go together, in this session's own tokens."""
        if guess is None:
            return Trail()
        own = guess.vocabulary == self._tokenizer.vocabulary
        tokens = self.tokens_of(guess)[:max_tokens]
        return Trail(tokens, guess.reading.logprobs if own else ())

    def _held(self, trail: Trail) -> list[Row]:
        """Return the rows of a guess that was read just now, and leave its tokens in the cache.

        Some of the first are enough: what is rejected mostly differs soon.
        """
        branch = self._last_read()
        if branch is None:
            return []
        seen = branch.rows[: common_prefix(branch.tokens, trail.tokens)]
        if seen:
            self._cache.cut(0, len(self._tokens) + len(seen))
            trail.keep(0, seen)
        return seen

    def _compute(self, live: Sequence[Draft], trail: Trail) -> list[FloatArray]:
        """Compute each draft's newest token; return the logits of those that go on.

        The drafts are equally long. Those that have followed the trail so far share its rows.
        """
        n = len(live[0].tokens)
        place = len(self._tokens) + n - 1
        for draft in live:
            if draft.on_trail and not trail.follows(draft.tokens):
                draft.on_trail = False
                if trail.reach >= n:
                    self._cache.cut(draft.index, place)
        together = [draft.index for draft in live if draft.on_trail]
        if together:
            self.counters.guessed += len(together)
            trail.walked = n
        alone = [draft for draft in live if not draft.on_trail]
        block = trail.block(n - 1) if together and trail.row(n) is None else []
        own: list[Row] = []
        if alone or block:
            rows = self._forward(
                [*(draft.tokens[-1] for draft in alone), *block],
                [*[place] * len(alone), *range(place, place + len(block))],
                [*((draft.index,) for draft in alone), *[together] * len(block)],
                context=False,
            )
            if block and len(self._branches) > 1:  # others compute while these rows are in use
                rows = replace(rows, logits=rows.logits.copy())
            own = [row_of(rows, i) for i in range(len(rows.logits))]
        if block:
            trail.keep(n - 1, own[len(alone) :])
        shared, next_own = trail.row(n), iter(own)
        ahead: list[FloatArray] = []
        for draft in live:
            row = shared if draft.on_trail else next(next_own)
            assert row is not None
            draft.take(row)
            if draft.step.ending is None:
                ahead.append(row.logits)
        return ahead

    def _draw(
        self, draft: Draft, row: FloatArray, sampling: Sampling, rng: np.random.Generator
    ) -> tuple[int, float]:
        """Return a draft's next token and its log-probability among those that are allowed."""
        if draft.matcher is not None:
            row = draft.matcher.allowed(row)
        shaped = row
        if self._process is not None:
            shaped = self._process([*self._tokens, *draft.tokens], row.copy())
            if draft.matcher is not None:  # it may have lifted what is forbidden
                shaped = masked_like(shaped, row)
        token, confidence = draw(shaped, sampling, rng)
        if draft.matcher is not None:
            draft.matcher.advance([token])
        return token, confidence if shaped is row else logprob(row, token)

    def _leaves_unfinished(self, candidate: Candidate) -> bool:
        """Whether the answer ends within a character that a candidate does not go on with.

        A candidate of another vocabulary is taken over as text, and text has whole characters: the
        step before it ended, as text, in front of that character. One without text leaves it open
        who finishes the character.
        """
        own = candidate.vocabulary == self._tokenizer.vocabulary
        return bool(not own and candidate.text and self._dangling_bytes())

    def _drop_unfinished(self) -> None:
        """Cut the character off that the answer ends within."""
        dangling = self._dangling_bytes()
        length, cut = len(self._tokens), b""
        while len(cut) < len(dangling) or cut[0] & 0xC0 == 0x80:  # a token may end a character, too
            length -= 1
            cut = self._tokenizer.token_bytes(self._tokens[length]) + cut
        self.rollback(length)
        self.extend(self._tokenizer.encode_text(cut[: -len(dangling)].decode(errors="replace")))
