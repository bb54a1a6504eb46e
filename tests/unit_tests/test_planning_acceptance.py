"""How verification went, and what it has cost, from recorded runs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from specguard_chains.errors import EvaluationError
from specguard_chains.evaluation import runner
from specguard_chains.evaluation.folder import read_results
from specguard_chains.evaluation.results import Result, StepResult
from specguard_chains.planning.acceptance import Recorded, speculating_of
from specguard_chains.planning.costs import PairCosts
from specguard_chains.planning.from_results import read_run
from specguard_chains.planning.measure import measure_pair
from specguard_chains.planning.recorded import Shape, prompt_read, work_of
from specguard_chains.planning.settings import Speculating
from specguard_chains.planning.work import Kind, Passes, seconds_of
from tests.unit_tests import toy_evaluation
from tests.unit_tests.planning_costs import PAIR, Clock, TimedToy

NO_SECONDS = {"draft": 0.0, "verify": 0.0, "select": 0.0, "target": 0.0}


def step(score: float, tokens: int = 10, *, drafted: int = 10, early: bool = False) -> StepResult:
    kept = score >= 0.7
    return StepResult(
        source="draft" if kept else "target",
        verdict="accepted" if kept else "rejected",
        score=score,
        confidence=None,
        grounding=None,
        threshold=0.7,
        rejected_early=early,
        num_candidates=1,
        answer_tokens=tokens,
        drafted=drafted,
        kept=drafted if kept else 0,
        regenerated=0 if kept else tokens,
        seconds=NO_SECONDS,
        phase="reasoning",
    )


def result(*steps: StepResult, error: str | None = None, **metrics: Any) -> Result:
    given = {"num_target_passes": 0, "draft_tokens_read": 100, "target_tokens_read": 0} | metrics
    return Result(
        problem="p",
        data="d",
        arm="a",
        right=True,
        extracted=None,
        timed_out=False,
        seconds=1.0,
        tokens=sum(each.answer_tokens for each in steps),
        finish_reason="stop",
        seed=0,
        metrics=given,
        peak_rss_mb=1.0,
        steps=steps,
        text="",
        error=error,
    )


WHOLE = result(step(0.9), step(0.8))
MIXED = result(
    *(step(0.75), step(0.2, 20, drafted=5, early=True), step(0.95)),
    num_salvaged_tokens=4,
    draft_tokens_read=120,  # the target's step of 20, too
    target_tokens_read=116,  # and 10 of the first step, and 6 in vain
)


def test_what_a_run_says_at_its_own_threshold() -> None:
    recorded = Recorded.of([WHOLE, MIXED, result(step(0.1), error="stopped")])
    acceptance = recorded.acceptance()
    assert acceptance.rate == pytest.approx(4 / 5)
    assert acceptance.drafted_of_rejected == pytest.approx(5 / 20)
    assert acceptance.salvaged == pytest.approx(4 / 20)
    assert acceptance.untouched == 0.5
    workload = recorded.workload()
    assert workload.prompt_tokens == 100
    assert workload.answer_tokens == 30
    assert workload.step_tokens == 12


def test_a_higher_threshold_rejects_what_had_passed() -> None:
    recorded = Recorded.of([WHOLE, MIXED])
    acceptance = recorded.acceptance(0.85)
    assert acceptance.rate == pytest.approx(2 / 5)
    assert acceptance.untouched == 0


def test_a_lower_threshold_is_not_known_where_steps_were_given_up_early() -> None:
    recorded = Recorded.of([WHOLE, MIXED])
    assert recorded.knows(0.7)
    assert not recorded.knows(0.69)
    with pytest.raises(EvaluationError, match=r"of 5 steps 1 were given up .* early_rejection=off"):
        recorded.acceptance(0.1)


def test_a_lower_threshold_is_known_where_none_was() -> None:
    recorded = Recorded.of([result(step(0.9), step(0.5), step(0.3))])
    assert recorded.acceptance(0.7).rate == pytest.approx(1 / 3)
    assert recorded.acceptance(0.5).rate == pytest.approx(2 / 3)
    assert recorded.acceptance(0.1).rate == 1


def test_a_lower_threshold_is_not_known_where_steps_were_not_drafted() -> None:
    paused = replace(step(0.5, drafted=0), score=None, verdict="unverified", num_candidates=0)
    recorded = Recorded.of([result(step(0.9), step(0.5), paused, num_paused_steps=1)])
    assert recorded.acceptance().rate == pytest.approx(1 / 3)
    assert recorded.acceptance().drafted_of_rejected == 0.5
    assert recorded.knows(0.8)
    assert not recorded.knows(0.6)
    with pytest.raises(EvaluationError, match=r"1 were not drafted; .* without patience"):
        recorded.acceptance(0.6)


def test_a_draft_that_begins_with_one_candidate() -> None:
    several = replace(step(0.9, drafted=40), num_candidates=4)
    recorded = Recorded.of([result(step(0.9), several)])
    assert recorded.candidates == 4
    assert recorded.drafted_candidates == 2.5
    seconds = seconds_of(work_of(recorded.results[0]), PAIR)
    assert 1000 * seconds.draft == pytest.approx(100 * 7 + 10 * 20 + 10 * 65)


def test_a_step_that_was_the_targets_to_write_stays_so() -> None:
    critical = replace(step(0.5), score=0.9)  # its score passes, its verdict does not
    recorded = Recorded.of([result(critical, step(0.9))])
    assert recorded.acceptance(0.1).rate == 0.5


def test_a_run_without_a_complete_answer_says_nothing() -> None:
    with pytest.raises(EvaluationError, match="no complete answer"):
        Recorded.of([result(step(0.9), error="stopped")])


def test_the_passes_of_a_recorded_answer() -> None:
    assert prompt_read(MIXED) == 100
    seconds = seconds_of(work_of(MIXED), PAIR)
    # prompt, 25 drafted tokens, the target's step read; none of it is known to be the draft's own
    assert 1000 * seconds.draft == pytest.approx(100 * 7 + 25 * 20 + 20 * 7)
    # prompt and the first step; 16 tokens one by one; 4 right ones and 6 in vain in blocks
    assert 1000 * seconds.target == pytest.approx(110 * 12 + 16 * 32 + 10 * 20)
    assert seconds_of(work_of(WHOLE), PAIR).target == 0


def test_the_passes_of_an_answer_that_the_target_has_judged() -> None:
    judged = result(step(0.9), step(0.5, 20), target_tokens_read=120)
    seconds = seconds_of(work_of(judged, Shape(verify_with="target")), PAIR)
    assert 1000 * seconds.target == pytest.approx(100 * 12 + 20 * 20 + 20 * 32)


def test_what_was_read_while_it_was_drafted_is_not_computed_again() -> None:
    early = replace(step(0.2, 20, drafted=16, early=True), salvaged=12)
    judged = result(
        *(step(0.9), early, step(0.8)),
        num_salvaged_tokens=12,
        draft_tokens_read=100 + 8,
        # Prompt and three drafted steps; what is salvaged counts as written, and not as read.
        target_tokens_read=100 + 10 + 16 + 10 - 12,
    )
    shape = Shape(verify_with="target", target_candidates=1, looks=True)
    assert prompt_read(judged, shape) == 100
    seconds = seconds_of(work_of(judged, shape), PAIR)
    assert 1000 * seconds.draft == pytest.approx(100 * 7 + 36 * 20 + 8 * 7)
    assert 1000 * seconds.target == pytest.approx(100 * 12 + 36 * 20 + 8 * 32)
    looks = [each.size for each in work_of(judged, shape).target if each.kind == Kind.VERIFY]
    assert work_of(judged, shape).target_calls == 4
    assert looks[:4] == [10, 12, 4, 10]


def test_a_step_that_the_target_was_asked_about_in_doubt_is_not_read_later() -> None:
    doubtful = replace(step(0.72), target_confidence=-0.1)
    asked = result(doubtful, step(0.9), step(0.1, 20), target_tokens_read=120)
    seconds = seconds_of(work_of(asked, Shape(target_candidates=1)), PAIR)
    assert 1000 * seconds.target == pytest.approx(110 * 12 + 10 * 20 + 20 * 32)


def test_grounding_from_the_target_takes_a_pass_over_every_complete_step() -> None:
    early = step(0.2, 20, drafted=5, early=True)
    grounded = result(step(0.9), early, target_tokens_read=110)
    work = work_of(grounded, Shape(attention_of="target"))
    assert [each for each in work.target if each.kind == Kind.VERIFY and each.times] == [
        Passes(Kind.VERIFY, 10)
    ]
    assert work.target_attention


def test_a_target_that_judges_reads_the_first_candidate_and_the_chosen_one() -> None:
    doubtful = replace(step(0.75, drafted=40), num_candidates=4)
    judged = result(doubtful, target_tokens_read=100 + 10 + 10)
    shape = Shape(verify_with="target", target_candidates=1, one_first=True, looks=True)
    work = work_of(judged, shape)
    assert 1000 * seconds_of(work, PAIR).draft == pytest.approx(100 * 7 + 10 * 20 + 10 * 50)
    read = [each for each in work.target if each.kind == Kind.VERIFY]
    assert read[:2] == [Passes(Kind.VERIFY, 10), Passes(Kind.VERIFY, 10, 0.75)]


def test_accepted_steps_may_be_shorter() -> None:
    recorded = Recorded.of([result(step(0.9), step(0.75), step(0.2, 20))])
    assert recorded.acceptance().length == 0.5
    assert recorded.acceptance(0.8).length == pytest.approx(10 / 15)
    assert Recorded.of([WHOLE]).acceptance().length == 1


def test_speculative_decoding_as_recorded() -> None:
    one = result(
        *(step(0.1, 10, drafted=12),),
        num_target_passes=4,
        num_draft_tokens=12,
        target_tokens_read=100 + 12 + 3,
    )
    assert speculating_of([one]) == Speculating(drafted=3, tokens_per_pass=2.5)
    assert prompt_read(one) == 100
    seconds = seconds_of(work_of(one), PAIR)
    assert 1000 * seconds.draft == pytest.approx(100 * 7 + 4 * 7 + 8 * 20)
    assert 1000 * seconds.target == pytest.approx(100 * 12 + 4 * 4 * 20)
    more = replace(one, metrics=one.metrics | {"draft_tokens_read": 106})
    assert speculating_of([more]).pending == 1.5


# Runs of toys whose passes take known times: the counts must explain them

ARMS = "target,draft,speculative,specguard-greedy,specguard:num_candidates=2:temperature=0.7"
SAVING = (
    "specguard-greedy:patience=1:pause_steps=2,specguard-greedy:hand_back=4,"
    "specguard:num_candidates=2:temperature=0.7:doubt_margin=0.05"
)


LOOKING = (
    "specguard-greedy:patience=0,specguard-greedy:patience=1:pause_steps=2,"
    "specguard-greedy:early_rejection=off,"
    "specguard:temperature=0.7:num_candidates=3:num_target_candidates=1:doubt_margin=0.2"
)
Judge = Literal["draft", "target"]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(runner, "perf_counter", clock)
    return clock


def toy_run(clock: Clock, folder: Path, arms: str, **more: Any) -> PairCosts:
    draft, target = (
        TimedToy(clock, base, token, policy=toy_evaluation.by_question(seed), name=name)
        for base, token, seed, name in ((10, 2, 1, "small"), (30, 5, 2, "large"))
    )
    measured = (
        TimedToy(clock, engine.pass_ms, engine.token_ms, name=engine.name)
        for engine in (draft, target)
    )
    costs = measure_pair(*measured, clock=clock)
    given = toy_evaluation.options(draft=draft, target=target, **more)
    toy_evaluation.run(folder, 8, arms, given=given)
    return costs


@pytest.mark.parametrize("verify_with", ["draft", "target"])
def test_counts_and_means_explain_recorded_times(
    clock: Clock, tmp_path: Path, verify_with: str
) -> None:
    costs = toy_run(clock, tmp_path, ARMS, verify_with=verify_with)
    checks = read_run(tmp_path, costs).checks
    assert [check.arm for check in checks] == ARMS.split(",")
    for check in checks:
        assert check.answers == 8
        assert abs(check.deviation(check.counted_s)) < 0.05, check
        assert abs(check.deviation(check.predicted_s)) < 0.1, check


def test_paused_steps_and_those_that_are_given_back(clock: Clock, tmp_path: Path) -> None:
    costs = toy_run(clock, tmp_path, SAVING)
    checks = read_run(tmp_path, costs).checks
    assert [check.arm for check in checks] == SAVING.split(",")
    for check in checks:
        assert abs(check.deviation(check.counted_s)) < 0.05, check
        # Pauses put rejected steps side by side, which means do not tell.
        assert abs(check.deviation(check.predicted_s)) < 0.12, check


def test_a_target_that_looks_at_steps_in_progress(clock: Clock, tmp_path: Path) -> None:
    costs = toy_run(clock, tmp_path, LOOKING, verify_with="target", threshold=0.4)
    found = read_run(tmp_path, costs)
    settings = {each.label: each for each in found.settings}
    looking, _, whole, sampled = (settings[arm] for arm in LOOKING.split(","))
    assert (looking.looks, whole.looks, sampled.looks, sampled.one_first) == (
        *(True, False, True, True),
    )
    assert (sampled.candidates, sampled.rewrites) == (3, 1)
    for check in found.checks:
        assert abs(check.deviation(check.counted_s)) < 0.05, check
        assert abs(check.deviation(check.predicted_s)) < 0.12, check


@pytest.mark.parametrize("patience", [0, 1])
@pytest.mark.parametrize(("verify_with", "threshold"), [("draft", 0.76), ("target", 0.4)])
def test_counts_are_the_tokens_that_sessions_have_computed(
    clock: Clock, tmp_path: Path, verify_with: Judge, threshold: float, patience: int
) -> None:
    arm = f"specguard-greedy:patience={patience}:pause_steps=2"
    toy_run(clock, tmp_path, arm, verify_with=verify_with, threshold=threshold)
    results = read_results(tmp_path)
    shape = Shape(verify_with=verify_with, target_candidates=1, looks=verify_with == "target")
    # Each question is one character longer than the one before.
    assert [prompt_read(each, shape) for each in results] == list(range(86, 94))
    for each in results:
        work, metrics = work_of(each, shape), each.metrics
        drafted = metrics["draft_tokens_read"] + metrics["num_draft_tokens"]
        assert tokens_of(work.draft) == pytest.approx(drafted)
        written = metrics["target_tokens_read"] + metrics["num_regenerated_tokens"]
        assert tokens_of(work.target) == pytest.approx(written)
    for what in ("num_salvaged_tokens", "num_accepted_steps"):
        assert sum(result.metrics[what] for result in results)
    paused = sum(result.metrics["num_paused_steps"] for result in results)
    assert (paused > 0) == (patience > 0)


def tokens_of(side: Iterable[Passes]) -> float:
    """All tokens that are computed in passes, of one candidate each."""
    return sum(each.times * (1 if each.kind == Kind.DECODE else each.size) for each in side)


def test_an_older_run_is_read_as_what_it_was(clock: Clock, tmp_path: Path) -> None:
    arm = "specguard:temperature=0.7:num_candidates=2"
    costs = toy_run(clock, tmp_path, arm, verify_with="target", doubt_margin=1)
    assert read_run(tmp_path, costs).settings[2].rewrites == 2  # as the toys' options say
    path = tmp_path / "settings.json"
    settings = json.loads(path.read_text())
    for options in (settings["defaults"], *settings["arms"].values()):
        for later in ("num_target_candidates", "doubt_margin", "target_confidence"):
            options.pop(later, None)
    path.write_text(json.dumps(settings))
    setting = read_run(tmp_path, costs).settings[2]
    assert (setting.rewrites, setting.looks, setting.one_first) == (2, False, False)


def test_thresholds_that_the_run_tells_of(clock: Clock, tmp_path: Path) -> None:
    costs = toy_run(clock, tmp_path, ARMS)
    found = read_run(tmp_path, costs)
    labels = [setting.label for setting in found.settings]
    assert "specguard-greedy at 0.8" in labels
    assert "specguard-greedy at 0.5" not in labels
    assert any("given up early" in note for note in found.notes)
    assert {setting.assumed for setting in found.settings if setting.judges} == {False}


def test_without_early_rejection_lower_thresholds_are_known(clock: Clock, tmp_path: Path) -> None:
    costs = toy_run(clock, tmp_path, "specguard-greedy", early_rejection=False)
    labels = [setting.label for setting in read_run(tmp_path, costs).settings]
    assert "specguard-greedy at 0.5" in labels


def test_an_arm_that_counts_say_nothing_of_is_left_out(clock: Clock, tmp_path: Path) -> None:
    costs = toy_run(clock, tmp_path, "target,target-majority:num_samples=2:temperature=0.7")
    found = read_run(tmp_path, costs)
    assert [check.arm for check in found.checks] == ["target"]
    assert any("target-majority" in note and "left out" in note for note in found.notes)


def test_an_arm_whose_target_speculates_is_left_out(clock: Clock, tmp_path: Path) -> None:
    mixed = "specguard-greedy:speculate_rewrites=true"
    costs = toy_run(clock, tmp_path, f"{mixed},target,specguard-greedy")
    found = read_run(tmp_path, costs)
    assert [check.arm for check in found.checks] == ["target", "specguard-greedy"]
    assert f"{mixed}: its target's speculative decoding is not in a plan; left out." in found.notes


def test_an_arm_that_drafts_by_the_clock_is_left_out(clock: Clock, tmp_path: Path) -> None:
    timed = "specguard-greedy:max_slowdown=0.1:verify_with=target"
    costs = toy_run(clock, tmp_path, f"{timed},target:max_slowdown=0.1,specguard-greedy")
    found = read_run(tmp_path, costs)
    assert [check.arm for check in found.checks] == ["target:max_slowdown=0.1", "specguard-greedy"]
    assert any(note.startswith(f"{timed}: what it drafts goes by") for note in found.notes)


def test_an_arm_without_a_draft_is_left_out(clock: Clock, tmp_path: Path) -> None:
    lookup = "speculative:speculate_with=prompt"
    costs = toy_run(clock, tmp_path, f"target,speculative,{lookup}")
    found = read_run(tmp_path, costs)
    assert [check.arm for check in found.checks] == ["target", "speculative"]
    assert f"{lookup}: a plan is of pairs, and this arm has no draft; left out." in found.notes
