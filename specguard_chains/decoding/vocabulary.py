"""What a vocabulary is known by: the same for the same tokens, whichever library has read them.

Two engines exchange tokens if their fingerprints are equal, and text if not. Libraries differ in
how they spell a token (" the" is `Ġthe`, `▁the` or the bytes themselves) and in how many ids
without meaning they append to fill the model's matrix up. Neither changes what a token means.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a vocabulary is known by."""

    fingerprint: str
    """SHA-256 as hexadecimal digits."""
    n_tokens: int
    """Ids up to the last one that has a meaning; equal where the fingerprints are."""

    @classmethod
    def of(cls, tokens: Iterable[bytes]) -> Vocabulary:
        """Identify a vocabulary.

        Args:
            tokens: For each id in order what it stands for: the bytes of text that a token adds to
                an answer, or how a control token is spelled. Which tokens are control tokens does
                not count, as libraries and publishers do not agree on it. An id without a token
                is b"", or spelled `[PAD7]` if its number is 7, as in GGUF files.
        """
        digest = hashlib.sha256()
        n_tokens = 0
        for number, meaning in enumerate(tokens):
            if meaning not in (b"", b"[PAD%d]" % number):
                skipped = number - n_tokens  # they count only if another one follows them
                digest.update(b"%d.%d." % (skipped, len(meaning)) + meaning)
                n_tokens = number + 1
        return cls(digest.hexdigest(), n_tokens)
