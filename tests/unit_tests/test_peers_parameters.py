"""Public reports about wrappers of local models: usage, seeds, sampling parameters."""

import asyncio
from typing import Any

import pytest
from langchain_core.callbacks import UsageMetadataCallbackHandler

from specguard_chains import ChatSpecGuard
from tests.unit_tests import toy_chat
from tests.unit_tests.test_peers_streaming import ROUTES, collected, text_of

QUESTION = "What now?"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_peers_055_one_chunk_of_a_stream_has_the_usage(asynchronous: bool) -> None:
    model = toy_chat.pair()
    chunks: list[Any] = (
        asyncio.run(collected(model.astream(QUESTION)))
        if asynchronous
        else list(model.stream(QUESTION))
    )
    usages = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert len(usages) == 1
    assert usages[0]["total_tokens"] == usages[0]["input_tokens"] + usages[0]["output_tokens"]


@pytest.mark.parametrize("route", ROUTES)
def test_peers_056_usage_handlers_find_the_model_and_its_tokens(route: str) -> None:
    handler = UsageMetadataCallbackHandler()
    model = toy_chat.pair(callbacks=[handler])
    text = text_of(model, route)
    (usage,) = handler.usage_metadata.values()
    assert list(handler.usage_metadata) == ["toy-draft + toy-target"]
    assert usage["output_tokens"] == len(text.encode()) + 1  # ... and the end token


@pytest.mark.parametrize("route", ROUTES)
def test_peers_064_equal_seeds_give_equal_answers_and_none_gives_others(route: str) -> None:
    def answer(seed: int | None) -> str:
        return text_of(toy_chat.random(1, seed=seed, temperature=1.5, top_p=1.0), route)

    assert answer(1) == answer(1) != answer(2)
    assert len({answer(None) for _ in range(4)}) > 1


def test_peers_064_the_seed_that_was_drawn_gives_the_answer_again() -> None:
    model = toy_chat.random(1, temperature=1.5, top_p=1.0)
    first = model.invoke(QUESTION)
    again = model.invoke(QUESTION, seed=first.response_metadata["seed"])
    assert again.text == first.text


def test_a_seed_gives_the_same_answer_whatever_came_before() -> None:
    model = toy_chat.random(1, seed=4, temperature=1.5)
    first = model.invoke(QUESTION).text
    model.invoke("Something else.")
    assert model.invoke(QUESTION).text == first


@pytest.mark.parametrize("route", ROUTES)
def test_peers_066_temperature_0_is_greedy(route: str) -> None:
    answers = {
        text_of(toy_chat.random(1, seed=seed, temperature=0), route) for seed in (1, 2, None)
    }
    assert len(answers) == 1


@pytest.mark.parametrize("route", ROUTES)
def test_peers_068_parameters_of_the_constructor_reach_the_sampler(route: str) -> None:
    base: dict[str, Any] = {"seed": 1, "temperature": 2.0, "top_p": 1.0}
    answers = {
        text_of(toy_chat.random(1, **{**base, **change}), route)
        for change in ({}, {"temperature": 0.3}, {"top_p": 0.3}, {"top_k": 2}, {"min_p": 0.6})
    }
    assert len(answers) == 5
    assert len(text_of(toy_chat.random(1, max_tokens=5), route).encode()) <= 5


def test_peers_080_the_models_name_follows_from_the_engines() -> None:
    one = toy_chat.pair()
    model = ChatSpecGuard(draft=one.draft, target=one.target)
    assert model.model == "toy-draft + toy-target"
