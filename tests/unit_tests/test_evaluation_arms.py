"""Arms of an evaluation, from the list on a command line to decoders."""

from __future__ import annotations

from typing import Any

import pytest

from specguard_chains.decoding.pacing import Patience
from specguard_chains.decoding.specguard import SpecGuardDecoder
from specguard_chains.errors import EvaluationError
from specguard_chains.evaluation.arms import Arm, parse_arms
from specguard_chains.evaluation.labels import OracleVerifier
from specguard_chains.options import SpecGuardOptions
from tests.unit_tests.toy_evaluation import ToyChecker, options, problems


def arms(text: str, **shared: Any) -> dict[str, Arm]:
    return {arm.label: arm for arm in parse_arms(text, SpecGuardOptions(**shared))}


def test_arms_come_in_their_order_with_labels_of_their_own() -> None:
    listed = "random@quick, quick=specguard:threshold=0.5:doubt_margin=1,target,draft"
    parsed = arms(listed, max_tokens=50)
    assert list(parsed) == ["random@quick", "quick", "target", "draft"]
    assert parsed["quick"].options.decoder == "specguard"
    assert parsed["quick"].options.threshold == 0.5
    assert parsed["quick"].options.doubt_margin == 1
    assert {arm.options.max_tokens for arm in parsed.values()} == {50}
    assert parsed["random@quick"].controls == "quick"
    assert [arm.same_for_all for arm in parsed.values()] == [False, True, True, True]


def test_the_label_is_the_text_unless_one_is_given() -> None:
    assert list(arms("specguard:threshold=0.5,specguard")) == [
        "specguard:threshold=0.5",
        "specguard",
    ]


def test_arms_without_variety_are_greedy_unless_a_temperature_is_given() -> None:
    listed = (
        "target,draft,speculative,rsd,specreason,specguard-greedy,specguard,rsd-majority,oracle"
    )
    usual = {label: arm.options.temperature for label, arm in arms(listed).items()}
    lively = {"specguard", "rsd-majority"}
    assert {label for label, temperature in usual.items() if temperature > 0} == lively
    assert {usual[label] for label in lively} == {SpecGuardOptions().temperature}
    shared = arms("target,specguard,rsd:temperature=0.2", temperature=0.4)
    assert [arm.options.temperature for arm in shared.values()] == [0.4, 0.4, 0.2]


def test_an_arms_own_setting_wins_over_the_shared_one() -> None:
    parsed = arms("specguard,a=specguard:threshold=0.1", threshold=0.9)
    assert [arm.options.threshold for arm in parsed.values()] == [0.9, 0.1]


def test_values_may_have_colons_and_lists_are_given_piece_by_piece() -> None:
    parsed = arms(
        r"a=target:target=openai://host:8000/model:step_delimiter=\n,"
        "b=speculative:speculative_tree=3:speculative_tree=2"
    )
    assert parsed["a"].options.target == "openai://host:8000/model"
    assert parsed["a"].options.step_delimiter == "\n"
    assert parsed["b"].options.speculative_tree == [3, 2]


def test_a_control_drafts_as_what_it_controls() -> None:
    x = "specguard:num_candidates=8:doubt_margin=1"
    parsed = arms(f"{x},draft,random@{x}", top_p=0.5)
    control, controlled = (parsed[label].options for label in (f"random@{x}", x))
    assert control.decoder == "random"
    for name in ("num_candidates", "top_p", "temperature"):
        assert getattr(control, name) == getattr(controlled, name)
    greedy = arms("specguard-greedy:temperature=0.9,random@specguard-greedy:temperature=0.9")
    assert greedy["random@specguard-greedy:temperature=0.9"].options.sampling().greedy


@pytest.mark.parametrize("name", ["random", "length"])
def test_a_control_pauses_as_what_it_controls(name: str) -> None:
    """Patience is SpecGuard's own by default; its controls draft as it does."""

    def pacing(listed: str, **shared: Any) -> dict[str, Patience | None]:
        return {label: arm.options.pacing() for label, arm in arms(listed, **shared).items()}

    listed = f"draft,x=specguard-greedy,y=rsd,{name}@x,{name}@y"
    usual = pacing(listed)
    assert usual[f"{name}@x"] == usual["x"] == Patience(1, 4)
    assert usual[f"{name}@y"] is usual["y"] is None
    assert set(pacing(listed, patience=0).values()) == {None}
    own = pacing(
        f"draft,x=specguard-greedy:patience=3:pause_steps=2,y=rsd:patience=1,{name}@x,{name}@y"
    )
    assert own[f"{name}@x"] == own["x"] == Patience(3, 2)
    assert own[f"{name}@y"] == own["y"] == Patience(1, 4)
    less = pacing(f"draft,x=specguard-greedy,{name}@x:patience=2")
    assert (less["x"], less[f"{name}@x:patience=2"]) == (Patience(1, 4), Patience(2, 4))


def test_a_control_of_one_candidate_rewrites_with_one() -> None:
    parsed = arms("draft,x=rsd:temperature=0.5,random@x", num_target_candidates=4)
    control = parsed["random@x"].options
    assert (control.num_candidates, control.num_target_candidates) == (1, 1)


def test_no_control_drafts_as_the_clock_tells() -> None:
    with pytest.raises(EvaluationError, match=r"'x' drafts is told by the clock \(max_slowdown\)"):
        arms("draft,x=specguard:max_slowdown=0.1,random@x")
    assert arms("oracle", max_slowdown=0.1)["oracle"].options.max_slowdown is None
    assert arms("x=rsd,random@x", max_slowdown=0.1)["random@x"].options.slowdown() is not None


@pytest.mark.parametrize("name", ["random", "length"])
def test_no_control_drafts_more_where_it_doubts(name: str) -> None:
    """It doubts no step, and would always have the best of several candidates."""
    with pytest.raises(EvaluationError, match="control an arm with doubt_margin=1"):
        arms(f"draft,x=specguard,{name}@x")
    for alike in ("doubt_margin=1", "num_candidates=1", "temperature=0"):
        assert arms(f"draft,x=specguard:{alike},{name}@x")[f"{name}@x"].controls == "x"


def test_a_control_hands_back_as_what_it_controls() -> None:
    parsed = arms("x=specguard-greedy:hand_back=3,random@x")
    assert parsed["random@x"].options.hand_back == 3


def test_the_oracle_judges_every_step_and_reads_none() -> None:
    parsed = arms("oracle,o=oracle:patience=2")
    assert parsed["oracle"].options.pacing() is None
    assert parsed["oracle"].options.verify_with == "draft"
    assert parsed["o"].options.pacing() == Patience(2, 4)


def test_a_control_names_the_longest_label_and_may_have_settings_of_its_own() -> None:
    listed = "x=specguard:threshold=0.2,x:threshold=0.3=specguard,random@x:threshold=0.3"
    with pytest.raises(EvaluationError):  # a label cannot look like settings
        arms(listed)
    parsed = arms("rsd,rsd:top_k=5,random@rsd:top_k=5:max_step_tokens=9")
    control = parsed["random@rsd:top_k=5:max_step_tokens=9"]
    assert control.controls == "rsd:top_k=5"
    assert (control.options.top_k, control.options.max_step_tokens) == (5, 9)
    assert arms("rsd,r=random@rsd:top_k=5")["r"].controls == "rsd"


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        (" , ", "no decoders; give at least one"),
        ("target,slow", "arm 'slow': there is no decoder 'slow'; there are .*oracle, and random@X"),
        (
            "a=specguard:treshold=1",
            "arm 'a': there is no parameter 'treshold'; did you mean thresh",
        ),
        ("a=specguard:threshold=2", "arm 'a': threshold='2': .*less than or equal to 1"),
        ("specguard:seed=2", "seed cannot be set by an arm"),
        ("specguard:top_k=2:top_k=3", "top_k is given twice"),
        ("target,target", "two arms are called 'target'; .* such as second=target"),
        ("random@x,target", "there is no arm 'x' to control; there are: target"),
        ("x=rsd,random@x,length@random@x,draft", "no arm 'random@x' to control"),
        ("target,random@target", "'target' does not judge steps"),
        ("rsd-majority,random@rsd-majority", "'rsd-majority' does not judge steps"),
        ("rsd,length@rsd", "needs the lengths of the draft's steps; add the arm draft"),
        ("specguard,target@specguard", "'target' is no control; there are random and length"),
    ],
)
def test_errors_name_arm_option_and_value(listed: str, message: str) -> None:
    with pytest.raises(EvaluationError, match=message):
        arms(listed)


@pytest.mark.parametrize(
    "name",
    ["rsd-majority", "target-majority", "draft-majority", "target-best-of-n", "draft-best-of-n"],
)
def test_answers_to_choose_from_must_differ(name: str) -> None:
    for listed, shared in (
        (f"a={name}:temperature=0", {}),
        (f"target,a={name}", {"temperature": 0}),
    ):
        words = f"arm 'a': with temperature=0.0 .* its 4 answers .* {name}:temperature=0.7"
        with pytest.raises(EvaluationError, match=words):
            arms(listed, **shared)
    with pytest.raises(EvaluationError, match="top_k=1 its 4 answers would be the same"):
        arms(f"{name}:top_k=1")
    arms(f"{name},b={name}:temperature=0:num_samples=1")
    arms(f"target,{name}:temperature=0.2", temperature=0)


def test_a_key_is_in_no_arm_and_in_no_error() -> None:
    for listed in ("target:api_key=sk-123", "a=target:top_k=2:api_key=sk-123"):
        with pytest.raises(EvaluationError, match="OPENAI_API_KEY, not api_key") as error:
            arms(listed)
        assert "sk-123" not in str(error.value)


def test_a_decoder_is_assembled_from_the_arms_options_and_those_it_is_matched_by() -> None:
    made: list[SpecGuardOptions] = []
    (arm,) = parse_arms("specguard:threshold=0.4", options())

    def make(given: SpecGuardOptions) -> Any:
        made.append(given)

    (problem,) = problems(1)
    arm.decoder_for(problem, ToyChecker(), matched={"top_k": 7}, make=make)  # type: ignore[arg-type]
    assert (made[0].threshold, made[0].top_k, arm.options.top_k) == (0.4, 7, 0)


def test_the_oracle_knows_the_problem() -> None:
    (arm,) = parse_arms("oracle", options())
    checker, (problem,) = ToyChecker(), problems(1)
    decoder = arm.decoder_for(problem, checker)  # type: ignore[arg-type]
    assert isinstance(decoder, SpecGuardDecoder)
    assert decoder.num_candidates == 1
    assert isinstance(decoder.verifier, OracleVerifier)
    assert (decoder.verifier.problem, decoder.verifier.checker) == (problem, checker)
    assert not arm.same_for_all


def test_the_request_is_the_arms() -> None:
    (arm,) = parse_arms("specguard:top_k=4:max_tokens=7:stop=END", options())
    (problem,) = problems(1)
    request = arm.request(problem, seed=11)
    assert (request.sampling.top_k, request.max_tokens, request.seed) == (4, 7, 11)
    assert request.stop == ("END",)
    assert any(problem.question in message["content"] for message in request.prompt.messages)
