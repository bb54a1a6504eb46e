"""`specguard plan --goal` and `--at-most`, and the options that they print."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from specguard_chains import ChatSpecGuard
from specguard_chains.cli import app, ask
from specguard_chains.cli import plan as plan_command
from specguard_chains.errors import EvaluationError, SpecGuardError
from specguard_chains.evaluation.arms import parse_arms
from specguard_chains.evaluation.settings import RunSettings
from specguard_chains.options import SpecGuardOptions
from specguard_chains.planning.arm_options import (
    as_flags,
    as_python,
    options_of,
    younger_options,
)
from tests.unit_tests.test_planning_goals import calibration
from tests.unit_tests.toy_results import settings


@pytest.fixture(autouse=True)
def nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        pytest.fail("a goal loads no model")

    monkeypatch.setattr(plan_command, "load_engine", fail)


def specguard(*arguments: Any) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)], env={"COLUMNS": "150"})


def flat(text: str) -> str:
    return " ".join(text.split())


def test_the_setting_for_the_targets_accuracy(tmp_path: Path) -> None:
    calibration(tmp_path)
    result = specguard("--results", tmp_path, "--goal", "accuracy")
    assert result.exit_code == 0, result.output
    text = flat(result.stdout)
    assert "problems in common: 100, of toy" in text
    assert "low 40/100 40.0 % (30.9 to 49.8) −20.0" in text
    assert "lower so far" in text
    assert "take: high: 7.00 s an answer, the target alone 10.00 s" in text
    assert "- low takes 4.00 s" in text
    assert "--threshold 0.8" in text
    assert "ChatSpecGuard(decoder='specguard-greedy', threshold=0.8, temperature=0.0" in text
    assert "measure it on others" in text


def test_the_setting_within_so_many_seconds(tmp_path: Path) -> None:
    calibration(tmp_path)
    text = flat(specguard("--results", tmp_path, "--at-most", 5).stdout)
    assert "take: low: 40 of 100 right, the only arm that takes at most 5 s an answer" in text
    assert "--threshold 0.6" in text
    text = flat(specguard("--results", tmp_path, "--at-most", 1).stdout)
    assert "no recorded arm meets the goal; nearest: low: it is the fastest" in text


def test_the_target_alone(tmp_path: Path) -> None:
    calibration(tmp_path)
    flags = ("--goal", "accuracy", "--tolerance", 1)
    text = flat(specguard("--results", tmp_path, *flags).stdout)
    assert "take: target alone: nothing else is faster and shown to be not below it." in text
    assert "to say that it is less than 1 points below" in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--goal", "accuracy"], "give it with --results"),
        (["--at-most", "3"], "--at-most 3 chooses from a run"),
        (["--results", ".", "--tolerance", "3"], "--tolerance 3 is of --goal accuracy"),
        (["--results", ".", "--at-most", "3", "--tolerance", "3"], "is of --goal accuracy"),
        (["--results", ".", "--at-most", "3", "--goal", "accuracy"], "are two goals: give one"),
        (
            ["--results", ".", "--at-most", "3", "--out", "x", "--num-candidates", "2"],
            "--out and --num-candidates would change nothing",
        ),
        (["--results", ".", "--at-most", "3", "--n-ctx", "512"], "--n-ctx would change nothing"),
        (["--results", ".", "--at-most", "3", "--acceptance", "0"], "--acceptance would change"),
    ],
)
def test_what_says_nothing_beside_a_goal_is_refused(flags: list[str], message: str) -> None:
    result = specguard(*flags)
    assert result.exit_code == 2
    assert message in flat(result.stderr)


def recorded(decoders: str, **shared: Any) -> RunSettings:
    options = SpecGuardOptions(**shared)
    return RunSettings.of(options, parse_arms(decoders, options), ["toy"], 0)


ARMS = (
    "target",
    "specguard",
    "a=specguard-greedy:threshold=0.8:verify_with=draft:salvage=false",
    r"a=specguard:step_delimiter=\n:stop=END:stop=it's over",
    "a=speculative:speculative_tree=3:speculative_tree=2:num_speculative_tokens=2",
)


@pytest.mark.parametrize("decoders", ARMS)
def test_the_options_can_be_pasted(decoders: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = recorded(decoders, max_tokens=600, draft="small model.gguf", target="large.gguf")
    (arm,) = run.arms
    meant = options_of(run, arm)
    assert meant["draft"] == "small model.gguf"
    assert younger_options(run) == []
    pasted: list[SpecGuardOptions] = []

    def load(options: SpecGuardOptions) -> Any:
        pasted.append(options)
        raise SpecGuardError("enough")

    monkeypatch.setattr(ask, "load", load)
    CliRunner().invoke(app, ["ask", "why?", *shlex.split(as_flags(meant))])
    assert pasted == [SpecGuardOptions(**meant)]
    model = eval(as_python(meant), {"ChatSpecGuard": ChatSpecGuard})
    assert {name: getattr(model, name) for name in meant} == meant


def test_only_what_differs_from_the_defaults_of_today_is_said() -> None:
    run = recorded("a=specguard:threshold=0.8")
    assert options_of(run, "a") == {"threshold": 0.8}
    assert as_flags({}) == ""


def test_defaults_of_the_run_that_are_none_any_more_are_said() -> None:
    run = settings({"ours": {}}, defaults={"threshold": 0.5, "gone": 3}, pair=None, max_tokens=None)
    with pytest.raises(EvaluationError, match="pair"):
        options_of(run, "ours")
    run = settings({"ours": {}}, defaults={"threshold": 0.5, "gone": 3})
    own = options_of(run, "ours")
    assert own == {"threshold": 0.5, "pair": "toy-pair", "max_tokens": 600, "n_threads": 2}
    assert "salvage" in younger_options(run)


def test_an_option_of_the_arm_that_is_none_any_more_is_an_error() -> None:
    with pytest.raises(EvaluationError, match=r"'ours'.*gone.*run it anew"):
        options_of(settings({"ours": {"gone": 3}}), "ours")


def test_the_help_says_how_to_calibrate() -> None:
    text = flat(re.sub(r"\x1b\[[\d;]*m", "", specguard("--help").stdout))
    assert "target,a=specguard:threshold=0.6,b=specguard:threshold=0.8" in text
    assert "Choose on training problems" in text
