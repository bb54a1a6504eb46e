"""Attention and hidden states out of a running llama.cpp, through ggml's eval callback.

Facts about llama.cpp that this rests on, and that `check_attention` verifies at load time:

- Without flash attention, layer l has a node `kq_soft_max-<l>`: F32, contiguous, shape
  (1, heads, rows, columns). Its columns are KV cells, not positions.
- What leaves layer l is the node `l_out-<l>`: F32, contiguous, shape (rows, width).
- The cells that a batch is written to are an input of the graph, `attn_inp_k_idxs`: the second
  source of the node that writes `cache_k_l<l>`.
- The callback is asked for every node in order (`ask`), and called again with the data of the
  nodes that it wants. An exception in it is swallowed and the results are garbage.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import llama_cpp
import numpy as np

from specguard_adapters.llama_cpp.ggml import F32, I64, Layout, name_of, nbytes, read
from specguard_chains.decoding.arrays import FloatArray, IntArray
from specguard_chains.errors import EngineError

BLOCK_FLOATS = 1 << 18
"""Attention that is read at once, in numbers: what a processor's cache holds."""


class Sink(Protocol):
    """Takes in attention while a batch is computed, piece by piece in the order of the graph."""

    def begin(self, cells: IntArray) -> None:
        """Take note of the cells of the tokens that come next."""

    def absorb(self, layer: int, attention: FloatArray, cells: IntArray) -> None:
        """Take in some rows of a layer, shape (heads, rows, columns)."""


class AttentionTap:
    """Reads attention and hidden states of some layers while they are computed."""

    def __init__(self) -> None:
        """Start without a listener."""
        self._layout = Layout()
        self._buffer = np.empty(BLOCK_FLOATS, dtype=np.float32)
        self._job = cache(_Job.of)  # called for every node
        self._error: BaseException | None = None
        self.states: list[FloatArray] = []
        """Hidden states of the latest decode, in pieces of shape (rows, width)."""
        self.listen(None)
        self.callback = llama_cpp.ggml_backend_sched_eval_callback(self._on_node)
        """For llama.cpp, which keeps a bare pointer to it."""

    def listen(
        self, sink: Sink | None, layers: range = range(0), state_layer: int | None = None
    ) -> None:
        """Hand the attention of the coming decode to a sink; None reads none.

        Args:
            sink: Who takes the attention in; counts layers from the first that is read.
            layers: The model's layers whose attention to read.
            state_layer: The layer whose hidden states to keep in `states`.
        """
        self._sink = sink
        self._layers = layers
        self._state_layer = state_layer
        self.states = []
        self._cells = np.zeros(0, dtype=np.intp)
        self._indices = 0  # address of the tensor that the cells came from
        self._written = -1  # layer whose keys were written last; it falls with a new ubatch

    def raise_error(self) -> None:
        """Raise what went wrong while the latest decode was read, if anything did."""
        error, self._error = self._error, None
        if isinstance(error, Exception):
            raise EngineError(f"reading the attention failed: {error}") from error
        if error is not None:
            raise error

    def _on_node(self, tensor: int, ask: bool, _: int | None) -> bool:
        """Answer llama.cpp: whether a node's data is wanted (ask), whether to go on (not ask)."""
        if self._sink is None and self._state_layer is None:
            return not ask
        try:
            job = self._job(name_of(tensor))
            if job is None:
                return False
            if job.node == b"l_out-":
                if not ask:
                    self.states.append(self._read_states(tensor))
                return job.layer == self._state_layer
            if self._sink is None:
                return False
            if job.node == b"cache_k_l":
                self._note_cells(tensor, job.layer)
                return False
            if ask:
                return job.layer in self._layers
            self._read(tensor, job.layer - self._layers.start, self._sink)
        except BaseException as error:  # llama.cpp would swallow it
            self._error, self._sink, self._state_layer = error, None, None
            return not ask
        return True

    def _read_states(self, tensor: int) -> FloatArray:
        """Return hidden states, shape (rows, width)."""
        width, rows, *rest = self._layout.shape(tensor)
        kind = self._layout.type(tensor)
        if kind != F32 or rest != [1, 1] or nbytes(tensor) != 4 * width * rows:
            raise EngineError(f"hidden states have the type {kind} and the shape {rows, width}")
        states = np.empty((rows, width), dtype=np.float32)
        read(tensor, states.ctypes.data, 0, states.nbytes)
        return states

    def _note_cells(self, tensor: int, layer: int) -> None:
        """Learn which cells the tokens of the ubatch are written to."""
        indices = self._layout.second_source(tensor)
        if not indices or b"k_idxs" not in name_of(indices):
            return  # a view of the same name
        new = layer <= self._written or self._written < 0
        self._written = layer
        if indices == self._indices and not new:
            return
        cells = self._read_cells(indices)
        if new:
            self._cells, self._indices = cells, indices
            assert self._sink is not None
            self._sink.begin(cells)
        elif not np.array_equal(cells, self._cells):
            raise EngineError("layers keep the same token in different cells")

    def _read_cells(self, indices: int) -> IntArray:
        kind = self._layout.type(indices)
        if kind != I64:
            raise EngineError(f"cells have the type {kind} instead of {I64}")
        cells = np.empty(nbytes(indices) // 8, dtype=np.int64)
        read(indices, cells.ctypes.data, 0, cells.nbytes)
        return cells.astype(np.intp, copy=False)

    def _read(self, tensor: int, layer: int, sink: Sink) -> None:
        """Hand a layer's attention on, in blocks of rows."""
        columns, rows, heads, _ = self._shape(tensor)
        block = max(1, len(self._buffer) // (heads * columns))
        if heads * columns > len(self._buffer):
            self._buffer = np.empty(heads * columns, dtype=np.float32)
        for start in range(0, rows, block):
            n = min(block, rows - start)
            attention = self._buffer[: heads * n * columns].reshape(heads, n, columns)
            if n == rows:
                read(tensor, attention.ctypes.data, 0, attention.nbytes)
            else:
                for head, part in enumerate(attention):
                    offset = 4 * columns * (head * rows + start)
                    read(tensor, part.ctypes.data, offset, part.nbytes)
            sink.absorb(layer, attention, self._cells[start : start + n])

    def _shape(self, tensor: int) -> tuple[int, int, int, int]:
        """Return (columns, rows, heads, 1) of an attention node that is as expected."""
        columns, rows, heads, streams = self._layout.shape(tensor)
        kind = self._layout.type(tensor)
        if kind != F32 or streams != 1 or nbytes(tensor) != 4 * columns * rows * heads:
            raise EngineError(
                f"attention has the type {kind} and the shape {(streams, heads, rows, columns)}"
            )
        if rows != len(self._cells):
            raise EngineError(f"attention has {rows} rows for {len(self._cells)} tokens")
        return columns, rows, heads, streams


@dataclass(frozen=True, slots=True)
class _Job:
    """What a node of the graph means to the tap."""

    layer: int
    node: bytes

    @classmethod
    def of(cls, name: bytes) -> _Job | None:
        """Return the job of the node with this name, None if there is nothing to do."""
        match = re.match(rb"(kq_soft_max-|cache_k_l|l_out-)(\d+)\b", name)
        return match and cls(int(match[2]), match[1])
