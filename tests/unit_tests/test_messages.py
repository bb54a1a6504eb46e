"""What chat templates are given for LangChain's messages, and messages for verified steps."""

from typing import Any

import pytest
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)

from specguard_chains.errors import ConfigurationError, SpecGuardError
from specguard_chains.messages import to_template, with_closing_instruction

USER = {"role": "user", "content": "hi"}
CALL: Any = {"id": "call_1", "name": "add", "args": {"名": "é", "b": 2}, "type": "tool_call"}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (HumanMessage("hi"), USER),
        (HumanMessage("hi", name="Ada"), {**USER, "name": "Ada"}),
        (SystemMessage("hi"), {"role": "system", "content": "hi"}),
        (AIMessage("hi"), {"role": "assistant", "content": "hi"}),
        (AIMessageChunk("hi"), {"role": "assistant", "content": "hi"}),
        (ChatMessage("hi", role="developer"), {"role": "developer", "content": "hi"}),
        (
            ToolMessage("hi", tool_call_id="call_1"),
            {"role": "tool", "content": "hi", "tool_call_id": "call_1"},
        ),
        (
            ToolMessage("hi", tool_call_id="call_1", name="add"),
            {"role": "tool", "content": "hi", "tool_call_id": "call_1", "name": "add"},
        ),
        (FunctionMessage("hi", name="add"), {"role": "tool", "content": "hi", "name": "add"}),
    ],
)
def test_roles(message: BaseMessage, expected: dict[str, Any]) -> None:
    assert to_template([message]) == [expected]


@pytest.mark.parametrize(
    "content",
    [
        ["hi"],
        ["h", "i"],
        [{"type": "text", "text": "hi"}],
        [{"type": "text", "text": "h", "cache_control": {"type": "ephemeral"}}, "i"],
        [{"type": "text", "text": "h"}, {"type": "text", "text": "i", "annotations": []}],
        [{"type": "text-plain", "text": "hi", "mime_type": "text/plain"}],
        [{"type": "output_text", "text": "hi"}],
    ],
)
@pytest.mark.parametrize("message_type", [HumanMessage, SystemMessage, AIMessage])
def test_peers_031_text_blocks_become_one_string(
    content: list[Any], message_type: type[BaseMessage]
) -> None:
    (message,) = to_template([message_type(content=content)])
    assert message["content"] == "hi"
    assert message.keys() == {"role", "content"}


def test_blocks_of_tool_messages_become_one_string() -> None:
    blocks: Any = [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}]
    (message,) = to_template([ToolMessage(blocks, tool_call_id="1")])
    assert message == {"role": "tool", "content": "42", "tool_call_id": "1"}


@pytest.mark.parametrize(
    "block",
    [
        {"type": "image", "url": "file:///cat.png"},
        {"type": "image_url", "image_url": {"url": "file:///cat.png"}},
        {"type": "audio", "base64": "AAAA", "mime_type": "audio/wav"},
        {"type": "file", "base64": "AAAA", "mime_type": "application/pdf"},
        {"type": "reasoning", "reasoning": "a user does not reason"},
        {"type": "text"},
        {"type": "text", "text": None},
    ],
)
def test_a_block_that_is_not_text_is_an_error_that_names_it(block: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=repr(block["type"])):
        to_template([HumanMessage("look:"), HumanMessage([block])])


def test_a_block_without_a_type_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="without a type"):
        to_template([HumanMessage([{"txt": "hi"}])])


def test_tool_calls_keep_their_arguments_as_a_mapping() -> None:
    (message,) = to_template([AIMessage("", tool_calls=[CALL])])
    assert message == {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "add", "arguments": {"名": "é", "b": 2}},
            }
        ],
    }


@pytest.mark.parametrize(
    "block",
    [
        {"type": "tool_use", "id": "call_1", "name": "add", "input": {"b": 2}},
        {"type": "tool_call", "id": "call_1", "name": "add", "args": {"b": 2}},
    ],
)
def test_tool_calls_are_not_told_twice(block: dict[str, Any]) -> None:
    content: Any = [{"type": "text", "text": "calling"}, block]
    (message,) = to_template([AIMessage(content, tool_calls=[CALL])])
    assert message["content"] == "calling"
    assert len(message["tool_calls"]) == 1


def test_anthropic_tool_results_become_tool_messages_before_the_text() -> None:
    content: Any = [
        {"type": "tool_result", "tool_use_id": "a", "content": "1"},
        {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "text", "text": "2"}]},
        {"type": "tool_result", "tool_use_id": "c"},
        {"type": "text", "text": "hi"},
    ]
    assert to_template([HumanMessage(content)]) == [
        {"role": "tool", "content": "1", "tool_call_id": "a"},
        {"role": "tool", "content": "2", "tool_call_id": "b"},
        {"role": "tool", "content": "", "tool_call_id": "c"},
        USER,
    ]
    assert len(to_template([HumanMessage(content[:1])])) == 1


@pytest.mark.parametrize(
    "message",
    [
        AIMessage([{"type": "reasoning", "reasoning": "Hm."}, {"type": "text", "text": "4"}]),
        AIMessage([{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "4"}]),
        AIMessage("4", additional_kwargs={"reasoning_content": "Hm."}),
    ],
)
def test_peers_035_reasoning_is_kept_apart_for_the_template_to_decide(message: AIMessage) -> None:
    assert to_template([message]) == [
        {"role": "assistant", "content": "4", "reasoning_content": "Hm."}
    ]


@pytest.mark.parametrize(
    "block",
    [
        {"type": "reasoning_content", "reasoning_content": {"text": "Hm.", "signature": "x"}},
        {"type": "reasoning_content", "reasoning_content": {"redacted_content": "x"}},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "reasoning", "summary": [], "id": "rs_1"},
        {"type": "refusal", "refusal": "4"},
    ],
)
def test_answers_of_other_models_can_be_gone_on_from(block: dict[str, Any]) -> None:
    refused = block["type"] == "refusal"
    blocks: Any = [block] if refused else [block, {"type": "text", "text": "4"}]
    (mapping,) = to_template([AIMessage(blocks)])
    assert mapping["content"] == "4"
    assert mapping.get("reasoning_content") == ("Hm." if "signature" in str(block) else None)
    with pytest.raises(ConfigurationError, match=repr(block["type"])):
        to_template([HumanMessage([block])])


def test_repeated_roles_pass_through() -> None:
    assert to_template([HumanMessage("hi"), HumanMessage("hi")]) == [USER, USER]


def test_peers_030_a_tool_message_may_be_last() -> None:
    conversation = [
        HumanMessage("hi"),
        AIMessage("", tool_calls=[CALL]),
        ToolMessage("", tool_call_id="call_1"),
    ]
    assert [message["role"] for message in to_template(conversation)] == [
        "user",
        "assistant",
        "tool",
    ]


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [HumanMessage("")],
        [HumanMessage(" \n")],
        [HumanMessage([])],
        [SystemMessage(""), HumanMessage([{"type": "text", "text": ""}])],
    ],
)
def test_nothing_to_answer_is_an_error(messages: list[BaseMessage]) -> None:
    with pytest.raises(ConfigurationError, match="nothing to answer"):
        to_template(messages)


def test_a_message_that_is_no_utterance_is_an_error() -> None:
    with pytest.raises(SpecGuardError, match="RemoveMessage"):
        to_template([HumanMessage("hi"), RemoveMessage(id="1")])


def test_reasoning_of_a_message_in_the_v1_form_is_told_once() -> None:
    blocks: Any = [{"type": "reasoning", "reasoning": "Hm."}, {"type": "text", "text": "Yes."}]
    message = AIMessage(blocks, additional_kwargs={"reasoning_content": "Hm."})
    (mapping,) = to_template([message])
    assert mapping == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}


def test_the_last_result_of_a_tool_says_what_comes_next() -> None:
    result = {"role": "tool", "content": "42", "tool_call_id": "1"}
    question = {"role": "user", "content": "How much?"}
    assert with_closing_instruction([question], "Answer in JSON.") == [question]
    assert with_closing_instruction([question, result], "") == [question, result]
    told = with_closing_instruction([question, result], "Answer in JSON.")
    assert told == [question, {**result, "content": "42\n\nAnswer in JSON."}]
    assert result["content"] == "42"


def test_invalid_calls_are_kept_where_they_have_results() -> None:
    invalid: Any = {"id": "a", "name": None, "args": '{"x": 1}', "error": None}
    message = AIMessage("hm", invalid_tool_calls=[invalid])
    assert to_template([message]) == [{"role": "assistant", "content": "hm"}]
    function = {"name": "unknown", "arguments": {"x": 1}}
    results = [
        ToolMessage("no", tool_call_id="a"),
        HumanMessage([{"type": "tool_result", "tool_use_id": "a", "content": "no"}]),
    ]
    for result in results:
        converted, _ = to_template([message, result])
        assert converted["tool_calls"] == [{"id": "a", "type": "function", "function": function}]
