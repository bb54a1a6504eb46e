"""The figures of a run in two files that hold no text of its problems.

summary.json has the figures of every arm on every data set and on all, with their uncertainty;
problems.csv has a line for every problem and arm. Equal results give equal files, in whatever order
they came.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from io import StringIO
from pathlib import Path
from typing import Any

from specguard_chains.errors import EvaluationError
from specguard_chains.evaluation.figures import (
    Figures,
    ProblemKey,
    Results,
    control_figures,
    figures_of,
    judged_steps,
    pairwise_figures,
)
from specguard_chains.evaluation.folder import SETTINGS, read_results
from specguard_chains.evaluation.results import Result
from specguard_chains.evaluation.settings import RunSettings
from specguard_chains.evaluation.whole_files import replace_file

SUMMARY, PROBLEMS = "summary.json", "problems.csv"
TARGET = "target"
DIGITS = 6
"""Significant digits of a figure: more of them differ between machines."""
COLUMNS = (
    *("data", "problem", "arm", "right", "error", "seconds", "tokens"),
    *("accepted_steps", "judged_steps", "started"),
)


@dataclass(frozen=True)
class Run:
    """The settings of a run and its results, in the order of settings and problems."""

    settings: RunSettings
    results: tuple[Result, ...]

    @classmethod
    def read(cls, folder: Path) -> Run:
        """Return a run, which may be going on.

        Raises:
            EvaluationError: There are no results, or a file is damaged; the message names the line.
        """
        settings = RunSettings.load(folder / SETTINGS)
        latest = {result.key: result for result in read_results(folder)}
        if not latest:
            raise EvaluationError(f"{folder} has no results yet; run the bench first")
        by_data, by_arm = _place_in(settings.data), _place_in(list(settings.arms))

        def place(result: Result) -> tuple[Any, ...]:
            return by_data(result.data), _natural(result.problem), by_arm(result.arm)

        return cls(settings, tuple(sorted(latest.values(), key=place)))

    @cached_property
    def data(self) -> tuple[str, ...]:
        """Names of the data sets that there are results of."""
        return tuple(dict.fromkeys(result.data for result in self.results))

    @cached_property
    def arms(self) -> tuple[str, ...]:
        """Labels of the arms that there are results of."""
        labels = dict.fromkeys(result.arm for result in self.results)
        return tuple(sorted(labels, key=_place_in(list(self.settings.arms))))

    @cached_property
    def target(self) -> str | None:
        """Label of the arm in which the target writes alone, if there is one."""
        alone = [arm for arm in self.arms if self.decoder(arm) == TARGET]
        return TARGET if TARGET in alone else next(iter(alone), None)

    def decoder(self, arm: str) -> str:
        """Return the name of an arm's decoder."""
        usual = self.settings.defaults.get("decoder", "specguard")
        return str(self.settings.arms.get(arm, {}).get("decoder", usual))

    def controlled(self, arm: str) -> str | None:
        """Return the label of the arm that a control is matched to, None for other arms."""
        label: str | None = self.settings.arms.get(arm, {}).get("controls")
        return label

    def by_arm(self, data: Iterable[str] | None = None) -> dict[str, dict[ProblemKey, Result]]:
        """Return each arm's results by problem, on some data sets or on all."""
        wanted = set(self.data if data is None else data)
        grouped: dict[str, dict[ProblemKey, Result]] = {arm: {} for arm in self.arms}
        for result in self.results:
            if result.data in wanted:
                grouped[result.arm][result.data, result.problem] = result
        return {arm: results for arm, results in grouped.items() if results}


def summarise(folder: Path) -> Figures:
    """Write summary.json and return the figures that are in it.

    Counts are totals; tokens drafted, kept and regenerated too. Seconds, tokens of the answer and
    steps are means a problem. What does not exist is None, such as a ratio without a target.

    Raises:
        EvaluationError: There are no results, or they are damaged.
    """
    figures = summary_of(Run.read(folder))
    text = json.dumps(figures, indent=1, allow_nan=False) + "\n"
    replace_file(folder / SUMMARY, text)
    plain: Figures = json.loads(text)  # as who reads the file will have it
    return plain


def summary_of(run: Run) -> Figures:
    """Return the figures of a run, for each data set and for all together.

    Those of all are over the problems that all of their arms have attempted: other shares of easy
    and hard data sets are no difference between arms. Arms that lack most problems are left out.
    So are those under "pairwise", which has each arm beside every other one.
    """
    data = {name: {"decoders": _rows(run, run.by_arm([name]))} for name in run.data}
    pooled = _pooled(run)
    overall = data[run.data[0]]["decoders"] if len(data) == 1 else _rows(run, pooled)
    pairwise = pairwise_figures(pooled)
    figures: Figures = _rounded(
        {"target": run.target, "data": data, "decoders": overall, "pairwise": pairwise}
    )
    invocations = [each.public() for each in run.settings.invocations]
    return {"settings": asdict(run.settings) | {"invocations": invocations}, **figures}


def per_problem(folder: Path) -> Path:
    """Write problems.csv, a line for each problem and arm; return the file.

    Raises:
        EvaluationError: There are no results, or they are damaged.
    """
    path = folder / PROBLEMS
    replace_file(path, _table(Run.read(folder).results))
    return path


def _rows(run: Run, results: dict[str, dict[ProblemKey, Result]]) -> dict[str, Figures]:
    target: Results | None = results.get(run.target) if run.target else None
    rows = {arm: figures_of(own, target) for arm, own in results.items()}
    for arm, row in rows.items():
        label = run.controlled(arm)
        controlled = results.get(label) if label else None
        row["control"] = (
            control_figures(results[arm], label, controlled) if label and controlled else None
        )
    return rows


def _pooled(run: Run) -> dict[str, dict[ProblemKey, Result]]:
    """Return results on the problems that all arms have attempted, of the arms that have most.

    An arm is left out if with it less than half of the most that an arm has attempted would remain.
    """
    by_arm = run.by_arm()
    # The target first among equals: the others are compared with it.
    first, *others = sorted(by_arm, key=lambda arm: (-len(by_arm[arm]), arm != run.target))
    kept, common = {first}, set(by_arm[first])
    for arm in others:
        shared = common & by_arm[arm].keys()
        if 2 * len(shared) >= len(by_arm[first]):
            kept.add(arm)
            common = shared
    return {
        arm: {key: result for key, result in own.items() if key in common}
        for arm, own in by_arm.items()
        if arm in kept
    }


def _table(results: Iterable[Result]) -> str:
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(map(_line, results))
    return text.getvalue()


def _line(result: Result) -> Iterator[Any]:
    yield from (result.data, result.problem, result.arm)
    yield from (int(result.right), int(result.error is not None))
    yield from (round(result.seconds, 3), result.tokens)
    judged = judged_steps([result])
    yield from (sum(step.accepted for step in judged), len(judged))
    yield None if result.started is None else round(result.started, 3)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(part) for part in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _natural(text: str) -> tuple[tuple[int, int | str], ...]:
    """Return by what texts are sorted so that gsm8k/9 comes before gsm8k/10."""
    parts = re.findall(r"\d+|\D+", text)
    return tuple((0, int(part)) if part.isdecimal() else (1, part) for part in parts)


def _place_in(order: Sequence[str]) -> Callable[[str], tuple[int, str]]:
    """Return by what names are sorted: their place in a list, those that are not in it last."""
    places = {name: place for place, name in enumerate(order)}
    return lambda name: (places.get(name, len(places)), name)
