"""Choices among recorded arms whose accuracy and time are known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from specguard_chains.errors import EvaluationError
from specguard_chains.evaluation.summary import Run, summary_of
from specguard_chains.planning.compared import compare
from specguard_chains.planning.goals import as_accurate, verdicts, within
from tests.unit_tests.toy_results import result, settings, write

GREEDY = {"decoder": "specguard-greedy", "temperature": 0.0}
ARMS: dict[str, dict[str, Any]] = {
    "target": {"decoder": "target", "temperature": 0.0},
    "low": GREEDY | {"threshold": 0.6},
    "high": GREEDY | {"threshold": 0.8},
}


def lines(arm: str, n: int, wrong: Iterable[int], seconds: float, **more: Any) -> Any:
    missed = set(wrong)
    return [result(i, arm, i not in missed, seconds=seconds, **more) for i in range(n)]


def run(folder: Path, *arms: Any, settings_of: Mapping[str, Mapping[str, Any]] = ARMS) -> Run:
    return Run.read(write(folder, settings(settings_of), [line for arm in arms for line in arm]))


def calibration(folder: Path, n: int = 100) -> Run:
    """The target misses 4 of ten, the low threshold 6, and the high one as many as the target."""
    tens = range(0, n, 10)
    of_target = [start + i for start in tens for i in range(4)]
    return run(
        folder,
        lines("target", n, of_target, 10.0),
        lines("low", n, [start + i for start in tens for i in range(6)], 4.0),
        lines("high", n, [*of_target[1:], 8], 7.0),
    )


def test_the_fastest_arm_that_is_not_below_the_target(tmp_path: Path) -> None:
    compared = compare(calibration(tmp_path))
    choice = as_accurate(compared)
    assert (choice.arm, choice.met) == ("high", True)
    assert "7.00 s an answer, the target alone 10.00 s" in choice.reason
    assert "by 0.0 points (−4.6 to +4.6), which is less than 5 points below" in choice.reason
    (low,) = choice.others
    assert "low takes 4.00 s" in low
    assert "−20.0 points" in low
    assert "so far no less than 5 points below" in low
    assert verdicts(compared.arms, 5) == {
        "target": "not below",
        "low": "lower so far",
        "high": "not below",
    }


def test_the_report_has_the_same_interval(tmp_path: Path) -> None:
    recorded = calibration(tmp_path)
    rows = summary_of(recorded)["decoders"]
    for each in compare(recorded).arms[1:]:
        assert each.interval == pytest.approx(rows[each.arm]["difference_interval"], rel=1e-5)


def test_too_few_problems_give_the_target_and_how_many_it_takes(tmp_path: Path) -> None:
    choice = as_accurate(
        compare(run(tmp_path, lines("target", 4, [0], 10.0), lines("high", 4, [0], 7.0)))
    )
    assert (choice.arm, choice.met) == ("target", True)
    assert choice.reason == "nothing else is faster and shown to be not below it"
    (high,) = choice.others
    assert "4 problems are too few to say that it is less than 5 points below" in high
    assert high.endswith("If it goes on like this, 73 would show it.")


def test_a_wider_tolerance_takes_a_faster_arm(tmp_path: Path) -> None:
    compared = compare(calibration(tmp_path))
    assert as_accurate(compared, 30).arm == "low"
    assert as_accurate(compared, 4).arm == "target"


def test_what_is_slower_than_the_target_is_not_taken(tmp_path: Path) -> None:
    choice = as_accurate(
        compare(run(tmp_path, lines("target", 4, [0, 1], 5.0), lines("high", 4, [], 7.0)))
    )
    assert (choice.arm, choice.others) == ("target", ())
    assert choice.reason == "nothing else is faster"


@pytest.mark.parametrize(
    ("own", "taken"),
    [
        ({"temperature": 0.0, "num_speculative_tokens": 6}, "fast"),
        ({"temperature": 0.7}, "target"),
        ({"temperature": 0.0, "target": "another.gguf"}, "target"),
    ],
)
def test_the_targets_own_text_needs_no_showing(
    tmp_path: Path, own: dict[str, Any], taken: str
) -> None:
    arms = ARMS | {"fast": {"decoder": "speculative", **own}}
    recorded = lines("target", 3, [0], 10.0), lines("fast", 3, [0], 7.0)
    compared = compare(run(tmp_path, *recorded, settings_of=arms))
    assert as_accurate(compared).arm == taken
    said = verdicts(compared.arms, 5)["fast"]
    assert said == ("the same text" if taken == "fast" else "73 problems")


def test_controls_and_the_oracle_are_not_to_be_chosen(tmp_path: Path) -> None:
    arms = ARMS | {
        "oracle": {"decoder": "oracle"},
        "random@high": {"decoder": "random", "controls": "high"},
    }
    recorded = [
        lines("target", 90, [], 10.0),
        lines("oracle", 90, [], 1.0),
        lines("random@high", 90, [], 1.0, controls="high"),
    ]
    compared = compare(run(tmp_path, *recorded, settings_of=arms))
    assert [each.arm for each in compared.arms] == ["target"]
    assert within(compared, 2).arm == "target"


def test_the_target_has_to_be_there_for_its_accuracy(tmp_path: Path) -> None:
    compared = compare(run(tmp_path, lines("low", 4, [0], 4.0), lines("high", 4, [], 7.0)))
    with pytest.raises(EvaluationError, match="run the target alone"):
        as_accurate(compared)
    assert within(compared, 8).arm == "high"


def test_the_most_accurate_arm_in_so_many_seconds(tmp_path: Path) -> None:
    compared = compare(calibration(tmp_path))
    assert [within(compared, s).arm for s in (4.0, 6.9, 7.0, 20)] == ["low", "low", "high", "high"]
    reason = within(compared, 7).reason
    assert reason == (
        "60 of 100 right, the most of the arms that take at most 7 s an answer; it takes 7.00 s"
    )
    assert "40 of 100 right, the only arm that takes at most 4 s" in within(compared, 4).reason


def test_nothing_in_so_few_seconds_gives_the_fastest(tmp_path: Path) -> None:
    choice = within(compare(calibration(tmp_path)), 1.5)
    assert (choice.arm, choice.met) == ("low", False)
    assert choice.reason == "it is the fastest, and takes 4.00 s an answer"


def test_arms_are_compared_over_the_same_problems(tmp_path: Path) -> None:
    recorded = [lines("target", 10, range(5, 10), 10.0), lines("high", 4, [0], 7.0)]
    compared = compare(run(tmp_path, *recorded))
    assert [(each.right, each.problems) for each in compared.arms] == [(4, 4), (3, 4)]
    assert compared.notes == ("Only 4 problems have been attempted by every arm, of 10: high 4.",)


def test_errors_count_as_wrong_and_take_no_time(tmp_path: Path) -> None:
    failed = [result(i, "high", False, seconds=0.1, error="out of memory") for i in (1, 2)]
    recorded = [lines("target", 3, [], 10.0), [*lines("high", 1, [], 7.0), *failed]]
    compared = compare(run(tmp_path, *recorded))
    high = compared.arms[1]
    assert (high.right, high.losses, high.seconds) == (1, 2, 7.0)
    assert compared.notes == (
        "high: 2 attempts ended in an error and count as wrong.",
        "Times are over what every arm has completed, 1 of 3 problems.",
    )


def test_times_are_compared_over_what_every_arm_has_completed(tmp_path: Path) -> None:
    """An arm that fails where problems are long is not faster for that."""
    long = result(1, "target", seconds=50.0), result(1, "high", False, seconds=0.1, error="late")
    recorded = lines("target", 1, [], 10.0), lines("high", 1, [], 12.0), long
    compared = compare(run(tmp_path, *recorded))
    assert [each.seconds for each in compared.arms] == [10.0, 12.0]


def test_without_a_problem_that_every_arm_has_completed_there_is_no_time(tmp_path: Path) -> None:
    failed = [result(i, arm, False, error="late") for i, arm in enumerate(("target", "high"))]
    recorded = [result(1, "target"), result(0, "high"), *failed]
    with pytest.raises(EvaluationError, match="none of the 2 problems has been completed by every"):
        compare(run(tmp_path, recorded))


def test_an_arm_without_any_answer_is_left_out(tmp_path: Path) -> None:
    failed = [result(0, "high", False, seconds=0.1, error="out of memory")]
    compared = compare(run(tmp_path, lines("target", 1, [], 10.0), failed))
    assert [each.arm for each in compared.arms] == ["target"]
    assert compared.notes == ("high: every attempt ended in an error (out of memory); left out.",)


def test_times_of_another_day_are_told_of(tmp_path: Path) -> None:
    recorded = [
        lines("target", 2, [], 10.0, started=0.0),
        lines("low", 2, [], 9.0, started=60.0),
        [*lines("high", 1, [], 7.0, started=60.0), result(1, "high", started=86_400.0)],
    ]
    (note,) = compare(run(tmp_path, *recorded)).notes
    assert note.startswith("high was timed apart from target on 1 of 2 problems: the machine may")
    (note,) = compare(run(tmp_path, *recorded[1:])).notes
    assert note.startswith("high was timed apart from low on 1 of 2 problems")


def test_no_problem_in_common_is_an_error(tmp_path: Path) -> None:
    apart = [[result(0, "target")], [result(1, "high")]]
    with pytest.raises(EvaluationError, match="target has 1 and high has 1"):
        compare(run(tmp_path, *apart))
