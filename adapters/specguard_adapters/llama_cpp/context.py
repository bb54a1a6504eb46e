"""Contexts of llama.cpp: KV memory for several sequences, and the forward pass.

Many misuses of llama.cpp end the process, so everything is checked on this side of the border:
lengths and ranges before a call, every return code after it.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from specguard_adapters.llama_cpp.ggml import AttentionTap
from specguard_adapters.llama_cpp.log import log
from specguard_adapters.llama_cpp.weights import Weights
from specguard_chains.decoding.arrays import FloatArray
from specguard_chains.errors import ContextOverflowError, DecodingCancelled, EngineError

MAX_SEQUENCES: int = llama_cpp.llama_max_parallel_sequences()
MAX_OUTPUTS = 32
"""Rows of logits that one decode may ask for; llama.cpp reserves memory for all of them."""


@dataclass(frozen=True, slots=True)
class ContextSettings:
    """How a context is set up; `cells` is the room for tokens, over all sequences."""

    cells: int
    sequences: int
    n_batch: int
    n_ubatch: int
    n_threads: int
    kv_type: str
    flash_attention: bool


KV_TYPES = {"f16": llama_cpp.GGML_TYPE_F16, "f32": llama_cpp.GGML_TYPE_F32}


@dataclass(frozen=True, slots=True)
class Piece:
    """What was saved of positions [start, end)."""

    start: int
    end: int
    state: npt.NDArray[np.uint8]


class Context:
    """KV memory for several sequences that share one pool of cells, and the forward pass."""

    def __init__(
        self,
        weights: Weights,
        settings: ContextSettings,
        tap: AttentionTap | None = None,
    ) -> None:
        """Reserve the memory.

        Args:
            weights: The model.
            settings: Sizes and types.
            tap: Reads the attention; needs `flash_attention=False`.

        Raises:
            EngineError: The memory cannot be reserved.
        """
        self.name = weights.path.name
        self.n_layer = weights.n_layer
        self.n_vocab = weights.n_vocab
        self.n_sequences = settings.sequences
        self.tap = tap
        self._cancelled: Callable[[], bool] | None = None
        self._abort_error: BaseException | None = None
        self._in_use = threading.Lock()
        self._on_abort_check = llama_cpp.ggml_abort_callback(self._abort)
        log.errors.clear()
        handle = llama_cpp.llama_init_from_model(weights.handle, self._params(settings))
        if not handle:
            raise EngineError(
                f"no memory for a context of {settings.cells} tokens; lower n_ctx. "
                f"llama.cpp says: {log.latest_error()}"
            )
        self._handle: int = handle
        self._free = weakref.finalize(self, _free_context, handle, weights)
        self._free.atexit = False  # `_stop_all` does it then
        _contexts.add(self)
        self._memory: int = llama_cpp.llama_get_memory(handle)
        if not self._memory:
            raise EngineError(f"{self.name} has no KV memory; take a causal transformer")
        self.cells: int = llama_cpp.llama_n_ctx(handle)
        self.n_batch: int = llama_cpp.llama_n_batch(handle)
        self.n_outputs = min(_outputs(settings), self.n_batch)
        self._batch = _Batch(self.n_batch)

    def _params(self, settings: ContextSettings) -> Any:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = settings.cells
        params.n_batch = max(settings.n_batch, settings.sequences)  # else llama.cpp aborts
        params.n_ubatch = settings.n_ubatch
        params.n_seq_max = settings.sequences
        params.n_outputs_max = _outputs(settings)
        params.n_threads = params.n_threads_batch = settings.n_threads
        params.type_k = params.type_v = KV_TYPES[settings.kv_type]
        params.flash_attn_type = (
            llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO
            if settings.flash_attention
            else llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        params.kv_unified = True  # False splits the cells, and seq_cp would copy or abort
        params.swa_full = True  # else cells behind the window are gone and cannot be rolled back
        params.no_perf = True
        if self.tap is not None:
            params.cb_eval = self.tap.callback
        return params

    def decode(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[Sequence[int]],
        *,
        all_logits: bool,
        wanted: Sequence[int] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> FloatArray:
        """Compute at most `n_batch` tokens; return logits that live until the next call.

        A token may belong to several sequences, if they hold the same so far.

        Shape (n, vocabulary), or (1, vocabulary) for the last token alone; in place of both, 1 in
        `wanted` asks for a token's logits and 0 does not. `cancelled` is asked between the nodes of
        the graph.

        Raises:
            ContextOverflowError: There are not enough free cells; nothing was computed.
            DecodingCancelled: `cancelled` said so; some tokens may have been computed.
            EngineError: llama.cpp failed.
        """
        if wanted is None:
            wanted = [1] * len(tokens) if all_logits else [*[0] * (len(tokens) - 1), 1]
        outputs = sum(wanted)
        self.check_batch(tokens, sequences, outputs)
        with self._in_use:
            self._check_open()
            batch = self._batch.fill(tokens, positions, sequences, wanted)
            self._watch(cancelled)
            code = llama_cpp.llama_decode(self._handle, batch)
            self._raise_errors()
            if code == 0:
                return self._logits(outputs)
        if code == 1:
            raise ContextOverflowError(
                f"{len(tokens)} more tokens do not fit into the cache of {self.cells}; raise n_ctx "
                "or candidate_tokens, or shorten the steps"
            )
        if code == 2:
            raise DecodingCancelled("the request was cancelled")
        raise EngineError(
            f"llama_decode failed with code {code} on {len(tokens)} tokens from position "
            f"{positions[0]}; llama.cpp says: {log.latest_error()}"
        )

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Let a sequence share another one's positions [start, end); copies no data."""
        self._check_sequence(source)
        self._check_sequence(target)
        with self._in_use:
            self._check_open()
            llama_cpp.llama_memory_seq_cp(self._memory, source, target, start, end)

    def cut(self, sequence: int, length: int) -> None:
        """Remove a sequence's positions from `length` on."""
        self._check_sequence(sequence)
        with self._in_use:
            self._check_open()
            done = llama_cpp.llama_memory_seq_rm(self._memory, sequence, length, -1)
        if not done:
            raise EngineError(
                f"{self.name} cannot be rolled back to {length} tokens; "
                "take a model without recurrent layers"
            )

    def save(self, sequence: int) -> npt.NDArray[np.uint8]:
        """Return the keys and values of a sequence, in the order of their cells.

        Of layers with a sliding window these are only the ones in sight of its last position.
        """
        self._check_sequence(sequence)
        with self._in_use:
            self._check_open()
            size = llama_cpp.llama_state_seq_get_size(self._handle, sequence)
            state = np.empty(size, dtype=np.uint8)
            copied = llama_cpp.llama_state_seq_get_data(
                self._handle, _pointer(state, ctypes.c_uint8), size, sequence
            )
        if copied != size:
            raise EngineError(f"llama.cpp has copied {copied} of {size} bytes of its memory")
        return state

    def load(
        self, pieces: Sequence[Piece], sequences: Sequence[int], spare: int, *, from_first: bool
    ) -> bool:
        """Let empty sequences hold what was saved, which goes through a spare one.

        `from_first` is to put it into the cells from the first on. False if there is no room, or if
        these cells may be taken: then nothing was done.
        """
        for sequence in (*sequences, spare):
            self._check_sequence(sequence)
        with self._in_use:
            self._check_open()
            if from_first:
                if not self._empty():
                    return False
                llama_cpp.llama_memory_clear(self._memory, False)  # the search begins at 0 again
            loaded = all(self._load(piece, sequences, spare) for piece in pieces)
            for sequence in (spare, *([] if loaded else sequences)):
                llama_cpp.llama_memory_seq_rm(self._memory, sequence, -1, -1)
            return loaded

    def close(self) -> None:
        """Free the memory, after a running decode; twice does no harm."""
        with self._in_use:
            self._free()

    def stop(self, timeout_s: float) -> None:
        """Close for good, if a running decode ends in time."""
        if self._in_use.acquire(timeout=timeout_s):
            self._free()
            self._in_use.release()

    def _logits(self, rows: int) -> FloatArray:
        pointer = llama_cpp.llama_get_logits(self._handle)
        if not pointer:
            raise EngineError("llama.cpp returned no logits")
        return np.ctypeslib.as_array(pointer, shape=(rows, self.n_vocab))

    def _watch(self, cancelled: Callable[[], bool] | None) -> None:
        """Ask `cancelled` between the nodes of the coming decodes."""
        if cancelled is not self._cancelled:
            self._cancelled = cancelled
            check = self._on_abort_check if cancelled else llama_cpp.ggml_abort_callback()
            llama_cpp.llama_set_abort_callback(self._handle, check, None)

    def _abort(self, _: int | None) -> bool:
        try:
            return _exiting.is_set() or (self._cancelled is not None and self._cancelled())
        except BaseException as error:  # llama.cpp would swallow it
            self._abort_error = error
            return True

    def _raise_errors(self) -> None:
        """Raise what a callback ran into."""
        error, self._abort_error = self._abort_error, None
        if error is not None:
            raise error
        if self.tap is not None:
            self.tap.raise_error()

    def _load(self, piece: Piece, sequences: Sequence[int], spare: int) -> bool:
        size = piece.state.nbytes
        data = _pointer(piece.state, ctypes.c_uint8)
        if llama_cpp.llama_state_seq_set_data(self._handle, data, size, spare) != size:
            return False
        for sequence in sequences:
            llama_cpp.llama_memory_seq_cp(self._memory, spare, sequence, piece.start, piece.end)
        return True

    def _empty(self) -> bool:
        last = llama_cpp.llama_memory_seq_pos_max
        return all(last(self._memory, sequence) < 0 for sequence in range(self.n_sequences))

    def _check_open(self) -> None:
        if not self._free.alive or _exiting.is_set():
            raise EngineError(f"the memory of {self.name} is closed")

    def _check_sequence(self, sequence: int) -> None:
        if not 0 <= sequence < self.n_sequences:  # llama.cpp would abort the process
            raise EngineError(f"sequence {sequence} is not one of the {self.n_sequences}")

    def check_batch(
        self, tokens: Sequence[int], sequences: Sequence[Sequence[int]], outputs: int
    ) -> None:
        """Refuse what would end the process.

        Raises:
            EngineError: Something is out of range.
        """
        if not 0 < len(tokens) <= self.n_batch or outputs > self.n_outputs:
            raise EngineError(
                f"a batch of {len(tokens)} tokens with {outputs} rows of logits is not within "
                f"1 to {self.n_batch} and {self.n_outputs}"
            )
        if min(tokens) < 0 or max(tokens) >= self.n_vocab:
            raise EngineError(f"a token is not in the vocabulary of {self.n_vocab} tokens")
        if len(sequences) != len(tokens) or not all(sequences):
            raise EngineError("every token of a batch must belong to a sequence")
        for sequence in {s for own in sequences for s in own}:
            self._check_sequence(sequence)


_contexts: weakref.WeakSet[Context] = weakref.WeakSet()
_exiting = threading.Event()


@atexit.register
def _stop_all() -> None:
    """Free all contexts while Python still runs.

    A thread that goes on decoding without it would end the process with a segmentation fault.
    """
    _exiting.set()
    for context in list(_contexts):
        context.stop(timeout_s=10)


def _outputs(settings: ContextSettings) -> int:
    """Return how many rows of logits to have room for; fewer than sequences make it abort."""
    return max(MAX_OUTPUTS, settings.sequences)


def _free_context(handle: int, weights: Weights) -> None:
    """Free a context before the weights that it needs."""
    llama_cpp.llama_free(handle)
    del weights


class _Batch:
    """A `llama_batch` over NumPy arrays: n tokens, each in one sequence or several."""

    def __init__(self, room: int) -> None:
        self._tokens = np.zeros(room, dtype=np.int32)
        self._positions = np.zeros(room, dtype=np.int32)
        self._counts = np.zeros(room, dtype=np.int32)
        self._sequences = np.zeros(0, dtype=np.int32)  # of all tokens, one after the other
        self._pointers = np.zeros(room, dtype=np.uintp)  # to each token's first
        self._outputs = np.zeros(room, dtype=np.int8)
        self._struct = llama_cpp.llama_batch(
            n_tokens=0,
            token=_pointer(self._tokens, llama_cpp.llama_token),
            embd=None,
            pos=_pointer(self._positions, llama_cpp.llama_pos),
            n_seq_id=_pointer(self._counts, ctypes.c_int32),
            seq_id=_pointer(self._pointers, ctypes.POINTER(llama_cpp.llama_seq_id)),
            logits=_pointer(self._outputs, ctypes.c_int8),
        )

    def fill(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[Sequence[int]],
        wanted: Sequence[int],
    ) -> Any:
        """Return the struct with these tokens in it."""
        n = len(tokens)
        self._tokens[:n] = tokens
        self._positions[:n] = positions
        self._counts[:n] = counts = [len(own) for own in sequences]
        self._sequences = np.array([s for own in sequences for s in own], dtype=np.int32)
        first = np.cumsum([0, *counts[:-1]]) * self._sequences.itemsize
        self._pointers[:n] = self._sequences.ctypes.data + first
        self._outputs[:n] = wanted
        self._struct.n_tokens = n
        return self._struct


def _pointer(array: npt.NDArray[Any], kind: Any) -> Any:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(kind))
