"""`specguard signals` with toy models, interrupted and gone on with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from specguard_chains import engines
from specguard_chains.cli import app, signals
from specguard_chains.decoding.engine import Engine
from specguard_chains.evaluation import recordings
from tests.toy_engine import ToyEngine
from tests.unit_tests import toy_evaluation
from tests.unit_tests.test_cli_bench import Checker, write
from tests.unit_tests.toy_evaluation import by_question

ENGINES = {"draft.gguf": 1, "target.gguf": 2}


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    toys = {name: ToyEngine(by_question(seed), name=name) for name, seed in ENGINES.items()}

    def load(model: Any, settings: Any, progress: Any) -> Engine:
        return toys[str(model)]

    monkeypatch.setattr(engines, "load", load)
    monkeypatch.setattr(signals, "AnswerChecker", Checker)
    return write(tmp_path / "toy.jsonl", 6)


def specguard(data: Path, out: Path) -> Result:
    models = ["--draft", "draft.gguf", "--target", "target.gguf", "--max-tokens", "60"]
    return CliRunner().invoke(app, ["signals", "--data", str(data), "--out", str(out), *models])


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
