"""Handles on llama.cpp: weights shared within the process, and contexts (KV memory).

Many misuses of llama.cpp end the process, so everything is checked on this side of the border:
lengths and ranges before a call, every return code after it. `llama_cpp` means the bindings of
llama-cpp-python.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from specguard_chains.errors import (
    ContextOverflowError,
    DecodingCancelled,
    EngineError,
    ModelIntegrityError,
)

FloatArray = npt.NDArray[np.float32]

VERSION: str = llama_cpp.__version__
MAX_SEQUENCES: int = llama_cpp.llama_max_parallel_sequences()
MAX_OUTPUTS = 64
"""Rows of logits that one decode may ask for; llama.cpp reserves memory for all of them."""

logger = logging.getLogger("specguard_chains.llama_cpp")


class _Log:
    """Takes llama.cpp's log: quiet unless asked, with the latest errors kept for messages."""

    LEVELS = (0, logging.INFO, logging.WARNING, logging.ERROR, logging.DEBUG)

    def __init__(self) -> None:
        self.verbose = False
        self.errors: deque[str] = deque(maxlen=8)
        self._level = logging.DEBUG
        self._callback = llama_cpp.llama_log_callback(self._write)
        llama_cpp.llama_log_set(self._callback, None)

    def _write(self, level: int, text: bytes | None, _: int | None) -> None:
        if level < len(self.LEVELS):  # a level beyond them continues the line before
            self._level = self.LEVELS[level]
        line = (text or b"").decode("utf-8", "replace").strip()
        if self._level == logging.ERROR and line:
            self.errors.append(line)
        if self.verbose and line.strip("."):
            logger.log(self._level, line)

    def latest_error(self) -> str:
        return self.errors[-1] if self.errors else "no reason given"


log = _Log()
llama_cpp.llama_backend_init()


class Weights:
    """A loaded model file: weights and vocabulary, without any KV memory.

    Freed when nobody refers to it any more: engines and contexts of the same file share it.
    """

    def __init__(self, path: Path, n_gpu_layers: int) -> None:
        """Load a GGUF file; see `load_weights` for the shared way in."""
        self.path = path
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = n_gpu_layers
        params.load_mode = llama_cpp.LLAMA_LOAD_MODE_MMAP
        log.errors.clear()
        self.handle: int | None = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not self.handle:
            raise _load_error(path)
        weakref.finalize(self, llama_cpp.llama_model_free, self.handle)
        self.vocab: int = llama_cpp.llama_model_get_vocab(self.handle)
        self.n_vocab: int = llama_cpp.llama_vocab_n_tokens(self.vocab)
        self.n_layer: int = llama_cpp.llama_model_n_layer(self.handle)
        self.n_ctx_train: int = llama_cpp.llama_model_n_ctx_train(self.handle)
        self.sliding_window: int = llama_cpp.llama_model_n_swa(self.handle)
        self._pieces: dict[int, bytes] = {}

    @property
    def obstacle(self) -> str | None:
        """What keeps the model from continuing text and rolling back, if anything does."""
        model = self.handle
        if self.n_vocab == 0:
            return "has no vocabulary"
        if llama_cpp.llama_model_has_encoder(model) or not llama_cpp.llama_model_has_decoder(model):
            return "has an encoder"
        if llama_cpp.llama_model_is_recurrent(model) or llama_cpp.llama_model_is_hybrid(model):
            return "is recurrent, so that a rejected step cannot be taken back"
        if llama_cpp.llama_model_is_diffusion(model):
            return "is a diffusion model"
        return None

    def metadata(self, key: str) -> str | None:
        """Return a value of the file's metadata as text."""
        buffer = ctypes.create_string_buffer(1024)
        size: int = llama_cpp.llama_model_meta_val_str(
            self.handle, key.encode(), buffer, len(buffer)
        )
        return None if size < 0 else buffer.value.decode("utf-8", "replace")

    @property
    def chat_template(self) -> str | None:
        """The model's own chat template, as Jinja source."""
        source: bytes | None = llama_cpp.llama_model_chat_template(self.handle, None)
        return source.decode("utf-8", "replace") if source else None

    def tokenize(self, text: str, *, special: bool) -> list[int]:
        """Return the text's tokens, nothing added; `special` reads special tokens in it."""
        data = text.encode("utf-8", "replace")
        room = len(data) + 8
        while True:
            tokens = (ctypes.c_int32 * room)()
            count: int = llama_cpp.llama_tokenize(
                self.vocab, data, len(data), tokens, room, False, special
            )
            if count >= 0:
                return tokens[:count]
            if -count <= room:
                raise EngineError(f"llama.cpp cannot tokenize the text {text[:60]!r}")
            room = -count

    def token_bytes(self, token: int) -> bytes:
        """Return a token's bytes, none for a control token."""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._token_bytes(token)
        return piece

    def _token_bytes(self, token: int) -> bytes:
        self._check_token(token)
        room = 64
        while True:
            buffer = ctypes.create_string_buffer(room)
            size: int = llama_cpp.llama_token_to_piece(self.vocab, token, buffer, room, 0, False)
            if size >= 0:
                return buffer.raw[:size]
            room = -size

    def token_text(self, token: int) -> str:
        """Return how the vocabulary spells a token; "" for none (-1)."""
        if token < 0:
            return ""
        self._check_token(token)
        text: bytes | None = llama_cpp.llama_vocab_get_text(self.vocab, token)
        return (text or b"").decode("utf-8", "replace")

    def is_end(self, token: int) -> bool:
        """Return whether a token ends a sequence."""
        self._check_token(token)
        return bool(llama_cpp.llama_vocab_is_eog(self.vocab, token))

    @property
    def bos(self) -> int:
        """The token that sequences begin with, -1 if there is none."""
        token: int = llama_cpp.llama_vocab_bos(self.vocab)
        return token

    @property
    def eos(self) -> int:
        """The token that sequences end with, -1 if there is none."""
        token: int = llama_cpp.llama_vocab_eos(self.vocab)
        return token

    @property
    def wants_bos(self) -> bool:
        """Whether the model was trained with `bos` in front of its texts."""
        return self.bos >= 0 and bool(llama_cpp.llama_vocab_get_add_bos(self.vocab))

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the vocabulary's type and all tokens' texts and attributes."""
        text, attributes = llama_cpp.llama_vocab_get_text, llama_cpp.llama_vocab_get_attr
        kind = llama_cpp.llama_vocab_type(self.vocab)
        digest = hashlib.sha256(f"{kind} {self.n_vocab}\n".encode())
        tokens = range(self.n_vocab)
        digest.update(b"\0".join(text(self.vocab, token) or b"" for token in tokens))
        kinds = [attributes(self.vocab, token) for token in tokens]
        digest.update(np.array(kinds, dtype="<i4").tobytes())
        return digest.hexdigest()

    def control_texts(self) -> list[str]:
        """Return how the control tokens are spelled."""
        attributes = llama_cpp.llama_vocab_get_attr
        control = llama_cpp.LLAMA_TOKEN_ATTR_CONTROL
        tokens = (t for t in range(self.n_vocab) if attributes(self.vocab, t) & control)
        return [text for text in map(self.token_text, tokens) if text]

    def _check_token(self, token: int) -> None:
        if not 0 <= token < self.n_vocab:
            raise EngineError(f"token {token} is not in the vocabulary of {self.n_vocab} tokens")


_loaded: weakref.WeakValueDictionary[tuple[Any, ...], Weights] = weakref.WeakValueDictionary()
_loading = threading.Lock()


def load_weights(path: Path, n_gpu_layers: int) -> Weights:
    """Return the file's weights, shared with whoever has loaded them in the same way.

    Raises:
        ModelIntegrityError: llama.cpp finds the file damaged.
        EngineError: llama.cpp cannot load it for another reason.
    """
    status = path.stat()
    key = (path.resolve(), status.st_mtime_ns, status.st_size, n_gpu_layers)
    with _loading:
        weights = _loaded.get(key)
        if weights is None:
            weights = _loaded[key] = Weights(path, n_gpu_layers)
        return weights


def _load_error(path: Path) -> Exception:
    reasons = " ".join(log.errors)
    said = f"llama.cpp (llama-cpp-python {VERSION}) says: {reasons or 'no reason given'}"
    if "unknown model architecture" in reasons:
        return EngineError(
            f"the model in {path} is of a kind that this llama.cpp does not know; "
            f"upgrade llama-cpp-python or take another model. {said}"
        )
    damaged = ("corrupt", "incomplete", "failed to read", "invalid", "missing tensor", "magic")
    if any(word in reasons for word in damaged):
        return ModelIntegrityError(f"{path} is damaged or incomplete; fetch it again. {said}")
    return EngineError(f"{path} cannot be loaded; is there enough memory? {said}")


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


class Context:
    """KV memory for several sequences that share one pool of cells, and the forward pass."""

    def __init__(
        self,
        weights: Weights,
        settings: ContextSettings,
        *,
        on_node: Any = None,
    ) -> None:
        """Reserve the memory.

        Args:
            weights: The model.
            settings: Sizes and types.
            on_node: A `ggml_backend_sched_eval_callback` that sees every node of the graph.

        Raises:
            EngineError: The memory cannot be reserved.
        """
        self.weights = weights
        self.n_sequences = settings.sequences
        self._on_node = on_node  # llama.cpp keeps a bare pointer to it
        self._cancelled: Callable[[], bool] | None = None
        self._on_abort_check = llama_cpp.ggml_abort_callback(self._abort)
        self.n_outputs = min(max(MAX_OUTPUTS, settings.sequences), settings.n_batch)
        log.errors.clear()
        handle = llama_cpp.llama_init_from_model(weights.handle, self._params(settings))
        if not handle:
            raise EngineError(
                f"no memory for a context of {settings.cells} tokens; lower n_ctx. "
                f"llama.cpp says: {log.latest_error()}"
            )
        self._handle: int = handle
        self._free = weakref.finalize(self, _free_context, handle, weights)
        self._memory: int = llama_cpp.llama_get_memory(handle)
        self.cells: int = llama_cpp.llama_n_ctx(handle)
        self.n_batch: int = llama_cpp.llama_n_batch(handle)
        self._batch = _Batch(self.n_batch)

    def _params(self, settings: ContextSettings) -> Any:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = settings.cells
        params.n_batch = settings.n_batch
        params.n_ubatch = settings.n_ubatch
        params.n_seq_max = settings.sequences
        params.n_outputs_max = self.n_outputs
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
        if self._on_node is not None:
            params.cb_eval = self._on_node
        return params

    def decode(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[int],
        *,
        all_logits: bool,
        cancelled: Callable[[], bool] | None = None,
    ) -> FloatArray:
        """Compute at most `n_batch` tokens; return logits that live until the next call.

        Shape (n, vocabulary), or (1, vocabulary) for the last token alone; `cancelled` is asked
        between the nodes of the graph.

        Raises:
            ContextOverflowError: There are not enough free cells; nothing was computed.
            DecodingCancelled: `cancelled` said so; some tokens may have been computed.
            EngineError: llama.cpp failed.
        """
        self._check_open()
        outputs = len(tokens) if all_logits else 1
        self._check_batch(tokens, sequences, outputs)
        batch = self._batch.fill(tokens, positions, sequences, all_logits=all_logits)
        self._watch(cancelled)
        code = llama_cpp.llama_decode(self._handle, batch)
        if code == 1:
            raise ContextOverflowError(
                f"{len(tokens)} more tokens do not fit into the cache of {self.cells}; raise n_ctx "
                "or candidate_tokens, or shorten the steps"
            )
        if code == 2:
            raise DecodingCancelled("the request was cancelled")
        if code != 0:
            raise EngineError(
                f"llama_decode failed with code {code} on {len(tokens)} tokens from position "
                f"{positions[0]}; llama.cpp says: {log.latest_error()}"
            )
        return self._logits(outputs)

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Let a sequence share another one's positions [start, end); copies no data."""
        self._check_open()
        self._check_sequence(source)
        self._check_sequence(target)
        llama_cpp.llama_memory_seq_cp(self._memory, source, target, start, end)

    def cut(self, sequence: int, length: int) -> None:
        """Remove a sequence's positions from `length` on."""
        self._check_open()
        self._check_sequence(sequence)
        if not llama_cpp.llama_memory_seq_rm(self._memory, sequence, length, -1):
            raise EngineError(
                f"{self.weights.path.name} cannot be rolled back to {length} tokens; "
                "take a model without recurrent layers"
            )

    def close(self) -> None:
        """Free the memory; twice does no harm."""
        self._free()

    def _logits(self, rows: int) -> FloatArray:
        pointer = llama_cpp.llama_get_logits(self._handle)
        if not pointer:
            raise EngineError("llama.cpp returned no logits")
        return np.ctypeslib.as_array(pointer, shape=(rows, self.weights.n_vocab))

    def _watch(self, cancelled: Callable[[], bool] | None) -> None:
        """Ask `cancelled` between the nodes of the coming decodes."""
        if cancelled is not self._cancelled:
            self._cancelled = cancelled
            check = self._on_abort_check if cancelled else llama_cpp.ggml_abort_callback()
            llama_cpp.llama_set_abort_callback(self._handle, check, None)

    def _abort(self, _: int | None) -> bool:
        return self._cancelled is not None and self._cancelled()

    def _check_open(self) -> None:
        if not self._free.alive:
            raise EngineError(f"the memory of {self.weights.path.name} is closed")

    def _check_sequence(self, sequence: int) -> None:
        if not 0 <= sequence < self.n_sequences:  # llama.cpp would abort the process
            raise EngineError(f"sequence {sequence} is not one of the {self.n_sequences}")

    def _check_batch(self, tokens: Sequence[int], sequences: Sequence[int], outputs: int) -> None:
        if not 0 < len(tokens) <= self.n_batch or outputs > self.n_outputs:
            raise EngineError(
                f"a batch of {len(tokens)} tokens with {outputs} rows of logits is not within "
                f"1 to {self.n_batch} and {self.n_outputs}"
            )
        if min(tokens) < 0 or max(tokens) >= self.weights.n_vocab:
            raise EngineError(f"a token is not in the vocabulary of {self.weights.n_vocab} tokens")
        self._check_sequence(min(sequences))
        self._check_sequence(max(sequences))


def _free_context(handle: int, weights: Weights) -> None:
    """Free a context before the weights that it needs."""
    llama_cpp.llama_free(handle)
    del weights


class _Batch:
    """A `llama_batch` over NumPy arrays: n tokens, each in one sequence."""

    def __init__(self, room: int) -> None:
        self._tokens = np.zeros(room, dtype=np.int32)
        self._positions = np.zeros(room, dtype=np.int32)
        self._counts = np.ones(room, dtype=np.int32)
        self._sequences = np.zeros(room, dtype=np.int32)
        steps = np.arange(room, dtype=np.uintp) * self._sequences.itemsize
        self._pointers = self._sequences.ctypes.data + steps
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
        sequences: Sequence[int],
        *,
        all_logits: bool,
    ) -> Any:
        """Return the struct with these tokens in it."""
        n = len(tokens)
        self._tokens[:n] = tokens
        self._positions[:n] = positions
        self._sequences[:n] = sequences
        self._outputs[:n] = all_logits
        self._outputs[n - 1] = 1
        self._struct.n_tokens = n
        return self._struct


def _pointer(array: npt.NDArray[Any], kind: Any) -> Any:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(kind))
