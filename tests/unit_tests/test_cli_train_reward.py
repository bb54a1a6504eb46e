"""`specguard train-reward` with a toy draft: its solutions are gone on with by their settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from specguard_chains import engines
from specguard_chains.cli import app, train_reward
from specguard_chains.decoding.engine import Engine
from specguard_chains.decoding.rewards import ValueHead
from specguard_chains.evaluation.solutions import Sampler
from tests.toy_engine import ToyEngine, random_policy
from tests.unit_tests.test_cli_bench import Checker


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    toys = {
        f"{name}.gguf": ToyEngine(random_policy(seed, end=-2.0), name=name)
        for seed, name in enumerate(["draft", "other"])
    }

    def load(model: Any, settings: Any, progress: Any) -> Engine:
        return toys[str(model)]

    monkeypatch.setattr(engines, "load", load)
    monkeypatch.setattr(train_reward, "AnswerChecker", Checker)
    monkeypatch.setattr(train_reward, "_layer", lambda engine, layer: 1)
    return tmp_path / "work"


def rows(path: Path, n: int) -> Path:
    content = [
        {"id": i, "question": f"{path.stem} {i}?", "answer": "abcdef"[i % 6]} for i in range(n)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in content))
    return path


def specguard(work: Path, *more: Any) -> Result:
    """Train on two files of problems with the same ids."""
    one, two = (rows(work.parent / f"{name}.jsonl", 8) for name in ("alpha", "beta"))
    flags = ["--data", one, "--data", two, "--work", work, "--draft", "draft.gguf"]
    flags += ["--samples", 4, "--max-tokens", 60, "--out", work.parent / "head.json", *more]
    return CliRunner().invoke(app, ["train-reward", *map(str, flags)])


def records(work: Path) -> list[Any]:
    return [json.loads(line) for line in (work / "solutions.jsonl").read_text().splitlines()]


def test_problems_with_the_same_id_are_two_and_stay_whole(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = specguard(work)
    assert result.exit_code == 0, result.output
    names = [(line["data"], line["problem"]) for line in records(work)]
    assert names == [(data, str(i)) for i in range(8) for data in ("alpha", "beta")]
    head = ValueHead.load(work.parent / "head.json")
    ended = [line for line in records(work) if line["solutions"]]
    assert head.training["problems"] == len(ended) > 8, "more than there are ids"

    def sample(*_: Any) -> Any:
        raise AssertionError("all solutions are there")

    monkeypatch.setattr(Sampler, "sample", sample)
    assert specguard(work).exit_code == 0
    assert ValueHead.load(work.parent / "head.json") == head


@pytest.mark.parametrize(
    ("flags", "difference"),
    [
        (["--draft", "other.gguf"], "draft is 'other.gguf', there 'draft.gguf'"),
        (["--samples", 5], "samples is 5, there 4"),
        (["--temperature", 0.9], "temperature is 0.9, there 0.7"),
        (["--seed", 3], "seed is 3, there 0"),
        (["--max-tokens", 50], "max_tokens is 50, there 60"),
    ],
)
def test_solutions_of_other_settings_are_not_taken(
    work: Path, flags: list[Any], difference: str
) -> None:
    assert specguard(work).exit_code == 0
    result = specguard(work, *flags)
    message = " ".join(result.stderr.split())
    assert result.exit_code == 1
    assert difference in message
    assert "another folder (--work)" in message
