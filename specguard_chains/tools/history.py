"""Earlier tool calls and their results, in the forms that chat templates insist on.

Templates agree on where calls stand in a message, and on little else: some take arguments as JSON
text, some one call a turn, some ids of nine characters; some want a result to name its tool. What
a template refuses in one form is tried in the next one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import product
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specguard_chains.tools.formats import ToolFormat

Message = Mapping[str, Any]
Messages = Sequence[Message]

ID_LENGTH = 9
"""Letters and digits of an id, as Mistral's templates demand them."""


def adaptations(messages: Messages) -> Iterator[Messages]:
    """Yield the messages, and then the same in forms that stricter templates take."""
    messages = with_names(messages)
    if not any(message.get("tool_calls") for message in messages):
        yield messages
        return
    seen: list[Messages] = []
    for text, single, short in product((False, True), repeat=3):
        adapted = one_call_a_turn(messages) if single else messages
        adapted = with_short_ids(adapted) if short else adapted
        adapted = with_arguments_as_text(adapted) if text else adapted
        if adapted not in seen:
            seen.append(adapted)
            yield adapted


def with_names(messages: Messages) -> Messages:
    """Return the messages with every result named after the tool that was called."""
    names = {
        call.get("id"): call["function"]["name"]
        for message in messages
        for call in message.get("tool_calls") or ()
    }
    return [
        {**message, "name": names[message["tool_call_id"]]}
        if message.get("role") == "tool"
        and not message.get("name")
        and message.get("tool_call_id") in names
        else message
        for message in messages
    ]


def with_arguments_as_text(messages: Messages) -> Messages:
    """Return the messages with the arguments of calls as JSON text."""
    return _each_call(messages, _as_text)


def with_text_ids(messages: Messages) -> Messages:
    """Return the messages with calls that have no id named "", and so their results."""
    return _each_id(messages, lambda identity: identity or "")


def with_short_ids(messages: Messages) -> Messages:
    """Return the messages with ids of nine letters and digits; equal ones stay equal."""
    return _each_id(messages, _short)


def one_call_a_turn(messages: Messages) -> Messages:
    """Return the messages with parallel calls one after the other, each before its result."""
    turns: list[Message] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            turns.append(message)
            continue
        results = []
        while at < len(messages) and messages[at].get("role") == "tool":
            results.append(messages[at])
            at += 1
        for i, call in enumerate(calls):
            content = message.get("content") if i == 0 else ""
            turns.append({**message, "content": content, "tool_calls": [call]})
            turns += [result for result in results if result.get("tool_call_id") == call.get("id")]
        known = {call.get("id") for call in calls}
        turns += [result for result in results if result.get("tool_call_id") not in known]
    return turns


def written_out(
    messages: Messages, tools: Sequence[Mapping[str, Any]], form: ToolFormat
) -> Messages:
    """Return the messages for a template that knows no tools: everything about them as text."""
    told = [_told(message, form) for message in with_names(messages)]
    if not tools:
        return told
    signatures = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    call = json.dumps({"name": "<name>", form.arguments: {}}).replace("{}", "<arguments>")
    text = (
        f"You may call these tools:\n<tools>\n{signatures}\n</tools>\n"
        f"A call is written as follows:\n{form.opening}{call}{form.closing}"
    )
    if told and told[0].get("role") == "system":
        return [{**told[0], "content": f"{told[0]['content']}\n\n{text}"}, *told[1:]]
    return [{"role": "system", "content": text}, *told]


def _told(message: Message, form: ToolFormat) -> Message:
    """Return a message whose calls or results are part of its text."""
    if message.get("role") == "tool":
        result = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": result}
    if not message.get("tool_calls"):
        return message
    calls = [
        f"{form.opening}{_object(call['function'], form.arguments)}{form.closing}"
        for call in message["tool_calls"]
    ]
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**kept, "content": "\n".join(filter(None, [message.get("content"), *calls]))}


def _object(function: Mapping[str, Any], key: str) -> str:
    return json.dumps({"name": function["name"], key: function["arguments"]}, ensure_ascii=False)


def _each_id(messages: Messages, change: Callable[[Any], str]) -> Messages:
    """Return the messages with other ids, of the calls and of their results."""
    return [
        {**message, "tool_call_id": change(message["tool_call_id"])}
        if "tool_call_id" in message
        else message
        for message in _each_call(messages, lambda call: {**call, "id": change(call.get("id"))})
    ]


def _each_call(messages: Messages, change: Callable[[Message], Message]) -> Messages:
    return [
        {**message, "tool_calls": [change(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _as_text(call: Message) -> Message:
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def _short(identity: Any) -> str:
    text = str(identity)
    if len(text) == ID_LENGTH and text.isalnum():
        return text
    return sha256(text.encode()).hexdigest()[:ID_LENGTH]
