"""A model without weights that exercises the real sessions: bytes in, table-driven numbers out.

Its KV cells are handed out in scrambled order and its attention looks at tokens and positions, so
that a session which confuses cells, positions or branches gives other numbers.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import cast

import numpy as np

from specguard_chains.decoding.arrays import FloatArray
from specguard_chains.decoding.batcher import Outcome, Part
from specguard_chains.decoding.cache import Rows, State, rollout_for
from specguard_chains.decoding.engine import Capabilities, Prompt
from specguard_chains.decoding.grounding import GroundingSpec, Rollout
from specguard_chains.decoding.local_engine import LocalEngine
from specguard_chains.errors import ContextOverflowError, DecodingCancelled

END = 256
ANSWER = 257
"""Ends every prompt, so that a policy can tell the answer from it."""
VOCABULARY = 258
HEADS = 2
LAYERS = 3
BLOCK = 64
"""Tokens whose state is stored together."""

Policy = Callable[[tuple[int, ...]], FloatArray]
"""(tokens so far) -> logits of the next one, shape (VOCABULARY,)."""


def random_policy(seed: int, *, spread: float = 2.0, end: float = 0.0) -> Policy:
    """A random table over the last two tokens; writes letters, line breaks and now and then é."""
    alphabet = np.full(VOCABULARY, -40.0, dtype=np.float32)
    alphabet[[*b"abcdef .\n\n", END]] = 0.0
    alphabet[ord("\n")] = 1.0
    alphabet[END] = end
    after_newline = alphabet.copy()
    after_newline[ord("\n")] = 8.0
    after_blank_line = alphabet.copy()
    after_blank_line[ord("\n")] = -40.0

    @cache
    def row(last: tuple[int, ...]) -> FloatArray:
        if last[-1] == 0xC3:  # a character's first byte: finish it
            return one_hot(0xA9)
        noise = np.random.default_rng([seed, *last]).normal(size=VOCABULARY)
        base = alphabet
        if last[-1] == ord("\n"):
            base = after_blank_line if last[0] == ord("\n") else after_newline
        logits = (base + spread * noise).astype(np.float32)
        logits[0xC3] = base[ord("a")]
        return logits

    return lambda tokens: row(tokens[-2:])


def scripted_policy(*steps: str, logprobs: Sequence[float] = (), end: bool = True) -> Policy:
    """Writes these steps one after the other, whoever wrote the ones before.

    Args:
        steps: Texts; each but the last should end with the step delimiter.
        logprobs: Log-probability of every token of the i-th step; -0.01 where not given.
        end: Whether the sequence ends after the last step; else it is repeated.
    """

    def next_token(tokens: tuple[int, ...]) -> FloatArray:
        answer = bytes(t for t in tokens[_answer_start(tokens) :] if t < END)
        done = 0
        for step in steps[:-1]:
            head, found, rest = answer.partition(b"\n\n")
            if not (found and head.strip()):
                break
            answer, done = rest, done + 1
            del step
        script = steps[done].encode()
        logprob = logprobs[done] if done < len(logprobs) else -0.01
        if len(answer) >= len(script) and end:
            return one_hot(END, logprob)
        return one_hot(script[len(answer) % len(script)], logprob)

    return next_token


def one_hot(token: int, logprob: float = -1e-4) -> FloatArray:
    """Logits that give one token this log-probability and share the rest out."""
    logits = np.zeros(VOCABULARY, dtype=np.float32)
    logits[token] = logprob - np.log(-np.expm1(logprob) / (VOCABULARY - 1))
    return logits


def attention_row(tokens: tuple[int, ...], layer: int) -> FloatArray:
    """The last token's attention probabilities, shape (HEADS, len(tokens))."""
    digest = hashlib.blake2b(repr((layer, tokens)).encode(), digest_size=8).digest()
    rng = np.random.default_rng(int.from_bytes(digest))
    scores = np.exp(2.0 * rng.normal(size=(HEADS, len(tokens))))
    return (scores / scores.sum(axis=1, keepdims=True)).astype(np.float32)


def hidden_state(tokens: tuple[int, ...], layer: int = 1) -> FloatArray:
    """The hidden state of the last token after a layer, shape (4,)."""
    digest = hashlib.blake2b(repr((tokens, layer)).encode(), digest_size=8).digest()
    rng = np.random.default_rng(int.from_bytes(digest))
    return rng.normal(size=4).astype(np.float32)


class ToyMemory:
    """Cells, and what attention is paid from them: of one cache, or of all that share it."""

    def __init__(self, cells: int) -> None:
        self.cells = cells
        self._free = list(np.random.default_rng(0).permutation(cells))
        self._lock = threading.Lock()
        self._holders: dict[int, int] = {}  # of each cell that is taken: on how many branches

    def take(self, n: int) -> list[int]:
        """Return n free cells, which nobody holds yet."""
        with self._lock:
            if n > len(self._free):
                raise ContextOverflowError(f"{n} more tokens do not fit into {self.cells} cells")
            return [int(self._free.pop()) for _ in range(n)]

    def hold(self, cells: Iterable[int]) -> None:
        with self._lock:
            for cell in cells:
                self._holders[cell] = self._holders.get(cell, 0) + 1

    def release(self, cells: Iterable[int]) -> None:
        with self._lock:
            for cell in cells:
                self._holders[cell] -= 1
                if not self._holders[cell]:
                    del self._holders[cell]
                    self._free.append(cell)

    def give_back(self, cells: Iterable[int]) -> None:
        """Free those of some cells that nobody holds."""
        with self._lock:
            self._free.extend(cell for cell in cells if cell not in self._holders)

    @property
    def taken(self) -> int:
        return len(self._holders)


class ToyCache:
    """KV memory: for each branch its tokens and their cells."""

    def __init__(self, engine: ToyEngine, memory: ToyMemory) -> None:
        self._engine = engine
        self._memory = memory
        self._branches: dict[int, list[tuple[int, int]]] = {0: []}  # (token, cell)
        self._length = 0
        self._rollout: Rollout | None = None
        self._cancelled: Callable[[], bool] | None = None
        self._state_layer: int | None = None

    def configure(
        self,
        grounding: GroundingSpec | None,
        cancelled: Callable[[], bool] | None,
        state_layer: int | None = None,
    ) -> None:
        self._state_layer = state_layer
        slots = self._memory.cells
        self._rollout = rollout_for(grounding, self._rollout, attention_layers=LAYERS, slots=slots)
        self._cancelled = cancelled

    @property
    def shareable(self) -> bool:
        """See `Cache.shareable`."""
        return self._memory is self._engine.memory

    def share(self, other: ToyCache, length: int) -> bool:
        assert list(self._branches) == [0]
        assert not self._branches[0]
        if self._memory is not other._memory:
            return False
        assert length <= other._length, "only context is shared"
        self._branches[0] = other._branches[0][:length]
        self._memory.hold(cell for _, cell in self._branches[0])
        self._length = length
        if self._rollout is not None:
            assert other._rollout is not None
            self._rollout.take_over(other._rollout)
        return True

    def fork(self, n: int, length: int) -> None:
        assert list(self._branches) == [0]
        assert length == len(self._branches[0])
        for i in range(1, n):
            self._branches[i] = list(self._branches[0])
            self._memory.hold(cell for _, cell in self._branches[i])

    def forward(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        branches: Sequence[Sequence[int]],
        *,
        context: bool,
        all_logits: bool,
    ) -> Rows:
        self._engine.count(len(tokens))
        return self.compute(tokens, positions, branches, context=context, all_logits=all_logits)

    def compute(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        branches: Sequence[Sequence[int]],
        *,
        context: bool,
        all_logits: bool,
    ) -> Rows:
        cells = self._memory.take(len(tokens))
        try:
            return self._compute(tokens, positions, branches, cells, context, all_logits)
        except BaseException:
            self._memory.give_back(cells)
            raise

    def _compute(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        branches: Sequence[Sequence[int]],
        own: Sequence[int],
        context: bool,
        all_logits: bool,
    ) -> Rows:
        cells = np.array(own, dtype=np.intp)
        if self._rollout is not None:
            self._rollout.begin(cells, context=context, positions=positions)
        logits, states = [], []
        for token, position, equal, cell in zip(tokens, positions, branches, own, strict=True):
            if self._cancelled is not None and self._cancelled():
                raise DecodingCancelled("cancelled in the forward pass")
            written = self._branches[equal[0]]
            for branch in equal:
                assert self._branches[branch][: len(written)] == written, "the branches differ"
                assert position == len(self._branches[branch]), "positions must follow each other"
            for branch in equal:
                self._branches[branch].append((int(token), cell))
                self._memory.hold([cell])
            seen = tuple(t for t, _ in written)
            logits.append(self._engine.policy(seen))
            if self._state_layer is not None:
                states.append(hidden_state(seen, self._state_layer))
            if self._rollout is not None:
                for layer in range(self._rollout.spec.layers):
                    row = np.zeros((HEADS, 1, self._memory.cells), dtype=np.float32)
                    row[:, 0, [c for _, c in written]] = attention_row(seen, layer)
                    self._rollout.absorb(layer, row, np.array([cell]))
        if context:
            self._length = len(self._branches[0])
        rows = np.stack(logits if all_logits else logits[-1:])
        read = np.stack(states) if states and not context else None
        if self._rollout is None:
            return Rows(rows, None, None, read)
        return Rows(rows, self._rollout.grounding(cells), self._rollout.passages(cells), read)

    def cut(self, branch: int, length: int) -> None:
        assert length >= self._length, "a branch is not cut into its context"
        self._memory.release(cell for _, cell in self._branches[branch][length:])
        del self._branches[branch][length:]

    def keep(self, branch: int, length: int) -> None:
        kept = self._branches[branch][:length]
        if self._rollout is not None:
            fresh = [cell for _, cell in kept[self._length :]]
            self._rollout.commit(np.array(fresh, dtype=np.intp))
        self._memory.hold(cell for _, cell in kept)
        for cells in self._branches.values():
            self._memory.release(cell for _, cell in cells)
        self._branches, self._length = {0: kept}, len(kept)

    def export(self, length: int) -> State:
        assert list(self._branches) == [0]
        assert length <= self._length
        held = self._branches[0][:length]
        cells = np.array([cell for _, cell in held], dtype=np.intp)
        state = {"tokens": np.array([token for token, _ in held])}
        return state if self._rollout is None else state | {"mass": self._rollout.export(cells)}

    @property
    def restorable(self) -> bool:
        """See `Cache.restorable`."""
        return True

    def restore(self, state: State, length: int) -> bool:
        assert self._branches == {0: []}
        assert length == len(state["tokens"])
        if self._memory.taken + length > self._memory.cells:
            return False
        cells = self._memory.take(length)
        self._memory.hold(cells)
        self._branches[0] = list(zip(state["tokens"].tolist(), cells, strict=True))
        self._length = length
        if self._rollout is not None:
            self._rollout.restore(np.array(cells), state["mass"])
        return True

    def close(self) -> None:
        self.keep(0, 0)
        self._branches = {}


class ToyEngine(LocalEngine):
    """See the module docstring."""

    def __init__(
        self,
        policy: Policy,
        *,
        name: str = "toy",
        context_length: int = 4096,
        attention: bool = True,
        states: bool = True,
        vocabulary: str = "bytes",
        delay_s: float = 0.0,
        max_parallel: int = 1,
        prompt_cache: Path | None = None,
        prompt_cache_gib: float = 4.0,
    ) -> None:
        super().__init__(max_parallel=max_parallel)
        self.policy = policy
        self.name = name
        self.context_length = context_length
        self.n_layer = LAYERS
        self.capabilities = Capabilities(
            in_process=True,
            logits=True,
            attention=attention,
            states=states,
            max_candidates=64,
            constraints=True,
            max_parallel=max_parallel,
        )
        self.cells = context_length + 2048
        self.memory = ToyMemory(max_parallel * self.cells) if max_parallel > 1 else None
        """What all sessions share if several requests are admitted."""
        self.delay_s = delay_s
        self.computed_tokens = 0
        """Tokens that went through forward passes so far."""
        self.forward_passes = 0
        self._vocabulary = vocabulary
        self.template: str | None = None
        self._entered = threading.Lock()
        self._share_prompts(prompt_cache, prompt_cache_gib, BLOCK, {"model": name})

    @property
    def vocabulary(self) -> str:
        return self._vocabulary

    @property
    def n_tokens(self) -> int:
        return VOCABULARY

    @property
    def end_token(self) -> int:
        return END

    def encode(self, prompt: Prompt) -> list[int]:
        text = prompt.text
        if text is None:
            text = "".join(f"<{m['role']}>{m['content']}" for m in prompt.messages)
        return [*text.encode(), ANSWER] if text else []

    def chat_template(self) -> str | None:
        return self.template

    def encode_text(self, text: str) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < END else b""

    def is_end(self, token: int) -> bool:
        return token == END

    def new_cache(self) -> ToyCache:
        return ToyCache(self, self.memory or ToyMemory(self.cells))

    def compute(self, parts: Sequence[Part]) -> Sequence[Outcome]:
        """One pass for all; a part that fails leaves the others alone."""
        self.count(sum(len(part.tokens) for part in parts))
        return [self._compute(part) for part in parts]

    def _compute(self, part: Part) -> Outcome:
        cache = cast("ToyCache", part.cache)
        while True:
            try:
                return cache.compute(
                    part.tokens,
                    part.positions,
                    part.branches,
                    context=part.context,
                    all_logits=part.all_logits,
                )
            except ContextOverflowError as error:
                if not self._prefixes.evict():
                    return error
            except BaseException as error:
                return error

    def count(self, tokens: int) -> None:
        """Book a forward pass; two at once would be a fault of the queue."""
        assert self._entered.acquire(blocking=False), "the engine was entered twice at once"
        try:
            self.computed_tokens += tokens
            self.forward_passes += 1
            if self.delay_s:
                time.sleep(self.delay_s)
        finally:
            self._entered.release()


def _answer_start(tokens: tuple[int, ...]) -> int:
    return tokens.index(ANSWER) + 1 if ANSWER in tokens else len(tokens)
