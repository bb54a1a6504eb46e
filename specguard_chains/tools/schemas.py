"""JSON schemas as users give them -> rules of a grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from specguard_chains.decoding.constraint import NO_BLANK_LINES
from specguard_chains.errors import ConfigurationError

KNOWN_FORMATS = frozenset(
    {
        "date",
        "date-time",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "time",
        "uri",
        "uuid",
    }
)
"""Formats of strings that llguidance enforces; JSON schema takes any other one for a remark."""

_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_SINGLE = frozenset({"items", "additionalProperties", "not", "if", "then", "else", "contains"})
_COMBINED = frozenset({"allOf", "anyOf", "oneOf", "$ref", "patternProperties"})

_ESCAPES = 'nrbtf\\"'  # half of a \uXXXX pair would be no text
_FLEXIBLE = {"whitespace_pattern": NO_BLANK_LINES}
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def json_rule(
    schema: Mapping[str, Any], of: str, *, strict: bool = True, compact: bool = False
) -> str:
    """Return the right side of a rule for JSON that follows a schema.

    Args:
        schema: The JSON schema.
        of: What it is the schema of, for messages.
        strict: Whether keywords that cannot be enforced are refused; else they are left out.
        compact: Allow white space as `json.dumps` and templates have it, and no other.

    Raises:
        ConfigurationError: The schema is wrong, or uses what cannot be enforced.
    """
    guidance = {"lenient": not strict, "json_allowed_escapes": _ESCAPES}
    guidance |= _COMPACT if compact else _FLEXIBLE
    whole = closed(schema)
    text = _text(whole, guidance)
    if not strict and _fault(text):  # what llguidance leaves out is keywords that it does not know
        text = _text(_without_patterns(whole), guidance)
    if fault := _fault(text):
        raise ConfigurationError(f"{of} cannot be enforced: {_reason(fault)}")
    return f"%json {text}"


def _text(schema: Mapping[str, Any], guidance: Mapping[str, Any]) -> str:
    return json.dumps({**schema, "x-guidance": guidance}, ensure_ascii=False)


def _without_patterns(schema: Any) -> Any:
    """Return a schema without the patterns of strings that no grammar can have, as look-around."""
    if not isinstance(schema, Mapping):
        return schema
    kept = {key: _applied(key, value, _without_patterns) for key, value in schema.items()}
    if "pattern" in kept and _fault(json.dumps({"pattern": kept["pattern"]})):
        del kept["pattern"]
    return kept


@lru_cache(maxsize=1024)
def _fault(schema: str) -> str:
    """Return what is wrong with a schema, "" for nothing; a millisecond of work each."""
    from llguidance import LLMatcher

    failed, messages = LLMatcher.validate_grammar_with_warnings(
        LLMatcher.grammar_from_json_schema(schema)
    )
    return " ".join(messages) if failed else ""


def _reason(message: str) -> str:
    """Return what llguidance objects to and what to do about it."""
    if keys := re.search(r"Unimplemented keys: \[(.*)\]", message):
        return f"the keyword {keys[1]} is not supported; leave it out, or give strict=False"
    return f"{' '.join(message.split())}; change the schema"


def parameters_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a tool's arguments, which are an object in any case."""
    return {"type": "object", "properties": {}, **(tool["function"].get("parameters") or {})}


def call_schema(name: str, parameters: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the schema of a call: {"name": name, key: the arguments}."""
    moved = _moved(parameters, f"#/properties/{key}")
    definitions = {k: moved.pop(k) for k in ("$defs", "definitions") if k in moved}
    return {
        **definitions,
        "type": "object",
        "properties": {"name": {"const": name}, key: moved},
        "required": ["name", key],
        "additionalProperties": False,
    }


def _moved(schema: Any, to: str) -> Any:
    """Return a schema whose references hold when it stands at another place, its $defs apart."""
    if isinstance(schema, list):
        return [_moved(part, to) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: _moved(value, to) for key, value in schema.items()}
    reference = moved.get("$ref")
    if isinstance(reference, str) and re.match(r"#(?!/(\$defs|definitions)/)", reference):
        moved["$ref"] = to + reference[1:]
    return moved


def closed(schema: Any) -> Any:
    """Return a schema whose objects have no properties but those that it names.

    A JSON schema allows any further ones unless it says otherwise, and small models write them.
    Formats that nobody enforces are left out.
    """
    return _closed(schema, close=True)


def _closed(schema: Any, *, close: bool) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    result: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "format" and value not in KNOWN_FORMATS:
            continue
        inner: Callable[[Any], Any] = lambda part: _closed(part, close=close)  # noqa: E731
        if key == "allOf":  # what one part names, another one may not forbid
            inner = lambda part: _closed(part, close=False)  # noqa: E731
        result[key] = _applied(key, value, inner)
    if close and "properties" in schema and not _COMBINED & schema.keys():
        result.setdefault("additionalProperties", False)
    return result


def _applied(key: str, value: Any, inner: Callable[[Any], Any]) -> Any:
    """Return a keyword's value with `inner` applied to the schemas in it."""
    if key in _MAPS and isinstance(value, Mapping):
        return {name: inner(part) for name, part in value.items()}
    if key in _LISTS and isinstance(value, list):
        return [inner(part) for part in value]
    return inner(value) if key in _SINGLE else value
