"""The part of an engine that all local models share: its queue and its cached sequences."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from specguard_chains.decoding.engine import Capabilities, Prompt
from specguard_chains.decoding.fair_lock import FairLock
from specguard_chains.decoding.grounding import GroundingSpec
from specguard_chains.decoding.local import (
    Cache,
    CachedSequence,
    LocalSession,
    Tokenizer,
    common_prefix,
)
from specguard_chains.errors import (
    AttentionUnavailableError,
    ConfigurationError,
    ContextOverflowError,
    EngineError,
)

MAX_IDLE = 2
"""Sequences that an engine keeps for reuse: one suffices unless a model is draft and target."""


class LocalEngine(Tokenizer, ABC):
    """An `Engine` whose model runs in this process.

    A subclass sets the attributes, implements `Tokenizer`, `encode` and `new_cache`, and frees its
    model in `close` after calling this class's.
    """

    name: str
    capabilities: Capabilities
    context_length: int

    def __init__(self) -> None:
        """Start with no cached sequence."""
        self._queue = FairLock()
        self._idle: list[CachedSequence] = []
        self._closed = False

    @abstractmethod
    def encode(self, prompt: Prompt) -> list[int]:
        """See `Engine.encode`."""

    @abstractmethod
    def new_cache(self) -> Cache:
        """Reserve KV memory for a sequence of `context_length` tokens and its candidates."""

    def open(
        self,
        prompt: Prompt,
        *,
        grounding: GroundingSpec | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> LocalSession:
        """See `Engine.open`."""
        if self._closed:
            raise EngineError(f"the engine {self.name} is closed; load the model again")
        if grounding is not None and not self.capabilities.attention:
            raise AttentionUnavailableError(
                f"{self.name} does not give attention, which grounding needs; load it with "
                "attention=True or set confidence_weight=1"
            )
        tokens = self.encode(prompt)
        if not tokens:
            raise ConfigurationError("the prompt is empty; give at least one message with text")
        if len(tokens) >= self.context_length:
            raise ContextOverflowError(
                f"the prompt has {len(tokens)} tokens and leaves no room in the context of "
                f"{self.context_length}; raise n_ctx or shorten the prompt"
            )
        sequence = self._take_sequence(tokens, grounding)
        sequence.cache.configure(grounding, cancelled)
        return LocalSession(
            sequence,
            tokens,
            self,
            context_length=self.context_length,
            cancelled=cancelled,
            on_close=self._give_back,
        )

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """See `Engine.exclusive`."""
        with self._queue:
            yield

    def clear(self) -> None:
        """Forget all cached sequences, so that the next request starts cold."""
        while self._idle:
            self._idle.pop().cache.close()

    def close(self) -> None:
        """See `Engine.close`."""
        self._closed = True
        self.clear()

    def _take_sequence(self, tokens: list[int], grounding: GroundingSpec | None) -> CachedSequence:
        """Return the idle sequence that shares the longest prefix, or a new one."""
        if not self._idle:
            return CachedSequence(self.new_cache(), grounding)
        sequence = max(
            self._idle,
            key=lambda idle: (
                common_prefix(idle.tokens, tokens) if idle.grounding == grounding else -1
            ),
        )
        self._idle.remove(sequence)
        if sequence.grounding != grounding:  # its context was read in another form
            sequence.grounding, sequence.tokens, sequence.prompt_logits = grounding, [], None
        return sequence

    def _give_back(self, sequence: CachedSequence) -> None:
        if self._closed:
            sequence.cache.close()
            return
        self._idle.append(sequence)
        while len(self._idle) > MAX_IDLE:
            self._idle.pop(0).cache.close()
