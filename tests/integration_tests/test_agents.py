"""Agents on the default pair: tools, answers by schema, checkpoints, step events, deep agents."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.structured_output import ToolStrategy
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.sqlite import SqliteSaver
from pydantic import BaseModel, Field

from specguard_chains import ChatSpecGuard
from specguard_chains.assembly import unload
from specguard_chains.callbacks import EVENT, LangGraphStepWriter
from specguard_chains.messages import STEPS_KEY

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module", autouse=True)
def free_memory_afterwards() -> Iterator[None]:
    yield
    unload()


@pytest.fixture(scope="module")
def model() -> ChatSpecGuard:
    return ChatSpecGuard(temperature=0, max_tokens=200)


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers."""
    return a * b


@tool
def look_up_price(item: str) -> str:
    """Return the price of one item of the shop, in euros."""
    return {"lamp": "37", "desk": "216"}.get(item.lower(), "no such item")


class Result(BaseModel):
    """The answer to the question."""

    number: int = Field(description="the number that was asked for")


class Recorder(BaseCallbackHandler):
    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []

    def on_custom_event(self, name: str, data: Any, **_: Any) -> None:
        assert name == EVENT
        self.steps.append(data)


def steps_of(messages: list[Any]) -> list[dict[str, Any]]:
    answers = [message for message in messages if isinstance(message, AIMessage)]
    return [step for answer in answers for step in answer.additional_kwargs[STEPS_KEY]]


@pytest.mark.parametrize("critical_steps", ["verify", "target"])
@pytest.mark.parametrize("response_format", [Result, ToolStrategy(Result)], ids=["schema", "tool"])
def test_an_agent_with_two_tools_answers_by_a_schema_and_streams_its_steps(
    response_format: Any, critical_steps: Any
) -> None:
    agent: Any = create_agent(
        ChatSpecGuard(temperature=0, max_tokens=200, critical_steps=critical_steps),
        [multiply, look_up_price],
        response_format=response_format,
    )
    recorder = Recorder()
    question = HumanMessage("What is 27 times 43? Use the tool.")
    parts: list[Any] = list(
        agent.stream(
            {"messages": [question]},
            {"callbacks": [recorder, LangGraphStepWriter()], "recursion_limit": 12},
            stream_mode=["custom", "values"],
        )
    )
    state = [data for mode, data in parts if mode == "values"][-1]
    assert state["structured_response"] == Result(number=1161)
    streamed = [data["data"] for mode, data in parts if mode == "custom"]
    assert streamed == recorder.steps == steps_of(state["messages"])
    assert streamed[-1]["finish_reason"] == "stop"
    if isinstance(response_format, ToolStrategy):  # else these models answer without the tool
        results = [m for m in state["messages"] if isinstance(m, ToolMessage)]
        assert ("multiply", "1161") in [(result.name, result.text) for result in results]
        calls = [step for step in streamed if step["phase"] == "tool_call"]
        assert len(calls) >= 2
        assert critical_steps == "verify" or {step["source"] for step in calls} == {"target"}


def test_a_conversation_is_taken_up_by_a_new_graph(model: ChatSpecGuard, tmp_path: Path) -> None:
    config: Any = {"configurable": {"thread_id": "one"}}
    path = str(tmp_path / "checkpoints.sqlite")

    def say(text: str, config: Any = config) -> dict[str, Any]:
        with SqliteSaver.from_conn_string(path) as saver:
            agent: Any = create_agent(model, [], checkpointer=saver)
            state: dict[str, Any] = agent.invoke({"messages": [HumanMessage(text)]}, config)
            return state

    say("My name is Ottilie. Please greet me.")
    second = say("What is my name?")
    assert [message.type for message in second["messages"]] == ["human", "ai"] * 2
    assert "Ottilie" in second["messages"][-1].text
    for message in second["messages"][1::2]:
        assert "".join(step["text"] for step in steps_of([message])) == message.text
        assert message.usage_metadata["output_tokens"] > 0
    other = say("What is my name?", {"configurable": {"thread_id": "two"}})
    assert "Ottilie" not in other["messages"][-1].text


TURN = """
import json, sys
from langchain.agents import create_agent
from langgraph.checkpoint.sqlite import SqliteSaver
from specguard_chains import ChatSpecGuard

with SqliteSaver.from_conn_string(sys.argv[1]) as saver:
    model = ChatSpecGuard(pair="smollm2-135m", temperature=0, max_tokens=12, n_ctx=512)
    agent = create_agent(model, [], checkpointer=saver)
    state = agent.invoke(
        {"messages": [("user", sys.argv[2])]}, {"configurable": {"thread_id": "one"}}
    )
messages = state["messages"]
print(json.dumps([[m.type, m.text, m.additional_kwargs.get("specguard_steps")] for m in messages]))
"""


def test_a_conversation_is_taken_up_by_a_new_process(tmp_path: Path) -> None:
    def turn(text: str) -> list[Any]:
        command = [sys.executable, "-c", TURN, str(tmp_path / "checkpoints.sqlite"), text]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
        messages: list[Any] = json.loads(done.stdout.splitlines()[-1])
        return messages

    first = turn("Name a colour.")
    second = turn("Name another one.")
    assert [kind for kind, _, _ in second] == ["human", "ai"] * 2
    assert second[:2] == first, "messages, their text and their steps are as they were"
    assert second[3][2]


def test_a_deep_agent_takes_the_model(model: ChatSpecGuard) -> None:
    """Its eight tools alone are 2500 tokens."""
    deepagents = pytest.importorskip("deepagents")
    agent: Any = deepagents.create_deep_agent(model)
    recorder = Recorder()
    state = agent.invoke(
        {"messages": [HumanMessage("Greet me in one short sentence. Use no tool.")]},
        {"callbacks": [recorder], "recursion_limit": 50},
    )
    answer = state["messages"][-1]
    assert isinstance(answer, AIMessage)
    assert answer.text
    assert answer.usage_metadata
    assert answer.usage_metadata["input_tokens"] > 2000
    assert recorder.steps == steps_of(state["messages"])
