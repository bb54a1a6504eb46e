"""The part of an engine that all local models share: its queue and its cached sequences."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from specguard_chains.decoding.batcher import Batcher, Outcome, Part
from specguard_chains.decoding.cache import Cache, CachedSequence, Tokenizer
from specguard_chains.decoding.constraint import Constraint, TokenTrie
from specguard_chains.decoding.engine import Capabilities, Prompt
from specguard_chains.decoding.fair_lock import FairLock
from specguard_chains.decoding.grounding import GroundingSpec
from specguard_chains.decoding.local_sequence import Process
from specguard_chains.decoding.local_trees import TreeSession
from specguard_chains.decoding.passages import locate
from specguard_chains.decoding.prefixes import Prefixes
from specguard_chains.decoding.prompt_files import PromptFiles
from specguard_chains.decoding.prompt_head import PromptHeads
from specguard_chains.decoding.shared_session import SharedSession
from specguard_chains.errors import (
    AttentionUnavailableError,
    ConfigurationError,
    ContextOverflowError,
    DecodingCancelled,
    EngineError,
    StatesUnavailableError,
)


class LocalEngine(Tokenizer, ABC):
    """An `Engine` whose model runs in this process.

    A subclass sets the attributes, implements `Tokenizer`, `encode` and `new_cache`, and frees its
    model in `close` after calling this class's.
    """

    name: str
    capabilities: Capabilities
    context_length: int
    n_layer: int
    """Layers of the model."""
    process_logits: Process | None = None
    """Changes the logits that are drawn from; `capabilities.logits` must be False then."""

    def __init__(self, *, max_idle: int = 1, max_parallel: int = 1) -> None:
        """Start with no cached sequence.

        At most `max_idle` of them are kept between requests, and as many as `max_parallel` requests
        leave behind if these are admitted at a time.
        """
        check_at_least_one(max_parallel=max_parallel)
        self.max_idle = max_idle
        self._queue = FairLock(max_parallel)
        self._idle: list[CachedSequence] = []
        self._prefixes = Prefixes(max(max_idle, max_parallel))  # these two if requests are parallel
        self._batcher = Batcher(self.compute)
        self._heads: PromptHeads | None = None
        self._known_trie: TokenTrie | None = None
        self._making_trie = threading.Lock()
        self._closed = False

    @abstractmethod
    def encode(self, prompt: Prompt) -> list[int]:
        """See `Engine.encode`."""

    @abstractmethod
    def new_cache(self) -> Cache:
        """Reserve KV memory for a sequence of `context_length` tokens and its candidates."""

    def compute(self, parts: Sequence[Part]) -> Sequence[Outcome]:
        """Compute a pass for several sessions, here one after the other.

        Returns for each part its rows, which stay valid, or the error that it alone has met. To be
        overridden where it pays to compute them together.
        """
        return [part.alone() for part in parts]

    def open(
        self,
        prompt: Prompt,
        *,
        grounding: GroundingSpec | None = None,
        cancelled: Callable[[], bool] | None = None,
        constraint: Constraint | None = None,
        state_layer: int | None = None,
    ) -> TreeSession:
        """See `Engine.open`."""

        def check() -> None:
            if self._closed:
                raise EngineError(f"the engine {self.name} is closed; load the model again")
            if cancelled is not None and cancelled():
                raise DecodingCancelled("the request was cancelled")

        check()
        if grounding is not None and not self.capabilities.attention:
            needing, else_ = (
                ("passages need", "give no passages")
                if prompt.passages
                else ("grounding needs", "set confidence_weight=1")
            )
            raise AttentionUnavailableError(
                f"{self.name} does not give attention, which {needing}; load it with "
                "attention=True, as a confidence_weight below 1 does with the model that "
                f"verify_with names, or {else_}"
            )
        if state_layer is not None and not self.capabilities.states:
            raise StatesUnavailableError(
                f"{self.name} does not give hidden states, which a value head needs; load it with "
                "states=True"
            )
        if state_layer is not None:
            check_state_layer(state_layer, self.n_layer, self.name)
        tokens = self.encode(prompt)
        if not tokens:
            raise ConfigurationError("the prompt is empty; give at least one message with text")
        if len(tokens) >= self.context_length:
            raise ContextOverflowError(
                f"the prompt has {len(tokens)} tokens and leaves no room in the context of "
                f"{self.context_length}; raise n_ctx or shorten the prompt"
            )
        if grounding is not None and prompt.passages:
            grounding = replace(grounding, passages=locate(prompt.passages, tokens, self))
        matcher = None if constraint is None else self._trie().start(constraint)
        shared = self.capabilities.max_parallel > 1
        sequence = (
            CachedSequence(self.new_cache(), grounding)
            if shared
            else self._take_sequence(tokens, grounding)
        )
        kind: Callable[..., TreeSession] = TreeSession
        if shared:
            kind = partial(SharedSession, batcher=self._batcher, prefixes=self._prefixes)
        try:
            sequence.cache.configure(grounding, cancelled, state_layer)
            session = kind(
                sequence,
                tokens,
                self,
                context_length=self.context_length,
                check=check,
                on_close=self._prefixes.give_back if shared else self._give_back,
                process=self.process_logits,
                matcher=matcher,
                head=self._heads and self._heads.of(prompt, tokens, grounding),
            )
        except BaseException:
            sequence.cache.close()
            raise
        if shared:
            self._prefixes.add(sequence)
        return session

    def chat_template(self) -> str | None:
        """See `Engine.chat_template`."""
        return None

    def exclusive(
        self, cancelled: Callable[[], bool] | None = None, *, max_waiting: int | None = None
    ) -> AbstractContextManager[None]:
        """See `Engine.exclusive`."""
        return self._queue.held(cancelled, max_waiting=max_waiting)

    def clear(self) -> None:
        """Forget all cached sequences, so that the next request starts cold."""
        for sequence in self._idle:
            sequence.clear()
        self._prefixes.clear()

    def close(self) -> None:
        """See `Engine.close`."""
        self._closed = True
        while self._idle:
            self._idle.pop().cache.close()
        self._prefixes.close()
        if self._heads is not None:
            self._heads.files.flush()

    def _share_prompts(
        self,
        folder: str | os.PathLike[str] | None,
        gib: float,
        block: int,
        identity: Mapping[str, Any],
    ) -> None:
        """Keep the beginnings of prompts in a folder, for processes to come; None keeps none.

        Args:
            folder: Where.
            gib: What all files there may have together, in GiB.
            block: How many tokens of a prompt the engine computes at once.
            identity: All that their states depend on.

        Raises:
            ConfigurationError: Nothing can be written there, or there is no room.
        """
        if folder is None:
            return
        if gib <= 0:
            raise ConfigurationError(f"prompt_cache_gib must be more than 0, not {gib}")
        files = PromptFiles(Path(folder), int(gib * 2**30), identity)
        self._heads = PromptHeads(files, self.encode, block)

    def _trie(self) -> TokenTrie:
        """Return the vocabulary for constraints, which is made when it is first needed."""
        with self._making_trie:
            if self._known_trie is None:
                self._known_trie = TokenTrie(self)
            return self._known_trie

    def _take_sequence(self, tokens: list[int], grounding: GroundingSpec | None) -> CachedSequence:
        """Return the idle sequence that shares the longest prefix, or a new one.

        A conversation that has nothing in common with the idle ones gets a sequence of its own
        while there may be more, then the one that was idle longest.
        """
        shared = [idle.usable(tokens, grounding) for idle in self._idle]
        best = max(range(len(shared)), key=shared.__getitem__, default=None)
        if best is None or (2 * shared[best] < len(tokens) and len(shared) < self.max_idle):
            return CachedSequence(self.new_cache(), grounding)
        sequence = self._idle.pop(best)
        if sequence.grounding != grounding:  # some of its context was read in another form
            sequence.cut(shared[best])
            sequence.grounding = grounding
        return sequence

    def _give_back(self, sequence: CachedSequence) -> None:
        self._idle.append(sequence)
        while len(self._idle) > (0 if self._closed else self.max_idle):
            self._idle.pop(0).cache.close()


def check_at_least_one(**values: int | None) -> None:
    """Refuse numbers below one; None is no number.

    Raises:
        ConfigurationError: One is; the message names it.
    """
    for name, value in values.items():
        if value is not None and value < 1:
            raise ConfigurationError(f"{name} must be at least 1, not {value}")


def check_state_layer(layer: int, n_layer: int, name: str) -> None:
    """Refuse a layer whose hidden states cannot be read: the last one's go into the logits.

    Raises:
        StatesUnavailableError: There is no such layer below the last.
    """
    if not 0 <= layer < n_layer - 1:
        raise StatesUnavailableError(
            f"the hidden states of layer {layer} of {name} cannot be read; choose one from 0 to "
            f"{n_layer - 2}, or a value head that was trained for this model"
        )


def check_sizes(
    model: object, *, n_ctx: int, trained: int | None, attention_layers: int, n_layer: int
) -> None:
    """Refuse sizes that a model does not have.

    Args:
        model: What the message calls it.
        n_ctx: Tokens of a sequence that are asked for.
        trained: Tokens that the model was trained for; None if it does not say.
        attention_layers: Layers whose attention is asked for.
        n_layer: Layers of the model.

    Raises:
        ConfigurationError: It has less.
    """
    if trained is not None and n_ctx > trained:
        raise ConfigurationError(
            f"n_ctx={n_ctx} is longer than the {trained} tokens that {model} was trained for; "
            "lower n_ctx"
        )
    if attention_layers > n_layer:
        raise ConfigurationError(
            f"attention_layers={attention_layers} is more than the {n_layer} layers of {model}"
        )
