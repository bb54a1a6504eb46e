"""Sessions of models that run in this process, on top of a KV cache.

Everything that local engines share is here: sampling k candidates that share their prefix, seeing
a step's end, giving a hopeless step up early, keeping what was computed for an accepted step, and
reading foreign steps only when they are needed. An engine adds the forward pass (`Cache`) and its
tokenizer; `local_engine` hands out the sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Protocol

import numpy as np
import numpy.typing as npt

from specguard_chains.decoding.boundaries import (
    Boundary,
    Ending,
    StepText,
    unfinished_character,
)
from specguard_chains.decoding.engine import Candidate, Counters, Reading, Watch
from specguard_chains.decoding.grounding import GroundingSpec
from specguard_chains.decoding.sampling import Sampling, draw, generators, log_normaliser
from specguard_chains.errors import ContextOverflowError, DecodingCancelled

FloatArray = npt.NDArray[np.float32]

READ_BLOCK = 64
"""Tokens of a step that are read at once: their logits are held together."""


@dataclass(frozen=True, slots=True)
class Rows:
    """What a forward pass gives for its n tokens."""

    logits: FloatArray
    """Shape (n, vocabulary), or (1, vocabulary) if only the last row was asked for; valid until
    the next forward pass."""
    grounding: FloatArray | None
    """Shape (n,); None if no grounding is read."""


class Cache(Protocol):
    """KV memory of one sequence and of branches that share its beginning.

    Branch 0 is the sequence itself. The caller says which token stands at which position of which
    branch; the cache computes and remembers.
    """

    def configure(
        self, grounding: GroundingSpec | None, cancelled: Callable[[], bool] | None
    ) -> None:
        """Prepare for a session. Whoever changes the grounding form drops the contents first."""
        ...

    def fork(self, n: int, length: int) -> None:
        """Let branches 1 to n - 1 share the first `length` tokens of branch 0."""
        ...

    def forward(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        branches: Sequence[int],
        *,
        context: bool,
        all_logits: bool,
    ) -> Rows:
        """Compute tokens: a run on one branch, or one token on each of several.

        `context` says that they belong to the context and not to a step in progress.
        """
        ...

    def keep(self, branch: int, length: int) -> None:
        """Make a branch's first `length` tokens the sequence, and drop all the rest.

        The kept part of a step becomes context for the grounding of later ones.
        """
        ...

    def close(self) -> None:
        """Free the memory."""
        ...


class Tokenizer(Protocol):
    """What a session needs to know of tokens."""

    @property
    def vocabulary(self) -> str:
        """Fingerprint of the vocabulary."""
        ...

    def encode_text(self, text: str) -> list[int]:
        """Tokenize text as it stands: special tokens in it stay text, nothing is added."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes of a token, empty for control tokens."""
        ...

    def is_end(self, token: int) -> bool:
        """Whether the token ends a sequence."""
        ...


@dataclass(slots=True)
class CachedSequence:
    """A cache and the tokens that it holds: what one session leaves to the next."""

    cache: Cache
    grounding: GroundingSpec | None = None
    tokens: list[int] = field(default_factory=list)
    prompt_logits: tuple[int, FloatArray] | None = None
    """(length, logits after that many tokens) of the latest prompt, so that the same prompt again
    gives the very same numbers."""


@dataclass(slots=True)
class _Branch:
    """A continuation that the cache holds beside the sequence."""

    index: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    grounding: list[float] = field(default_factory=list)
    computed: int = 0
    """How many of the tokens the cache holds."""
    logits: FloatArray | None = None
    """For the token after the last one."""
    text: str = ""
    ending: Ending | None = None

    def write(self, token: int, logprob: float, text: StepText, tokenizer: Tokenizer) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if tokenizer.is_end(token):
            self.ending = "end_of_sequence"
        else:
            self.ending = text.add(tokenizer.token_bytes(token))
            self.text = text.text

    def hopeless(self, watch: Watch) -> bool:
        return not watch(min(self.logprobs), min(self.grounding, default=None))

    def reading(self) -> Reading:
        return Reading(
            np.array(self.logprobs, dtype=np.float32),
            np.array(self.grounding, dtype=np.float32) if self.grounding else None,
        )

    def candidate(self, vocabulary: str) -> Candidate:
        ending = self.ending or "withdrawn"
        return Candidate(tuple(self.tokens), self.text, self.reading(), ending, vocabulary)


class LocalSession:
    """A `Session` over a `Cache`."""

    def __init__(
        self,
        sequence: CachedSequence,
        prompt: Sequence[int],
        tokenizer: Tokenizer,
        *,
        context_length: int,
        cancelled: Callable[[], bool] | None,
        on_close: Callable[[CachedSequence], None],
    ) -> None:
        """Start with a prompt on a sequence whose cached tokens may share its beginning."""
        self._sequence = sequence
        self._cache = sequence.cache
        self._tokenizer = tokenizer
        self._context_length = context_length
        self._cancelled = cancelled or (lambda: False)
        self._on_close: Callable[[CachedSequence], None] | None = on_close
        self._tokens = list(prompt)
        self._prompt_length = len(self._tokens)
        self._branches: list[_Branch] = []
        self._logits: FloatArray | None = None  # for the token after the sequence
        self._cached = common_prefix(sequence.tokens, self._tokens)
        if sequence.prompt_logits is not None:
            length, logits = sequence.prompt_logits
            if length == self._cached == len(self._tokens):
                self._logits = logits
        self._cache.keep(0, self._cached)
        self.counters = Counters()
        self._reused = self._cached  # counted when the session is first used

    @property
    def room(self) -> int:
        """Tokens that still fit into the context."""
        return self._context_length - len(self._tokens)

    def sample(
        self,
        n: int,
        boundary: Boundary,
        sampling: Sampling,
        *,
        seed: Sequence[int],
        watch: Watch | None = None,
    ) -> list[Candidate]:
        """See `Session.sample`. Equal candidates (greedy sampling) are computed once."""
        self._require_room(boundary.max_tokens)
        distinct = 1 if sampling.greedy else n
        logits = self._next_logits()
        self._branches = [_Branch(index=i) for i in range(distinct)]
        self._cache.fork(distinct, len(self._tokens))
        rngs = generators(seed, distinct)
        texts = [StepText(boundary, self._dangling_bytes()) for _ in self._branches]
        rows: Iterable[FloatArray] = [logits] * distinct
        while live := [branch for branch in self._branches if branch.ending is None]:
            for branch, row in zip(live, rows, strict=True):
                token, logprob = draw(row, sampling, rngs[branch.index])
                branch.write(token, logprob, texts[branch.index], self._tokenizer)
            self.counters.written += len(live)
            if self._give_up(watch):
                break
            rows = self._compute(live)
            if self._give_up(watch):
                break
        candidates = [branch.candidate(self._tokenizer.vocabulary) for branch in self._branches]
        return candidates if distinct == n else candidates * n

    def read(self, candidate: Candidate) -> Reading:
        """See `Session.read`."""
        tokens = self._own_tokens(candidate)
        self._require_room(len(tokens))
        logits = self._next_logits()
        branch = _Branch()
        self._branches = [branch]
        self._cache.fork(1, len(self._tokens))
        for start in range(0, len(tokens), READ_BLOCK):
            block = tokens[start : start + READ_BLOCK]
            rows = self._forward(block, self._positions(start, len(block)), context=False)
            before = np.concatenate([logits[None], rows.logits[:-1]])
            branch.logprobs += [
                float(row[token]) - log_normaliser(row)
                for row, token in zip(before, block, strict=True)
            ]
            if rows.grounding is not None:
                branch.grounding += rows.grounding.tolist()
            logits = rows.logits[-1].copy()
            branch.tokens += block
        branch.computed, branch.logits = len(tokens), logits
        self.counters.read += len(tokens)
        return branch.reading()

    def accept(self, candidate: Candidate) -> None:
        """See `Session.accept`."""
        tokens = self._own_tokens(candidate)
        self._require_room(len(tokens))
        kept, logits = 0, None
        if self._branches:
            branch = max(self._branches, key=lambda b: common_prefix(b.tokens, tokens))
            kept = min(common_prefix(branch.tokens, tokens), branch.computed)
            if kept == len(branch.tokens) == len(tokens):
                logits = branch.logits
            self._cache.keep(branch.index, self._cached + kept)
            self._branches = []
            self._cached += kept
        self._logits = logits if tokens else self._logits
        self._tokens += tokens

    def rollback(self, length: int) -> None:
        """See `Session.rollback`."""
        if not self._prompt_length <= length <= len(self._tokens):
            raise ValueError(
                f"cannot roll back to {length} tokens: the prompt has {self._prompt_length}, "
                f"the sequence {len(self._tokens)}"
            )
        self._drop_branches()
        if length < len(self._tokens):
            del self._tokens[length:]
            self._cached = min(self._cached, length)
            self._cache.keep(0, self._cached)
            self._logits = None

    def close(self) -> None:
        """See `Session.close`."""
        if self._on_close is None:
            return
        on_close, self._on_close = self._on_close, None
        self._sequence.tokens = self._tokens[: self._cached]
        on_close(self._sequence)

    def _next_logits(self) -> FloatArray:
        """Read what the sequence has gained, and return the logits after its last token."""
        self._drop_branches()
        self.counters.reused = self._reused
        if self._logits is None:
            if self._cached == len(self._tokens):  # the last token's logits are gone: read again
                self._cached -= 1
                self._cache.keep(0, self._cached)
            pending = self._tokens[self._cached :]
            positions = range(self._cached, len(self._tokens))
            rows = self._forward(pending, positions, context=True)
            self._logits = rows.logits[-1].copy()
            self._cached = len(self._tokens)
            self.counters.read += len(pending)
            if self._cached == self._prompt_length:
                self._sequence.prompt_logits = (self._cached, self._logits)
        return self._logits

    def _compute(self, live: Sequence[_Branch]) -> list[FloatArray]:
        """Compute each branch's newest token; return the logits of those that go on."""
        offset = len(self._tokens) - 1
        rows = self._forward(
            [branch.tokens[-1] for branch in live],
            [offset + len(branch.tokens) for branch in live],
            [branch.index for branch in live],
            context=False,
        )
        for i, branch in enumerate(live):
            branch.computed = len(branch.tokens)
            if rows.grounding is not None:
                branch.grounding.append(float(rows.grounding[i]))
            if branch.ending is not None:
                branch.logits = rows.logits[i].copy()
        return [row for branch, row in zip(live, rows.logits, strict=True) if not branch.ending]

    def _forward(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        branches: Sequence[int] | None = None,
        *,
        context: bool,
    ) -> Rows:
        if self._cancelled():
            raise DecodingCancelled("the request was cancelled")
        return self._cache.forward(
            tokens,
            positions,
            branches or [0] * len(tokens),
            context=context,
            all_logits=not context,
        )

    def _give_up(self, watch: Watch | None) -> bool:
        """Withdraw all candidates if none of them can be accepted any more."""
        if watch is None or not all(branch.hopeless(watch) for branch in self._branches):
            return False
        for branch in self._branches:
            if branch.ending is None or branch.computed < len(branch.tokens):
                branch.ending = "withdrawn"
        return True

    def _drop_branches(self) -> None:
        if self._branches:
            self._branches = []
            self._cache.keep(0, self._cached)

    def _own_tokens(self, candidate: Candidate) -> list[int]:
        """The candidate's tokens in this session's vocabulary."""
        if candidate.vocabulary == self._tokenizer.vocabulary:
            return list(candidate.tokens)
        return self._tokenizer.encode_text(candidate.text)

    def _positions(self, start: int, count: int) -> range:
        """Positions of tokens `start` to `start + count` after the sequence."""
        return range(len(self._tokens) + start, len(self._tokens) + start + count)

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


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many leading tokens two sequences share."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
