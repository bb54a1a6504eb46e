"""Every decoder by its name, through the chat model: steps come as events, and figures are sane."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, get_args

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage

from specguard_chains import ChatSpecGuard
from specguard_chains.callbacks import EVENT
from specguard_chains.decoding.rewards import ValueHead
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.decoding.steps import Step
from specguard_chains.errors import ConfigurationError, DecodingTimeoutError
from specguard_chains.options import DecoderName, SpecGuardOptions
from tests.toy_engine import ToyEngine, random_policy

NAMES: tuple[str, ...] = get_args(DecoderName)
VOTES = tuple(name for name in NAMES if name.endswith(("-majority", "-best-of-n")))
SOLO = tuple(name for name in NAMES if name.startswith(("draft", "target")))
UNVERIFIED = ("speculative", *SOLO)
QUESTION = "What is next?"


class Listener(BaseCallbackHandler):
    def __init__(self) -> None:
        self.steps: list[Step] = []

    def on_custom_event(self, name: str, data: Any, **kwargs: Any) -> None:
        if name == EVENT:
            self.steps.append(Step.from_dict(data))


def chat(name: str, *, delay_s: float = 0.0, **options: Any) -> ChatSpecGuard:
    draft, target = (
        ToyEngine(random_policy(table, end=-40.0), name=name, delay_s=delay_s)
        for table, name in ((1, "d"), (2, "t"))
    )
    writer = "t" if name == "target-best-of-n" else "d"
    settings: dict[str, Any] = {
        "draft": draft,
        "target": target,
        "reward_model": ValueHead(draft=writer, layer=1, weights=(1.0, 1.0, 1.0, 1.0), bias=0.5),
        "max_step_tokens": 12,
        "max_tokens": 60,
        "max_accepted_tokens": 6,
        "threshold": 0.6,
        "confidence_weight": 0.5,
        "seed": 3,
        "num_samples": 3,
    }
    return ChatSpecGuard(decoder=name, **(settings | options))


def ask(model: ChatSpecGuard, **config: Any) -> tuple[AIMessage, list[Step]]:
    listener = Listener()
    answer = model.invoke(QUESTION, {"callbacks": [listener], **config})
    assert isinstance(answer, AIMessage)
    return answer, listener.steps


def check_steps(steps: Sequence[Step], answer: AIMessage) -> None:
    assert "".join(step.text for step in steps) == answer.text
    assert [step.number for step in steps] == list(range(1, len(steps) + 1))
    assert [step.finish_reason is None for step in steps] == [True] * (len(steps) - 1) + [False]


def check_figures(name: str, steps: Sequence[Step], answer: AIMessage) -> None:
    figures = answer.response_metadata["specguard"]
    written = answer.usage_metadata["output_tokens"] if answer.usage_metadata else 0
    assert written == sum(step.answer_tokens for step in steps)
    assert figures["num_steps"] == len(steps)
    assert 0 <= figures["num_accepted_tokens"] <= written
    assert figures["num_accepted_tokens"] <= figures["num_draft_tokens"]
    judged = name not in UNVERIFIED
    assert (figures["acceptance_rate"] is not None) == judged
    assert 0 <= (figures["acceptance_rate"] or 0) <= 1
    assert figures["num_accepted_steps"] <= figures["num_drafts"] <= len(steps)
    assert sum(figures["steps_by_source"].values()) == len(steps)
    for who in ("draft", "verify", "select", "target"):
        assert figures[f"{who}_seconds"] >= 0
    guards = name in ("specguard", "specguard-greedy")
    assert (figures["confidence_from"] is not None) == guards
    assert (figures["grounding_from"] is not None) == guards
    assert (figures["confidence_weight"] is not None) == guards


@pytest.mark.parametrize("name", NAMES)
def test_steps_come_as_events_and_figures_are_sane(name: str) -> None:
    model = chat(name)
    answer, steps = ask(model)
    check_steps(steps, answer)
    check_figures(name, steps, answer)
    assert answer.response_metadata["specguard"]["num_steps"] == len(steps) > 1


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_gives_the_same_steps(name: str) -> None:
    used, fresh = chat(name), chat(name)
    ask(used, metadata={"which": "first"})
    runs = [ask(model)[1] for model in (used, fresh)]
    assert [s.text for s in runs[0]] == [s.text for s in runs[1]]
    assert [s.verdict for s in runs[0]] == [s.verdict for s in runs[1]]
    other = "".join(s.text for s in ask(chat(name, seed=4))[1])
    greedy = name == "specguard-greedy"
    assert (other == "".join(s.text for s in runs[1])) == greedy


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_can_be_streamed(name: str) -> None:
    model = chat(name)
    texts = [chunk.text for chunk in model.stream(QUESTION)]
    assert "".join(texts) == ask(chat(name))[0].text
    assert sum(map(bool, texts)) > 1


@pytest.mark.parametrize("name", NAMES)
def test_a_stream_that_is_left_frees_the_models(name: str) -> None:
    model = chat(name)
    expected = ask(chat(name))[0].text
    for _ in range(2):
        stream = model.stream(QUESTION)
        next(stream)
        stream.close()
    assert ask(model)[0].text == expected


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_that_takes_too_long_is_given_up(name: str) -> None:
    model = chat(name, delay_s=0.02, max_tokens=400)
    start = time.perf_counter()
    with pytest.raises(DecodingTimeoutError, match=r"timeout=0\.1"):
        model.invoke(QUESTION, timeout=0.1)
    assert time.perf_counter() - start < 5
    assert model.invoke(QUESTION, max_tokens=3, timeout=60).text


@pytest.mark.parametrize("name", NAMES)
def test_hooks_are_asked(name: str) -> None:
    reviewed: list[Step] = []
    ended: list[Step] = []
    said = {"review": "keep"}

    def review(step: Step) -> str:
        reviewed.append(step)
        return said["review"]

    def stop_when(step: Step) -> bool:
        ended.append(step)
        return step.number == 2

    model = chat(name, review=review, stop_when=stop_when)
    answer, steps = ask(model)
    check_steps(steps, answer)
    assert len(steps) <= 2
    answers = 3 if name in VOTES else 1
    assert len(reviewed) >= len(ended) >= len(steps) - 1
    assert [step.number for step in reviewed].count(1) == answers
    said["review"] = "stop"
    assert len(ask(model)[1]) == 1


@pytest.mark.parametrize("name", VOTES)
def test_a_vote_at_temperature_0_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="num_samples=1"):
        chat(name, temperature=0).invoke(QUESTION)
    one = chat(name, temperature=0, num_samples=1)
    assert one.invoke(QUESTION).text


@pytest.mark.parametrize("name", ["rsd-majority", "draft-majority", "target-best-of-n"])
def test_the_first_answer_of_a_vote_is_the_plain_one(name: str) -> None:
    plain = SpecGuardOptions(decoder=name).method
    expected = ask(chat(plain))[0].text
    assert ask(chat(name, num_samples=1))[0].text == expected


def test_structured_output_is_refused_where_a_model_is_asked_in_words() -> None:
    schema = {"title": "Answer", "type": "object", "properties": {"x": {"type": "integer"}}}
    model = chat("specreason").with_structured_output(schema)
    with pytest.raises(ConfigurationError, match="grammar"):
        model.invoke(QUESTION)


def test_the_greedy_decoders_write_what_their_names_say() -> None:
    """At temperature 0, what accepts everything is the draft, what accepts nothing the target."""
    alone = {who: ask(chat(who, temperature=0))[0].text for who in ("draft", "target")}
    assert alone["draft"] != alone["target"]
    for name, options, who in (
        ("random", {"acceptance_rate": 1.0}, "draft"),
        ("random", {"acceptance_rate": 0.0}, "target"),
        ("length", {"max_accepted_tokens": 1000}, "draft"),
        ("length", {"max_accepted_tokens": 0}, "target"),
        ("selector", {}, "draft"),
        ("rsd", {"threshold": 0.0}, "draft"),
        ("rsd", {"reward_model": lambda messages, steps: 0.0}, "target"),
        ("specreason", {"threshold": 0.0}, "draft"),
        ("speculative", {}, "target"),
    ):
        assert ask(chat(name, temperature=0, **options))[0].text == alone[who], name


def test_sampling_is_the_same_for_all() -> None:
    for name in NAMES:
        sampling = SpecGuardOptions(decoder=name, temperature=0.3).sampling()
        assert sampling == Sampling(temperature=0.0 if name == "specguard-greedy" else 0.3)


def test_thresholds_are_our_own_and_the_papers() -> None:
    assert SpecGuardOptions(decoder="specguard").score_threshold() == 0.8
    assert SpecGuardOptions(decoder="specguard-greedy").score_threshold() == 0.8
    assert SpecGuardOptions(decoder="rsd").score_threshold() == 0.7
    assert SpecGuardOptions(decoder="rsd-majority").score_threshold() == 0.7
    assert SpecGuardOptions(decoder="specreason").score_threshold() == 0.7
    assert SpecGuardOptions(threshold=0.0).score_threshold() == 0.0
