"""LangChain messages -> what chat templates render.

Only text goes into a template. Roles are passed on as they come: what a model's template cannot
take (two user turns in a row, a system message) is adapted where the template is known.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from specguard_chains.errors import ConfigurationError

TemplateMessage = dict[str, Any]
"""Keys: role, content (text); where they apply name, reasoning_content, tool_calls and
tool_call_id, in the shape that Hugging Face templates document."""

STEPS_KEY = "specguard_steps"
"""Where the steps are in a message's `additional_kwargs`: a list, which merging appends to."""

TEXT_BLOCKS = frozenset({"text", "text-plain", "input_text", "output_text"})
REASONING_BLOCKS = frozenset({"reasoning", "thinking", "redacted_thinking", "reasoning_content"})
"""Reasoning as LangChain, Anthropic and Bedrock have it; a redacted one tells nothing."""
IN_TOOL_CALLS = frozenset(
    {
        "tool_call",
        "tool_call_chunk",
        "invalid_tool_call",
        "tool_use",
        "input_json_delta",
        "function_call",
    }
)
"""Blocks that repeat what `AIMessage.tool_calls` and `AIMessage.invalid_tool_calls` hold."""


def to_template(messages: Sequence[BaseMessage]) -> list[TemplateMessage]:
    """Return the messages as mappings for a chat template.

    Raises:
        ConfigurationError: There is nothing to answer, or a block that no template renders.
    """
    converted = as_mappings(messages)
    if not any(part["content"].strip() or part.get("tool_calls") for part in converted):
        raise ConfigurationError(
            "there is nothing to answer: "
            + ("all messages are empty" if messages else "the list of messages is empty")
            + "; give at least one message with text"
        )
    return converted


def as_mappings(messages: Sequence[BaseMessage]) -> list[TemplateMessage]:
    """Return the messages as mappings, whether or not there is something to answer.

    Raises:
        ConfigurationError: A block that no template renders.
    """
    answered = {identity for message in messages for identity in _answered(message)}
    return [part for message in messages for part in _convert(message, answered)]


def plain_text(messages: Sequence[TemplateMessage]) -> str:
    """Return what messages say without a template, which decides about reasoning."""
    return "\n".join(
        f"{message['role']}: {message['content']}"
        + "".join(
            f"\n{json.dumps(call['function'], ensure_ascii=False)}"
            for call in message.get("tool_calls", ())
        )
        for message in messages
    )


def _answered(message: BaseMessage) -> Iterator[str]:
    """Yield the ids of the calls whose results are in a message."""
    if isinstance(message, ToolMessage):
        yield message.tool_call_id
    elif isinstance(message, HumanMessage) and not isinstance(message.content, str):
        for block in message.content:
            if isinstance(block, dict) and _type(block) == "tool_result":
                yield block.get("tool_use_id", "")


def _convert(message: BaseMessage, answered: Collection[str]) -> Iterator[TemplateMessage]:
    """Yield the mappings of one message: an Anthropic-style one may hold several tools' results.

    Args:
        message: The message.
        answered: The ids of the calls that have results.
    """
    match message:
        case AIMessage():
            yield _assistant(message, answered)
        case SystemMessage():
            yield _mapping("system", message)
        case HumanMessage():
            yield from _user(message)
        case ToolMessage():
            yield _mapping("tool", message, tool_call_id=message.tool_call_id)
        case FunctionMessage():
            yield _mapping("tool", message)
        case ChatMessage():
            yield _mapping(message.role, message)
        case _:
            raise ConfigurationError(
                f"a {type(message).__name__} cannot be rendered; use human, AI, system, tool or "
                "chat messages"
            )


def _mapping(role: str, message: BaseMessage, **more: Any) -> TemplateMessage:
    mapping: TemplateMessage = {"role": role, "content": text_of(message.content, role), **more}
    if message.name:
        mapping["name"] = message.name
    return mapping


def _user(message: HumanMessage) -> Iterator[TemplateMessage]:
    """Yield tool results, which Anthropic-style messages hold as blocks, before the user's text."""
    blocks = [message.content] if isinstance(message.content, str) else message.content
    rest: list[str | dict[str, Any]] = []
    results = 0
    for block in blocks:
        if isinstance(block, dict) and _type(block) == "tool_result":
            text = text_of(block.get("content") or "", "tool")
            yield {"role": "tool", "content": text, "tool_call_id": block.get("tool_use_id", "")}
            results += 1
        else:
            rest.append(block)
    if rest or not results:
        yield _mapping("user", message.model_copy(update={"content": rest}))


def _assistant(message: AIMessage, answered: Collection[str]) -> TemplateMessage:
    """Return an earlier answer; its reasoning stands apart, and the template decides about it."""
    mapping = _mapping("assistant", message)
    blocks = [message.content] if isinstance(message.content, str) else message.content
    in_blocks = "".join(
        _reasoning_text(block)
        for block in blocks
        if isinstance(block, Mapping) and _type(block) in REASONING_BLOCKS
    )
    # A message in the v1 form has the same in both places.
    if text := in_blocks or message.additional_kwargs.get("reasoning_content"):
        mapping["reasoning_content"] = text
    calls = [_call(call["id"], call["name"], call["args"]) for call in message.tool_calls]
    # Strict templates take no result without its call.
    calls += [
        _call(call["id"], call["name"] or "unknown", _object(call["args"]))
        for call in message.invalid_tool_calls
        if call["id"] in answered
    ]
    if calls:
        mapping["tool_calls"] = calls
    return mapping


def _reasoning_text(block: Mapping[str, Any]) -> str:
    nested = block.get("reasoning_content")
    within = nested.get("text") if isinstance(nested, Mapping) else None
    return str(block.get("reasoning") or block.get("thinking") or within or "")


def _call(identity: str | None, name: str, arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": identity, "type": "function", "function": function}


def _object(text: str | None) -> dict[str, Any]:
    """Return the JSON object that a text is, {} if it is none."""
    try:
        value = json.loads(text or "")
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def text_of(content: str | Sequence[str | Mapping[str, Any]], role: str) -> str:
    """Return the text of a message's content, which is a string or a list of blocks.

    Raises:
        ConfigurationError: A block is neither text nor told in another key of the mapping.
    """
    if isinstance(content, str):
        return content
    return "".join(_block_text(block, role) for block in content)


def _block_text(block: str | Mapping[str, Any], role: str) -> str:
    if isinstance(block, str):
        return block
    kind = _type(block)
    if kind in TEXT_BLOCKS and isinstance(block.get("text"), str):
        return str(block["text"])
    if role == "assistant" and kind in REASONING_BLOCKS | IN_TOOL_CALLS:
        return ""
    if role == "assistant" and kind == "refusal":
        return str(block.get("refusal") or "")
    raise ConfigurationError(
        f"a {role} message has a block of type {kind!r}: these models read text only; leave the "
        "block out or put what it says into a text block"
    )


def _type(block: str | Mapping[str, Any]) -> str:
    return "text" if isinstance(block, str) else str(block.get("type", "without a type"))


def with_instruction(messages: Sequence[Mapping[str, Any]], text: str) -> list[Mapping[str, Any]]:
    """Return messages whose system message says this too."""
    if not text:
        return list(messages)
    if messages and messages[0]["role"] == "system":
        system = messages[0]
        joined = "\n\n".join(filter(None, [system["content"], text]))
        return [{**system, "content": joined}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def with_closing_instruction(
    messages: Sequence[Mapping[str, Any]], text: str
) -> Sequence[Mapping[str, Any]]:
    """Return messages whose last one says this too, if it is the result of a tool."""
    if not text or not messages or messages[-1]["role"] != "tool":
        return messages
    last = messages[-1]
    return [*messages[:-1], {**last, "content": f"{last['content']}\n\n{text}"}]
