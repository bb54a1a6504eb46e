"""KV memory as cells: one row of keys and values a layer, to which every pass appends.

Tokens of several candidates, or of a tree, lie in it one after the other; who sees whom is the
mask's business. Once a path is kept, its cells move together and close the holes.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from specguard_chains.errors import EngineError

FIRST_CELLS = 256
"""Cells that a layer starts with."""


class CellLayer(CacheLayerMixin):  # type: ignore[misc]
    """A layer's cells: buffers that double as they fill."""

    is_sliding = False  # a window's cells are all kept, so that a rollback finds them

    def __init__(self, cells: Cells) -> None:
        """Reserve nothing yet."""
        super().__init__()
        self._cells = cells

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Start with empty buffers of the right kind."""
        self.device = key_states.device
        self.keys, self.values = (self._room_for(s, 0) for s in (key_states, value_states))
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Put a pass's keys and values behind the used cells; return all."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, end = self._cells.used, self._cells.used + key_states.shape[-2]
        if end > self.keys.shape[-2]:
            self.keys, self.values = (self._grown(b, end) for b in (self.keys, self.values))
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        return self.keys[:, :, :end], self.values[:, :, :end]

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy cells to other places; sources and targets may overlap."""
        if self.is_initialized:
            for buffer in (self.keys, self.values):
                places = targets.to(buffer.device)
                buffer[:, :, places] = buffer[:, :, sources.to(buffer.device)]

    def copy(self, other: CellLayer, cells: int) -> None:
        """Begin with another layer's first cells."""
        if other.is_initialized:
            self.lazy_initialization(other.keys, other.values)
            self.keys, self.values = (self._room_for(b, cells) for b in (self.keys, self.values))
            self.keys[:, :, :cells] = other.keys[:, :, :cells]
            self.values[:, :, :cells] = other.values[:, :, :cells]

    def export(self, cells: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of the first cells.

        Raises:
            EngineError: The layer has none of its own.
        """
        if not self.is_initialized:
            raise EngineError("a layer has no keys and values of its own")
        return self.keys[:, :, :cells], self.values[:, :, :cells]

    def restore(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Begin with keys and values that were exported."""
        self.lazy_initialization(keys, values)
        cells = keys.shape[-2]
        self.keys, self.values = (self._room_for(b, cells) for b in (keys, values))
        self.keys[:, :, :cells], self.values[:, :, :cells] = keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many cells there will be and the number of the first."""
        return self._cells.used + self._cells.coming, 0

    def get_seq_length(self) -> int:
        """Return how many cells are used."""
        return self._cells.used

    def get_max_length(self) -> int:
        """Return that there is no limit here."""
        return -1

    def get_max_cache_shape(self) -> int:
        """Return the same, under the name that it had before transformers 5.24."""
        return -1

    def _room_for(self, states: torch.Tensor, cells: int) -> torch.Tensor:
        room = min(max(cells, FIRST_CELLS), max(self._cells.limit, cells))
        return states.new_empty((*states.shape[:2], room, states.shape[-1]))

    def _grown(self, buffer: torch.Tensor, cells: int) -> torch.Tensor:
        grown = self._room_for(buffer, max(cells, 2 * buffer.shape[-2]))
        used = self._cells.used
        grown[:, :, :used] = buffer[:, :, :used]
        return grown


class Cells(Cache):  # type: ignore[misc]
    """The cells of all layers, as the cache that a model is given."""

    def __init__(self, layers: int, limit: int) -> None:
        """Start empty; `limit` is the most cells that will be used."""
        self.used = 0
        """Cells whose contents count; passes write behind them."""
        self.coming = 0
        """Tokens of the pass that is going on."""
        self.limit = limit
        super().__init__(layers=[CellLayer(self) for _ in range(layers)])

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy cells to other places in all layers."""
        for layer in self.layers:
            layer.move(sources, targets)

    def copy(self, other: Cells, cells: int) -> None:
        """Begin with the first cells of another cache."""
        for own, layer in zip(self.layers, other.layers, strict=True):
            own.copy(layer, cells)
