"""Sessions of an engine that several requests use at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from specguard_chains.decoding.arrays import FloatArray
from specguard_chains.decoding.batcher import Batcher, Part
from specguard_chains.decoding.cache import Rows
from specguard_chains.decoding.local_trees import TreeSession
from specguard_chains.decoding.prefixes import Prefixes

T = TypeVar("T")

CHUNK, SHARED_CHUNK = 512, 64
"""Tokens of a prompt that are read in one pass: while they are, the others write one token each."""


class SharedSession(TreeSession):
    """A session that works on its request's thread; only its forward passes go elsewhere."""

    def __init__(self, *args: Any, batcher: Batcher, prefixes: Prefixes, **kwargs: Any) -> None:
        """See `LocalSession`. The sequence is empty, and known to `prefixes`."""
        super().__init__(*args, **kwargs)
        self._batcher = batcher
        self._prefixes = prefixes
        self._prompt_begun = False

    def _run(self, work: Callable[[], T]) -> T:
        with self._batcher.computing():
            return work()

    def _away(self) -> AbstractContextManager[None]:
        return self._batcher.away()

    def _pass(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        branches: Sequence[Sequence[int]],
        *,
        context: bool,
    ) -> Rows:
        part = Part(self._cache, tokens, positions, branches, context, not context)
        return self._batcher.forward(part, self._check)

    def _catch_up(self) -> FloatArray:
        """See `LocalSession._catch_up`. A prompt's beginning may come from other sessions."""
        if self._prompt_begun:
            return super()._catch_up()
        self._check()
        prompt = self._tokens[: self._prompt_length]
        self._prefixes.begin(self._sequence, prompt, self._check, self._away)
        try:
            self._prompt_begun = True
            self._cached = self._reused = len(self._sequence.tokens)
            latest = self._sequence.prompt_logits
            if latest is not None and latest[0] == self._cached == len(self._tokens):
                return latest[1]
            self._begin_prompt()
            self._prefixes.grow(self._sequence, prompt[: self._cached])
            return super()._catch_up()
        finally:
            self._prefixes.finish(self._sequence)

    def _read_on(self) -> FloatArray:
        while True:
            end = self._cached + (SHARED_CHUNK if self._batcher.shared else CHUNK)
            logits = self._read_to(min(end, len(self._tokens)))
            self._prefixes.grow(
                self._sequence, self._tokens[: min(self._cached, self._prompt_length)]
            )
            if self._cached == len(self._tokens):
                return logits

    def _cut_cache(self, length: int) -> None:
        self._prefixes.shrink(self._sequence, length)
        super()._cut_cache(length)
