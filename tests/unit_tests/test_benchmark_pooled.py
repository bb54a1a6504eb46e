"""Runs over other problems in one table: right answers of all, times of those who took turns."""

from __future__ import annotations

import csv
from collections.abc import Callable
from importlib import util
from pathlib import Path
from types import ModuleType

import pytest

PATH = Path(__file__).parents[2] / "benchmarks" / "pooled.py"
COLUMNS = (
    *("data", "problem", "arm", "right", "error", "seconds", "tokens"),
    *("accepted_steps", "judged_steps", "started"),
)
Add = Callable[..., Path]


@pytest.fixture(scope="module")
def pooled() -> ModuleType:
    spec = util.spec_from_file_location("benchmark_pooled", PATH)
    assert spec and spec.loader
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def add(tmp_path: Path) -> Add:
    """Writes a run: (problem, arm, right, seconds, started) each."""

    def add(name: str, *rows: tuple[str, str, int, float, float | str]) -> Path:
        (tmp_path / name).mkdir()
        with (tmp_path / name / "problems.csv").open("w", newline="", encoding="utf-8") as file:
            lines = csv.writer(file)
            lines.writerow(COLUMNS)
            for problem, arm, right, seconds, started in rows:
                lines.writerow(["gsm8k", problem, arm, right, 0, seconds, 9, 1, 2, started])
        return tmp_path / name

    return add


def test_right_answers_are_counted_over_what_all_arms_have_solved(
    pooled: ModuleType, add: Add
) -> None:
    one = add("one", ("1", "target", 1, 2.0, 0.0), ("1", "draft", 0, 1.0, 9.0))
    two = add("two", ("2", "target", 1, 2.0, 0.0), ("2", "draft", 1, 1.0, 9.0))
    more = add("more", ("3", "target", 1, 2.0, 0.0))
    arms = pooled.read([one, two, more], [])
    assert {arm: pooled.rights(rows) for arm, rows in arms.items()} == {
        "target": [True, True],
        "draft": [False, True],
    }
    *_, row = pooled.table(arms, "target")
    assert row.startswith("| draft | 1 | 1 | 50 ")


def test_times_are_compared_where_arms_took_turns_in_one_run(pooled: ModuleType, add: Add) -> None:
    together = add("together", ("1", "target", 1, 2.0, 50.0), ("1", "draft", 1, 1.0, 99.0))
    apart = add("apart", ("2", "target", 1, 2.0, 50.0), ("2", "draft", 1, 8.0, 5000.0))
    unknown = add("unknown", ("3", "target", 1, 2.0, ""), ("3", "draft", 1, 8.0, ""))
    arms = pooled.read([together, apart, unknown], [])
    ratio, n = pooled.time_ratio(arms["draft"], arms["target"])
    assert (ratio.value, n) == (0.5, 1)
    none = pooled.read([apart], [])
    assert pooled.times(none["draft"], none["target"]) == "–"


def test_a_problem_that_two_runs_have_solved_is_refused(pooled: ModuleType, add: Add) -> None:
    runs = [add(name, ("1", "target", 1, 2.0, 0.0)) for name in ("one", "two")]
    with pytest.raises(SystemExit, match="target has solved 1 twice"):
        pooled.read(runs, [])
    with pytest.raises(SystemExit, match="there is no arm draft"):
        pooled.read(runs[:1], ["target", "draft"])


def test_accuracy_is_drawn_against_time(pooled: ModuleType, add: Add) -> None:
    pytest.importorskip("matplotlib")
    rows = [(str(n), arm, n % 2, 2.0, 9.0 * n) for n in range(4) for arm in ("target", "draft")]
    drawing = pooled.frontier(pooled.read([add("run", *rows)], []), "target")
    assert drawing.startswith("<svg")
    assert "4 problems" in drawing
