"""Where the texts of passages stand among a prompt's tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specguard_chains.decoding.arrays import IntArray
from specguard_chains.decoding.cache import Tokenizer
from specguard_chains.decoding.grounding import Span
from specguard_chains.errors import ConfigurationError

NO_TEXT = b"\xff"
"""Stands for a control token: no text has this byte, so no passage reaches across one."""
NOBODY = -1


def locate(
    passages: Sequence[str], tokens: Sequence[int], tokenizer: Tokenizer
) -> tuple[tuple[Span, ...], ...]:
    """Return where each passage stands in a prompt: its spans of tokens, in every place.

    White space around a passage does not matter. A token that a passage only begins or ends in is
    the passage's as well; one that two passages meet in is the first one's. A passage within the
    text of a longer one stands where that one does not.

    Raises:
        ConfigurationError: A passage is empty, given twice, or does not stand in the prompt.
    """
    _check(passages)
    pieces = [tokenizer.token_bytes(token) or NO_TEXT for token in tokens]
    text = b"".join(pieces)
    sought = [_as_tokenized(passage.strip(), tokenizer) for passage in passages]
    owners = np.full(len(text), NOBODY, dtype=np.intp)  # of every byte
    for number in sorted(range(len(sought)), key=lambda i: -len(sought[i])):
        _claim(owners, number, text, sought[number])
    of_token = _owners_of_tokens(owners, [len(piece) for piece in pieces])
    spans = tuple(_spans(of_token == number) for number in range(len(passages)))
    for number, found in enumerate(spans):
        if not found:
            raise ConfigurationError(
                f"{_named(passages, number)} does not stand in the prompt, or only within another "
                "passage; put its text there to the letter, not escaped as in JSON, where the chat "
                "template does not drop it and no special token cuts it"
            )
    return spans


def _check(passages: Sequence[str]) -> None:
    if isinstance(passages, str):
        raise ConfigurationError(f"passages must be a list of texts, not the text {passages!r:.60}")
    first: dict[str, int] = {}
    for number, passage in enumerate(passages):
        if not isinstance(passage, str):
            raise ConfigurationError(
                f"passage {number + 1} is of type {type(passage).__name__}; give its text"
            )
        if not passage.strip():
            raise ConfigurationError(f"passage {number + 1} is empty; leave it out")
        same = first.setdefault(passage.strip(), number)
        if same != number:
            raise ConfigurationError(
                f"{_named(passages, number)} is the same as passage {same + 1}; give it once"
            )


def _named(passages: Sequence[str], number: int) -> str:
    words = passages[number].split()
    return f"passage {number + 1} ({' '.join(words[:6])[:60]!r}{'…' if words[6:] else ''})"


def _as_tokenized(text: str, tokenizer: Tokenizer) -> bytes:
    """Return the bytes of a text's tokens: some vocabularies normalise what they tokenize."""
    return b"".join(tokenizer.token_bytes(t) or NO_TEXT for t in tokenizer.encode_text(text))


def _claim(owners: IntArray, number: int, text: bytes, sought: bytes) -> None:
    """Make all free places of a passage in the text its own."""
    start = text.find(sought)
    while start >= 0:
        place = owners[start : start + len(sought)]
        free = (place == NOBODY).all()
        if free:
            place[:] = number
        start = text.find(sought, start + (len(sought) if free else 1))


def _owners_of_tokens(owners: IntArray, sizes: Sequence[int]) -> IntArray:
    """Return whose each token is: the owner of its first byte that has one."""
    of_token = np.full(len(sizes), NOBODY, dtype=np.intp)
    owned = np.flatnonzero(owners != NOBODY)[::-1]  # what is assigned last stays: the first byte's
    of_token[np.searchsorted(np.cumsum(sizes), owned, side="right")] = owners[owned]
    return of_token


def _spans(members: IntArray) -> tuple[Span, ...]:
    """Return the runs of truth in an array."""
    edges = np.flatnonzero(np.diff(members.astype(np.int8), prepend=0, append=0))
    return tuple((int(start), int(end)) for start, end in edges.reshape(-1, 2))
