"""KV memory of one sequence and its candidates in llama.cpp, with the grounding of its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from specguard_adapters.llama_cpp.context import Context, Piece
from specguard_adapters.llama_cpp.grounded import GroundedCells
from specguard_adapters.llama_cpp.hearing import Hearing, Listener
from specguard_chains.decoding.arrays import FloatArray, IntArray
from specguard_chains.decoding.cache import Rows, State, check_branches, rollout_for
from specguard_chains.decoding.grounding import GroundingSpec

ABORTABLE_TOKENS = 16
"""Longer runs can be cancelled while they are computed; shorter ones only before and after."""


class LlamaCppCache:
    """A `Cache` over a llama.cpp context: branch i is the i-th of its sequences there.

    A sliding window's cells may be overwritten once they are out of sight of the one sequence that
    they belong to, even where a rollback would bring them back into sight; and then its layers
    keep a token in another cell than the layers without a window do, which grounding must not
    see. In such models a branch is therefore two sequences that always hold the same.
    """

    def __init__(
        self,
        context: Context,
        *,
        context_length: int,
        max_candidates: int,
        attention_layers: int,
        window: int,
        first: int = 0,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        """Start empty.

        Args:
            context: What computes.
            context_length: The most tokens of a branch.
            max_candidates: The most branches.
            attention_layers: Most last layers whose attention can be read.
            window: Tokens that layers with a sliding window see; 0 if there are none.
            first: Number of the first of its sequences, of which there are `sequences_of`.
            on_close: What to do in place of closing the context, once its sequences are empty.
        """
        self.context = context
        self._first = first
        self._on_close = on_close
        self._context_length = context_length
        self._max_candidates = max_candidates
        self._attention_layers = attention_layers
        self._window = window
        self._twins = _twins(window)
        self.cancelled: Callable[[], bool] | None = None
        self._branches: list[int] = []  # forked from branch 0
        self._committed = 0  # tokens of branch 0 that are context
        self._grounded: GroundedCells | None = None
        self._state_layer: int | None = None

    def configure(
        self,
        grounding: GroundingSpec | None,
        cancelled: Callable[[], bool] | None,
        state_layer: int | None = None,
    ) -> None:
        """See `Cache.configure`."""
        self._state_layer = state_layer
        self.cancelled = cancelled
        latest = None if self._grounded is None else self._grounded.rollout
        rollout = rollout_for(
            grounding,
            latest,
            attention_layers=self._attention_layers,
            slots=self.context.cells,
        )
        if rollout is None:
            self._grounded = None
        elif rollout is not latest:
            self._grounded = GroundedCells(rollout, self._max_candidates, self._context_length)

    @property
    def shareable(self) -> bool:
        """See `Cache.shareable`. A context of its own is shared with nobody."""
        return self._on_close is not None

    def share(self, other: LlamaCppCache, length: int) -> bool:
        """See `Cache.share`. Copies no keys and values."""
        if other.context is not self.context:
            return False
        self.context.copy(other._first, self._branch(0), 0, length)
        self._committed = length
        if self._grounded is not None:
            assert other._grounded is not None
            self._grounded.take_over(other._grounded, length)
        return True

    def fork(self, n: int, length: int) -> None:
        """See `Cache.fork`."""
        check_branches(n, self._max_candidates)
        self._drop_branches()
        for branch in range(1, n):
            self._branches.append(branch)
            self.context.copy(self._first, self._branch(branch), 0, length)

    def forward(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        branches: Sequence[Sequence[int]],
        *,
        context: bool,
        all_logits: bool,
    ) -> Rows:
        """See `Cache.forward`. Context has no grounding; tokens of a step have one each."""
        limit = self.context.n_outputs if all_logits else self.context.n_batch
        parts = [slice(i, i + limit) for i in range(0, max(len(tokens), 1), limit)]
        cancelled = (self.cancelled or never) if len(tokens) > ABORTABLE_TOKENS else None
        sequences = self.sequences(branches)
        tap = self.context.tap
        logits, cells, states = [], [], []
        for part in parts:
            hearing = self.hearing(positions[part], context=context)
            if tap is not None:
                tap.listen(hearing.listener, hearing.layers, hearing.state_layer)
            rows = self.context.decode(
                tokens[part],
                positions[part],
                sequences[part],
                all_logits=all_logits,
                cancelled=cancelled,
            )
            logits.append(rows.copy() if all_logits and part is not parts[-1] else rows)
            cells += hearing.cells
            states += tap.states if tap is not None and hearing.state_layer is not None else []
        whole = np.concatenate(logits) if all_logits and parts[1:] else logits[-1]
        return self.finish(positions, branches, whole, cells, states, context=context)

    def sequences(self, branches: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """Return the sequences of each token in the context."""
        if not self._first and self._twins == 1:
            return branches
        return [[s for branch in equal for s in self._branch(branch)] for equal in branches]

    def hearing(self, positions: Sequence[int], *, context: bool) -> Hearing:
        """Return what is to be read of the coming decode of tokens at these positions."""
        state_layer = None if context else self._state_layer
        if self._grounded is None:
            return Hearing(None, range(0), state_layer)
        n_layer, rollout = self.context.n_layer, self._grounded.rollout
        # Nothing looks at the context's values in the top layer.
        layers = range(n_layer - rollout.spec.layers, n_layer - context)
        return Hearing(Listener(rollout, positions, context), layers, state_layer)

    def state_layers(self, *, context: bool) -> frozenset[int]:
        """Return the layer whose hidden states are read, if one is."""
        layer = None if context else self._state_layer
        return frozenset() if layer is None else frozenset({layer})

    def finish(
        self,
        positions: Sequence[int],
        branches: Sequence[Sequence[int]],
        logits: FloatArray,
        cells: Sequence[IntArray],
        states: Sequence[FloatArray],
        *,
        context: bool,
    ) -> Rows:
        """Take note of tokens that were computed; return what the decodes gave."""
        if context:
            self._committed = positions[-1] + 1
        grounding = passages = None
        if self._grounded is not None and context:
            self._grounded.note_context(positions, np.concatenate(cells))
        elif self._grounded is not None:
            placed = np.concatenate(cells)
            grounding, passages = self._grounded.note_step(positions, branches, placed)
        return Rows(logits, grounding, passages, np.concatenate(states) if states else None)

    def undo(self, positions: Sequence[int], branches: Sequence[Sequence[int]]) -> None:
        """Drop what a decode that failed has left of these tokens."""
        for branch in {branch for equal in branches for branch in equal}:
            places = zip(positions, branches, strict=True)
            start = min(position for position, equal in places if branch in equal)
            self.context.cut(self._branch(branch), start)

    def cut(self, branch: int, length: int) -> None:
        """See `Cache.cut`."""
        self.context.cut(self._branch(branch), length)

    def keep(self, branch: int, length: int) -> None:
        """See `Cache.keep`."""
        if branch:
            self.context.cut(self._branch(0), self._committed)
            source = self._branch(branch)[0]
            self.context.copy(source, self._branch(0), self._committed, length)
        self._drop_branches()
        self.context.cut(self._branch(0), length)
        if self._grounded is not None and length > self._committed:
            self._grounded.commit(branch, self._committed, length)
        self._committed = length

    def export(self, length: int) -> State:
        """See `Cache.export`."""
        state: dict[str, npt.NDArray[Any]] = {}
        parts = self._parts(length)
        spare = self._branch(1)[0]
        for part in parts:
            self.context.copy(self._first, [spare], part.start, part.stop)
            try:
                state[f"cells{part.start}"] = self.context.save(spare)
            finally:
                self.context.cut([spare], 0)
        return state if self._grounded is None else state | self._grounded.export(parts)

    @property
    def restorable(self) -> bool:
        """See `Cache.restorable`.

        llama.cpp does not tell which cells it takes, which grounding must know. In a context that
        is empty these are the first ones; so, among parallel requests, only the first one can.
        """
        return self._grounded is None or self.context.is_empty(but=self._branch(0))

    def restore(self, state: State, length: int) -> bool:
        """See `Cache.restore`."""
        pieces = [
            Piece(part.start, part.stop, state[f"cells{part.start}"])
            for part in self._parts(length)
        ]
        from_first = self._grounded is not None
        spare = self._branch(1)[0]
        if not self.context.load(pieces, self._branch(0), spare, from_first=from_first):
            return False
        if self._grounded is not None:
            self._grounded.restore(state, length)
        self._committed = length
        return True

    def _parts(self, length: int) -> list[range]:
        """Return positions in parts that lie in one window: what is out of sight is not saved."""
        size = self._window or length
        return [range(start, min(start + size, length)) for start in range(0, length, size)]

    def close(self) -> None:
        """See `Cache.close`."""
        if self._on_close is None:
            self.context.close()
            return
        self.keep(0, 0)
        self._on_close()

    def _branch(self, branch: int) -> range:
        """Return the sequences of a branch."""
        start = self._first + branch * self._twins
        return range(start, start + self._twins)

    def _drop_branches(self) -> None:
        while self._branches:
            self.context.cut(self._branch(self._branches[-1]), 0)
            self._branches.pop()


def sequences_of(max_candidates: int, *, window: int, exports: bool) -> int:
    """Return how many sequences a cache takes; `export` needs one beside those of branch 0."""
    twins = _twins(window)
    return max(max_candidates * twins, twins + exports)


def _twins(window: int) -> int:
    """Return how many sequences a branch is."""
    return 2 if window else 1


def never() -> bool:
    """Cancel only when Python exits."""
    return False
