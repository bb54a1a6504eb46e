"""`specguard bench` with toy models."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from specguard_chains import calibrations, engines
from specguard_chains.cli import app, bench, bench_progress
from specguard_chains.cli.bench_progress import Bar, Tally, in_words
from specguard_chains.decoding.calibration import Bounds, Calibration
from specguard_chains.decoding.engine import Engine
from specguard_chains.errors import ServerError
from specguard_chains.evaluation.folder import read_results
from tests.toy_engine import ToyEngine
from tests.unit_tests import toy_evaluation
from tests.unit_tests.toy_evaluation import ToyChecker, by_question

LIST = "target,draft,specguard-greedy"


class Checker(ToyChecker):
    def __enter__(self) -> Checker:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class Shelf:
    """Stands in for the engines that are loaded."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.engines = {
            "draft.gguf": ToyEngine(by_question(1), name="toy draft"),
            "target.gguf": ToyEngine(by_question(2), name="toy target"),
        }

    def load(self, model: Any, settings: Any, progress: Any) -> Engine:
        self.loaded.append(str(model))
        return self.engines[str(model)]


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> Shelf:
    shelf = Shelf()
    monkeypatch.setattr(engines, "load", shelf.load)
    monkeypatch.setattr(bench, "AnswerChecker", Checker)
    return shelf


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write(tmp_path / "toy.jsonl", 4)


def write(path: Path, n: int) -> Path:
    rows = (
        {"id": problem.id, "question": problem.question, "answer": problem.answer}
        for problem in toy_evaluation.problems(n)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def specguard(*arguments: Any) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def flags(data: Path, out: Path, *more: Any) -> list[Any]:
    models = ["--draft", "draft.gguf", "--target", "target.gguf"]
    shape = ["--max-tokens", 60, "--confidence-weight", 1, "--threshold", 0.76]
    return ["--data", data, "--out", out, "--decoders", LIST, *models, *shape, *more]


def flat(text: str) -> str:
    return " ".join(text.split())


def test_one_command_solves_and_reports(shelf: Shelf, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    result = specguard(*flags(data, out, "--limit", 3))
    assert result.exit_code == 0, result.output
    assert len(read_results(out)) == 9
    summary = json.loads((out / "summary.json").read_text())
    assert set(summary["data"]["toy"]["decoders"]) == set(LIST.split(","))
    assert (out / "report.md").read_text()
    assert (out / "report.html").read_text()
    correct = summary["decoders"]["draft"]["correct"]
    assert f"{correct}/3 = {correct / 3:.1%}" in result.stdout
    assert "accepted" in result.stdout
    assert f"in {out}: summary.json" in result.stdout
    assert len((out / "problems.csv").read_text().splitlines()) == 10
    progress = result.stderr.splitlines()
    assert [line.split("/")[0] for line in progress[-9:]] == [str(n) for n in range(1, 10)]
    assert progress[-9].startswith("1/9 toy/0 target: ")
    assert progress[-1].endswith("0 s left")


def test_the_same_command_solves_nothing_again(shelf: Shelf, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    specguard(*flags(data, out))
    before, loaded = read_results(out), len(shelf.loaded)
    result = specguard(*flags(data, out))
    assert result.exit_code == 0, result.output
    assert "nothing to solve: all 12 results are there" in result.stdout
    assert read_results(out) == before
    assert len(shelf.loaded) == loaded


def test_more_problems_and_data_sets_are_added(shelf: Shelf, data: Path, tmp_path: Path) -> None:
    out, other = tmp_path / "out", write(tmp_path / "other.jsonl", 2)
    specguard(*flags(data, out, "--limit", 1))
    result = specguard(*flags(data, out, "--limit", 1, "--skip", 1, "--data", other))
    assert result.exit_code == 0, result.output
    assert {(r.data, r.problem) for r in read_results(out)} == {
        *(("toy", "toy/0"), ("toy", "toy/1"), ("other", "toy/1"))
    }
    assert set(json.loads((out / "summary.json").read_text())["data"]) == {"toy", "other"}
    assert "all" in result.stdout


def test_reports_alone_need_results_only(shelf: Shelf, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "has no results" in specguard("--out", out, "--report-only").stderr
    specguard(*flags(data, out, "--limit", 1))
    for name in ("summary.json", "report.md", "report.html"):
        (out / name).unlink()
    loaded = len(shelf.loaded)
    result = specguard("--out", out, "--report-only")
    assert result.exit_code == 0, result.output
    assert (out / "summary.json").exists()
    assert (out / "report.html").exists()
    assert len(shelf.loaded) == loaded


def test_the_command_is_recorded(
    shelf: Shelf, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = flags(data, tmp_path / "out", "--limit", 1)
    monkeypatch.setattr(sys, "argv", ["/opt/bin/specguard", "bench", *map(str, arguments)])
    assert specguard(*arguments).exit_code == 0
    (told,) = json.loads((tmp_path / "out" / "settings.json").read_text())["invocations"]
    assert told["command"].startswith("specguard bench --data ./toy.jsonl --out ./out --decoders ")
    assert str(tmp_path) not in (tmp_path / "out" / "summary.json").read_text()


def test_settings_of_all_arms_and_of_one(shelf: Shelf, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    listed = "target,a=specguard:num_candidates=1:threshold=0.1"
    specguard(*flags(data, out, "--limit", 1, "--decoders", listed, "--seed", 5, "--top-k", 9))
    told = json.loads((out / "settings.json").read_text())
    assert told["seed"] == 5
    assert told["arms"]["a"]["threshold"] == 0.1
    assert told["arms"]["target"]["threshold"] == 0.76
    assert {arm["top_k"] for arm in told["arms"].values()} == {9}
    assert (told["draft"], told["max_tokens"]) == ("draft.gguf", 60)


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        (["--decoders", "target,slow"], 2, "--decoders: arm 'slow': there is no decoder 'slow'"),
        (["--decoders", "a=specguard:threshold=7"], 2, "arm 'a': threshold='7'"),
        (["--decoders", "target,draft-majority", "--temperature", "0"], 2, "arm 'draft-majority'"),
        (["--threshold", "7"], 2, "--threshold 7 is not possible"),
        (["--skip", "9"], 2, "toy.jsonl has no problems after the first 9"),
        (["--data", "none.jsonl"], 1, "none.jsonl is neither a file nor a known benchmark"),
        (["--limit", "0"], 2, "limit"),
    ],
)
def test_mistakes_are_told_before_anything_is_loaded(
    shelf: Shelf, data: Path, tmp_path: Path, changes: list[str], code: int, message: str
) -> None:
    result = specguard(*flags(data, tmp_path / "out", *changes))
    assert result.exit_code == code
    assert message in flat(result.stderr)
    assert not shelf.loaded
    assert not (tmp_path / "out").exists()


def test_an_arm_without_a_decoder_is_told_before_any_problem(
    shelf: Shelf, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    result = specguard(*flags(data, out, "--decoders", "target,draft,mine=rsd"))
    assert result.exit_code == 1
    assert "arm 'mine': no value head of toy draft is known" in flat(result.stderr)
    assert read_results(out) == []


def test_data_are_asked_for(tmp_path: Path) -> None:
    result = specguard("--out", tmp_path / "out")
    assert result.exit_code == 2
    assert "--data is missing" in result.stderr


def test_one_data_set_is_given_once(shelf: Shelf, data: Path, tmp_path: Path) -> None:
    result = specguard(*flags(data, tmp_path / "out", "--data", data))
    assert result.exit_code == 2
    assert "there is another one called toy" in flat(result.stderr)


def test_one_half_of_the_problems_is_run(shelf: Shelf, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = specguard(*flags(data, out, "--only", "odd"))
    assert result.exit_code == 0, result.output
    assert {result.problem for result in read_results(out)} == {"toy/1", "toy/3"}
    assert json.loads((out / "summary.json").read_text())["settings"]["only"] == "odd"
    report = (out / "report.md").read_text()
    assert "the problems at odd places, counted from 0" in report
    assert "--only odd --limit 2" in report
    refused = specguard(*flags(data, out, "--only", "even"))
    assert refused.exit_code == 1
    assert "only is 'even', there 'odd'" in flat(refused.stderr)
    assert specguard(*flags(data, out, "--only", "some")).exit_code == 2


def test_changed_problems_need_another_folder(shelf: Shelf, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    specguard(*flags(data, out, "--limit", 1))
    data.write_text(data.read_text().replace("?", "!"))
    result = specguard(*flags(data, out, "--limit", 1))
    assert result.exit_code == 1
    assert "has results of another problem 'toy/0' of toy" in flat(result.stderr)
    assert "Choose another folder" in flat(result.stderr)


def test_another_seed_needs_another_folder(shelf: Shelf, data: Path, tmp_path: Path) -> None:
    specguard(*flags(data, tmp_path, "--limit", 1))
    result = specguard(*flags(data, tmp_path, "--limit", 1, "--seed", 8))
    assert result.exit_code == 1
    assert "seed is 8, there 0" in flat(result.stderr)
    assert "Traceback" not in result.output


def test_other_bounds_need_another_folder(
    shelf: Shelf, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specguard(*flags(data, tmp_path, "--limit", 1))
    known = Calibration(confidence=Bounds(low=-3, high=0), grounding=Bounds(low=0, high=1))
    monkeypatch.setattr(calibrations, "find", lambda *names: known)
    result = specguard(*flags(data, tmp_path, "--limit", 2))
    assert result.exit_code == 1
    assert "bounds of arm 'specguard-greedy' is 'calibrated', there 'fallback'" in (
        flat(result.stderr)
    )
    assert "the same command goes on" not in flat(result.stderr)
    assert len(read_results(tmp_path)) == 3


@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt(), 130), (ServerError("the server is down"), 1)]
)
def test_an_interrupted_command_says_how_to_go_on(
    shelf: Shelf,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
) -> None:
    class Interrupted(Checker):
        checks = 0

        def check(self, text: str, problem: Any) -> Any:
            Interrupted.checks += 1
            if Interrupted.checks == 5:
                raise error
            return super().check(text, problem)

    monkeypatch.setattr(bench, "AnswerChecker", Interrupted)
    result = specguard(*flags(data, tmp_path / "out"))
    assert result.exit_code == code
    assert "4 results are kept in" in flat(result.stderr)
    assert "the same command goes on from there" in flat(result.stderr)
    again = specguard(*flags(data, tmp_path / "out"))
    assert again.exit_code == 0, again.output
    assert "5/12" in again.stderr
    assert "4/12" not in again.stderr


def test_errors_of_problems_are_counted(shelf: Shelf, data: Path, tmp_path: Path) -> None:
    shelf.engines["target.gguf"].context_length = 120  # the instruction alone leaves too little
    result = specguard(*flags(data, tmp_path / "out", "--limit", 1))
    assert result.exit_code == 0, result.output
    assert "target: failed (ContextOverflowError" in result.stderr
    assert "2 of 3 results are errors, which count as wrong answers" in flat(result.stderr)


def test_a_terminal_shows_a_bar(
    shelf: Shelf, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    specguard(*flags(data, out, "--limit", 2))
    results = read_results(out)
    console = Console(force_terminal=True, width=120, color_system=None, force_interactive=True)
    monkeypatch.setattr(bench_progress, "ERR", console)
    todo = toy_evaluation.plan(toy_evaluation.options(), 2, LIST)
    tasks = list(todo.tasks())
    with (
        console.capture() as captured,
        bench_progress.progress(Tally(results[:4], tasks[4:])) as bar,
    ):
        assert isinstance(bar, Bar)
        bar.begin(tasks[4])
        bar.end(results[4])
        bar.refresh()
    shown = captured.get()
    assert "toy/1 draft" in shown or "toy/1 specguard-greedy" in shown
    assert "5/6" in shown
    assert "left" in shown
    right = [result.right for result in results[:5] if result.arm == "target"]
    assert f"target {sum(right) / len(right):.0%}" in shown


def test_the_time_left_is_by_the_mean_time_of_each_arm(shelf: Shelf) -> None:
    def result(arm: str, seconds: float) -> Any:
        from types import SimpleNamespace

        return SimpleNamespace(arm=arm, right=True, seconds=seconds)

    def tasks() -> Iterator[Any]:
        todo = toy_evaluation.plan(toy_evaluation.options(), 2, LIST)
        return todo.tasks()

    assert Tally([], tasks()).time_left() == "time left unknown"
    done = [result("target", 100.0), result("target", 300.0), result("draft", 2.0)]
    # two of target, two of draft, and two of an arm that takes as long as the mean of all
    assert Tally(done, tasks()).time_left() == f"{in_words(2 * 200 + 2 * 2 + 2 * 134)} left"


def test_times_in_words() -> None:
    assert [in_words(seconds) for seconds in (0.4, 89, 100, 3599, 9000)] == [
        *("0 s", "89 s", "2 min", "1 h 0 min", "2 h 30 min")
    ]


def test_the_help_shows_how_it_is_used() -> None:
    result = specguard("--help")
    assert result.exit_code == 0
    shown = flat(result.output)
    for text in (
        "--decoders",
        "--report-only",
        "random@X",
        "--max-tokens",
        "default 600",
        "--pair",
    ):
        assert text in shown
    assert "--api-key" not in shown
    assert "--acceptance-rate" not in shown
