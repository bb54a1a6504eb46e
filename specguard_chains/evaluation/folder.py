"""The folder of a run: its settings, and the results that it appends to as they come.

A run that ends, however it ends, can be gone on with: what is recorded is never computed again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specguard_chains.errors import EvaluationError
from specguard_chains.evaluation.lines import Lines, open_lines, read_lines
from specguard_chains.evaluation.results import Key, Result
from specguard_chains.evaluation.settings import RunSettings

RESULTS, SETTINGS = "results.jsonl", "settings.json"


class ResultsLog:
    """The results of a run, in memory and on disk."""

    def __init__(self, lines: Lines[Result]) -> None:
        """Go on with what there is."""
        self._lines = lines
        self._results = {result.key: result for result in lines.records}

    def __contains__(self, key: Key) -> bool:
        return key in self._results

    def __len__(self) -> int:
        return len(self._results)

    def get(self, key: Key) -> Result | None:
        """Return a result, None if it is not there yet."""
        return self._results.get(key)

    def append(self, result: Result) -> None:
        """Record a result; it is on the disk when this returns."""
        self._lines.append(json.dumps(result.to_dict()))
        self._results[result.key] = result


@contextmanager
def open_run(folder: Path, settings: RunSettings) -> Iterator[ResultsLog]:
    """Give the results of a run that is new, or that is gone on with.

    Raises:
        EvaluationError: The folder cannot be written, is in use, or is that of a run with other
            settings.
    """
    with open_lines(folder / RESULTS, _result) as lines:
        _settle(folder, settings, begun=bool(lines.records))
        yield ResultsLog(lines)


def read_results(folder: Path) -> list[Result]:
    """Return the results of a run, which may be going on; a line in the making is left out.

    Raises:
        EvaluationError: There are none, or a line is damaged.
    """
    if not (path := folder / RESULTS).exists():
        raise EvaluationError(
            f"{folder} has no results: there is no {RESULTS}; run the bench first"
        )
    return read_lines(path, _result)


def _settle(folder: Path, settings: RunSettings, *, begun: bool) -> None:
    """Write the settings of the run, together with those that it goes on with."""
    path = folder / SETTINGS
    if path.exists():
        settings = RunSettings.load(path).joined(settings, folder)
    elif begun:
        raise EvaluationError(
            f"{folder} has results, but no {SETTINGS} that says how they came about; choose "
            "another folder"
        )
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(settings.to_json(), encoding="utf-8")
    unfinished.replace(path)


def _result(line: bytes) -> Result:
    return Result.from_dict(json.loads(line))
