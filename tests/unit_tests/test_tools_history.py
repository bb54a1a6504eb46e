"""Earlier calls and results in the forms that chat templates insist on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage

from specguard_chains.errors import ConfigurationError
from specguard_chains.messages import to_template
from specguard_chains.templates import ChatTemplate
from specguard_chains.tools.formats import HERMES, LLAMA3
from specguard_chains.tools.history import (
    Messages,
    adaptations,
    one_call_a_turn,
    with_names,
    with_short_ids,
    written_out,
)

FOLDER = Path(__file__).parent / "templates"
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}


def history(*names: str, content: str = "") -> list[dict[str, Any]]:
    """A question, calls of these tools with long ids, and their results without names."""
    calls = [
        {
            "id": f"call_{i:020}",
            "type": "function",
            "function": {"name": name, "arguments": {"a": i, "ort": "Köln"}},
        }
        for i, name in enumerate(names)
    ]
    results = [
        {"role": "tool", "content": f"result {i}", "tool_call_id": call["id"]}
        for i, call in enumerate(calls)
    ]
    assistant = {"role": "assistant", "content": content, "tool_calls": calls}
    return [{"role": "user", "content": "1 + 2?"}, assistant, *results]


def rendered(name: str, messages: Messages) -> str:
    """Return the prompt of the first form that a template takes."""
    template = ChatTemplate((FOLDER / f"{name}.jinja").read_text(encoding="utf-8"), "<s>", "</s>")
    for adapted in adaptations(messages):
        try:
            return template.render(adapted, [TOOL])
        except ConfigurationError:
            continue
    raise AssertionError("refused in all forms")


@pytest.mark.parametrize(
    "name", ["qwen2.5", "qwen3", "hermes", "llama3", "mistral", "mistral-named", "deepseek-r1"]
)
@pytest.mark.parametrize("number", [1, 2])
def test_every_template_takes_calls_and_results(name: str, number: int) -> None:
    text = rendered(name, history(*["add"] * number))
    for i in range(number):
        assert json.dumps({"a": i, "ort": "Köln"}, ensure_ascii=False) in text
        assert f"result {i}" in text


def test_what_a_template_takes_at_once_stays_as_it_is() -> None:
    messages = history("add", "add")
    assert next(iter(adaptations(messages))) == with_names(messages)
    plain = [{"role": "user", "content": "Hi"}]
    assert list(adaptations(plain)) == [plain]


def test_results_are_named_after_the_tools_that_were_called() -> None:
    *_, first, second = with_names(history("add", "größe"))
    assert (first["name"], second["name"]) == ("add", "größe")
    named = {"role": "tool", "content": "", "tool_call_id": "x", "name": "own"}
    unknown = {"role": "tool", "content": "", "tool_call_id": "y"}
    assert with_names([named, unknown]) == [named, unknown]


def test_short_ids_belong_together_and_stay_if_they_are_short() -> None:
    _, assistant, *results = with_short_ids(history("add", "add"))
    ids = [call["id"] for call in assistant["tool_calls"]]
    assert ids == [result["tool_call_id"] for result in results]
    assert len(set(ids)) == 2
    assert all(len(identity) == 9 and identity.isalnum() for identity in ids)
    assert with_short_ids([{"role": "tool", "tool_call_id": "abcdefgh1"}]) == [
        {"role": "tool", "tool_call_id": "abcdefgh1"}
    ]


def test_parallel_calls_become_turns() -> None:
    question, assistant, first, second = history("add", "größe", content="Both.")
    stray = {"role": "tool", "content": "?", "tool_call_id": "z"}
    turns = one_call_a_turn([question, assistant, second, first, stray, question])
    calls = assistant["tool_calls"]
    assert turns == [
        question,
        {"role": "assistant", "content": "Both.", "tool_calls": [calls[0]]},
        first,
        {"role": "assistant", "content": "", "tool_calls": [calls[1]]},
        second,
        stray,
        question,
    ]


def test_templates_without_tools_get_everything_as_text() -> None:
    system, question, assistant, result = written_out(history("add", content="So:"), [TOOL], HERMES)
    assert json.dumps(TOOL) in system["content"]
    assert (
        '<tool_call>\n{"name": "<name>", "arguments": <arguments>}\n</tool_call>'
        in (system["content"])
    )
    assert question == {"role": "user", "content": "1 + 2?"}
    call = '{"name": "add", "arguments": {"a": 0, "ort": "Köln"}}'
    assert assistant == {
        "role": "assistant",
        "content": f"So:\n<tool_call>\n{call}\n</tool_call>",
    }
    assert result == {"role": "user", "content": "<tool_response>\nresult 0\n</tool_response>"}


def test_what_users_say_to_the_system_comes_before_the_tools() -> None:
    told = written_out([{"role": "system", "content": "Be kind."}], [TOOL], LLAMA3)
    assert told[0]["content"].startswith("Be kind.\n\nYou may call")
    assert '{"name": "<name>", "parameters": <arguments>}' in told[0]["content"]
    assert written_out([{"role": "user", "content": "Hi"}], [], HERMES) == [
        {"role": "user", "content": "Hi"}
    ]


@pytest.mark.parametrize("name", ["hermes", "mistral", "qwen2.5", "llama3"])
@pytest.mark.parametrize("valid", [False, True])
@pytest.mark.parametrize("blocks", [False, True])
def test_results_of_invalid_calls_have_their_calls_before_them(
    name: str, valid: bool, blocks: bool
) -> None:
    """As in a history in which a user's code has answered a call that was no JSON."""
    calls = [{"type": "tool_call", "id": "call_1", "name": "add", "args": {"a": 7}}]
    invalid = {"type": "invalid_tool_call", "id": "call_2", "name": "add", "error": None}
    assistant = AIMessage(
        [{"type": "text", "text": "So:"}, invalid] if blocks else "So:",
        tool_calls=calls if valid else [],
        invalid_tool_calls=[
            {**invalid, "args": "(the call is not valid JSON) {1"},
            {**invalid, "id": "call_3"},
        ],
    )
    results: list[BaseMessage] = [ToolMessage("That is no JSON.", tool_call_id="call_2")]
    if valid:
        results.insert(0, ToolMessage("Seven.", tool_call_id="call_1"))
    mappings = to_template([HumanMessage("1 + 2?"), assistant, *results])
    arguments = [call["function"]["arguments"] for call in mappings[1]["tool_calls"]]
    assert arguments == ([{"a": 7}, {}] if valid else [{}])
    assert "That is no JSON." in rendered(name, mappings)
