"""Choosing one of k candidates by self-consistency (paper section 3.1).

Embed the candidates, S = E E^T on L2-normalised rows, softmax each row, and take the candidate
with the lowest self-alignment, j* = argmin_j softmax(S_j)_j. As S_jj = 1, that is the candidate
whose similarities to the others have the largest sum of exponentials: the one that the others
agree with most.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Protocol
from zlib import crc32

import numpy as np
import numpy.typing as npt

from specguard_chains.decoding.arrays import FloatArray
from specguard_chains.errors import ConfigurationError

Vectors = npt.NDArray[np.floating[Any]]


class Encoder(Protocol):
    """Embeds texts."""

    def __call__(self, texts: Sequence[str]) -> FloatArray:
        """Return one vector per text, shape (len(texts), dimensions); any length.

        Several requests may ask it at a time.
        """
        ...


class HashedNgrams:
    """Counts of words, numbers and character trigrams, hashed into a fixed number of dimensions.

    Needs no model and no download, and sees what matters between solutions of one problem: the
    same numbers and words. Signs come from the hash too, so that collisions cancel on average.
    """

    asks_others = False
    """See `Selector.asks_others`."""

    def __init__(self, dimensions: int = 4096) -> None:
        """Hash into this many dimensions."""
        self.dimensions = dimensions

    def __call__(self, texts: Sequence[str]) -> FloatArray:
        """See `Encoder`."""
        vectors = np.zeros((len(texts), self.dimensions), dtype=np.float32)
        for vector, text in zip(vectors, texts, strict=True):
            normal = " ".join(text.lower().split())
            trigrams = [normal[i : i + 3] for i in range(len(normal) - 2)]
            numbers = re.findall(r"\d+(?:\.\d+)?", normal)
            for feature in normal.split() + numbers + trigrams:
                code = crc32(feature.encode())
                vector[code % self.dimensions] += 1.0 if code >> 31 else -1.0
        return vectors


class Selector:
    """Picks the candidate that the others agree with most."""

    def __init__(self, encoder: Encoder | None = None) -> None:
        """Compare texts by this encoder; hashed n-grams if none is given."""
        self.encoder = encoder or HashedNgrams()

    @property
    def asks_others(self) -> bool:
        """See `Verifier.asks_others`: the encoder may, unless it says that it does not."""
        return bool(getattr(self.encoder, "asks_others", True))

    def __call__(self, texts: Sequence[str]) -> int:
        """Return the index of the most consistent text; the lowest one among equals."""
        if all(text == texts[0] for text in texts):
            return 0
        return lowest_self_alignment(_checked(self.encoder(texts), len(texts)))


def _checked(vectors: object, n: int) -> Vectors:
    """Return what an encoder gave as an array of n rows.

    Raises:
        ConfigurationError: It is no such thing.
    """
    try:
        array = np.asarray(vectors, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"the encoder must return one vector of numbers for each text, not {vectors!r:.80}"
        ) from error
    if array.ndim != 2 or len(array) != n:
        raise ConfigurationError(
            f"the encoder must return one vector for each of {n} texts; what it returned has the "
            f"shape {array.shape}"
        )
    if not np.isfinite(array).all():
        raise ConfigurationError("the encoder returned numbers that are not finite; take another")
    return array


def lowest_self_alignment(embeddings: Vectors) -> int:
    """Return argmin_j softmax(S_j)_j for embeddings of shape (k, dimensions)."""
    vectors = embeddings.astype(np.float64)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    # A text without features is like others without any, and unlike all the rest.
    unit = np.hstack([vectors, lengths == 0]) / np.where(lengths, lengths, 1)
    similarity = unit @ unit.T
    alignment = np.exp(np.diag(similarity)) / np.exp(similarity).sum(axis=1)
    # Equal candidates must tie whatever the rounding of their sums.
    return int(np.argmax(alignment <= alignment.min() + 1e-9))
