"""A reward model as a function: tokens in, the numbers at the last of them out."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from specguard_adapters.huggingface.checks import HALF_TOLERANCE, TOLERANCE
from specguard_adapters.huggingface.model import NotEnoughMemoryError
from specguard_adapters.reward.heads import head_of
from specguard_adapters.reward.kinds import Head
from specguard_adapters.reward.memory import Memory
from specguard_chains.errors import ConfigurationError, EngineError

CHECKED = 16
"""Tokens that the check at load time reads."""


class Network:
    """Remembers keys and values of the latest texts, so that only what is new is computed."""

    def __init__(
        self, model: PreTrainedModel, head: Head, picked: Sequence[int], name: str, *, reuse: bool
    ) -> None:
        """Use a model.

        Args:
            model: It, ready to compute.
            head: What gives the numbers.
            picked: Indices of the numbers that are wanted; none for all.
            name: For messages.
            reuse: Remember; models with code of their own do not.

        Raises:
            ConfigurationError: The model lacks the head, or does not take up where it has stopped.
        """
        self._model = model
        self._picked = list(picked)
        self._name = name
        self._own = head is Head.OWN
        self._reuse = reuse and not self._own
        plain = head in (Head.OWN, Head.LANGUAGE)
        self._head = None if plain else head_of(model, head)
        self._body = model if plain else model.base_model
        known = inspect.signature(self._body.forward).parameters
        self._cache_name = "cache" if "cache" in known else "past_key_values"
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
        self._memory: Memory[DynamicCache] = Memory(_beginning)
        if self._reuse:
            self._check()

    def __call__(self, tokens: Sequence[int]) -> list[float]:
        """Return the numbers at the last token.

        Raises:
            EngineError: The memory does not suffice, or the model fails.
        """
        try:
            return self._numbers(tokens)
        except NotEnoughMemoryError:
            if not self._memory:
                raise
            self.clear()  # what is remembered of other texts may be what is missing
        return self._numbers(tokens)

    def clear(self) -> None:
        """Forget what was computed."""
        self._memory.clear()

    def _numbers(self, tokens: Sequence[int]) -> list[float]:
        kept, cache = self._remembered(tokens)
        with torch.inference_mode(), self._translated(len(tokens)):
            state = self._state(tokens[kept:], cache)
            numbers = state if self._head is None else self._head(state)
            picked = numbers[self._picked] if self._picked else numbers
            values: list[float] = picked.tolist()
        if cache is not None:
            self._memory.put(tokens, cache)
        return values

    @contextmanager
    def _translated(self, length: int) -> Iterator[None]:
        """Raise this package's errors in place of the library's."""
        try:
            yield
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError) or "can't allocate" in str(error):
                raise NotEnoughMemoryError(
                    f"the memory does not suffice for {self._name} and {length} tokens; load "
                    "it with a smaller dtype, a smaller n_ctx or reuse=False"
                ) from error
            first = next(iter(str(error).splitlines()), "")
            raise EngineError(f"{self._name} failed: {type(error).__name__}: {first}") from error

    def _remembered(self, tokens: Sequence[int]) -> tuple[int, DynamicCache | None]:
        """Return how many first tokens need not be computed, and a cache that holds just these.

        None in its place if nothing is to be remembered.
        """
        if not self._reuse:
            return 0, None
        kept, cache = self._memory.take(tokens)
        # Without a config all is kept, also what is behind a layer's window.
        return kept, DynamicCache() if cache is None else cache

    def _state(self, tokens: Sequence[int], cache: Any) -> torch.Tensor:
        """Return what the model makes of the last token: what the head reads, or the numbers."""
        ids = torch.as_tensor(tokens, dtype=torch.long, device=self._model.device)[None]
        if self._own:
            output = self._model(input_ids=ids)
            numbers = output.logits if hasattr(output, "logits") else output[0]
            return numbers[0, -1].float()
        reused = {} if cache is None else {self._cache_name: cache}
        output = self._body(input_ids=ids, use_cache=cache is not None, **reused, **self._last_only)
        rows = output.logits if self._head is None else output.last_hidden_state
        return rows[0, -1].float()

    def _check(self) -> None:
        """Refuse a model that does not take up where it has stopped.

        Raises:
            ConfigurationError: It does not: it reads in both directions, or keeps its past in
                another form.
        """
        n_vocab = self._model.config.get_text_config().vocab_size
        tokens = [int(t) for t in np.linspace(0, n_vocab - 1, CHECKED)]
        try:
            with torch.inference_mode(), self._translated(CHECKED):
                whole, cache = self._state(tokens, None), DynamicCache()
                self._state(tokens[:-1], cache)
                cache.crop(-(CHECKED // 2))
                parts = self._state(tokens[CHECKED - 1 - CHECKED // 2 :], cache)
                difference = float((parts - whole).square().mean().sqrt() / whole.std())
        except NotEnoughMemoryError:
            raise
        except EngineError as error:
            problem = str(error)
        else:
            exact = self._model.dtype == torch.float32
            if difference <= (TOLERANCE if exact else HALF_TOLERANCE):
                return
            problem = f"its states change by {difference:.2g} of their spread"
        raise ConfigurationError(
            f"{self._name} cannot take up where it has stopped ({problem}); load it with "
            "reuse=False"
        )


def _beginning(cache: DynamicCache, length: int, wanted: int) -> DynamicCache:
    """Return a cache of the first `wanted` of `length` tokens, which shares the tensors.

    Nobody writes into these: layers of this kind replace them when tokens are added or removed.
    """
    begun = copy(cache)
    begun.layers = [copy(layer) for layer in cache.layers]
    begun.crop(wanted - length)
    return begun
