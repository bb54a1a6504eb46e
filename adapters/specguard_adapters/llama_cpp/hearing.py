"""Who takes in what of a decode beside its logits: one session, or several that are merged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from specguard_chains.decoding.arrays import FloatArray, IntArray
from specguard_chains.decoding.grounding import Rollout


@dataclass(frozen=True, slots=True)
class Hearing:
    """What a session reads of one decode beside its logits."""

    listener: Listener | None
    layers: range
    """Whose attention it takes in."""
    state_layer: int | None

    @property
    def cells(self) -> list[IntArray]:
        """Where its tokens were put, if it has a listener; in pieces."""
        return self.listener.cells if self.listener else []


class Listener:
    """Feeds a rollout with the attention of one decode, and collects the cells of its tokens."""

    def __init__(self, rollout: Rollout, positions: Sequence[int], context: bool) -> None:
        """Expect tokens at these positions."""
        self._rollout = rollout
        self._positions = iter(positions)
        self._context = context
        self.cells: list[IntArray] = []
        self.absorb = rollout.absorb

    def begin(self, cells: IntArray) -> None:
        """See `Sink.begin`."""
        self.cells.append(cells)
        positions = [next(self._positions) for _ in cells]
        self._rollout.begin(cells, context=self._context, positions=positions)


class SplitListener:
    """A `Sink` that hands the attention of a merged pass on to the sessions whose rows it is."""

    def __init__(self, hearings: Sequence[Hearing], counts: Sequence[int], cells: int) -> None:
        """Expect so many tokens of each session, one session after the other."""
        self._hearings = hearings
        self._coming = np.repeat(np.arange(len(counts)), counts)  # whose the next tokens are
        self._owners = np.zeros(cells, dtype=np.intp)  # whose token lies in a cell
        layers = [hearing.layers for hearing in hearings if hearing.listener is not None]
        self.heard = bool(layers)
        """Whether anybody must know of the cells, even of a pass in which no layer is taken in."""
        self.layers = range(0)
        """All layers that somebody takes in."""
        if layers:
            self.layers = range(min(r.start for r in layers), max(r.stop for r in layers))

    def begin(self, cells: IntArray) -> None:
        """See `Sink.begin`."""
        owners, self._coming = self._coming[: len(cells)], self._coming[len(cells) :]
        self._owners[cells] = owners
        for hearing, rows in self._runs(owners):
            if hearing.listener is not None:
                hearing.listener.begin(cells[rows])

    def absorb(self, layer: int, attention: FloatArray, cells: IntArray) -> None:
        """See `Sink.absorb`."""
        number = self.layers.start + layer
        for hearing, rows in self._runs(self._owners[cells]):
            if hearing.listener is not None and number in hearing.layers:
                own = number - hearing.layers.start
                hearing.listener.absorb(own, attention[:, rows], cells[rows])

    def _runs(self, owners: IntArray) -> Iterator[tuple[Hearing, slice]]:
        """Yield the sessions whose tokens these are, and which of them."""
        starts = [0, *(np.flatnonzero(np.diff(owners)) + 1).tolist(), len(owners)]
        for start, end in pairwise(starts):
            yield self._hearings[owners[start]], slice(start, end)
