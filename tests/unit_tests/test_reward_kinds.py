"""What reward models read and how their numbers become rewards; no model is needed for that."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from specguard_adapters.reward import KINDS, Head, Layout, RewardKind, Scale
from specguard_adapters.reward.kinds import detect, kind_called, reward_of
from specguard_adapters.reward.layout import lay_out, question
from specguard_chains import adapters
from specguard_chains.errors import ConfigurationError, EngineError

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 3 + 4?"},
]
STEPS = ["2 + 3 = 5.\n\n", "5 + 4 = 9."]


def render(messages: Sequence[Mapping[str, Any]], begin_answer: bool) -> str:
    text = "".join(f"<{m['role']}>{m['content']}</>" for m in messages)
    return text + "<assistant>" * begin_answer


def laid_out(name: str, steps: Sequence[str] = STEPS) -> list[str]:
    return lay_out(KINDS[name], MESSAGES, steps, render)


# --- what is read


def test_a_separator_follows_each_step_of_the_assistants_turn() -> None:
    (text,) = laid_out("qwen-prm")
    assert text == (
        "<system>Be brief.</><user>What is 2 + 3 + 4?</>"
        "<assistant>2 + 3 = 5.<extra_0>5 + 4 = 9.<extra_0>"
    )


def test_steps_and_separators_are_pieces() -> None:
    assert laid_out("skywork-prm") == [
        *("What is 2 + 3 + 4?\n", "2 + 3 = 5.", "\n\n", "5 + 4 = 9.", "\n\n")
    ]
    assert laid_out("token-classification") == [
        *("What is 2 + 3 + 4?", "2 + 3 = 5.", "\n", "5 + 4 = 9.", "\n")
    ]


def test_tags_stand_in_one_text() -> None:
    assert laid_out("math-shepherd") == ["What is 2 + 3 + 4? 2 + 3 = 5. ки\n5 + 4 = 9. ки"]


def test_steps_are_turns_that_were_called_good() -> None:
    assert laid_out("rlhflow-prm") == [
        "<user>What is 2 + 3 + 4? 2 + 3 = 5.</><assistant>+</><user>5 + 4 = 9.</><assistant>"
    ]


def test_a_whole_answer_ends_with_its_newest_step() -> None:
    (text,) = laid_out("sequence-classification")
    assert text.endswith("<assistant>2 + 3 = 5.\n\n5 + 4 = 9.")


@pytest.mark.parametrize("name", KINDS)
def test_the_first_step_is_laid_out_as_later_ones_see_it(name: str) -> None:
    """What is read of a step does not depend on the steps behind it."""
    first, both = "".join(laid_out(name, STEPS[:1])), "".join(laid_out(name))
    assert both.startswith(first)


def test_the_chat_template_may_come_with_words_around_the_answer() -> None:
    def wordy(messages: Sequence[Mapping[str, Any]], begin_answer: bool) -> str:
        return render(messages, begin_answer).replace("<assistant>", "<assistant>Well: ")

    (text,) = lay_out(KINDS["qwen-prm"], MESSAGES, STEPS, wordy)
    assert "<assistant>Well: 2 + 3 = 5.<extra_0>" in text


def test_a_chat_template_that_drops_answers_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"leaves out what the assistant says; give"):
        lay_out(KINDS["qwen-prm"], MESSAGES, STEPS, lambda messages, begin: "nothing")


def test_the_question_is_all_that_is_not_the_systems() -> None:
    asked = [
        *MESSAGES,
        {"role": "assistant", "content": None},
        {"role": "user", "content": [{"type": "text", "text": "Be "}, "quick."]},
    ]
    assert question(asked) == "What is 2 + 3 + 4?\n\nBe quick."


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        (MESSAGES[:1], "no question; give"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "'image_url'; leave it out"),
    ],
)
def test_a_conversation_without_text_is_refused(
    messages: list[dict[str, Any]], problem: str
) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        lay_out(KINDS["skywork-prm"], messages, STEPS, render)


@pytest.mark.parametrize("name", KINDS)
def test_no_step_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="no step to rate; give at least one"):
        laid_out(name, [])


# --- which kind a model is of


@pytest.mark.parametrize(
    ("name", "architecture", "kind"),
    [
        ("Qwen2.5-Math-PRM-7B", "Qwen2ForProcessRewardModel", "qwen-prm"),
        ("Skywork-o1-Open-PRM-Qwen-2.5-1.5B", "Qwen2ForPrmModel", "skywork-prm"),
        ("my-prm", "Qwen2ForTokenClassification", "token-classification"),
        ("my-rm", "LlamaForSequenceClassification", "sequence-classification"),
        ("math-shepherd-mistral-7b-prm", "MistralForCausalLM", "math-shepherd"),
        ("Llama3.1-8B-PRM-Deepseek-Data", "LlamaForCausalLM", "rlhflow-prm"),
        ("Llama3.1-8B-PRM-Mistral-Data", "LlamaForCausalLM", "rlhflow-prm"),
    ],
)
def test_published_models_are_recognised(name: str, architecture: str, kind: str) -> None:
    found = detect(name, [architecture], 2)
    assert found is not None
    assert found.name == kind


def test_a_plain_language_model_is_of_no_kind() -> None:
    assert detect("Qwen2.5-0.5B", ["Qwen2ForCausalLM"], 2) is None
    assert detect("nameless", [], 2) is None


@pytest.mark.parametrize(("labels", "scale"), [(1, Scale.SIGMOID), (2, Scale.CLASSES)])
@pytest.mark.parametrize("ending", ["TokenClassification", "SequenceClassification"])
def test_classifiers_are_scaled_by_what_they_give(ending: str, labels: int, scale: Scale) -> None:
    found = detect("prm", [f"Qwen2For{ending}"], labels)
    assert found is not None
    assert found.scale is scale
    assert found.size == labels


def test_an_unknown_kind_is_named_with_the_known_ones() -> None:
    assert kind_called("qwen-prm") is KINDS["qwen-prm"]
    with pytest.raises(ConfigurationError, match=r"no reward kind 'qwen'; there are qwen-prm, sky"):
        kind_called("qwen")


@pytest.mark.parametrize(
    "wrong",
    [
        {"good": "+"},
        {"good": "+", "bad": "-"},
        {"scale": Scale.TOKENS},
        {"scale": Scale.TOKENS, "good": "+", "bad": "-"},
        {"head": Head.LANGUAGE},
    ],
)
def test_a_kind_that_contradicts_itself_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="the reward kind 'qwen-prm' has"):
        replace(KINDS["qwen-prm"], **wrong)


def test_code_that_comes_with_a_model_may_give_any_numbers() -> None:
    for scale, words in ((Scale.TOKENS, "+-"), (Scale.SIGMOID, ("", ""))):
        good, bad = words
        RewardKind("mine", Layout.TEXT, Head.OWN, scale, good=good, bad=bad)


# --- how numbers become rewards


@pytest.mark.parametrize(
    ("numbers", "reward"),
    [
        ([0.0], 0.5),
        ([2.0], 0.8807970779778823),
        ([-1000.0], 0.0),
        ([1000.0], 1.0),
        ([1.0, 1.0], 0.5),
        ([1.0, 3.0], 0.8807970779778823),
        ([1000.0, -1000.0], 0.0),
    ],
)
def test_rewards_are_probabilities(numbers: list[float], reward: float) -> None:
    assert reward_of(numbers, "prm") == pytest.approx(reward, abs=1e-15)


@pytest.mark.parametrize("numbers", [[float("nan")], [float("inf"), 0.0]])
def test_a_number_that_is_none_is_refused(numbers: list[float]) -> None:
    with pytest.raises(EngineError, match=r"prm gives is not a finite number; load it with"):
        reward_of(numbers, "prm")


# --- how the class is found


def test_a_missing_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "ProcessRewardModel" in dir(adapters)
    monkeypatch.delitem(sys.modules, "specguard_adapters.reward.model", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    remedy = r"needs torch, which is not installed: pip install 'specguard_chains\[transformers\]'"
    with pytest.raises(ImportError, match=remedy):
        _ = adapters.ProcessRewardModel
