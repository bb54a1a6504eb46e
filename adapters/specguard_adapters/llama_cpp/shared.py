"""One context for all sessions of an engine, and the passes in which their tokens are merged."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import cast

import numpy as np

from specguard_adapters.llama_cpp.cache import ABORTABLE_TOKENS, LlamaCppCache, never
from specguard_adapters.llama_cpp.context import Context
from specguard_adapters.llama_cpp.hearing import SplitListener
from specguard_chains.decoding.arrays import FloatArray
from specguard_chains.decoding.batcher import Outcome, Part
from specguard_chains.errors import ContextOverflowError, DecodingCancelled


class SharedContext:
    """A context whose sequences are handed out to sessions in slots of equal width."""

    def __init__(
        self, context: Context, *, slots: int, width: int, evict: Callable[[], bool]
    ) -> None:
        """Start with all slots free; `evict` makes room in the cells, or says that it cannot."""
        self._context = context
        self._evict = evict
        self._lock = threading.Lock()
        self._slots = slots
        self._free = [slot * width for slot in reversed(range(slots))]
        self._closed = False

    @property
    def context(self) -> Context:
        """What computes."""
        return self._context

    def take(self) -> int | None:
        """Return the first sequence of a free slot, None if there is none."""
        with self._lock:
            return self._free.pop() if self._free else None

    def give_back(self, first: int) -> None:
        """Take back a slot, whose sequences are empty."""
        with self._lock:
            self._free.append(first)
            self._close_if_unused()

    def close(self) -> None:
        """Free the context as soon as nobody has a slot."""
        with self._lock:
            self._closed = True
            self._close_if_unused()

    def compute(self, parts: Sequence[Part]) -> list[Outcome]:
        """Compute parts in as few decodes as they fit into; see `LocalEngine.compute`."""
        outcomes: dict[int, Outcome] = {}
        for group in self._groups(parts):
            results = self._attempt([parts[number] for number in group])
            outcomes.update(zip(group, results, strict=True))
        return [outcomes[number] for number in range(len(parts))]

    def _groups(self, parts: Sequence[Part]) -> Iterator[list[int]]:
        """Yield the numbers of the parts of each decode, in order; large parts stay alone."""
        group: list[int] = []
        tokens = outputs = 0
        states: set[int] = set()  # the layer whose hidden states the decode gives
        for number, part in enumerate(parts):
            n, rows = len(part.tokens), len(part.tokens) if part.all_logits else 1
            cache = _cache(part)
            if cache.context is not self._context or not self._fits(n, rows):
                yield [number]
                continue
            layers = cache.state_layers(context=part.context)
            if len(states | layers) > 1 or not self._fits(tokens + n, outputs + rows):
                yield group
                group, tokens, outputs, states = [], 0, 0, set()
            group.append(number)
            tokens, outputs, states = tokens + n, outputs + rows, states | layers
        if group:
            yield group

    def _fits(self, tokens: int, outputs: int) -> bool:
        return tokens <= self._context.n_batch and outputs <= self._context.n_outputs

    def _attempt(self, group: Sequence[Part]) -> list[Outcome]:
        """Compute some parts in one decode; if it fails, each in one of its own."""
        try:
            return self._alone(group[0]) if len(group) == 1 else self._merged(group)
        except BaseException as error:
            for part in group:
                _cache(part).undo(part.positions, part.branches)
            ours = _cache(group[0]).context is self._context  # else it stays as full as it is
            if ours and isinstance(error, ContextOverflowError) and self._evict():
                return self._attempt(group)
            if len(group) == 1 or isinstance(error, DecodingCancelled):  # then all of them are
                return [error] * len(group)
        return [outcome for part in group for outcome in self._attempt([part])]

    def _alone(self, part: Part) -> list[Outcome]:
        outcome = part.alone()
        if isinstance(outcome, BaseException):
            raise outcome
        return [replace(outcome, logits=outcome.logits.copy())]  # the next pass may come at once

    def _merged(self, group: Sequence[Part]) -> list[Outcome]:
        counts = [len(part.tokens) for part in group]
        hearings = [_cache(part).hearing(part.positions, context=part.context) for part in group]
        layer = max((h.state_layer for h in hearings if h.state_layer is not None), default=None)
        tap = self._context.tap
        if tap is not None:
            split = SplitListener(hearings, counts, self._context.cells)
            tap.listen(split if split.heard else None, split.layers, layer)
        wanted = [
            [1] * n if part.all_logits else [*[0] * (n - 1), 1]
            for part, n in zip(group, counts, strict=True)
        ]
        logits = self._context.decode(
            list(chain.from_iterable(part.tokens for part in group)),
            list(chain.from_iterable(part.positions for part in group)),
            list(chain.from_iterable(_cache(part).sequences(part.branches) for part in group)),
            all_logits=False,
            wanted=list(chain.from_iterable(wanted)),
            cancelled=_all_cancelled(group),
        )
        states = np.concatenate(tap.states) if tap is not None and tap.states else None
        rows = np.split(logits, np.cumsum([sum(each) for each in wanted])[:-1])
        ends = np.cumsum(counts)
        outcomes: list[Outcome] = []
        for part, hearing, own, end in zip(group, hearings, rows, ends, strict=True):
            read: list[FloatArray] = []
            if hearing.state_layer is not None:
                assert states is not None
                read = [states[end - len(part.tokens) : end]]
            outcomes.append(
                _cache(part).finish(
                    part.positions,
                    part.branches,
                    own.copy(),
                    hearing.cells,
                    read,
                    context=part.context,
                )
            )
        return outcomes

    def _close_if_unused(self) -> None:
        if self._closed and len(self._free) == self._slots:
            self._context.close()


def _cache(part: Part) -> LlamaCppCache:
    return cast("LlamaCppCache", part.cache)


def _all_cancelled(group: Sequence[Part]) -> Callable[[], bool] | None:
    """Return what aborts a pass: that nobody wants it any more. A short one is not asked about."""
    if max(len(part.tokens) for part in group) <= ABORTABLE_TOKENS:
        return None
    asked = [_cache(part).cancelled or never for part in group]
    return lambda: all(cancelled() for cancelled in asked)
