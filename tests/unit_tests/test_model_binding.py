"""Options bound to a chat model count in everything that is made of the binding."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.load import dumpd
from langchain_core.runnables import RunnableBinding, RunnableSequence
from langchain_core.tracers.run_collector import RunCollectorCallbackHandler
from pydantic import BaseModel

from specguard_chains import ChatSpecGuard, StepParser
from tests.unit_tests import toy_chat
from tests.unit_tests.routes import collect, passed
from tests.unit_tests.test_model_class import KINDS


class Person(BaseModel):
    name: str


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


BOUND: dict[str, Callable[[ChatSpecGuard], Any]] = {
    "bind": lambda m: m.bind(max_tokens=3),
    "twice": lambda m: m.bind(max_tokens=9).bind(max_tokens=3),
    "with_config": lambda m: m.bind(max_tokens=3).with_config(tags=["t"]),
    "bind_tools": lambda m: m.bind(max_tokens=3).bind_tools([add]),
    "bind_tools twice": lambda m: m.bind_tools([add], max_tokens=3).bind_tools([add]),
    "with_retry": lambda m: m.bind(max_tokens=3).with_retry().bind_tools([add]),
    "with_fallbacks": lambda m: m.bind(max_tokens=3).with_fallbacks([m]),
}


@pytest.mark.parametrize("bound", BOUND)
def test_tools_do_not_make_a_binding_forget_its_options(bound: str) -> None:
    model = BOUND[bound](toy_chat.scripted())
    assert model.invoke("hi").text == "One"
    assert (model | StepParser()).invoke("hi")[0].text == "One"
    assert model.bind_tools([add]).invoke("hi").text == "One"
    assert model.bind_tools([add], max_tokens=1).invoke("hi").text == "O"


@pytest.mark.parametrize("method", ["json_schema", "json_mode", "function_calling"])
def test_nor_do_answers_of_a_given_form(method: Any) -> None:
    answer = json.dumps({"name": "Person", "arguments": {"name": "Ann"}})
    call = f"<tool_call>\n{answer}\n</tool_call>"
    text = call if method == "function_calling" else '{"name": "Ann"}'
    collector = RunCollectorCallbackHandler()
    bound: Any = toy_chat.scripted(text).bind(max_tokens=3)
    bound = bound.with_config(tags=["t"])
    given = bound.with_structured_output(Person, method=method, include_raw=True).invoke(
        "Who?", {"callbacks": [collector]}
    )
    assert given["raw"].usage_metadata["output_tokens"] == 3
    assert given["parsed"] is None
    (run,) = [run for run in _runs(collector.traced_runs) if run.run_type == "llm"]
    assert "t" in (run.tags or [])
    whole = bound.with_structured_output(Person, method=method, max_tokens=200)
    assert whole.invoke("Who?") == Person(name="Ann")


def _runs(runs: Any) -> Any:
    for run in runs:
        yield run
        yield from _runs(run.child_runs)


def test_tools_stay_beside_a_form() -> None:
    bound: Any = toy_chat.scripted().bind_tools([add], parallel_tool_calls=False)
    llm = bound.with_structured_output(Person).first
    assert [tool["function"]["name"] for tool in llm.kwargs["tools"]] == ["add"]
    assert llm.kwargs["parallel_tool_calls"] is False


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


@pytest.mark.parametrize("choice", ["add", "any"])
def test_a_choice_goes_with_the_tools_among_which_it_was_made(choice: str) -> None:
    bound: Any = toy_chat.scripted().bind_tools([add], tool_choice=choice, max_tokens=3)
    again = bound.bind_tools([multiply])
    assert again.invoke("hi").text == "One"
    assert again.bind_tools([add], tool_choice="add").kwargs["tool_choice"] == "add"
    before: Any = toy_chat.scripted().bind(tool_choice=choice)
    assert before.bind_tools([add]).kwargs["tool_choice"] == choice


@pytest.mark.parametrize("kind", KINDS)
def test_steps_have_the_options_of_the_binding(kind: str) -> None:
    bound: Any = KINDS[kind](toy_chat.scripted()).bind(max_tokens=3, stop=["x"])
    assert [step.text for step in bound.steps("hi")] == ["One"]
    assert [step.text for step in bound.steps("hi", stop=["n"])] == ["O"]
    assert [step.text for step in bound.steps("hi", max_tokens=1)] == ["O"]
    assert [step.text for step in asyncio.run(collect(bound.asteps("hi")))] == ["One"]
    assert [step.text for step in asyncio.run(collect(bound.asteps("hi", stop=["n"])))] == ["O"]


def test_a_binding_is_langchains_own_to_everybody_else() -> None:
    model = toy_chat.scripted()
    bound: Any = model.bind(stop=["x"])
    assert isinstance(bound, RunnableBinding)
    assert type(bound | passed) is RunnableSequence
    stored = ChatSpecGuard(draft="d.gguf", target="t.gguf").bind(stop=["x"])
    own = RunnableBinding(bound=stored.bound, kwargs={"stop": ["x"]})
    assert dumpd(stored) == dumpd(own)
    assert pickle.loads(pickle.dumps(stored)).kwargs == {"stop": ["x"]}
    assert bound.get_name() == RunnableBinding(bound=model).get_name() == "ChatSpecGuard"
    traces = []
    for each in (bound, RunnableBinding(bound=model, kwargs={"stop": ["x"]})):
        collector = RunCollectorCallbackHandler()
        each.invoke("hi", {"callbacks": [collector]})
        traces.append([(run.name, run.run_type) for run in collector.traced_runs])
    assert traces[0] == traces[1] == [("ChatSpecGuard", "llm")]
