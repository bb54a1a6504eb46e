"""`specguard plan` with toy models."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from specguard_chains import engines
from specguard_chains.cli import app, plan
from specguard_chains.decoding.engine import Engine
from specguard_chains.planning import measure
from specguard_chains.planning.plan import Plan
from tests.unit_tests import toy_evaluation
from tests.unit_tests.planning_costs import Clock, TimedToy

MODELS = ("--draft", "draft.gguf", "--target", "target.gguf")


class Shelf:
    """Stands in for the engines that are loaded: a pair of 1:4."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.attention: list[tuple[str, bool]] = []
        self.engines = {
            "draft.gguf": TimedToy(self.clock, 10, 2, name="small toy"),
            "target.gguf": TimedToy(self.clock, 40, 8, name="large toy"),
        }

    def load(self, model: Any, settings: Any, progress: Any) -> Engine:
        self.attention.append((str(model), settings.attention))
        return self.engines[str(model)]


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> Shelf:
    shelf = Shelf()
    monkeypatch.setattr(engines, "load", shelf.load)

    def measured(*args: Any, **kwargs: Any) -> Any:
        return measure.measure_pair(*args, clock=shelf.clock, **kwargs)

    monkeypatch.setattr(plan, "measure_pair", measured)
    return shelf


def specguard(*arguments: Any) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def flat(text: str) -> str:
    return " ".join(text.split())


def test_a_pair_is_measured_and_a_setting_recommended(shelf: Shelf, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    result = specguard(*MODELS, "--out", out)
    assert result.exit_code == 0, result.output
    text = flat(result.stdout)
    assert "an answer of 200 tokens in steps of 30, after a prompt of 150" in text
    for label in ("target", "draft", "specguard-greedy", "rsd", "speculative"):
        assert label in text
    assert "Assumed, not measured: 50% of the drafted steps are accepted" in text
    assert "after rejections the target goes on alone (patience)" in text
    assert "fastest: " in text
    assert "1:4 (this)" in text
    assert "1:20" in text
    made = Plan.model_validate_json(out.read_text())
    assert made.costs.ratio == pytest.approx(4)
    assert made.costs.draft_with_attention is None, "by default nobody reads attention"
    greedy = made.rows[2].setting
    assert (greedy.verify_with, greedy.looks, greedy.rewrites) == ("target", True, 1)
    assert made.recommended in text
    assert f"the plan is in {out}" in flat(result.stderr)


def test_the_draft_is_loaded_with_attention_and_without(shelf: Shelf) -> None:
    grounded = ("--confidence-weight", 0.3, "--verify-with", "draft")
    assert specguard(*MODELS, *grounded).exit_code == 0
    assert shelf.attention == [
        ("draft.gguf", True),
        ("target.gguf", False),
        ("draft.gguf", False),
    ]
    shelf.attention.clear()
    assert specguard(*MODELS).exit_code == 0
    assert {attention for _, attention in shelf.attention} == {False}


def test_costs_are_taken_from_a_plan(shelf: Shelf, tmp_path: Path) -> None:
    out, again = tmp_path / "plan.json", tmp_path / "again.json"
    first = specguard(*MODELS, "--out", out)
    shelf.attention.clear()
    second = specguard("--costs", out, "--out", again)
    assert second.exit_code == 0, second.output
    assert not shelf.attention
    assert second.stdout == first.stdout
    assert again.read_text() == out.read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--costs", "{costs}", "--n-threads", 3], "what --n-threads would set is as .*: leave"),
        (["--costs", "{costs}", *MODELS], "what --draft and --target would set"),
        (["--results", "{run}", *MODELS, "--patience", 3], "what --patience would set"),
    ],
)
def test_options_that_would_change_nothing_are_refused(
    shelf: Shelf, tmp_path: Path, flags: list[object], message: str
) -> None:
    costs, run = tmp_path / "plan.json", tmp_path / "run"
    specguard(*MODELS, "--out", costs)
    toy_evaluation.run(run, 1, "target")
    shelf.attention.clear()
    result = specguard(*(str(flag).format(costs=costs, run=run) for flag in flags))
    assert result.exit_code == 2
    assert re.search(message, flat(result.stderr))
    assert not shelf.attention, "nothing is loaded for a command that cannot end well"


def test_more_acceptance_changes_the_advice(shelf: Shelf, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    specguard(*MODELS, "--out", out)
    answers = {}
    for acceptance in (0, 1):
        assumed = ("--acceptance", acceptance, "--answer-tokens", 400)
        result = specguard("--costs", out, "--verify-with", "draft", *assumed)
        answers[acceptance] = re.search(r"fastest: (.*?):", flat(result.stdout))
        assert "an answer of 400 tokens" in result.stdout
    assert answers[0] is not None
    assert answers[0][1] == "speculative"
    assert answers[1] is not None
    assert answers[1][1] == "specguard-greedy"


def test_a_recorded_run_takes_the_place_of_assumptions(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs, run = tmp_path / "plan.json", tmp_path / "run"
    specguard(*MODELS, "--out", costs)
    monkeypatch.setattr("specguard_chains.evaluation.runner.perf_counter", shelf.clock)
    draft, target = (
        TimedToy(shelf.clock, base, token, policy=toy_evaluation.by_question(seed), name=name)
        for base, token, seed, name in ((10, 2, 1, "small toy"), (40, 8, 2, "large toy"))
    )
    given = toy_evaluation.options(draft=draft, target=target)
    toy_evaluation.run(run, 4, "target,specguard-greedy", given=given)
    out = tmp_path / "with-run.json"
    result = specguard("--costs", costs, "--results", run, "--out", out)
    assert result.exit_code == 0, result.output
    text = flat(result.stdout)
    assert "recorded runs, seconds an answer" in text
    assert "The sizes of answers are those of specguard-greedy, 4 answers." in text
    assert "specguard-greedy at 0.8" in text
    assert "of the steps are accepted, whoever" not in text
    assert "of the tokens that speculative decoding proposes" in text
    made = Plan.model_validate_json(out.read_text())
    assert [check.arm for check in made.checks] == ["target", "specguard-greedy"]
    assert all(abs(check.deviation(check.counted_s)) < 0.05 for check in made.checks)


def test_the_chart_is_a_drawing_of_its_own(shelf: Shelf, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    first, second = tmp_path / "a.svg", tmp_path / "b.svg"
    costs = tmp_path / "plan.json"
    specguard(*MODELS, "--out", costs)
    for path in (first, second):
        assert specguard("--costs", costs, "--plot", path).exit_code == 0
    text = first.read_text()
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "specguard-greedy" in text
    assert "1:20" in text
    assert "var(" not in text, "not every program knows the variables of a page"
    assert text == second.read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--costs", "{folder}/none.json"], "does not hold a plan with costs"),
        (["--costs", "{folder}/broken.json"], "does not hold a plan with costs"),
        (["--out", "{folder}/none/plan.json"], "there is no folder"),
        (["--plot", "{folder}/none/plan.svg"], "there is no folder"),
    ],
)
def test_what_cannot_be_read_or_written_is_one_line(
    shelf: Shelf, tmp_path: Path, flags: list[str], message: str
) -> None:
    (tmp_path / "broken.json").write_text("{}")
    result = specguard(*MODELS, *(flag.format(folder=tmp_path) for flag in flags))
    assert result.exit_code in (1, 2)
    assert message in flat(result.stderr)
    assert not shelf.attention, "nothing is loaded for a command that cannot end well"


def test_a_folder_without_a_run_is_named(shelf: Shelf, tmp_path: Path) -> None:
    result = specguard(*MODELS, "--results", tmp_path)
    assert result.exit_code == 1
    assert "has no results" in flat(result.stderr)
    assert not shelf.attention


def test_a_run_and_an_assumption_of_the_same_contradict_each_other(
    shelf: Shelf, tmp_path: Path
) -> None:
    toy_evaluation.run(tmp_path, 1, "target")
    result = specguard(*MODELS, "--results", tmp_path, "--acceptance", 0.3)
    assert result.exit_code == 2
    assert "--acceptance 0.3 is what a run tells" in flat(result.stderr)


def test_planning_is_light() -> None:
    code = (
        "import sys, specguard_chains.planning.plan, specguard_chains.planning.measure, "
        "specguard_chains.planning.plots; "
        "heavy = {'torch', 'transformers', 'llama_cpp', 'httpx', 'sklearn', 'matplotlib'}; "
        "print(sorted(heavy & sys.modules.keys()))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
    code = "import sys, specguard_chains; print('specguard_chains.planning' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"


def test_the_plan_is_json_that_others_can_read(shelf: Shelf, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    specguard(*MODELS, "--out", out)
    plain = json.loads(out.read_text())
    assert plain["rows"][0]["setting"]["label"] == "target"
    assert set(plain["costs"]["machine"]) >= {"cpu", "threads", "versions", "measured"}
