"""Predicted seconds against sums by hand."""

from __future__ import annotations

from typing import Any

import pytest

from specguard_chains.errors import ConfigurationError
from specguard_chains.options import SpecGuardOptions
from specguard_chains.planning.advice import advise
from specguard_chains.planning.assumptions import assumed_settings
from specguard_chains.planning.costs import PairCosts
from specguard_chains.planning.model import accepting, pays_from, predict
from specguard_chains.planning.plan import at_ratios, plan
from specguard_chains.planning.settings import Acceptance, Setting, Speculating, Workload
from tests.unit_tests.planning_costs import CHEAP, DRAFT, PAIR

WORKLOAD = Workload(prompt_tokens=100, answer_tokens=200, step_tokens=20)
"""Ten steps."""
TARGET = Setting(label="target", method="target")


def specguard(rate: float, *, k: int = 1, label: str = "specguard", **more: Any) -> Setting:
    given = {"drafted_of_rejected": 1.0, "salvaged": 0.0, "untouched": None} | more
    verify_with = given.pop("verify_with", "draft")
    return Setting(
        label=label,
        method="specguard",
        candidates=k,
        verify_with=verify_with,
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
    assert saved == pytest.approx(10 * (10 * 32 - (10 + 4) * 20))


def test_a_target_that_judges_reads_every_step_once() -> None:
    prediction = predict(specguard(0.5, untouched=0.0, verify_with="target"), WORKLOAD, PAIR)
    target = 100 * 12 + 200 * 20 + 5 * 20 * 32
    assert 1000 * prediction.seconds.target == pytest.approx(target)
    everything = predict(specguard(1.0, verify_with="target"), WORKLOAD, PAIR)
    assert 1000 * everything.seconds.target == pytest.approx(100 * 12 + 200 * 20)


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
    expected = 100 * (7 + 12) + passes * (3 * 20 + 4 * 20)
    assert ms(setting) == pytest.approx(expected)


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
        early_rejection=False, salvage=False, num_candidates=1, num_speculative_tokens=2
    )
    settings = {each.label: each for each in assumed_settings(options, PAIR, 0.4)}
    acceptance = settings["specguard-greedy"].acceptance
    assert acceptance == Acceptance(rate=0.4, drafted_of_rejected=1.0, salvaged=0.0)
    assert settings["speculative"].speculating == Speculating.at(0.7, 2)
    assert list(settings) == ["target", "draft", "specguard-greedy", "rsd", "speculative"]
    alone = PAIR.model_copy(update={"same_vocabulary": False})
    assert "speculative" not in {each.label for each in assumed_settings(options, alone)}


def test_attention_is_read_where_it_was_measured() -> None:
    slower = PAIR.model_copy(update={"draft_with_attention": DRAFT.scaled(1.1)})
    read, not_read = (
        assumed_settings(SpecGuardOptions(confidence_weight=weight), slower)[2]
        for weight in (0.3, 1.0)
    )
    assert (read.attention_of, not_read.attention_of) == ("draft", None)
    at = [predict(each, WORKLOAD, slower).seconds for each in (read, not_read)]
    assert at[0].draft == pytest.approx(1.1 * at[1].draft)
    assert at[0].target == at[1].target
