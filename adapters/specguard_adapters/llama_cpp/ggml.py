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

import ctypes
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import llama_cpp
import numpy as np
import numpy.typing as npt

from specguard_chains.decoding.arrays import FloatArray, IntArray
from specguard_chains.errors import EngineError

F32, I64 = llama_cpp.GGML_TYPE_F32, llama_cpp.GGML_TYPE_I64
BLOCK_FLOATS = 1 << 18
"""Attention that is read at once, in numbers: what a processor's cache holds."""


class _InitParams(ctypes.Structure):
    _fields_ = (
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    )


def _load_library() -> ctypes.CDLL:
    """Return ggml's base library, the one that llama_cpp itself has loaded."""
    folder = Path(llama_cpp.llama_cpp._base_path)
    names = ("libggml-base.so", "libggml-base.dylib", "ggml-base.dll", "libggml-base.dll")
    for name in names:
        if (folder / name).exists():
            return ctypes.CDLL(str(folder / name))
    raise EngineError(f"none of {', '.join(names)} is in {folder}; reinstall llama-cpp-python")


_lib = _load_library()


def _function(name: str, result: Any, *arguments: Any) -> Any:
    function = getattr(_lib, name)
    function.restype, function.argtypes = result, arguments
    return function


_pointer, _size, _long, _int = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64, ctypes.c_int
_init = _function("ggml_init", _pointer, _InitParams)
_free = _function("ggml_free", None, _pointer)
_overhead = _function("ggml_tensor_overhead", _size)
_new_2d = _function("ggml_new_tensor_2d", _pointer, _pointer, _int, _long, _long)
_new_1d = _function("ggml_new_tensor_1d", _pointer, _pointer, _int, _long)
_set_rows = _function("ggml_set_rows", _pointer, _pointer, _pointer, _pointer, _pointer)
_name = _function("ggml_get_name", ctypes.c_char_p, _pointer)
_nbytes = _function("ggml_nbytes", _size, _pointer)
_get = _function("ggml_backend_tensor_get", None, _pointer, _pointer, _size, _size)


class _Layout:
    """Where `struct ggml_tensor` keeps what has no function to ask for it.

    Learned from tensors made for the purpose, so that nothing is read where it may not be.
    """

    def __init__(self) -> None:
        memory = ctypes.create_string_buffer(1 << 16)
        context = _init(_InitParams(len(memory), ctypes.addressof(memory), True))
        try:
            table = _new_2d(context, F32, 1009, 883)
            index = _new_1d(context, I64, 7)
            write = _set_rows(context, table, _new_2d(context, F32, 1009, 7), index)
            size = _overhead()
            self.shape = _find(table, size, np.array([1009, 883, 1, 1], dtype=np.int64))
            self.type = _find(index, size, np.array([I64], dtype=np.int32))
            self.second_source = _find(write, size, np.array([index], dtype=np.uint64))
        finally:
            _free(context)


def _find(tensor: int, size: int, value: npt.NDArray[Any]) -> int:
    """Return the offset of a value in a struct."""
    struct = ctypes.string_at(tensor, size)
    for offset in range(0, size - value.nbytes + 1, value.itemsize):
        if struct[offset : offset + value.nbytes] == value.tobytes():
            return offset
    raise EngineError("ggml's tensors are not laid out as expected")


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
        self._layout = _Layout()
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
            job = self._job(_name(tensor))
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
        width, rows, *rest = (_long * 4).from_address(tensor + self._layout.shape)
        kind = ctypes.c_int32.from_address(tensor + self._layout.type).value
        if kind != F32 or rest != [1, 1] or _nbytes(tensor) != 4 * width * rows:
            raise EngineError(f"hidden states have the type {kind} and the shape {rows, width}")
        states = np.empty((rows, width), dtype=np.float32)
        _get(tensor, states.ctypes.data, 0, states.nbytes)
        return states

    def _note_cells(self, tensor: int, layer: int) -> None:
        """Learn which cells the tokens of the ubatch are written to."""
        indices = ctypes.c_void_p.from_address(tensor + self._layout.second_source).value
        if not indices or b"k_idxs" not in _name(indices):
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
        kind = ctypes.c_int32.from_address(indices + self._layout.type).value
        if kind != I64:
            raise EngineError(f"cells have the type {kind} instead of {I64}")
        cells = np.empty(_nbytes(indices) // 8, dtype=np.int64)
        _get(indices, cells.ctypes.data, 0, cells.nbytes)
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
                _get(tensor, attention.ctypes.data, 0, attention.nbytes)
            else:
                for head, part in enumerate(attention):
                    offset = 4 * columns * (head * rows + start)
                    _get(tensor, part.ctypes.data, offset, part.nbytes)
            sink.absorb(layer, attention, self._cells[start : start + n])

    def _shape(self, tensor: int) -> tuple[int, int, int, int]:
        """Return (columns, rows, heads, 1) of an attention node that is as expected."""
        columns, rows, heads, streams = (_long * 4).from_address(tensor + self._layout.shape)
        kind = ctypes.c_int32.from_address(tensor + self._layout.type).value
        if kind != F32 or streams != 1 or _nbytes(tensor) != 4 * columns * rows * heads:
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


class FullAttention:
    """A `Sink` that keeps everything: for checks and tests on short texts of one sequence."""

    def __init__(self, layers: int) -> None:
        """Start empty."""
        self._rows: list[list[FloatArray]] = [[] for _ in range(layers)]
        self.cells = np.zeros(0, dtype=np.intp)

    def begin(self, cells: IntArray) -> None:
        """See `Sink.begin`."""
        self.cells = np.concatenate([self.cells, cells])

    def absorb(self, layer: int, attention: FloatArray, cells: IntArray) -> None:
        """See `Sink.absorb`."""
        self._rows[layer].append(attention.copy())

    def missing(self) -> list[int]:
        """Return the layers that gave nothing."""
        return [layer for layer, rows in enumerate(self._rows) if not rows]

    def matrix(self) -> FloatArray:
        """Return the attention among all tokens seen, shape (layers, heads, N, N)."""
        return np.stack([self._by_position(rows) for rows in self._rows])

    def _by_position(self, blocks: list[FloatArray]) -> FloatArray:
        width = max(block.shape[2] for block in blocks)
        padded = [np.pad(b, ((0, 0), (0, 0), (0, width - b.shape[2]))) for b in blocks]
        rows: FloatArray = np.concatenate(padded, axis=1)[:, :, self.cells]
        return rows
