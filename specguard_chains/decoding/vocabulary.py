"""A vocabulary's fingerprint: the same for the same tokens, whichever library has read them.

Two engines exchange tokens if their fingerprints are equal, and text if not. Libraries differ in
how they spell a token (" the" is `Ġthe`, `▁the` or the bytes themselves) and in how many ids
without meaning they append to fill the model's matrix up. Neither changes what a token means.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def fingerprint(tokens: Iterable[bytes]) -> str:
    """Return the SHA-256 of a vocabulary as hexadecimal digits.

    Args:
        tokens: For each id in order what it stands for: the bytes of text that a token adds to an
            answer, or how a control token is spelled. Which tokens are control tokens does not
            count, as libraries and publishers do not agree on it. An id without a token is b"",
            or spelled `[PAD7]` if its number is 7, as in GGUF files.
    """
    digest = hashlib.sha256()
    skipped = 0  # ids without meaning count only if another one follows them
    for number, meaning in enumerate(tokens):
        if meaning in (b"", b"[PAD%d]" % number):
            skipped += 1
            continue
        digest.update(b"%d.%d." % (skipped, len(meaning)) + meaning)
        skipped = 0
    return digest.hexdigest()
