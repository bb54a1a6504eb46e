"""Summaries of runs, against figures found by hand."""

from __future__ import annotations

import csv
import json
import math
import random
import time
from pathlib import Path
from typing import Any

import pytest

from specguard_chains.errors import EvaluationError
from specguard_chains.evaluation.statistics import mcnemar_p, wilson_interval
from specguard_chains.evaluation.summary import per_problem, summarise
from tests.unit_tests import toy_evaluation
from tests.unit_tests.toy_results import (
    ARMS,
    SECRET,
    four_problems,
    result,
    settings,
    step,
    unverified,
    write,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path, settings(ARMS), four_problems())


def rows(folder: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = summarise(folder)["decoders"]
    return found


def test_accuracy_and_what_it_is_beside_the_target(folder: Path) -> None:
    found = rows(folder)
    assert list(found) == ["target", "draft", "ours", "random@ours"]
    assert [row["correct"] for row in found.values()] == [2, 1, 3, 1]
    ours = found["ours"]
    assert (ours["n"], ours["accuracy"], ours["pairs"]) == (4, 0.75, 4)
    assert ours["accuracy_interval"] == pytest.approx(wilson_interval(3, 4), rel=1e-5)
    assert ours["difference_to_target"] == 0.25
    assert (ours["only_right"], ours["only_target_right"]) == (1, 0)
    assert ours["mcnemar_p"] == 1  # one win of one
    assert ours["difference_interval"] == pytest.approx([-0.362364, 0.699358])  # Tango's
    draft = found["draft"]
    assert (draft["difference_to_target"], draft["only_target_right"]) == (-0.25, 1)


def test_time_beside_the_target(folder: Path) -> None:
    ours = rows(folder)["ours"]
    assert ours["seconds"] == 6
    assert ours["ms_per_token"] == 200
    assert ours["time_ratio"] == pytest.approx(24 / 46, rel=1e-5)
    assert ours["time_ratio_interval"] is None  # of four problems
    parts = {"draft": 2.25, "verify": 1.25, "select": 0, "target": 2, "other": 0.5}
    assert ours["seconds_by"] == parts


def test_the_interval_of_a_time_ratio(tmp_path: Path) -> None:
    lines = [
        result(i, arm, seconds=seconds)
        for i in range(8)
        for arm, seconds in (("target", 10.0 + i), ("ours", 6.0))
    ]
    ours = rows(write(tmp_path, settings(ARMS), lines))["ours"]
    low, high = ours["time_ratio_interval"]
    assert 6 / 17 < low < 48 / 108 < high < 6 / 10


def test_the_target_is_its_own_measure(folder: Path) -> None:
    target = rows(folder)["target"]
    assert (target["difference_to_target"], target["time_ratio"]) == (0, 1)
    for name in ("difference_interval", "time_ratio_interval", "mcnemar_p", "control"):
        assert target[name] is None
    assert (target["acceptance_by_step"], target["acceptance_by_token"]) == (None, None)


def test_acceptance_by_step_and_by_token(folder: Path) -> None:
    found = rows(folder)
    ours = found["ours"]
    assert (ours["accepted_steps"], ours["judged_steps"], ours["early_rejections"]) == (8, 12, 4)
    assert ours["acceptance_by_step"] == pytest.approx(2 / 3, rel=1e-5)
    assert ours["acceptance_by_token"] == pytest.approx(20 / 30, rel=1e-5)
    assert ours["tokens"] == {"drafted": 96, "kept": 80, "regenerated": 40}
    assert (ours["steps"], ours["answer_tokens"], ours["peak_rss_mb"]) == (3, 30, 103)
    assert found["draft"]["acceptance_by_step"] is None  # nobody has judged
    assert found["draft"]["acceptance_by_token"] == 1


def test_a_control_beside_what_it_controls(folder: Path) -> None:
    found = rows(folder)
    control = found["random@ours"]["control"]
    assert (control["of"], control["n"]) == ("ours", 4)
    assert control["acceptance_by_step"] == 0.5
    assert control["acceptance_of_controlled"] == pytest.approx(2 / 3, rel=1e-5)
    assert control["gain"] == 0.5  # right on 0, 1 and 2 against 1
    assert control["gain_interval"] == pytest.approx([-0.234836, 0.849961])
    assert control["mcnemar_p"] == 0.5  # two wins of two
    assert found["ours"]["control"] is None


def test_arms_that_are_right_on_the_same_problems_may_still_differ(tmp_path: Path) -> None:
    lines = [result(i, arm) for i in range(4) for arm in ("target", "ours", "random@ours")]
    found = rows(write(tmp_path, settings(ARMS), lines))
    ends = pytest.approx([-0.489891, 0.489891])
    assert found["ours"]["difference_interval"] == ends
    assert found["random@ours"]["control"]["gain_interval"] == ends


def test_controls_are_compared_over_what_both_have(tmp_path: Path) -> None:
    missing = ("ours", "toy/3")
    lines = [line for line in four_problems() if (line["arm"], line["problem"]) != missing]
    control = rows(write(tmp_path, settings(ARMS), lines))["random@ours"]["control"]
    assert control["n"] == 3
    alone = [line for line in lines if line["arm"] != "ours"]
    assert rows(write(tmp_path, settings(ARMS), alone))["random@ours"]["control"] is None


def test_only_problems_that_both_have_are_compared(tmp_path: Path) -> None:
    lines = [result(i, "ours", True, seconds=3.0) for i in range(3)]
    lines += [result(i, "target", False, seconds=6.0) for i in (1, 2, 3, 4)]
    ours = rows(write(tmp_path, settings(ARMS), lines))["ours"]
    assert (ours["n"], ours["pairs"], ours["timed_pairs"]) == (3, 2, 2)
    assert (ours["difference_to_target"], ours["time_ratio"]) == (1, 0.5)
    assert ours["mcnemar_p"] == mcnemar_p([True, True], [False, False]) == 0.5


def test_only_answers_written_in_turns_are_timed(tmp_path: Path) -> None:
    """An arm that was added on another day meets a machine that may be slower."""
    begun = [(None, None), (0.0, 60.0), (0.0, 86_400.0), (None, 86_400.0)]
    lines = []
    for i, (target, ours) in enumerate(begun):
        lines += [
            result(i, "target", seconds=4.0, started=target),
            result(i, "ours", seconds=2.0 if i < 2 else 40.0, started=ours),
        ]
    ours = rows(write(tmp_path, settings(ARMS), lines))["ours"]
    assert (ours["pairs"], ours["timed_pairs"], ours["time_ratio"]) == (4, 2, 0.5)


def test_mcnemar_counts_problems_that_differ(tmp_path: Path) -> None:
    lines = []
    for i in range(20):
        lines += [result(i, "target", i < 10), result(i, "ours", i < 16)]
    ours = rows(write(tmp_path, settings(ARMS), lines))["ours"]
    assert (ours["only_right"], ours["only_target_right"]) == (6, 0)
    assert ours["mcnemar_p"] == 2 / 2**6


def test_errors_are_wrong_and_have_no_time(tmp_path: Path) -> None:
    lines = [
        result(0, "target", True, seconds=8.0),
        result(1, "target", True, seconds=8.0),
        result(0, "ours", True, seconds=4.0, steps=[step()], timed_out=True),
        result(1, "ours", False, seconds=0.1, steps=[step("rejected")], error="EngineError: gone"),
    ]
    ours = rows(write(tmp_path, settings(ARMS), lines))["ours"]
    assert (ours["n"], ours["correct"], ours["errors"], ours["checker_timeouts"]) == (2, 1, 1, 1)
    assert (ours["seconds"], ours["time_ratio"], ours["timed_pairs"]) == (4, 0.5, 1)
    assert (ours["difference_to_target"], ours["pairs"]) == (-0.5, 2)
    assert ours["judged_steps"] == 2  # those before the error were judged


def test_answers_that_were_cut(tmp_path: Path) -> None:
    lines = [result(i, "ours", finish_reason="length" if i else "stop") for i in range(3)]
    assert rows(write(tmp_path, settings(ARMS), lines))["ours"]["cut_by_length"] == 2


def test_without_the_target_nothing_is_compared(tmp_path: Path) -> None:
    lines = [line for line in four_problems() if line["arm"] != "target"]
    summary = summarise(write(tmp_path, settings(ARMS), lines))
    assert summary["target"] is None
    for row in summary["decoders"].values():
        assert row["pairs"] == row["timed_pairs"] == row["only_right"] == 0
        for name in ("difference_to_target", "difference_interval", "mcnemar_p", "time_ratio"):
            assert row[name] is None


def test_the_target_is_known_by_its_decoder(tmp_path: Path) -> None:
    arms = {"target": {"decoder": "speculative"}, "big": {"decoder": "target"}}
    lines = [result(0, "target", False), result(0, "big", True)]
    summary = summarise(write(tmp_path, settings(arms), lines))
    assert summary["target"] == "big"
    assert summary["decoders"]["target"]["difference_to_target"] == -1
    both = {"warm": {"decoder": "target"}, **ARMS}
    lines = [result(0, "warm"), result(0, "target")]
    assert summarise(write(tmp_path, settings(both), lines))["target"] == "target"


@pytest.mark.parametrize("error", [None, "EngineError: gone"])
def test_all_wrong_on_one_problem(tmp_path: Path, error: str | None) -> None:
    lines = [result(0, arm, False, error=error) for arm in ARMS]
    found = rows(write(tmp_path, settings(ARMS), lines))
    for row in found.values():
        assert (row["n"], row["accuracy"]) == (1, 0)
        assert (row["seconds"] is None) == (error is not None)
        assert row["time_ratio_interval"] is None
        assert row["ms_per_token"] is None  # no tokens at all
    assert found["target"]["time_ratio"] == (None if error else 1)
    assert "NaN" not in (tmp_path / "summary.json").read_text()


def test_nothing_takes_no_time(tmp_path: Path) -> None:
    lines = [result(0, arm, seconds=0.0) for arm in ARMS]
    assert rows(write(tmp_path, settings(ARMS), lines))["ours"]["time_ratio"] is None


def test_data_sets_apart_and_together(tmp_path: Path) -> None:
    lines = [result(i, arm, i == 0) for i in range(2) for arm in ("target", "ours")]
    lines += [result(i, "ours", True, data="hard") for i in range(2)]
    summary = summarise(write(tmp_path, settings(ARMS, data=("toy", "hard", "none")), lines))
    assert list(summary["data"]) == ["toy", "hard"]
    assert list(summary["data"]["hard"]["decoders"]) == ["ours"]
    assert summary["data"]["hard"]["decoders"]["ours"]["difference_to_target"] is None
    assert summary["data"]["hard"]["decoders"]["ours"]["accuracy"] == 1
    overall = summary["decoders"]  # over the problems that both have attempted
    assert [(row["n"], row["accuracy"]) for row in overall.values()] == [(2, 0.5), (2, 0.5)]
    assert overall["ours"]["pairs"] == 2


@pytest.mark.parametrize(("attempted", "n"), [(4, 4), (3, 3), (2, 2), (1, 4)])
def test_an_arm_that_lacks_most_problems_is_in_no_table_of_all(
    tmp_path: Path, attempted: int, n: int
) -> None:
    """Nor does it leave that table next to nothing."""
    lines = [
        result(i, arm, data == "easy", data=data)
        for data in ("easy", "hard")
        for i in range(2)
        for arm in ("target", "draft")
    ]
    lines += [line | {"arm": "ours"} for line in lines if line["arm"] == "draft"][:attempted]
    summary = summarise(write(tmp_path, settings(ARMS, data=("easy", "hard")), lines))
    rows_of_all = summary["decoders"]
    assert {row["n"] for row in rows_of_all.values()} == {n}
    assert len({row["accuracy"] for row in rows_of_all.values()}) == 1  # they are all alike
    assert ("ours" in rows_of_all) == (attempted > 1)
    assert summary["data"]["easy"]["decoders"]["ours"]["n"] == min(attempted, 2)


def test_two_halves_without_a_common_problem_leave_one_arm(tmp_path: Path) -> None:
    lines = [result(i, "ours", data=data) for data in ("toy", "hard") for i in range(2)]
    lines += [result(i, "target", data="toy") for i in range(2)]
    lines += [result(i, "draft", data="hard") for i in range(2)]
    overall = summarise(write(tmp_path, settings(ARMS, data=("toy", "hard")), lines))["decoders"]
    assert {arm: row["n"] for arm, row in overall.items()} == {"target": 2, "ours": 2}


def test_problems_of_one_name_in_two_data_sets_are_two(tmp_path: Path) -> None:
    same = {"problem": "1"}
    lines = [result(0, "target") | same, result(0, "ours", data="other") | same]
    summary = summarise(write(tmp_path, settings(ARMS, data=("toy", "other")), lines))
    assert summary["data"]["other"]["decoders"]["ours"]["pairs"] == 0
    assert list(summary["decoders"]) == ["target"]


def test_the_settings_are_in_it(folder: Path) -> None:
    told = json.loads((folder / "settings.json").read_text())
    assert summarise(folder)["settings"] == told


def test_equal_results_give_equal_files(tmp_path: Path) -> None:
    lines = four_problems()
    random.Random(1).shuffle(lines)
    one = write(tmp_path / "a", settings(ARMS), four_problems())
    other = write(tmp_path / "b", settings(ARMS), lines)
    for folder in (one, other):
        summarise(folder)
        per_problem(folder)
    for name in ("summary.json", "problems.csv"):
        assert (one / name).read_bytes() == (other / name).read_bytes()
    before = (one / "summary.json").read_bytes()
    summarise(one)
    assert (one / "summary.json").read_bytes() == before
    assert sorted(path.name for path in one.iterdir()) == [
        *("problems.csv", "results.jsonl", "settings.json", "summary.json")
    ]


def test_what_is_returned_is_what_is_written(folder: Path) -> None:
    returned = summarise(folder)
    assert json.loads((folder / "summary.json").read_text()) == returned


def test_a_line_for_each_problem_and_arm(tmp_path: Path) -> None:
    lines = [
        result(10, "ours", steps=[step(), step("rejected")], seconds=1.23456, started=1.7e9),
        result(9, "ours", False, error="EngineError: gone", steps=[unverified("draft")]),
    ]
    path = per_problem(write(tmp_path, settings(ARMS), lines))
    assert path == tmp_path / "problems.csv"
    assert path.read_text() == (
        "data,problem,arm,right,error,seconds,tokens,accepted_steps,judged_steps,started\n"
        "toy,toy/9,ours,0,1,4.0,10,0,0,\n"
        "toy,toy/10,ours,1,0,1.235,20,1,2,1700000000.0\n"
    )


def test_no_text_of_the_data_is_written(tmp_path: Path) -> None:
    folder = write(tmp_path, settings(ARMS), four_problems())
    summarise(folder)
    per_problem(folder)
    for name in ("summary.json", "problems.csv"):
        text = (folder / name).read_text()
        assert SECRET not in text
        assert "eggs" not in text


def test_any_script_may_be_in_names(tmp_path: Path) -> None:
    arm, data = 'τ "0,7" | 解', "Übung"
    folder = write(
        tmp_path,
        settings({arm: {"decoder": "rsd"}}, data=(data,)),
        [result("第1", arm, data=data)],
    )
    assert list(summarise(folder)["data"][data]["decoders"]) == [arm]
    with per_problem(folder).open(encoding="utf-8", newline="") as lines:
        (row,) = csv.DictReader(lines)
    assert (row["problem"], row["arm"]) == ("Übung/第1", arm)


def test_a_damaged_line_is_named(folder: Path) -> None:
    path = folder / "results.jsonl"
    lines = path.read_text().splitlines()
    for damaged in ('{"problem": 3', '{"problem": "toy/0"}', "[]"):
        path.write_text("\n".join([lines[0], damaged, lines[1]]) + "\n")
        with pytest.raises(EvaluationError, match=r"line 2 of .*results\.jsonl is damaged"):
            summarise(folder)


def test_a_torn_last_line_is_ignored(folder: Path) -> None:
    before = summarise(folder)
    with (folder / "results.jsonl").open("a") as lines:
        lines.write(json.dumps(four_problems()[0])[:50])
    assert summarise(folder) == before


def test_the_later_of_two_results_counts(tmp_path: Path) -> None:
    lines = [result(0, "ours", False), result(0, "ours", True)]
    ours = rows(write(tmp_path, settings(ARMS), lines))["ours"]
    assert (ours["n"], ours["correct"]) == (1, 1)


def test_a_folder_without_results(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match=r"settings\.json"):
        summarise(tmp_path)
    write(tmp_path, settings(ARMS), [])
    with pytest.raises(EvaluationError, match="has no results yet; run the bench"):
        summarise(tmp_path)
    (tmp_path / "results.jsonl").unlink()
    with pytest.raises(EvaluationError, match="has no results"):
        summarise(tmp_path)


def test_a_run_of_decoders(tmp_path: Path) -> None:
    results = toy_evaluation.run(tmp_path, n=3)
    summary = summarise(tmp_path)
    assert list(summary["decoders"]) == toy_evaluation.ARMS.split(",")
    greedy = summary["decoders"]["specguard-greedy"]
    steps = [step for r in results if r.arm == "specguard-greedy" for step in r.steps]
    assert greedy["judged_steps"] == len(steps) > 0
    assert greedy["tokens"]["drafted"] == sum(
        r.metrics["num_draft_tokens"] for r in results if r.arm == "specguard-greedy"
    )
    assert math.isclose(
        sum(greedy["seconds_by"].values()), greedy["seconds"], rel_tol=1e-3, abs_tol=1e-6
    )


def test_five_thousand_results_are_soon_summarised(tmp_path: Path) -> None:
    rng = random.Random(0)
    steps = [step(score=0.5), step("rejected", score=0.2)] * 3
    lines = [
        result(i, arm, rng.random() < 0.5, seconds=rng.random(), steps=steps)
        for i in range(1250)
        for arm in ARMS
    ]
    folder = write(tmp_path, settings(ARMS), lines)
    start = time.process_time()  # not that of other programs
    summarise(folder)
    assert time.process_time() - start < 60  # seconds; with work that grows as their square, hours
