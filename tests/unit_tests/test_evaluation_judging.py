"""What an arm judges steps by is recorded, and results of other bounds are not mixed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specguard_chains import calibrations
from specguard_chains.assembly import assemble
from specguard_chains.decoding.baselines import SoloDecoder
from specguard_chains.decoding.calibration import FALLBACK, Bounds, Calibration
from specguard_chains.decoding.rewards import ValueHead
from specguard_chains.decoding.rivals import RewardVerifier
from specguard_chains.decoding.steps import Source
from specguard_chains.decoding.verification import EnsembleVerifier, Verifier
from specguard_chains.decoding.voting import VotingDecoder, best_value
from specguard_chains.errors import EvaluationError
from specguard_chains.evaluation.folder import open_run
from specguard_chains.evaluation.judging import by_fallback, judged_by
from specguard_chains.evaluation.report import report_of
from specguard_chains.evaluation.settings import RunSettings
from specguard_chains.evaluation.summary import Run, summary_of
from tests.toy_engine import ToyEngine, random_policy
from tests.unit_tests.toy_evaluation import options, run
from tests.unit_tests.toy_results import ARMS, four_problems, settings, write

KNOWN = Calibration(confidence=Bounds(low=-3, high=-0.5), grounding=Bounds(low=0.25, high=0.75))
HEAD = ValueHead(draft="toy draft", layer=1, weights=(0.5,), bias=0.0)


def of(verifier: Verifier) -> dict[str, Any]:
    return judged_by(SimpleNamespace(verifier=verifier))


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ({}, {"confidence_bounds": [-3, -0.5], "grounding_bounds": [0.25, 0.75]}),
        ({"confidence_weight": 1.0}, {"confidence_bounds": [-3, -0.5]}),
        ({"confidence_weight": 0.0}, {"grounding_bounds": [0.25, 0.75]}),
    ],
)
def test_the_bounds_of_signals_that_count(
    weights: dict[str, float], expected: dict[str, Any]
) -> None:
    assert of(EnsembleVerifier(KNOWN, **weights)) == {"bounds": "calibrated", **expected}


def test_value_heads_are_told_apart() -> None:
    other = HEAD.model_copy(update={"bias": 1.0})
    heads = [of(RewardVerifier(head))["value_head"] for head in (HEAD, other)]
    assert len(set(heads)) == 2
    assert all(len(head) == 12 for head in heads)
    only = EnsembleVerifier(KNOWN, value_head=HEAD, value_weight=1.0)
    assert of(only) == {"value_head": heads[0]}
    engine = ToyEngine(random_policy(1))
    rated = SoloDecoder(engine, Source.TARGET, scorer=RewardVerifier(HEAD))
    assert judged_by(VotingDecoder(rated, 2, best_value)) == {"value_head": heads[0]}
    assert judged_by(SoloDecoder(engine, Source.TARGET)) == {}


def test_fallback_bounds_are_known_as_such() -> None:
    assert by_fallback(judged_by(assemble(options())))
    assert not by_fallback(of(EnsembleVerifier(KNOWN)))
    assert not by_fallback({})


def test_it_is_recorded_for_every_arm(tmp_path: Path) -> None:
    run(tmp_path, 1, "target,specguard-greedy,random@specguard-greedy,oracle")
    told = json.loads((tmp_path / "settings.json").read_text())["judged_by"]
    assert told == {
        "target": {},
        "specguard-greedy": {"bounds": "fallback", "confidence_bounds": [-5.0, 0.0]},
        "random@specguard-greedy": {},
        "oracle": {},
    }


def found(monkeypatch: pytest.MonkeyPatch, calibration: Calibration) -> None:
    """Let these bounds be found from now on."""
    monkeypatch.setattr(calibrations, "find", lambda *names: calibration)


def test_results_of_other_bounds_are_not_mixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found(monkeypatch, FALLBACK)
    before = run(tmp_path, 1, "target,specguard-greedy")
    found(monkeypatch, KNOWN)
    with pytest.raises(EvaluationError) as error:
        run(tmp_path, 2, "specguard-greedy")
    assert "bounds of arm 'specguard-greedy' is 'calibrated', there 'fallback'" in str(error.value)
    assert "is [-3.0, -0.5], there [-5.0, 0.0]" in str(error.value)
    assert run(tmp_path, 1, "target,specguard-greedy") == before  # nothing is left to judge
    run(tmp_path, 1, "x=specguard-greedy")  # an arm of its own
    found(monkeypatch, FALLBACK)
    assert len(run(tmp_path, 2, "target,specguard-greedy")) == 5


def test_bounds_may_change_before_the_first_result(tmp_path: Path) -> None:
    told = settings(ARMS)
    with open_run(tmp_path, told) as log:
        for source in ("fallback", "calibrated"):
            log.note("ours", {"bounds": source})
            recorded = RunSettings.load(tmp_path / "settings.json").judged_by
            assert recorded == {"ours": {"bounds": source}}


def test_a_run_of_an_older_version_is_gone_on_with(tmp_path: Path) -> None:
    run(tmp_path, 1, "specguard-greedy")
    path = tmp_path / "settings.json"
    told = json.loads(path.read_text())
    recorded = told.pop("judged_by")
    path.write_text(json.dumps(told))
    run(tmp_path, 2, "specguard-greedy")
    assert json.loads(path.read_text())["judged_by"] == recorded


def test_a_report_tells_of_fallback_bounds(tmp_path: Path) -> None:
    def caveats(folder: str, source: str) -> str:
        told = settings(ARMS, judged_by={"ours": {"bounds": source}, "target": {}})
        recorded = Run.read(write(tmp_path / folder, told, four_problems()))
        return " ".join(report_of(recorded, summary_of(recorded)).caveats)

    assert "No bounds of the signals were known for ours: scores" in caveats("one", "fallback")
    assert "No bounds" not in caveats("two", "calibrated")
