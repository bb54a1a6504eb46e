"""Contexts of llama.cpp: KV memory for several sequences, and the forward pass.

Many misuses of llama.cpp end the process, so everything is checked on this side of the border:
lengths and ranges before a call, every return code after it.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import llama_cpp
import numpy as np
import numpy.typing as npt

from specguard_adapters.llama_cpp.abort import AbortCheck, exiting, stop_at_exit
from specguard_adapters.llama_cpp.batch import Batch, pointer
from specguard_adapters.llama_cpp.log import log
from specguard_adapters.llama_cpp.settings import ContextSettings
from specguard_adapters.llama_cpp.tap import AttentionTap
from specguard_adapters.llama_cpp.weights import Weights
from specguard_chains.decoding.arrays import FloatArray
from specguard_chains.errors import ContextOverflowError, DecodingCancelled, EngineError


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
        self._abort_check = AbortCheck()
        self._in_use = threading.Lock()
        params = settings.params(None if tap is None else tap.callback)
        log.errors.clear()
        handle = llama_cpp.llama_init_from_model(weights.handle, params)
        if not handle:
            raise EngineError(
                f"no memory for a context of {settings.cells} tokens; lower n_ctx. "
                f"llama.cpp says: {log.latest_error()}"
            )
        self._handle: int = handle
        self._free = weakref.finalize(self, _free_context, handle, weights)
        self._free.atexit = False  # `stop` does it then
        stop_at_exit(self)
        self._memory: int = llama_cpp.llama_get_memory(handle)
        if not self._memory:
            raise EngineError(f"{self.name} has no KV memory; take a causal transformer")
        self.cells: int = llama_cpp.llama_n_ctx(handle)
        self.n_batch: int = llama_cpp.llama_n_batch(handle)
        self.n_outputs = min(settings.outputs, self.n_batch)
        self._batch = Batch(self.n_batch)

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
            self._abort_check.ask(self._handle, cancelled)
            code = llama_cpp.llama_decode(self._handle, batch)
            self._abort_check.raise_error()
            if self.tap is not None:
                self.tap.raise_error()
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

    def copy(self, source: int, targets: Sequence[int], start: int, end: int) -> None:
        """Let sequences share another one's positions [start, end); copies no data."""
        for sequence in (source, *targets):
            self._check_sequence(sequence)
        with self._in_use:
            self._check_open()
            for target in targets:
                llama_cpp.llama_memory_seq_cp(self._memory, source, target, start, end)

    def cut(self, sequences: Sequence[int], length: int) -> None:
        """Remove positions from `length` on from some sequences, before anybody else decodes."""
        for sequence in sequences:
            self._check_sequence(sequence)
        with self._in_use:
            self._check_open()
            done = [
                llama_cpp.llama_memory_seq_rm(self._memory, sequence, length, -1)
                for sequence in sequences
            ]
        if not all(done):
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
                self._handle, pointer(state, ctypes.c_uint8), size, sequence
            )
        if copied != size:
            raise EngineError(f"llama.cpp has copied {copied} of {size} bytes of its memory")
        return state

    def is_empty(self, *, but: Sequence[int]) -> bool:
        """Return whether no sequence holds anything, except for these."""
        with self._in_use:
            self._check_open()
            return self._empty(but)

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
        logits = llama_cpp.llama_get_logits(self._handle)
        if not logits:
            raise EngineError("llama.cpp returned no logits")
        return np.ctypeslib.as_array(logits, shape=(rows, self.n_vocab))

    def _load(self, piece: Piece, sequences: Sequence[int], spare: int) -> bool:
        size = piece.state.nbytes
        data = pointer(piece.state, ctypes.c_uint8)
        if llama_cpp.llama_state_seq_set_data(self._handle, data, size, spare) != size:
            return False
        for sequence in sequences:
            llama_cpp.llama_memory_seq_cp(self._memory, spare, sequence, piece.start, piece.end)
        return True

    def _empty(self, but: Sequence[int] = ()) -> bool:
        last = llama_cpp.llama_memory_seq_pos_max
        sequences = (sequence for sequence in range(self.n_sequences) if sequence not in but)
        return all(last(self._memory, sequence) < 0 for sequence in sequences)

    def _check_open(self) -> None:
        if not self._free.alive or exiting.is_set():
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


def _free_context(handle: int, weights: Weights) -> None:
    """Free a context before the weights that it needs."""
    llama_cpp.llama_free(handle)
    del weights
