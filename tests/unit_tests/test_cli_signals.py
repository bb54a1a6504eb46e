"""`specguard signals` with toy models: interrupted and gone on with, by these settings alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from specguard_chains import engines
from specguard_chains.cli import app, signals
from specguard_chains.cli.training_problems import training_problems
from specguard_chains.decoding.engine import Engine
from specguard_chains.decoding.rewards import ValueHead
from specguard_chains.evaluation import recordings
from specguard_chains.evaluation.problems import load_problems
from tests.toy_engine import ToyEngine
from tests.unit_tests import toy_evaluation
from tests.unit_tests.test_cli_bench import Checker, write
from tests.unit_tests.toy_evaluation import by_question

ENGINES = {"draft.gguf": 1, "target.gguf": 2, "other.gguf": 3}


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    toys = {name: ToyEngine(by_question(seed), name=name) for name, seed in ENGINES.items()}

    def load(model: Any, settings: Any, progress: Any) -> Engine:
        return toys[str(model)]

    monkeypatch.setattr(engines, "load", load)
    monkeypatch.setattr(signals, "AnswerChecker", Checker)
    return write(tmp_path / "toy.jsonl", 6)


def specguard(data: Path, out: Path, *more: Any) -> Result:
    models = ["--draft", "draft.gguf", "--target", "target.gguf", "--max-tokens", "60"]
    flags = ["--data", data, "--out", out, *models, *more]
    return CliRunner().invoke(app, ["signals", *map(str, flags)])


def lines(path: Path) -> list[Any]:
    return [json.loads(line) | {"seconds": 0} for line in path.read_text().splitlines()]


def test_an_interrupted_measurement_goes_on(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    result = specguard(data, whole)
    assert result.exit_code == 0, result.output
    assert "even half" in result.stdout
    recorded: list[str] = []
    record = recordings.Recorder.record

    def stop(recorder: Any, problem: Any) -> Any:
        if len(recorded) == 3:
            raise KeyboardInterrupt
        recorded.append(problem.id)
        return record(recorder, problem)

    monkeypatch.setattr(recordings.Recorder, "record", stop)
    assert specguard(data, stopped).exit_code == 130
    assert len(lines(stopped / "recordings.jsonl")) == 3
    recorded.clear()
    assert specguard(data, stopped).exit_code == 0
    assert recorded == [problem.id for problem in toy_evaluation.problems(6)[3:]]
    assert lines(stopped / "recordings.jsonl") == lines(whole / "recordings.jsonl")
    for again, once in zip(
        *(lines(out / "signals.jsonl") for out in (stopped, whole)), strict=True
    ):
        assert again["problem"] == once["problem"]
        for step, expected in zip(again["steps"], once["steps"], strict=True):
            assert step == pytest.approx(expected, abs=1e-5), "but for rounding"
    recorded.clear()
    assert specguard(data, stopped).exit_code == 0
    assert recorded == []


HEAD = ValueHead(draft="draft", layer=1, weights=(1.0, 0.0, 0.0, 0.0), bias=0.0)


@pytest.mark.parametrize(
    ("flags", "file", "difference"),
    [
        (["--draft", "other.gguf"], "recordings", "draft is 'other.gguf', there 'draft.gguf'"),
        (["--target", "other.gguf"], "recordings", "target is 'other.gguf'"),
        (["--seed", 5], "recordings", "seed is 5, there 0"),
        (["--max-tokens", 50], "recordings", "max_tokens is 50, there 60"),
        (["--n-ctx", 1024], "recordings", "n_ctx is 1024, there 2048"),
        (["--grounding-layers", 2], "signals", "grounding_layers is 2, there 3"),
        (["--reward-model", "head.json"], "signals", "value_head is '"),
    ],
)
def test_records_of_other_settings_are_not_taken(
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: list[Any],
    file: str,
    difference: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    HEAD.save(tmp_path / "head.json")
    out = tmp_path / "out"
    assert specguard(data, out, "--limit", 2).exit_code == 0
    before = {path: path.read_bytes() for path in out.iterdir()}
    result = specguard(data, out, *flags)
    message = " ".join(result.stderr.split())
    assert result.exit_code == 1, message
    assert difference in message
    assert f"{file}.jsonl has records of other settings" in message
    assert "another folder (--out)" in message
    assert {path: path.read_bytes() for path in out.iterdir()} == before
    assert specguard(data, tmp_path / "another", *flags).exit_code == 0


def test_without_its_signals_a_recording_is_read_with_other_settings(
    data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert specguard(data, out).exit_code == 0
    recorded = lines(out / "recordings.jsonl")
    (out / "signals.jsonl").unlink()
    result = specguard(data, out, "--grounding-layers", 2)
    assert result.exit_code == 0, result.output
    assert lines(out / "recordings.jsonl") == recorded
    assert json.loads((out / "settings.json").read_text())["signals.jsonl"]["grounding_layers"] == 2


def test_a_folder_whose_settings_nobody_knows_is_refused(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "recordings.jsonl").write_text('{"problem": "toy/0"}\n')
    result = specguard(data, out)
    assert result.exit_code == 1
    assert "no settings.json beside it" in " ".join(result.stderr.split())
    (out / "settings.json").write_text('{"version": "0.1", "seed": 0}')
    result = specguard(data, out)
    assert result.exit_code == 1
    assert "does not hold the settings of records" in " ".join(result.stderr.split())


def rows(path: Path, questions: Sequence[str]) -> Path:
    path.parent.mkdir(exist_ok=True)
    content = [{"id": i, "question": q, "answer": "a"} for i, q in enumerate(questions)]
    path.write_text("".join(json.dumps(row) + "\n" for row in content))
    return path


def test_problems_of_two_files_with_the_same_ids_are_two(data: Path, tmp_path: Path) -> None:
    one = rows(tmp_path / "one.jsonl", ["?", "??"])
    two = rows(tmp_path / "two.jsonl", ["???", "????"])
    assert specguard(one, tmp_path / "out", "--data", two).exit_code == 0
    recorded = lines(tmp_path / "out" / "recordings.jsonl")
    names = [(each["data"], each["problem"]) for each in recorded]
    assert names == [("one", "0"), ("two", "0"), ("one", "1"), ("two", "1")]
    alone = lines_of(two, tmp_path / "alone")
    assert [each for each in recorded if each["data"] == "two"] == alone


def lines_of(data: Path, out: Path) -> list[Any]:
    assert specguard(data, out).exit_code == 0
    return lines(out / "recordings.jsonl")


def test_another_file_of_the_same_name_is_recorded_by_itself(data: Path, tmp_path: Path) -> None:
    one = rows(tmp_path / "a" / "toy.jsonl", ["?", "??"])
    other = rows(tmp_path / "b" / "toy.jsonl", ["???", "??"])
    assert len(lines_of(one, tmp_path / "out")) == 2
    recorded = lines_of(other, tmp_path / "out")
    assert [each["problem"] for each in recorded] == ["0", "1", "0"]
    assert recorded[2] == lines_of(other, tmp_path / "alone")[0]
    result = specguard(one, tmp_path / "both", "--data", other)
    assert result.exit_code == 2
    assert "there is another one called toy" in " ".join(result.stderr.split())


@pytest.mark.parametrize(("skip", "limit"), [(0, None), (1, None), (3, 4)])
def test_halves_are_those_of_the_bench(data: Path, skip: int, limit: int | None) -> None:
    write(data, 9)
    with data.open("a") as file:
        file.write("\n")
    problems = training_problems([str(data)], [], limit=limit, skip=skip, seed=0)
    assert list(problems) == load_problems(data, limit=limit, skip=skip)
    even, odd = (load_problems(data, only=half) for half in ("even", "odd"))
    for problem, place in problems.items():
        assert problem in (odd if place % 2 else even)


def test_what_resembles_a_problem_to_avoid_is_left_out_of_its_own_file_alone(
    tmp_path: Path,
) -> None:
    alike = "How many pens are there in 3 boxes of 12 pens?"
    one = rows(tmp_path / "one.jsonl", [alike, "What does a lamp cost in this shop?"])
    two = rows(tmp_path / "two.jsonl", ["How old is the captain of the ship?"])
    test = rows(tmp_path / "test.jsonl", [alike.replace("12", "10")])
    kept = training_problems([str(one), str(two)], [str(test)], limit=None, skip=0, seed=0)
    assert [(p.data, p.id, place) for p, place in kept.items()] == [
        ("two", "0", 0),
        ("one", "1", 1),
    ]


def test_a_reward_model_that_reads_text_is_no_signal(data: Path, tmp_path: Path) -> None:
    result = specguard(data, tmp_path / "out", "--reward-model", "org/some-prm")
    assert result.exit_code == 2
    assert "org/some-prm is no value head" in " ".join(result.stderr.split())
