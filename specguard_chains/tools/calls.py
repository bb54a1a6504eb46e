"""Reads calls from JSON as models write it, and says early what cannot become one."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from specguard_chains.tools.parts import Call, MalformedCall

ARGUMENTS = ("arguments", "parameters")
FIRST_KEYS = ("name", *ARGUMENTS, "function", "type", "id", "tool_calls")
"""Keys that the object of a call may begin with."""
_KEYS = {"name", *ARGUMENTS, "function", "type", "id"}
"""All keys that it has; one with others, such as a description, is something else."""

_INVALID = "the call is not valid JSON"


def may_become_call(text: str, names: Collection[str]) -> bool | None:
    """Whether JSON that begins like this can be a call of one of the tools; None: too early."""
    head = re.match(r"(\[\s*)?(\{\s*){0,2}", text)
    assert head is not None
    rest = text[head.end() :]
    if not rest:
        return None
    key = re.match(r'"([^"\\]*)(")?', rest)
    if "{" not in head[0] or key is None:
        return False
    if not key[2]:
        whole = key.end() == len(rest)
        return None if whole and _begins_one(key[1], FIRST_KEYS) else False
    if key[1] not in FIRST_KEYS:
        return False
    colon = re.match(r"\s*(:\s*)?", rest[key.end() :])
    assert colon is not None
    value = rest[key.end() + colon.end() :]
    if not value:
        return None
    return bool(colon[1]) and _value_fits(key[1], value, names)


def _value_fits(key: str, value: str, names: Collection[str]) -> bool | None:
    """Whether the first value of an object fits a call."""
    if key in ("name", "type", "function") and value[0] == '"':
        possible = ("function",) if key == "type" else names
        string = re.match(r'"([^"\\]*)(.)?', value, re.DOTALL)
        assert string is not None
        if string[2] == '"':
            return string[1] in possible
        begins = _begins_one(string[1], possible)
        return begins if string[2] or not begins else None  # an escape may stand for any letter
    return value[0] in {"name": "", "type": "", "function": "{", "tool_calls": "["}.get(key, '{"n')


def _begins_one(text: str, words: Collection[str]) -> bool:
    return any(word.startswith(text) for word in words)


def read_calls(
    text: str, names: Collection[str], *, marked: bool
) -> list[Call | MalformedCall] | None:
    """Return the calls that a region holds, None if it is none.

    Args:
        text: An object or a list.
        names: The known tools.
        marked: It stands between marks for calls: a call was meant, known or not.
    """
    value = _parsed(text)
    try:
        calls = [_call(item, names, marked=marked) for item in _items(value)]
    except RecursionError:  # so deep that it can just be read, and not be written
        value = None
    if value is None:
        name, arguments = _fragments(text)
        if not marked and name not in names:
            return None
        return [MalformedCall(name, arguments, _INVALID)]
    if marked:
        return [call or MalformedCall(None, text, "the call names no tool") for call in calls]
    known = [call for call in calls if call is not None and call.name in names]
    return known if calls and len(known) == len(calls) else None


def call_of(name: str, arguments: str, names: Collection[str]) -> Call | MalformedCall:
    """Return a call whose name and arguments stand apart."""
    try:
        return _checked(name, _parsed(arguments), arguments, names)
    except RecursionError:
        return MalformedCall(name, arguments, _INVALID)


def _parsed(text: str) -> Any:
    """Return the value of JSON, None if it has none or is nested too deep.

    Templates teach some models to write {{…}}.
    """
    for variant in _variants(text):
        try:
            return json.loads(variant, strict=False)
        except (ValueError, RecursionError):
            continue
    return None


def _variants(text: str) -> Iterator[str]:
    yield text
    if re.match(r"\[?\s*\{\s*\{", text):
        if text.startswith("{") and text.endswith("}"):
            yield text[1:-1]
            yield text[1:]
        yield text.replace("{{", "{").replace("}}", "}")


def _items(value: Any) -> Sequence[Any]:
    inner = value.get("tool_calls") if isinstance(value, dict) else value
    return inner if isinstance(inner, list) else [value]


def _call(item: Any, names: Collection[str], *, marked: bool) -> Call | MalformedCall | None:
    """Return the call that an object is, None if it is something else."""
    if not isinstance(item, dict):
        return None
    inner = item["function"] if isinstance(item.get("function"), dict) else item
    name = inner.get("name", item.get("function"))
    if not isinstance(name, str) or not (marked or inner.keys() <= _KEYS):
        return None
    arguments = next((inner[key] for key in ARGUMENTS if key in inner), None)
    return _checked(name, arguments, _dumped(arguments), names)


def _checked(name: str, arguments: Any, raw: str, names: Collection[str]) -> Call | MalformedCall:
    if isinstance(arguments, str):  # JSON in JSON
        raw = arguments
        arguments = _parsed(arguments) if arguments.strip() else {}
    if name not in names:
        known = ", ".join(sorted(names))
        return MalformedCall(name, raw, f"there is no tool {name!r}; known are: {known}")
    if arguments is None and raw in ("null", ""):
        arguments = {}
    if not isinstance(arguments, dict):
        return MalformedCall(name, raw, "the arguments are not a JSON object")
    return Call(name, _dumped(arguments))


def _fragments(text: str) -> tuple[str | None, str]:
    """Return the name and the arguments of a call that is no valid JSON, as far as they go."""
    name = re.search(r'"name"\s*:\s*("(?:[^"\\]|\\.)*")', text)
    arguments = re.search(r'"(?:arguments|parameters)"\s*:\s*', text)
    return name and _parsed(name[1]), text[arguments.end() :] if arguments else text


def _dumped(value: Any) -> str:
    """Return JSON in plain characters; half of a surrogate pair is none and is replaced."""
    text = json.dumps(value, ensure_ascii=False)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
