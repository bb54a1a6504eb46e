"""Public reports about wrappers of local models: stop strings."""

import asyncio
from typing import Any

import pytest
from langchain_core.runnables import ConfigurableField

from specguard_chains import ChatSpecGuard
from specguard_chains.messages import STEPS_KEY
from tests.toy_engine import ToyEngine, scripted_policy
from tests.unit_tests import toy_chat
from tests.unit_tests.test_peers_streaming import ROUTES, collected, text_of

SCRIPT = ("hello beta ga", "mma.\n\n", "more STOP and more.\n\n", "end")


def model(**options: Any) -> ChatSpecGuard:
    """Draft and target agree; every character is a token, so strings are split over tokens."""
    return ChatSpecGuard(
        draft=ToyEngine(scripted_policy("".join(SCRIPT[:2]), *SCRIPT[2:])),
        target=ToyEngine(scripted_policy("".join(SCRIPT[:2]), *SCRIPT[2:])),
        confidence_weight=1.0,
        threshold=0.5,
        **options,
    )


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (["STOP"], "hello beta gamma.\n\nmore "),
        (["beta gamma"], "hello "),
        (["gamma.\n\nmore"], "hello beta "),
        (["more", "STOP"], "hello beta gamma.\n\n"),
        (["nowhere", "hello"], ""),
        (["nowhere"], "".join(SCRIPT)),
        ([], "".join(SCRIPT)),
        (None, "".join(SCRIPT)),
    ],
)
def test_peers_015_to_023_all_routes_cut_before_the_first_stop_string(
    route: str, stop: list[str] | None, expected: str
) -> None:
    assert text_of(model(), route, stop=stop) == expected


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("stop", ["o", "beta gamma", "a.\n\nmore S", " ", "\n", "é😀", "STOP and"])
def test_peers_016_a_stop_string_may_have_any_number_of_tokens(route: str, stop: str) -> None:
    """Also characters of several tokens, white space, and what ends a step."""
    script = ("hello beta gamma.\n\n", "more STOP and é😀 more.\n\n", "end")
    text = "".join(script)
    assert text_of(toy_chat.scripted(*script), route, stop=[stop]) == text[: text.index(stop)]


@pytest.mark.parametrize("given", ["field", "call", "bind", "config"])
def test_peers_023_every_route_honours_stop_alike(given: str) -> None:
    def chat() -> Any:
        match given:
            case "field":
                return model(stop=["gamma"])
            case "bind":
                return model().bind(stop=["gamma"])
            case "config":
                return model().configurable_fields(stop=ConfigurableField("stop"))
        return model()

    overrides: Any = {
        "call": {"stop": ["gamma"]},
        "config": {"config": {"configurable": {"stop": ["gamma"]}}},
    }.get(given, {})
    answers = {route: text_of(chat(), route, **overrides) for route in ROUTES}
    assert set(answers.values()) == {"hello beta "}, answers


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("streaming", [None, True, False])
def test_peers_017_invoke_keeps_stop_with_streaming_set(route: str, streaming: bool | None) -> None:
    assert text_of(model(streaming=streaming), route, stop=["STOP"]).endswith("more ")


@pytest.mark.parametrize("route", ROUTES)
def test_peers_019_the_calls_stop_strings_override_the_models(route: str) -> None:
    assert text_of(model(stop=["gamma"]), route) == "hello beta "
    assert text_of(model(stop=["gamma"]), route, stop=["STOP"]).endswith("more ")
    assert text_of(model(stop=["gamma"]).bind(stop=["beta"]), route) == "hello "  # type: ignore[arg-type]


@pytest.mark.parametrize("route", ROUTES)
def test_peers_024_an_empty_list_means_no_stop_strings(route: str) -> None:
    assert text_of(model(stop=["gamma"]), route, stop=[]) == "".join(SCRIPT)


def test_peers_020_no_beginning_of_a_stop_string_is_streamed() -> None:
    chatty = toy_chat.scripted("ABC DEFGHIJ KLM", max_step_tokens=2)
    chunks = [chunk.text for chunk in chatty.stream("?", stop=["DEFGHIJ"])]
    assert "".join(chunks) == "ABC "
    chunks = [chunk.text for chunk in chatty.stream("?", stop=["DEFGHIX"])]
    assert "".join(chunks) == "ABC DEFGHIJ KLM"


@pytest.mark.parametrize("max_step_tokens", range(1, 12))
def test_peers_021_a_stop_string_split_over_steps_is_seen(max_step_tokens: int) -> None:
    chatty = model(max_step_tokens=max_step_tokens)
    assert chatty.invoke("?", stop=["gamma.\n\nmore"]).text == "hello beta "


@pytest.mark.parametrize("route", ["invoke", "stream", "ainvoke", "astream"])
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "stop"),
        ({"stop": ["STOP"]}, "stop"),
        ({"max_tokens": 5}, "length"),
        ({"max_tokens": 5, "stop": ["hell"]}, "stop"),
        ({"max_tokens": 5, "stop": ["hello beta"]}, "length"),
    ],
)
def test_text_steps_usage_and_finish_reason_agree(
    route: str, options: dict[str, Any], reason: str
) -> None:
    chatty = model(**options)
    if route.endswith("invoke"):
        answer: Any = chatty.invoke("?") if route == "invoke" else asyncio.run(chatty.ainvoke("?"))
    else:
        chunks: list[Any] = (
            list(chatty.stream("?"))
            if route == "stream"
            else asyncio.run(collected(chatty.astream("?")))
        )
        answer = sum(chunks[1:], start=chunks[0])
    steps = answer.additional_kwargs[STEPS_KEY]
    assert "".join(step["text"] for step in steps) == answer.text
    assert answer.response_metadata["finish_reason"] == steps[-1]["finish_reason"] == reason
    assert answer.usage_metadata["output_tokens"] == sum(step["answer_tokens"] for step in steps)
