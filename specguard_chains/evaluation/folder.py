"""The folder of a run: its settings, and the results that it appends to as they come.

A run that ends, however it ends, can be gone on with: what is recorded is never computed again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specguard_chains.errors import EvaluationError
from specguard_chains.evaluation.judging import JudgedBy
from specguard_chains.evaluation.lines import Lines, open_lines, read_lines
from specguard_chains.evaluation.problems import Problem
from specguard_chains.evaluation.results import Key, Result
from specguard_chains.evaluation.settings import RunSettings
from specguard_chains.evaluation.whole_files import replace_file

RESULTS, SETTINGS = "results.jsonl", "settings.json"


class ResultsLog:
    """The results of a run, in memory and on disk."""

    def __init__(self, lines: Lines[Result], settings: RunSettings) -> None:
        """Go on with what there is."""
        self._lines = lines
        self._settings = settings
        self._results = {result.key: result for result in lines.records}
        self._digests = {
            (result.data, result.problem): result.problem_digest
            for result in lines.records
            if result.problem_digest is not None
        }

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

    def check(self, data: str, problem: Problem) -> None:
        """Refuse a problem that is another one than the results of its id are of, by any arm.

        Raises:
            EvaluationError: It is.
        """
        if self._digests.get((data, problem.id), problem.digest) != problem.digest:
            raise EvaluationError(
                f"{self._lines.path} has results of another problem {problem.id!r} of {data}: its "
                "question, answer or choices have changed since. Choose another folder, give the "
                "problem an id of its own, or take the data as they were"
            )

    def note(self, arm: str, found: JudgedBy) -> None:
        """Record what was found for an arm to judge steps by, see `judging.judged_by`.

        Raises:
            EvaluationError: Its results so far were judged by something else.
        """
        folder = self._lines.path.parent
        begun = any(label == arm for _, _, label in self._results)
        settings = self._settings.judging(arm, found, folder, begun=begun)
        if settings != self._settings:
            _write(settings, folder)
            self._settings = settings


@contextmanager
def open_run(folder: Path, settings: RunSettings) -> Iterator[ResultsLog]:
    """Give the results of a run that is new, or that is gone on with.

    Raises:
        EvaluationError: The folder cannot be written, is in use, or is that of a run with other
            settings.
    """
    with open_lines(folder / RESULTS, _result) as lines:
        settings = _settled(folder, settings, begun=bool(lines.records))
        _write(settings, folder)
        yield ResultsLog(lines, settings)


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


def _settled(folder: Path, settings: RunSettings, *, begun: bool) -> RunSettings:
    """Return the settings of the run, together with those that it goes on with.

    Settings without a result are those of a command that came to nothing, and bind nobody.
    """
    path = folder / SETTINGS
    if begun and path.exists():
        return RunSettings.load(path).joined(settings, folder)
    if begun:
        raise EvaluationError(
            f"{folder} has results, but no {SETTINGS} that says how they came about; choose "
            "another folder"
        )
    return settings


def _write(settings: RunSettings, folder: Path) -> None:
    replace_file(folder / SETTINGS, settings.to_json())


def _result(line: bytes) -> Result:
    return Result.from_dict(json.loads(line))
