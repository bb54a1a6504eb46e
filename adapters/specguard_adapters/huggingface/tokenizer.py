"""Tokenizers of transformers: text to tokens and back to the very bytes."""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import tokenizers
from transformers import PreTrainedTokenizerBase

from specguard_chains.decoding.prompt_encoder import end_of_turn
from specguard_chains.decoding.vocabulary import Vocabulary
from specguard_chains.errors import ConfigurationError, EngineError


class HuggingFaceTokenizer:
    """A copy of a fast tokenizer, so that nobody else's settings or threads get in its way."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, n_vocab: int, name: str) -> None:
        """Copy a tokenizer; see `copy_of` for the shared way in.

        Args:
            tokenizer: The model's.
            n_vocab: Tokens that the model knows; it may have more of them than the tokenizer.
            name: The model's name, for messages.

        Raises:
            ConfigurationError: It is not a fast tokenizer, or of a kind that is not known here.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, tokenizers.Tokenizer):
            raise ConfigurationError(
                f"{name} has a {type(tokenizer).__name__}, which does not show its tokens' bytes; "
                "take a model with a fast tokenizer (tokenizer.json)"
            )
        self.name = name
        self.n_vocab = n_vocab
        self.size = len(tokenizer)
        """Tokens that the tokenizer knows."""
        self._lock = threading.Lock()  # it refuses a second thread
        self._backend = tokenizers.Tokenizer.from_str(backend.to_str())
        self._backend.no_truncation()
        self._backend.no_padding()
        self._spelling = _Spelling.of(self._backend, name)
        added = self._backend.get_added_tokens_decoder()
        self._control: dict[int, str] = {t: a.content for t, a in added.items() if _is_control(a)}
        self._added: dict[int, str] = {
            t: a.content for t, a in added.items() if t not in self._control
        }
        self._templates = tokenizer.chat_template
        self.bos_text = str(tokenizer.bos_token or "")
        self.eos_text = str(tokenizer.eos_token or "")
        self._eos: int | None = tokenizer.eos_token_id

    def tokenize(self, text: str, *, special: bool) -> list[int]:
        """Return the text's tokens, nothing added; `special` reads special tokens in it."""
        text = text.encode("utf-8", "replace").decode()
        with self._lock:
            self._backend.encode_special_tokens = not special
            tokens: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return tokens

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
            raise EngineError(f"{self.name} cannot tokenize the text {text[:60]!r} without a space")
        return tokens[len(start) :]

    @cached_property
    def _adds_space(self) -> bool:
        return b"".join(map(self.token_bytes, self.tokenize("a", special=False))) == b" a"

    @cached_property
    def prefix(self) -> list[int]:
        """What the tokenizer puts in front of every text: mostly nothing, or one token."""
        plain = self.tokenize("a", special=True)
        with self._lock:
            whole: list[int] = self._backend.encode("a", add_special_tokens=True).ids
        for start in range(len(whole) - len(plain) + 1):
            if whole[start : start + len(plain)] == plain:
                return whole[:start]
        raise EngineError(f"the tokenizer of {self.name} changes a text that it frames")

    def token_bytes(self, token: int) -> bytes:
        """Return a token's bytes, none for a control token."""
        self.check(token)
        if token in self._control:
            return b""
        return self._text_bytes(token)

    def _text_bytes(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        spelled: str | None = self._backend.id_to_token(token)
        return b"" if spelled is None else self._spelling.bytes_of(spelled)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """What the vocabulary is known by, in every library."""
        return Vocabulary.of(map(self._meaning, range(self.n_vocab)))

    def _meaning(self, token: int) -> bytes:
        """Return a token's bytes, or how a control token is spelled."""
        if token in self._control:
            return self._control[token].encode()
        return self._text_bytes(token)

    @property
    def control_texts(self) -> list[str]:
        """How the control tokens are spelled."""
        return [text for text in self._control.values() if text]

    def ends(self, more: Iterable[int]) -> frozenset[int]:
        """Return the tokens that end a sequence: the tokenizer's own, and those given."""
        return frozenset({*more, *([] if self._eos is None else [self._eos])})

    def end_of_turn(self, ends: Iterable[int]) -> int:
        """Return the end token with which the chat template ends a turn; else the tokenizer's own.

        Raises:
            ConfigurationError: Nothing ends a sequence.
        """
        known = {token: self._control.get(token, "") for token in ends}
        token = end_of_turn(self, known)
        if token is None:
            token = self._eos if self._eos is not None else min(known, default=None)
        if token is None:
            raise ConfigurationError(
                f"{self.name} has no token that ends a sequence; give a tokenizer with eos_token"
            )
        return token

    def chat_template(self, name: str | None = None) -> str | None:
        """Return the model's own chat template, or its one of that name, as Jinja source."""
        templates = self._templates
        if isinstance(templates, dict):
            source: str | None = templates.get(name or "default")
            return source
        return None if name else templates

    def check(self, token: int) -> None:
        """Refuse what is no token of the model."""
        if not 0 <= token < self.n_vocab:
            raise EngineError(f"token {token} is not in the vocabulary of {self.n_vocab} tokens")


_copies: weakref.WeakKeyDictionary[PreTrainedTokenizerBase, HuggingFaceTokenizer]
_copies = weakref.WeakKeyDictionary()
_copying = threading.Lock()


def copy_of(tokenizer: PreTrainedTokenizerBase, n_vocab: int, name: str) -> HuggingFaceTokenizer:
    """Return a copy of a tokenizer, shared with whoever uses it with the same number of tokens.

    Raises:
        ConfigurationError: It is not a fast tokenizer, or of a kind that is not known here.
    """
    with _copying:
        copy = _copies.get(tokenizer)
        if copy is None or (copy.n_vocab, copy.size) != (n_vocab, len(tokenizer)):
            copy = _copies[tokenizer] = HuggingFaceTokenizer(tokenizer, n_vocab, name)
        return copy


class _Spelling:
    """How a vocabulary spells bytes."""

    def __init__(self, *, byte_level: bool, byte_fallback: bool) -> None:
        self._byte_level = byte_level
        self._byte_fallback = byte_fallback

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer, name: str) -> _Spelling:
        """Find out by the parts of the decoder."""
        decoder = backend.decoder
        state: dict[str, Any] = json.loads(decoder.__getstate__()) if decoder else {}
        parts = state.get("decoders", [state])
        kinds = {part.get("type") for part in parts}
        spaced = any("\u2581" in json.dumps(part, ensure_ascii=False) for part in parts)
        if not kinds <= {"ByteLevel"} and not spaced:
            raise ConfigurationError(
                f"the tokenizer of {name} spells its tokens in an unknown way (its decoder is "
                f"{state.get('type', 'missing')}); take a model with byte-level BPE or "
                "SentencePiece"
            )
        return cls(byte_level="ByteLevel" in kinds, byte_fallback="ByteFallback" in kinds)

    def bytes_of(self, spelled: str) -> bytes:
        if self._byte_level:
            return b"".join(_BYTES.get(c) or c.encode() for c in spelled)
        if self._byte_fallback and len(spelled) == 6 and spelled[:3] == "<0x" and spelled[5] == ">":
            return bytes([int(spelled[3:5], 16)])
        return spelled.replace("\u2581", " ").encode()


def _byte_characters() -> dict[str, bytes]:
    """Return the characters that byte-level vocabularies write bytes as.

    Bytes that Latin-1 prints stand for themselves, the others for the characters from 256 on.
    """
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printed]
    table = {chr(byte): bytes([byte]) for byte in printed}
    return table | {chr(256 + n): bytes([byte]) for n, byte in enumerate(others)}


_BYTES = _byte_characters()


def _is_control(token: tokenizers.AddedToken) -> bool:
    """Whether a token is a control token: by its mark, or by its looks as for llama.cpp.

    Some publishers leave the mark out, and the GGUF file of the same model has it.
    """
    text: str = token.content
    looks = (text.startswith("<|") and text.endswith("|>")) or (
        text.startswith("<\uff5c") and text.endswith("\uff5c>")
    )
    return bool(token.special) or looks
