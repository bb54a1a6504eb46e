"""Sessions of models that run in this process, on top of a KV cache.

Everything that local engines share is here: sampling k candidates that share their prefix, early
rejection, keeping what was computed for an accepted step, and reading foreign steps only when they
are needed. An engine adds the forward pass and its tokenizer (`cache`); `local_engine` hands out
the sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np

from specguard_chains.decoding import compute_thread
from specguard_chains.decoding.arrays import FloatArray
from specguard_chains.decoding.boundaries import Boundary, unfinished_character
from specguard_chains.decoding.cache import CachedSequence, Rows, Tokenizer, common_prefix
from specguard_chains.decoding.constraint import Matcher
from specguard_chains.decoding.engine import Candidate, Counters, Look, Reading, Watch
from specguard_chains.decoding.local_drafts import (
    Branch,
    Draft,
    Read,
    give_up,
    masked_like,
    reject_early,
)
from specguard_chains.decoding.prompt_head import PromptHead
from specguard_chains.decoding.sampling import Sampling, draw, generators, logprob
from specguard_chains.decoding.step_writer import StepWriter
from specguard_chains.decoding.trail import Row, Trail, row_of
from specguard_chains.errors import ContextOverflowError, EngineError

S = TypeVar("S", bound="LocalSession")
P = ParamSpec("P")
T = TypeVar("T")

READ_BLOCK = 32
"""Tokens of a step that are read at once: their logits are held together."""

Process = Callable[[Sequence[int], FloatArray], FloatArray]
"""(all tokens so far, logits of the next one) -> the logits to draw from."""


def computes(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Let a session's method run where it may compute."""

    @wraps(method)
    def run(session: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return session._run(lambda: method(session, *args, **kwargs))

    return run


class LocalSession:
    """A `Session` over a `Cache`."""

    def __init__(
        self,
        sequence: CachedSequence,
        prompt: Sequence[int],
        tokenizer: Tokenizer,
        *,
        context_length: int,
        check: Callable[[], None],
        on_close: Callable[[CachedSequence], None],
        process: Process | None = None,
        matcher: Matcher | None = None,
        head: PromptHead | None = None,
    ) -> None:
        """Start with a prompt on a sequence that may hold its beginning.

        `check` is called before every forward pass and raises if there must be none; `process`
        changes the logits that are drawn from, not the log-probs that are reported; `matcher`
        says which tokens may follow the prompt, and changes both; `head` knows what other
        processes have computed of the prompt.
        """
        self.counters = Counters()
        self._sequence = sequence
        self._cache = sequence.cache
        self._tokenizer = tokenizer
        self._n_tokens = tokenizer.n_tokens
        self._context_length = context_length
        self._check = check
        self._process = process
        self._head = head
        self._first_matcher = self._matcher = matcher  # at the end of the prompt, of the sequence
        self._grounded = sequence.grounding is not None
        self._on_close: Callable[[CachedSequence], None] | None = on_close
        self._tokens = list(prompt)
        self._prompt_length = len(self._tokens)
        self._branches: list[Branch] = []
        self._cached = self._reused = sequence.keep_prefix(self._tokens)
        self._logits: FloatArray | None = None  # for the token after the sequence
        if sequence.prompt_logits is not None:
            length, logits = sequence.prompt_logits
            self._logits = logits if length == len(self._tokens) else None

    @property
    def length(self) -> int:
        """See `Session.length`."""
        return len(self._tokens)

    @property
    def room(self) -> int:
        """See `Session.room`."""
        return self._context_length - len(self._tokens)

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

    def encode_text(self, text: str) -> list[int]:
        """See `LogitSession.encode_text`."""
        return self._tokenizer.encode_text(text)

    def writer(self, boundary: Boundary) -> StepWriter:
        """See `LogitSession.writer`."""
        return StepWriter(boundary, self._tokenizer, self._dangling_bytes())

    def extend(self, tokens: Sequence[int]) -> None:
        """See `LogitSession.extend`."""
        self._require_open()
        self._require_room(len(tokens))
        if not tokens:
            return
        self._logits = None
        if self._branches:
            branch = max(self._branches, key=lambda b: common_prefix(b.tokens, tokens))
            kept = common_prefix(branch.tokens[: branch.computed], tokens)
            self._cache.keep(branch.index, self._cached + kept)
            self._cached += kept
            if kept == len(tokens):
                self._logits = self._logits_after(branch, tokens)
            self._forget_branches()
        self._tokens += tokens
        if self._matcher is not None:
            self._matcher = self._matcher.fork()  # the first one stays where it is
            self._matcher.advance(tokens)

    def rollback(self, length: int) -> None:
        """See `Session.rollback`."""
        self._require_open()
        if not self._prompt_length <= length <= len(self._tokens):
            raise ValueError(
                f"cannot roll back to {length} tokens: the prompt has {self._prompt_length}, "
                f"the sequence {len(self._tokens)}"
            )
        self._drop_branches()
        if length < len(self._tokens):
            del self._tokens[length:]
            self._logits = None
            self._cut_cache(min(self._cached, length))
            if (matcher := self._first_matcher) is not None:
                self._matcher = matcher.fork()
                self._matcher.advance(self._tokens[self._prompt_length :])

    def close(self) -> None:
        """See `Session.close`."""
        if self._on_close is None:
            return
        on_close, self._on_close = self._on_close, None
        self._forget_branches()  # the cache is the next session's
        self._sequence.tokens = self._tokens[: self._cached]
        try:
            if self._head is not None:
                self._head.keep(self._cache, self._cached)
        finally:
            on_close(self._sequence)

    def _next_logits(self) -> FloatArray:
        """Read what the sequence has gained, and return the logits after its last token."""
        self._require_open()
        self._drop_branches()
        if self._logits is None:
            self._logits = self._catch_up()
        self.counters.reused = self._reused
        return self._logits

    def _catch_up(self) -> FloatArray:
        """Read what the sequence has gained; return the logits after its last token."""
        self._begin_prompt()
        if self._cached == len(self._tokens):  # the last token's logits are gone: read again
            self._cut_cache(self._cached - 1)
        return self._read_on()

    def _begin_prompt(self) -> None:
        """Take over what other processes have computed of the prompt, the first time."""
        if self._head is not None and not self._head.begun:
            with self._away():  # reading a file takes a while
                held = self._head.begin(self._cache, self._cached, self._cut_cache)
            if held != self._cached:
                self._cached = self._reused = held

    def _read_on(self) -> FloatArray:
        """Read all tokens that the cache does not hold; return the logits after them."""
        return self._read_to(len(self._tokens))

    def _read_to(self, length: int) -> FloatArray:
        """Read the sequence's next tokens, up to this number; return the logits after them."""
        self._reused = min(self._reused, self._cached)
        pending = self._tokens[self._cached : length]
        rows = self._forward(pending, range(self._cached, length), context=True)
        self._cached = length
        self.counters.read += len(pending)
        logits: FloatArray = rows.logits[-1].copy()
        if length == self._prompt_length:
            self._sequence.prompt_logits = (length, logits)
        return logits

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

    def _forward(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        branches: Sequence[Sequence[int]] | None = None,
        *,
        context: bool,
    ) -> Rows:
        try:
            self._check()
            rows = self._pass(tokens, positions, branches or [(0,)] * len(tokens), context=context)
            return replace(rows, logits=rows.logits[:, : self._n_tokens])
        except BaseException:
            self._forget_branches()
            self._cache.keep(0, self._cached)
            raise

    def _pass(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        branches: Sequence[Sequence[int]],
        *,
        context: bool,
    ) -> Rows:
        return self._cache.forward(
            tokens, positions, branches, context=context, all_logits=not context
        )

    def _away(self) -> AbstractContextManager[None]:
        """Return what to do other things within, in the middle of a call that computes."""
        return nullcontext()

    def _run(self, work: Callable[[], T]) -> T:
        """Return what work returns that computes, whichever thread asks for it."""
        return compute_thread.run(work)

    def _logits_after(self, branch: Branch, tokens: Sequence[int]) -> FloatArray | None:
        """Return the logits after tokens of a branch, if they are still there."""
        return branch.logits if len(branch.tokens) == len(tokens) else None

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
        token, _ = draw(shaped, sampling, rng)
        if draft.matcher is not None:
            draft.matcher.advance([token])
        return token, logprob(row, token)

    def _fork(self) -> Matcher | None:
        """Return a matcher of its own for a continuation of the sequence."""
        return None if self._matcher is None else self._matcher.fork()

    def _forget_branches(self) -> None:
        """Take note that the cache holds nothing beside the sequence."""
        self._branches = []

    def _drop_branches(self) -> None:
        if self._branches:
            self._forget_branches()
            self._cache.keep(0, self._cached)

    def _cut_cache(self, length: int) -> None:
        self._cached = length
        self._cache.keep(0, length)

    def tokens_of(self, candidate: Candidate) -> list[int]:
        """The candidate's tokens in this session's vocabulary."""
        if candidate.vocabulary == self._tokenizer.vocabulary:
            return list(candidate.tokens)
        end = [self._tokenizer.end_token] if candidate.ends_sequence else []
        return self._tokenizer.encode_text(candidate.text) + end

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
        while len(cut) < len(dangling):
            length -= 1
            cut = self._tokenizer.token_bytes(self._tokens[length]) + cut
        self.rollback(length)
        self.extend(self._tokenizer.encode_text(cut[: -len(dangling)].decode(errors="replace")))

    def _require_open(self) -> None:
        if self._on_close is None:
            raise EngineError("the session is closed; open another one")

    def _require_room(self, tokens: int) -> None:
        if tokens > self.room:
            raise ContextOverflowError(
                f"{tokens} more tokens do not fit: {len(self._tokens)} of the context's "
                f"{self._context_length} are taken; raise n_ctx or shorten the prompt"
            )

    def _dangling_bytes(self) -> bytes:
        """The begun but unfinished character at the end of the answer so far."""
        answer = self._tokens[max(self._prompt_length, len(self._tokens) - 4) :]
        return unfinished_character(b"".join(map(self._tokenizer.token_bytes, answer)))
