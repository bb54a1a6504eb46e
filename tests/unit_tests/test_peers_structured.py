"""Public reports about wrappers of local models: structured output."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

import pytest
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, HumanMessage
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from specguard_chains import ChatSpecGuard
from tests.unit_tests.test_peers_streaming import collected
from tests.unit_tests.test_peers_tools import CHATML_WITH_TOOLS, add, call_text, talk


class Joke(BaseModel):
    """A joke."""

    setup: str = Field(description="its question")
    stars: int = Field(ge=1, le=5)


class JokeDict(TypedDict):
    """A joke."""

    setup: Annotated[str, ..., "its question"]
    stars: int


class Mood(BaseModel):
    """A mood; nothing in it is free."""

    mood: Literal["good", "bad"]


JOKE = {"setup": "Why?", "stars": 5}
TEXT = json.dumps(JOKE)
ALL_METHODS = ["function_calling", "json_schema", "json_mode"]

ROUTES: dict[str, Callable[[Any, str], Any]] = {
    "invoke": lambda r, q: r.invoke(q),
    "stream": lambda r, q: list(r.stream(q))[-1],
    "batch": lambda r, q: r.batch([q])[0],
    "ainvoke": lambda r, q: asyncio.run(r.ainvoke(q)),
    "astream": lambda r, q: asyncio.run(collected(r.astream(q)))[-1],
}


def answer(method: str, schema: str = "Joke", text: str = TEXT) -> str:
    """What a model writes that does what the method asks of it."""
    return call_text(schema, text) if method == "function_calling" else text


# --- 46: instances of a model class


@pytest.mark.parametrize("method", [None, *ALL_METHODS])
@pytest.mark.parametrize("route", ROUTES)
def test_peers_046_a_model_class_gives_instances_of_it(route: str, method: Any) -> None:
    parameters = inspect.signature(ChatSpecGuard.with_structured_output).parameters
    model = talk(answer(method or parameters["method"].default))
    structured = model.with_structured_output(Joke, **({"method": method} if method else {}))
    assert ROUTES[route](structured, "Tell me a joke.") == Joke(**JOKE)


@pytest.mark.parametrize("method", ALL_METHODS)
@pytest.mark.parametrize("schema", [JokeDict, Joke.model_json_schema()], ids=["dict", "schema"])
@pytest.mark.parametrize("route", ROUTES)
def test_peers_046_other_schemas_give_mappings(route: str, schema: Any, method: Any) -> None:
    name = "JokeDict" if schema is JokeDict else "Joke"
    structured = talk(answer(method, name)).with_structured_output(schema, method=method)
    assert ROUTES[route](structured, "Tell me a joke.") == JOKE


# --- 47: all methods and options


@pytest.mark.parametrize("method", ALL_METHODS)
@pytest.mark.parametrize("strict", [None, True, False])
@pytest.mark.parametrize("include_raw", [True, False])
@pytest.mark.parametrize("route", ["invoke", "ainvoke", "batch"])
def test_peers_047_every_method_takes_every_option(
    route: str, include_raw: bool, strict: bool | None, method: Any
) -> None:
    structured = talk(answer(method)).with_structured_output(
        Joke, method=method, strict=strict, include_raw=include_raw
    )
    result = ROUTES[route](structured, "Tell me a joke.")
    if not include_raw:
        assert result == Joke(**JOKE)
        return
    assert result.keys() == {"raw", "parsed", "parsing_error"}
    assert result["parsed"] == Joke(**JOKE)
    assert result["parsing_error"] is None
    assert isinstance(result["raw"], AIMessage)
    assert result["raw"].usage_metadata


def test_peers_047_a_method_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"json_schemas.*json_schema"):
        talk(TEXT).with_structured_output(Joke, method="json_schemas")


# --- 48: never None


@pytest.mark.parametrize("method", ALL_METHODS)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "text",
    [
        TEXT,
        json.dumps(JOKE, indent=2),
        f"```json\n{TEXT}\n```",
        f"Sure!\n\n```json\n{TEXT}\n```\nBye!",
        f"Sure!\n\n{TEXT}",
    ],
)
def test_peers_048_plain_json_is_read_from_a_model_that_cannot_be_constrained(
    text: str, route: str, method: Any
) -> None:
    structured = talk(text, constraints=False).with_structured_output(Joke, method=method)
    assert ROUTES[route](structured, "Tell me a joke.") == Joke(**JOKE)


@pytest.mark.parametrize("method", ALL_METHODS)
@pytest.mark.parametrize(
    "text", ["I know no jokes.", '{"setup": "Why?"', '{"setup": "Why?"}', "[]"]
)
def test_peers_048_what_is_no_answer_is_an_error_and_not_none(text: str, method: Any) -> None:
    model = talk(text, constraints=False)
    for route in ("invoke", "ainvoke", "batch"):
        with pytest.raises((OutputParserException, ValueError)):
            ROUTES[route](model.with_structured_output(Joke, method=method), "Tell me a joke.")
    raw = model.with_structured_output(Joke, method=method, include_raw=True).invoke("A joke!")
    assert raw["parsed"] is None
    assert isinstance(raw["parsing_error"], Exception)


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
@pytest.mark.parametrize("route", ROUTES)
def test_peers_048_a_constrained_model_answers_whatever_it_would_rather_say(
    route: str, method: Any
) -> None:
    model = talk("I know no moods.")
    result = ROUTES[route](model.with_structured_output(Mood, method=method), "Your mood?")
    assert isinstance(result, Mood)


# --- 49: reasoning before the answer

THINKING = CHATML_WITH_TOOLS + "{# <think> </think> #}"
THOUGHT = 'Let me see.\n\nA joke {with} braces: [1], "so" to say.\n\n'


@pytest.mark.parametrize("method", ALL_METHODS)
@pytest.mark.parametrize("max_step_tokens", [4, 512])
@pytest.mark.parametrize("route", ROUTES)
def test_peers_049_thinking_before_the_answer_is_kept_apart(
    route: str, max_step_tokens: int, method: Any
) -> None:
    text = f"<think>\n{THOUGHT}</think>\n\n{answer(method)}"
    model = talk(text, template=THINKING, max_step_tokens=max_step_tokens)
    assert ROUTES[route](model.with_structured_output(Joke, method=method), "A joke!") == Joke(
        **JOKE
    )


@pytest.mark.parametrize("method", ALL_METHODS)
@pytest.mark.parametrize("output_version", ["v0", "v1"])
def test_peers_049_the_raw_message_has_both(output_version: str, method: Any) -> None:
    text = f"<think>\n{THOUGHT}</think>\n\n{answer(method)}"
    model = talk(text, template=THINKING, output_version=output_version)
    result = model.with_structured_output(Joke, method=method, include_raw=True).invoke("A joke!")
    assert result["parsed"] == Joke(**JOKE)
    reasoning = [b["reasoning"] for b in result["raw"].content_blocks if b["type"] == "reasoning"]
    assert "".join(reasoning).strip() == THOUGHT.strip()
    assert "Let me see" not in result["raw"].text
    if method != "function_calling":
        assert json.loads(result["raw"].text) == JOKE


def test_peers_049_an_agents_answer_is_nothing_but_json() -> None:
    thinking = "<think>\nLet me see.\n</think>\n\n"
    model = talk(thinking + call_text(), thinking + TEXT, template=THINKING)
    agent = create_agent(model, [add], response_format=ProviderStrategy(Joke))
    result = agent.invoke({"messages": [HumanMessage("A joke!")]})
    assert result["structured_response"] == Joke(**JOKE)
    assert json.loads(result["messages"][-1].text) == JOKE
