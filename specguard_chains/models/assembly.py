"""A model file put together from pieces, so that an interruption costs one piece at most.

The bytes grow in `<file>.partial`; `<file>.journal` names the pieces that are completely in it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from specguard_chains.errors import ModelIntegrityError
from specguard_chains.models.cache import CHUNK_BYTES, partial_path, write_whole


@dataclass(frozen=True, slots=True)
class Piece:
    """One piece that is completely in the partial file."""

    name: str
    size: int
    sha256: str


class Assembly:
    """The partial file of one model, and the journal of what is in it."""

    def __init__(self, path: Path, *, expected: Iterable[str], size: int) -> None:
        """Take up what an earlier run left: the journal's pieces that are still intact.

        Args:
            path: Where the finished file will lie.
            expected: The names of all pieces, in order.
            size: Bytes of the finished file.
        """
        self.partial = partial_path(path)
        self.journal = path.with_name(f"{path.name}.journal")
        self.size = size
        self.pieces = self._intact(list(expected))

    @property
    def done(self) -> int:
        """Bytes of the complete pieces."""
        return sum(piece.size for piece in self.pieces)

    def __contains__(self, name: str) -> bool:
        return any(piece.name == name for piece in self.pieces)

    def append(self, name: str, source: IO[bytes]) -> None:
        """Add a piece and record it; a failure on the way leaves the pieces before it.

        Raises:
            ModelIntegrityError: The pieces together are longer than the file.
        """
        start = self.done
        digest = hashlib.sha256()
        with self.partial.open("r+b" if self.partial.exists() else "w+b") as sink:
            sink.truncate(start)
            sink.seek(start)
            while chunk := source.read(CHUNK_BYTES):
                if sink.tell() + len(chunk) > self.size:
                    raise ModelIntegrityError(
                        f"{name} makes {self.partial} longer than {self.size:,} bytes: "
                        "it is not a piece of that model"
                    )
                digest.update(chunk)
                sink.write(chunk)
            sink.flush()
            os.fsync(sink.fileno())  # the journal must never be ahead of the bytes
            piece = Piece(name, sink.tell() - start, digest.hexdigest())
        self.pieces.append(piece)
        write_whole(self.journal, json.dumps([asdict(piece) for piece in self.pieces]))

    def discard(self) -> None:
        """Remove the partial file and the journal."""
        self.partial.unlink(missing_ok=True)
        self.journal.unlink(missing_ok=True)

    def _intact(self, expected: list[str]) -> list[Piece]:
        """Return the leading pieces of the journal whose bytes are still in the partial file."""
        intact: list[Piece] = []
        try:
            recorded = [
                Piece(**entry) for entry in json.loads(self.journal.read_text(encoding="utf-8"))
            ]
            with self.partial.open("rb") as stream:
                for name, piece in zip(expected, recorded, strict=False):
                    data_hash = hashlib.sha256(stream.read(piece.size)).hexdigest()
                    if (name, data_hash) != (piece.name, piece.sha256):
                        break
                    intact.append(piece)
        except (OSError, ValueError, TypeError):
            pass  # no journal or a broken one: what was read so far is what counts
        return intact
