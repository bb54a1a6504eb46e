"""Predicted seconds against sums by hand."""

from __future__ import annotations

import random
from typing import Any

import pytest

from specguard_chains.decoding.pacing import Pacing, Patience
from specguard_chains.decoding.steps import Judgement, Verdict
from specguard_chains.errors import ConfigurationError
from specguard_chains.options import SpecGuardOptions
from specguard_chains.planning.advice import advise
from specguard_chains.planning.assumptions import assumed_settings, in_words
from specguard_chains.planning.costs import Curve, PairCosts
from specguard_chains.planning.model import accepting, pays_from, predict
from specguard_chains.planning.pausing import paced
from specguard_chains.planning.plan import at_ratios, plan
from specguard_chains.planning.settings import Acceptance, Setting, Speculating, Workload
from tests.unit_tests.planning_costs import CHEAP, DRAFT, PAIR

WORKLOAD = Workload(prompt_tokens=100, answer_tokens=200, step_tokens=20)
"""Ten steps."""
TARGET = Setting(label="target", method="target")


def specguard(rate: float, *, k: int = 1, label: str = "specguard", **more: Any) -> Setting:
    given = {"drafted_of_rejected": 1.0, "salvaged": 0.0, "untouched": None} | more
    verify_with, looks = given.pop("verify_with", "draft"), given.pop("looks", False)
    return Setting(
        label=label,
        method="specguard",
        candidates=k,
        verify_with=verify_with,
        looks=looks,
        acceptance=Acceptance(rate=rate, **given),
    )


def ms(setting: Setting, costs: PairCosts = PAIR) -> float:
    return 1000 * predict(setting, WORKLOAD, costs).total_s


def test_one_model_alone() -> None:
    assert ms(TARGET) == pytest.approx(100 * 12 + 200 * 32)
    assert ms(Setting(label="draft", method="draft")) == pytest.approx(100 * 7 + 200 * 20)
    assert predict(TARGET, WORKLOAD, PAIR).token_ms == pytest.approx(7600 / 200)


def test_where_all_is_accepted_the_target_does_nothing() -> None:
    prediction = predict(specguard(1.0), WORKLOAD, PAIR)
    assert prediction.seconds.target == 0
    assert 1000 * prediction.seconds.draft == pytest.approx(100 * 7 + 200 * 20)


def test_where_nothing_is_accepted_both_write_everything() -> None:
    prediction = predict(specguard(0.0), WORKLOAD, PAIR)
    # The last step of the target is nobody's to read.
    assert 1000 * prediction.seconds.draft == pytest.approx(100 * 7 + 200 * 20 + 9 * 20 * 7)
    assert 1000 * prediction.seconds.target == pytest.approx(100 * 12 + 200 * 32)


def test_early_rejection_saves_drafting() -> None:
    saved = ms(specguard(0.0)) - ms(specguard(0.0, drafted_of_rejected=0.25))
    assert saved == pytest.approx(0.75 * 200 * 20)


def test_half_accepted_in_answers_that_are_all_touched() -> None:
    # Five of ten steps; of the accepted ones 5/6 stand before a later rejection and are read.
    target = 100 * 12 + 5 * 20 * 32 + 5 * 20 * 5 / 6 * 12
    draft = 100 * 7 + 200 * 20 + 5 * 20 * 7 * 0.9
    prediction = predict(specguard(0.5, untouched=0.0), WORKLOAD, PAIR)
    assert 1000 * prediction.seconds.target == pytest.approx(target)
    assert 1000 * prediction.seconds.draft == pytest.approx(draft)


def test_answers_without_the_target_do_not_pay_for_its_prompt() -> None:
    # Half of the answers have all rejected steps: ten each of ten.
    target = 0.5 * 100 * 12 + 5 * 20 * 32
    prediction = predict(specguard(0.5, untouched=0.5), WORKLOAD, PAIR)
    assert 1000 * prediction.seconds.target == pytest.approx(target)


def test_candidates_are_written_side_by_side() -> None:
    prediction = predict(specguard(0.0, k=4), WORKLOAD, PAIR)
    assert 1000 * prediction.seconds.draft == pytest.approx(100 * 7 + 200 * 65 + 9 * 20 * 7)
    assert 1000 * prediction.seconds.target == pytest.approx(100 * 12 + 200 * 92)


def test_salvaged_tokens_cost_a_blocks_share() -> None:
    # Half of each step: 10 tokens in 1.25 blocks of 8, and half a block in vain, at 20 ms each.
    saved = ms(specguard(0.0)) - ms(specguard(0.0, salvaged=0.5))
    # The draft, which has written them, does not read them either, 9 times.
    assert saved == pytest.approx(10 * (10 * 32 - (10 + 4) * 20) + 9 * 10 * 7)


def test_a_target_that_judges_reads_every_step_once() -> None:
    prediction = predict(specguard(0.5, untouched=0.0, verify_with="target"), WORKLOAD, PAIR)
    target = 100 * 12 + 200 * 20 + 5 * 20 * 32
    assert 1000 * prediction.seconds.target == pytest.approx(target)
    everything = predict(specguard(1.0, verify_with="target"), WORKLOAD, PAIR)
    assert 1000 * everything.seconds.target == pytest.approx(100 * 12 + 200 * 20)


def test_a_target_that_looks_reads_what_is_drafted_and_does_not_write_what_was_right() -> None:
    given = {"verify_with": "target", "drafted_of_rejected": 0.5, "salvaged": 0.25}
    looking = specguard(0.5, looks=True, **given)
    prediction = predict(looking, WORKLOAD, PAIR)
    # Five steps of 20 tokens and five of 10, and three quarters of five others alone.
    target = 100 * 12 + (5 * 20 + 5 * 10) * 20 + 5 * 15 * 32
    assert 1000 * prediction.seconds.target == pytest.approx(target)
    draft = 100 * 7 + (5 * 20 + 5 * 10) * 20 + 5 * 15 * 7 * 0.9
    assert 1000 * prediction.seconds.draft == pytest.approx(draft)
    several = looking.model_copy(update={"target_candidates": 2})  # each begins from the context
    blocks = (5 * 5 + 5 * 4) * 20
    more = 5 * 15 * 20 + blocks  # 52 ms a token of two
    assert 1000 * predict(several, WORKLOAD, PAIR).seconds.target == pytest.approx(target + more)


def test_grounding_from_the_target_takes_a_pass_over_accepted_steps() -> None:
    costs = PAIR.model_copy(update={"target_with_attention": PAIR.target})
    setting = specguard(0.5).model_copy(update={"attention_of": "target"})
    prediction = predict(setting, WORKLOAD, costs)
    target = 100 * 12 + 5 * 20 * 20 + 5 * 20 * 32
    assert 1000 * prediction.seconds.target == pytest.approx(target)


def test_a_look_reads_fewer_tokens_at_a_time() -> None:
    # 20 tokens at once take 10 ms and 8 in a pass of 12 and one of 8: twice 10.
    verify = Curve.of({1: 0.01, 64: 0.01})
    target = PAIR.target.model_copy(update={"verify": verify})
    costs = PAIR.model_copy(update={"target": target})
    times = [
        predict(specguard(1.0, verify_with="target", looks=looks), WORKLOAD, costs).seconds.target
        for looks in (False, True)
    ]
    assert 1000 * (times[1] - times[0]) == pytest.approx(10 * 10)


def test_steps_that_are_not_drafted_are_read_together() -> None:
    # Six steps of the target in two runs: 4 of 6 are not drafted.
    given = {"drafted_of_rejected": 1 / 3, "undrafted": 2 / 3, "untouched": 0.0}
    prediction = predict(specguard(0.4, **given), WORKLOAD, PAIR)
    draft = 100 * 7 + (4 + 2) * 20 * 20 + 2 * 60 * 7 * (1 - 1 / 6)
    assert 1000 * prediction.seconds.draft == pytest.approx(draft)
    # Of four accepted steps and two runs in any order, 2/3 of the steps stand before a run.
    target = 100 * 12 + 6 * 20 * 32 + 4 * 2 / 3 * 20 * 12
    assert 1000 * prediction.seconds.target == pytest.approx(target)


def test_accepted_steps_that_are_shorter() -> None:
    # 5 n + 5 n / 3 = 200: of the target's 30 tokens, accepted ones 10.
    prediction = predict(specguard(0.5, length=1 / 3, untouched=0.0), WORKLOAD, PAIR)
    target = 100 * 12 + 5 * 30 * 32 + 5 * 10 * 5 / 6 * 12
    assert 1000 * prediction.seconds.target == pytest.approx(target)
    draft = 100 * 7 + 200 * 20 + 5 * 30 * 7 * 0.9
    assert 1000 * prediction.seconds.draft == pytest.approx(draft)


def test_a_draft_that_begins_with_one_candidate() -> None:
    # One step in three is in doubt: 3 others are drafted, and 3 times in 4 another one is judged.
    change = {"one_first": True, "drafted_candidates": 2.0, "target_candidates": 1}
    setting = specguard(1.0, k=4, verify_with="target").model_copy(update=change)
    prediction = predict(setting, WORKLOAD, PAIR)
    draft = 100 * 7 + 200 * 20 + 200 / 3 * DRAFT.decode.at(3) * 1000
    assert 1000 * prediction.seconds.draft == pytest.approx(draft)
    assert 1000 * prediction.seconds.target == pytest.approx(100 * 12 + 200 * 20 * 1.25)


def test_long_steps_are_verified_in_blocks() -> None:
    workload = Workload(prompt_tokens=100, answer_tokens=80, step_tokens=80)
    costs = PAIR.model_copy(
        update={"target": PAIR.target.model_copy(update={"verify": DRAFT.verify})}
    )
    prediction = predict(specguard(1.0, verify_with="target"), workload, costs)
    assert 1000 * prediction.seconds.target == pytest.approx(100 * 12 + 80 * 10)


def test_speculative_decoding() -> None:
    assert Speculating.at(0.5, 2).tokens_per_pass == pytest.approx((1 - 0.5**3) / (1 - 0.5))
    assert Speculating.at(1.0, 3).tokens_per_pass == 4
    assert Speculating.at(0.0, 3).tokens_per_pass == 1
    setting = Setting(
        label="s", method="speculative", speculating=Speculating(drafted=3, tokens_per_pass=2.5)
    )
    passes = 200 / 2.5
    # The first token that is proposed comes from a pass over the target's one, as it is read.
    expected = 100 * (7 + 12) + passes * (7 + 2 * 20 + 4 * 20)
    assert ms(setting) == pytest.approx(expected)
    assert Speculating.at(0.5, 2).pending == 1.25, "a token that was right is read, too"


def test_bounds_stand_beside_the_prediction() -> None:
    prediction = predict(specguard(0.5, drafted_of_rejected=0.5), WORKLOAD, PAIR)
    every, none = prediction.all_accepted_s, prediction.none_accepted_s
    assert every == pytest.approx(predict(specguard(1.0), WORKLOAD, PAIR).total_s)
    assert none == pytest.approx(
        predict(specguard(0.0, drafted_of_rejected=0.5), WORKLOAD, PAIR).total_s
    )
    assert predict(TARGET, WORKLOAD, PAIR).all_accepted_s is None


@pytest.mark.parametrize("costs", [PAIR, CHEAP], ids=["pair", "cheap"])
@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("salvaged", [0.0, 0.3])
def test_more_acceptance_is_never_slower(costs: PairCosts, k: int, salvaged: float) -> None:
    given = specguard(0.0, k=k, drafted_of_rejected=0.6, salvaged=salvaged)
    times = [ms(accepting(given, rate / 50), costs) for rate in range(51)]
    assert times == sorted(times, reverse=True)


def test_the_acceptance_from_which_it_pays() -> None:
    setting = specguard(0.5, drafted_of_rejected=0.6)
    rate = pays_from(setting, WORKLOAD, PAIR)
    assert rate is not None
    alone = ms(TARGET)
    assert ms(accepting(setting, rate + 0.001)) < alone < ms(accepting(setting, rate - 0.001))
    dear = PAIR.at_ratio(0.5)
    assert pays_from(setting, WORKLOAD, dear) is None


def test_what_is_not_said_of_a_setting_is_missed() -> None:
    with pytest.raises(ConfigurationError, match="odd: nothing is said"):
        predict(Setting(label="odd", method="specguard"), WORKLOAD, PAIR)
    with pytest.raises(ConfigurationError, match="one vocabulary"):
        other = PAIR.model_copy(update={"same_vocabulary": False})
        setting = Setting(label="s", method="speculative", speculating=Speculating.at(0.5, 2))
        predict(setting, WORKLOAD, other)


# Advice


def best(costs: PairCosts, *settings: Setting) -> tuple[str, str]:
    predictions = [predict(each, WORKLOAD, costs) for each in (TARGET, *settings)]
    advice = advise(predictions, WORKLOAD, costs)
    return advice.best.setting.label, advice.reason


def test_the_advice_turns_where_drafting_begins_to_pay() -> None:
    setting = specguard(0.5, drafted_of_rejected=0.6)
    rate = pays_from(setting, WORKLOAD, PAIR)
    assert rate is not None
    assert best(PAIR, accepting(setting, rate - 0.01))[0] == "target"
    assert best(PAIR, accepting(setting, rate + 0.01))[0] == "specguard"
    assert best(CHEAP, accepting(setting, rate - 0.01))[0] == "specguard"


def test_the_reason_gives_the_price_of_a_token() -> None:
    label, reason = best(PAIR, specguard(0.3))
    assert label == "target"
    assert "takes 20 + 12 ms, one that the target writes alone 32 ms" in reason
    assert "drafting pays only in answers that the target never touches" in reason
    _, reason = best(PAIR, specguard(0.3, verify_with="target"))
    assert "a drafted and judged token takes 20 + 20 ms" in reason
    assert reason.endswith("drafting saves no time")
    _, reason = best(CHEAP, specguard(0.9))
    assert reason.endswith("90% of the steps are accepted, 35% of the answers as a whole")


def test_a_setting_that_no_acceptance_makes_pay() -> None:
    label, reason = best(PAIR.at_ratio(1.0), specguard(0.9))
    assert label == "target"
    assert "drafting pays only" in reason


def test_speculative_decoding_wins_where_blocks_are_cheap() -> None:
    setting = Setting(label="s", method="speculative", speculating=Speculating.at(0.8, 4))
    label, reason = best(CHEAP, setting)
    assert label == "s"
    assert reason.startswith("3.4 tokens at a time take 6 ms to draft and 100 ms to verify")
    assert best(PAIR, setting)[0] == "target"


def test_the_draft_alone_is_no_advice() -> None:
    assert best(CHEAP, Setting(label="draft", method="draft"))[0] == "target"


def test_advice_needs_the_target_to_compare_with() -> None:
    with pytest.raises(ConfigurationError, match="target alone"):
        advise([predict(specguard(1.0), WORKLOAD, PAIR)], WORKLOAD, PAIR)


# Plans


def test_a_plan_has_a_row_for_each_setting_and_a_column_for_each_ratio() -> None:
    settings = assumed_settings(SpecGuardOptions(), PAIR)
    made = plan(PAIR, settings, WORKLOAD)
    labels = [row.setting.label for row in made.rows]
    assert labels == [
        *("target", "draft", "specguard-greedy", "specguard, 4 candidates", "rsd", "speculative")
    ]
    assert made.rows[0].ratio == 1
    own = next(each for each in made.at_ratios if each.measured)
    assert [each.ratio for each in made.at_ratios] == pytest.approx([1.6, 3, 5, 10, 20])
    for row in made.rows:
        assert own.by_setting[row.setting.label] == pytest.approx(row.ratio)


def test_a_cheaper_draft_gains_and_changes_nothing_of_the_target() -> None:
    settings = [TARGET, specguard(0.7), Setting(label="draft", method="draft")]
    rows = at_ratios(PAIR, settings, WORKLOAD, (3, 5, 10, 20))
    for label in ("specguard", "draft"):
        gained = [row.by_setting[label] for row in rows]
        assert gained == sorted(gained, reverse=True)
    assert {row.by_setting["target"] for row in rows} == {1.0}
    near = at_ratios(PAIR.at_ratio(10.2), settings, WORKLOAD)
    assert [row.ratio for row in near] == pytest.approx([3, 5, 10.2, 20])


def test_what_is_assumed_follows_the_options() -> None:
    options = SpecGuardOptions(
        early_rejection=False,
        salvage=False,
        num_candidates=1,
        num_speculative_tokens=2,
        patience=0,
    )
    settings = {each.label: each for each in assumed_settings(options, PAIR, 0.4)}
    acceptance = settings["specguard-greedy"].acceptance
    assert acceptance == Acceptance(rate=0.4, drafted_of_rejected=1.0, salvaged=0.0)
    assert settings["speculative"].speculating == Speculating.at(0.7, 2)
    assert list(settings) == ["target", "draft", "specguard-greedy", "rsd", "speculative"]
    assert not settings["specguard-greedy"].looks
    alone = PAIR.model_copy(update={"same_vocabulary": False})
    assert "speculative" not in {each.label for each in assumed_settings(options, alone)}


def test_the_defaults_are_a_target_that_looks_and_pauses() -> None:
    settings = assumed_settings(SpecGuardOptions(), PAIR, 0.5, WORKLOAD)
    greedy, sampled, rsd = settings[2:5]
    assert (greedy.verify_with, greedy.looks, greedy.rewrites) == ("target", True, 1)
    assert (sampled.candidates, sampled.rewrites, sampled.one_first) == (4, 1, True)
    assert sampled.drafted_candidates == 1 + 0.2 * 3  # scores in 0.1 around the threshold
    assert (rsd.verify_with, rsd.looks) == ("draft", False)
    acceptance = greedy.acceptance
    assert acceptance is not None
    assert acceptance.of_drafted == pytest.approx(0.5)
    kept, drafted = paced(0.5, Patience(1, 4), 10)
    assert acceptance.rate == pytest.approx(kept / 10)
    assert acceptance.undrafted == pytest.approx((10 - drafted) / (10 - kept))
    assert acceptance.drafted_of_rejected == pytest.approx(0.6 * (1 - acceptance.undrafted))
    assert rsd.acceptance == Acceptance(rate=0.5, salvaged=0.3)
    said = in_words(settings)[0]
    assert "50% of the drafted steps are accepted" in said
    assert f"{acceptance.rate:.0%} of the answer's steps are the draft's" in said
    assert "20% of the steps are in doubt" in said
    assert "given up after 60% of its tokens" in said
    assert "30% of the tokens that replace it were drafted right" in said


def test_all_candidates_at_once_are_complete_before_the_target_reads_one() -> None:
    greedy, sampled = assumed_settings(SpecGuardOptions(doubt_margin=1.0), PAIR)[2:4]
    assert (greedy.looks, sampled.looks, sampled.one_first) == (True, False, False)
    assert greedy.acceptance is not None
    assert sampled.acceptance is not None
    assert greedy.acceptance.drafted_of_rejected == pytest.approx(
        0.6 * sampled.acceptance.drafted_of_rejected
    )


@pytest.mark.parametrize("patience", [None, Patience(1, 4), Patience(2, 1), Patience(3, 2)])
@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
def test_how_many_steps_are_drafted_with_patience(rate: float, patience: Patience | None) -> None:
    steps, answers = 12, 2000
    rng = random.Random(1)
    kept = drafted = 0
    for _ in range(answers):
        pacing = Pacing(patience)
        for _ in range(steps):
            if not pacing.pauses():
                accepted = rng.random() < rate
                kept, drafted = kept + accepted, drafted + 1
                pacing.note(Judgement(Verdict.ACCEPTED if accepted else Verdict.REJECTED))
    expected = paced(rate, patience, steps)
    assert expected == pytest.approx((kept / answers, drafted / answers), rel=0.03)


def test_attention_is_read_where_it_was_measured() -> None:
    slower = PAIR.model_copy(update={"draft_with_attention": DRAFT.scaled(1.1)})
    read, not_read = (
        assumed_settings(SpecGuardOptions(confidence_weight=weight, verify_with="draft"), slower)[2]
        for weight in (0.3, 1.0)
    )
    assert (read.attention_of, not_read.attention_of) == ("draft", None)
    at = [predict(each, WORKLOAD, slower).seconds for each in (read, not_read)]
    assert at[0].draft == pytest.approx(1.1 * at[1].draft)
    assert at[0].target == at[1].target
