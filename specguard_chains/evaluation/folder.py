"""The folder of a run: its settings, and the results that it appends to as they come.

A run that ends, however it ends, can be gone on with: what is recorded is never computed again.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

from specguard_chains.errors import EvaluationError
from specguard_chains.evaluation.results import Key, Result
from specguard_chains.evaluation.settings import RunSettings

logger = logging.getLogger(__name__)

RESULTS, SETTINGS, LOCK = "results.jsonl", "settings.json", "run.lock"


class ResultsLog:
    """The results of a run, in memory and on disk."""

    def __init__(self, file: BinaryIO, results: Mapping[Key, Result]) -> None:
        """Go on with what there is; the file stands at its end."""
        self._file = file
        self._results = dict(results)

    def __contains__(self, key: Key) -> bool:
        return key in self._results

    def __len__(self) -> int:
        return len(self._results)

    def get(self, key: Key) -> Result | None:
        """Return a result, None if it is not there yet."""
        return self._results.get(key)

    def append(self, result: Result) -> None:
        """Record a result; it is on the disk when this returns."""
        self._file.write(json.dumps(result.to_dict()).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._results[result.key] = result


@contextmanager
def open_run(folder: Path, settings: RunSettings) -> Iterator[ResultsLog]:
    """Give the results of a run that is new, or that is gone on with.

    Raises:
        EvaluationError: The folder cannot be written, is in use, or is that of a run with other
            settings.
    """
    with _locked(folder), (folder / RESULTS).open("a+b") as file:
        _settle(folder, settings)
        yield ResultsLog(file, {result.key: result for result in _read_whole_lines(file)})


def read_results(folder: Path) -> list[Result]:
    """Return the results of a run, which may be going on; a line in the making is left out.

    Raises:
        EvaluationError: There are none, or a line is damaged.
    """
    path = folder / RESULTS
    try:
        whole, _, _ = path.read_bytes().rpartition(b"\n")
    except OSError as error:
        raise EvaluationError(f"{folder} has no results ({error}); run the bench first") from error
    return list(_parse(whole, path))


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other runs out of the folder, which is made if it is not there."""
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


def _settle(folder: Path, settings: RunSettings) -> None:
    """Write the settings of the run, together with those that it goes on with."""
    path = folder / SETTINGS
    if path.exists():
        settings = RunSettings.load(path).joined(settings, folder)
    elif (folder / RESULTS).stat().st_size:
        raise EvaluationError(
            f"{folder} has results, but no {SETTINGS} that says how they came about; choose "
            "another folder"
        )
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(settings.to_json(), encoding="utf-8")
    unfinished.replace(path)


def _read_whole_lines(file: BinaryIO) -> Iterator[Result]:
    """Yield the results of a file, which is cut after the last line that is whole."""
    file.seek(0)
    content = file.read()
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        logger.warning(
            "the last line of %s is not whole, as the run was killed while it was written; it is "
            "dropped, and its problem solved again",
            file.name,
        )
        file.truncate(len(whole))
    yield from _parse(whole, Path(file.name))


def _parse(lines: bytes, path: Path) -> Iterator[Result]:
    for number, line in enumerate(lines.splitlines(), start=1):
        try:
            yield Result.from_dict(json.loads(line))
        except (ValueError, EvaluationError) as error:
            raise EvaluationError(f"line {number} of {path} is damaged: {error}") from error
