"""Records in a file of JSON lines, which a run that is killed can go on with.

A line that was being written at that time is torn: it is no record, and more are added in its
place.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar

from filelock import FileLock, Timeout

from specguard_chains.errors import EvaluationError

logger = logging.getLogger(__name__)

LOCK = "run.lock"
Record = TypeVar("Record")
Parse = Callable[[bytes], Record]
"""A line -> its record, or a ValueError or EvaluationError that says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Lines(Generic[Record]):
    """A file that lines are added to, and the records that it had before."""

    path: Path
    records: tuple[Record, ...]
    _file: BinaryIO

    def append(self, line: str) -> None:
        """Add a line; it is on the disk when this returns.

        Raises:
            EvaluationError: The file cannot be written.
        """
        try:
            self._file.write(line.encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise EvaluationError(f"{self.path} cannot be written: {error}") from error


def read_lines(path: Path, parse: Parse[Record]) -> list[Record]:
    """Return a file's records. Lines may be added meanwhile.

    Raises:
        EvaluationError: The file cannot be read, or a line is damaged; the message names it.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise EvaluationError(f"{path} cannot be read: {error}") from error
    return _parsed(_whole(content), path, parse)


@contextmanager
def open_lines(path: Path, parse: Parse[Record]) -> Iterator[Lines[Record]]:
    """Give a file, which is made if it is not there, to add to; its folder is locked meanwhile.

    Raises:
        EvaluationError: Another run writes to the folder, the file cannot be read or written, or a
            line is damaged; the message names it.
    """
    with locked(path.parent):
        try:
            file = path.open("a+b")
        except OSError as error:
            raise EvaluationError(f"{path} cannot be written: {error}") from error
        with file:
            yield Lines(path, tuple(_parsed(_cut(file, path), path, parse)), file)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other runs out of a folder, which is made if it is not there.

    Raises:
        EvaluationError: One is in it, or the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = FileLock(folder / LOCK, timeout=0).acquire()
    except Timeout:
        raise EvaluationError(
            f"another run is writing to {folder}; wait for its end or choose another folder"
        ) from None
    except OSError as error:
        raise EvaluationError(f"{folder} cannot be written ({error}); choose another") from error
    with held:
        yield


def _whole(content: bytes) -> bytes:
    """Return a file's content up to the end of its last whole line."""
    return content[: content.rfind(b"\n") + 1]


def _cut(file: BinaryIO, path: Path) -> bytes:
    """Return the whole lines of a file, which ends with them from now on."""
    file.seek(0)
    content = file.read()
    if (whole := _whole(content)) != content:
        logger.warning(
            "the last line of %s is not whole, as the run was killed while it was written; it is "
            "dropped, and what it was to hold is computed again",
            path,
        )
        file.truncate(len(whole))
    return whole


def _parsed(lines: bytes, path: Path, parse: Parse[Record]) -> list[Record]:
    records = []
    for number, line in enumerate(lines.split(b"\n")[:-1], start=1):
        try:
            records.append(parse(line))
        except (ValueError, EvaluationError) as error:
            raise EvaluationError(
                f"line {number} of {path} is damaged: {error}; mend or remove it"
            ) from error
    return records
