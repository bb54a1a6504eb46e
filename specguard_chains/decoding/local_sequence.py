"""A growing sequence of tokens of a model in this process, on top of a KV cache.

It keeps what was computed for a continuation that is taken over, and computes what it has gained
only once it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from specguard_chains.decoding import compute_thread
from specguard_chains.decoding.arrays import FloatArray
from specguard_chains.decoding.boundaries import Boundary, unfinished_character
from specguard_chains.decoding.cache import CachedSequence, Rows, Tokenizer, common_prefix
from specguard_chains.decoding.constraint import Matcher
from specguard_chains.decoding.engine import Counters
from specguard_chains.decoding.local_drafts import Branch
from specguard_chains.decoding.prompt_head import PromptHead
from specguard_chains.decoding.step_writer import StepWriter
from specguard_chains.errors import ContextOverflowError, DecodingCancelled, EngineError

S = TypeVar("S", bound="LocalSequence")
P = ParamSpec("P")
T = TypeVar("T")

Process = Callable[[Sequence[int], FloatArray], FloatArray]
"""(all tokens so far, logits of the next one) -> the logits to draw from."""


def computes(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Let a session's method run where it may compute."""

    @wraps(method)
    def run(session: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return session._run(lambda: method(session, *args, **kwargs))

    return run


class LocalSequence:
    """The tokens of a session, what its cache holds of them, and continuations beside them."""

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
        return compute_thread.run(work, self._is_cancelled)

    def _is_cancelled(self) -> bool:
        try:
            self._check()
        except DecodingCancelled:
            return True
        return False

    def _logits_after(self, branch: Branch, tokens: Sequence[int]) -> FloatArray | None:
        """Return the logits after tokens of a branch, if they are still there."""
        return branch.logits if len(branch.tokens) == len(tokens) else None

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
