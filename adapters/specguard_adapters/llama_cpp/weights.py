"""Model files in llama.cpp: weights and vocabulary, shared within the process."""

from __future__ import annotations

import ctypes
import threading
import weakref
from functools import cached_property
from pathlib import Path
from typing import Any

import llama_cpp

from specguard_adapters.llama_cpp.log import log
from specguard_chains.decoding.prompt_encoder import end_of_turn
from specguard_chains.decoding.vocabulary import Vocabulary
from specguard_chains.errors import EngineError, ModelIntegrityError

VERSION: str = llama_cpp.__version__
GPU: bool = llama_cpp.llama_supports_gpu_offload()
CELLS_STEP = 256
"""Contexts have a multiple of so many cells."""

llama_cpp.llama_backend_init()


class Weights:
    """A loaded model file: weights and vocabulary, without any KV memory.

    Freed when nobody refers to it any more: engines and contexts of the same file share it.
    """

    def __init__(self, path: Path, n_gpu_layers: int, *, use_mmap: bool, repack: bool) -> None:
        """Load a GGUF file; see `load_weights` for the shared way in."""
        self.path = path
        status = path.stat()
        self._file = [path.name, status.st_size, status.st_mtime_ns]
        self._loaded = {"n_gpu_layers": n_gpu_layers, "repack": repack}
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = n_gpu_layers
        params.use_extra_bufts = repack
        params.load_mode = (
            llama_cpp.LLAMA_LOAD_MODE_MMAP if use_mmap else llama_cpp.LLAMA_LOAD_MODE_NONE
        )
        log.errors.clear()
        self.handle: int | None = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not self.handle:
            raise _load_error(path)
        free = weakref.finalize(self, llama_cpp.llama_model_free, self.handle)
        free.atexit = False  # a context may still be in use
        self.vocab: int = llama_cpp.llama_model_get_vocab(self.handle)
        self.n_vocab: int = llama_cpp.llama_vocab_n_tokens(self.vocab)
        self.n_layer: int = llama_cpp.llama_model_n_layer(self.handle)
        self.n_embd: int = llama_cpp.llama_model_n_embd(self.handle)
        self.n_ctx_train: int = llama_cpp.llama_model_n_ctx_train(self.handle)
        self.window: int = llama_cpp.llama_model_n_swa(self.handle)
        self._pieces: dict[int, bytes] = {}

    @property
    def obstacle(self) -> str | None:
        """What keeps the model from continuing text and rolling back, if anything does."""
        model = self.handle
        if llama_cpp.llama_vocab_type(self.vocab) == llama_cpp.LLAMA_VOCAB_TYPE_NONE:
            return "has no vocabulary"
        if self.metadata(f"{self.metadata('general.architecture')}.attention.causal") == "false":
            return "reads in both directions"
        if llama_cpp.llama_model_has_encoder(model) or not llama_cpp.llama_model_has_decoder(model):
            return "has an encoder"
        if llama_cpp.llama_model_is_recurrent(model) or llama_cpp.llama_model_is_hybrid(model):
            return "is recurrent, so that a rejected step cannot be taken back"
        if llama_cpp.llama_model_is_diffusion(model):
            return "is a diffusion model"
        return None

    def identity(self) -> dict[str, Any]:
        """Return what tells the numbers that are computed from others: model, library, machine."""
        return {
            "library": f"llama-cpp-python {VERSION}",
            "machine": llama_cpp.llama_print_system_info().decode("utf-8", "replace"),
            "file": self._file,
            "loaded": self._loaded,
        }

    def long_rope(self, cells: int) -> bool:
        """Return whether positions are turned by the factors for long texts, if there are such.

        llama.cpp goes by the size of a context, even if all of its sequences are short.
        """
        scaling = f"{self.metadata('general.architecture')}.rope.scaling"
        kind, factor = self.metadata(f"{scaling}.type"), self.metadata(f"{scaling}.attn_factor")
        if kind != "longrope" and factor is None:
            return False
        original = self.metadata(f"{scaling}.original_context_length")
        padded = -(-cells // CELLS_STEP) * CELLS_STEP
        return padded > int(original or self.n_ctx_train)

    def metadata(self, key: str) -> str | None:
        """Return a value of the file's metadata as text."""
        buffer = ctypes.create_string_buffer(1024)
        size: int = llama_cpp.llama_model_meta_val_str(
            self.handle, key.encode(), buffer, len(buffer)
        )
        return None if size < 0 else buffer.value.decode("utf-8", "replace")

    def chat_template(self, name: str | None = None) -> str | None:
        """Return the model's own chat template, or its one of that name, as Jinja source."""
        key = name and name.encode()
        source: bytes | None = llama_cpp.llama_model_chat_template(self.handle, key)
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

    def tokenize_on(self, text: str, *, special: bool) -> list[int]:
        """Return the tokens of text that continues other text.

        Some vocabularies put a space in front of everything that they tokenize. A line break in
        front of the text takes it, and is cut off again.
        """
        if not text or not self._adds_space:
            return self.tokenize(text, special=special)
        start = self.tokenize("\n", special=special)
        tokens = self.tokenize("\n" + text, special=special)
        if tokens[: len(start)] != start:
            raise EngineError(f"llama.cpp cannot tokenize the text {text[:60]!r} without a space")
        return tokens[len(start) :]

    @cached_property
    def _adds_space(self) -> bool:
        return b"".join(map(self.token_bytes, self.tokenize("a", special=False))) == b" a"

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

    @cached_property
    def end_of_turn(self) -> int:
        """The token with which the model ends its turn.

        The chat template's; else the file's own one, or the end of text where it names none.
        """
        named: int = llama_cpp.llama_vocab_eot(self.vocab)
        ends = {t: text for t, text in self._control.items() if self.is_end(t)}
        token = end_of_turn(self, ends)
        return token if token is not None else named if named >= 0 else self.eos

    @property
    def eos(self) -> int:
        """The token that sequences end with, -1 if there is none."""
        token: int = llama_cpp.llama_vocab_eos(self.vocab)
        return token

    @property
    def bos_text(self) -> str:
        """See `ChatTokenizer.bos_text`."""
        return self.token_text(self.bos)

    @property
    def eos_text(self) -> str:
        """See `ChatTokenizer.eos_text`."""
        return self.token_text(self.eos)

    @property
    def prefix(self) -> list[int]:
        """See `ChatTokenizer.prefix`: `bos`, if the model was trained with it."""
        wanted = self.bos >= 0 and llama_cpp.llama_vocab_get_add_bos(self.vocab)
        return [self.bos] if wanted else []

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """What the vocabulary is known by, in every library."""
        return Vocabulary.of(map(self._meaning, range(self.n_vocab)))

    def _meaning(self, token: int) -> bytes:
        """Return a token's bytes, or how a control token is spelled."""
        attribute = llama_cpp.llama_vocab_get_attr(self.vocab, token)
        if attribute & (llama_cpp.LLAMA_TOKEN_ATTR_CONTROL | llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN):
            return self.token_text(token).encode()
        return self._token_bytes(token)

    @property
    def control_texts(self) -> list[str]:
        """See `ChatTokenizer.control_texts`."""
        return [*self._control.values()]

    @cached_property
    def _control(self) -> dict[int, str]:
        """The control tokens, and how they are spelled."""
        attributes = llama_cpp.llama_vocab_get_attr
        control = llama_cpp.LLAMA_TOKEN_ATTR_CONTROL
        tokens = (t for t in range(self.n_vocab) if attributes(self.vocab, t) & control)
        return {t: text for t in tokens if (text := self.token_text(t))}

    def _check_token(self, token: int) -> None:
        if not 0 <= token < self.n_vocab:
            raise EngineError(f"token {token} is not in the vocabulary of {self.n_vocab} tokens")


_loaded: weakref.WeakValueDictionary[tuple[Any, ...], Weights] = weakref.WeakValueDictionary()
_loading = threading.Lock()


def load_weights(
    path: Path, n_gpu_layers: int, *, use_mmap: bool = False, repack: bool = True
) -> Weights:
    """Return the file's weights, shared with whoever has loaded them in the same way.

    Raises:
        ModelIntegrityError: llama.cpp finds the file damaged.
        EngineError: llama.cpp cannot load it for another reason.
    """
    status = path.stat()
    key = (path.resolve(), status.st_mtime_ns, status.st_size, n_gpu_layers, use_mmap, repack)
    with _loading:
        weights = _loaded.get(key)
        if weights is None:
            weights = _loaded[key] = Weights(path, n_gpu_layers, use_mmap=use_mmap, repack=repack)
        return weights


def _load_error(path: Path) -> Exception:
    reasons = " ".join(log.errors)
    said = f"llama.cpp (llama-cpp-python {VERSION}) says: {reasons or 'no reason given'}"
    if "unknown model architecture" in reasons:
        return EngineError(
            f"the model in {path} is of a kind that this llama.cpp does not know; "
            f"upgrade llama-cpp-python or take another model. {said}"
        )
    damaged = ("corrupt", "incomplete", "failed to read", "invalid", "not found", "magic")
    if any(word in reasons for word in damaged):
        return ModelIntegrityError(f"{path} is damaged or incomplete; fetch it again. {said}")
    return EngineError(f"{path} cannot be loaded; free some memory or fetch it again. {said}")
