"""The forms in which an answer can be asked for: JSON by a schema, any JSON, or a grammar."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from langchain_core.utils.function_calling import convert_to_json_schema

from specguard_chains.decoding.constraint import Constraint
from specguard_chains.errors import ConfigurationError

FORMS = (
    "a pydantic class, a TypedDict, a JSON schema, OpenAI's description of a function, "
    '{"type": "json_schema", "json_schema": …}, {"type": "json_object"}, '
    '{"type": "regex", "regex": …} or {"type": "grammar", "grammar": …}'
)


JSON_OBJECT = {"type": "object"}
"""The schema of any JSON object."""


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """What an answer must look like."""

    format: Literal["json", "regex", "grammar"] | None = None
    """None is free text."""
    schema: Mapping[str, Any] = field(default_factory=dict)
    """The JSON schema; {} allows any JSON object."""
    source: str = ""
    """The regular expression, or the grammar in llguidance's variation of Lark."""
    reason_first: bool = False
    """Free reasoning comes before the JSON."""
    strict: bool | None = None
    """What OpenAI's description of a schema says of it; see `Asked.strict`."""

    @classmethod
    def of(cls, given: Any, *, reason_first: bool = False) -> ResponseFormat:
        """Return the format that a call asks for.

        Args:
            given: One of many forms, see `FORMS`; None is free text.
            reason_first: Let the model reason in free text before.

        Raises:
            ConfigurationError: It is in none of the forms.
        """
        if given is None or given == {"type": "text"}:
            if reason_first:
                raise ConfigurationError(
                    "reason_first=True lets the model reason before an answer in JSON; give a "
                    "response_format too"
                )
            return cls()
        kind = given.get("type") if isinstance(given, Mapping) else None
        if kind in ("regex", "grammar"):
            if reason_first:
                raise ConfigurationError(
                    "reason_first=True goes with an answer in JSON; write the reasoning into the "
                    f"{kind} itself"
                )
            if not isinstance(given.get(kind), str):
                raise ConfigurationError(f"a response format of type {kind!r} needs {kind!r}: text")
            return cls(kind, source=given[kind])
        if kind == "json_object":
            return cls("json", JSON_OBJECT, reason_first=reason_first)
        if kind == "json_schema" or (kind is None and _is_named_schema(given)):
            described = given.get("json_schema", given)
            described = described if isinstance(described, Mapping) else {}
            schema, strict = _schema(described.get("schema")), described.get("strict")
            return cls("json", schema, reason_first=reason_first, strict=strict)
        return cls("json", _schema(given), reason_first=reason_first)

    @property
    def is_json(self) -> bool:
        """Whether the answer is JSON."""
        return self.format == "json"

    @property
    def constraint(self) -> Constraint | None:
        """The grammar of an answer that is neither JSON nor free; None for those."""
        if self.format == "regex":
            return Constraint.regex(self.source)
        return Constraint.lark(self.source) if self.format == "grammar" else None


_KEYWORDS = {"type", "properties", "anyOf", "oneOf", "allOf", "$ref", "enum", "const"}
"""A mapping with one of them is a JSON schema."""


def _is_named_schema(given: Any) -> bool:
    """Whether this is what stands under OpenAI's key json_schema."""
    return isinstance(given, Mapping) and {"name", "schema"} <= given.keys()


def _schema(given: Any) -> dict[str, Any]:
    is_tool = isinstance(given, Mapping) and given.get("type") == "function"
    if isinstance(given, Mapping) and _KEYWORDS & given.keys() and not is_tool:
        return dict(given)
    try:
        if isinstance(given, Mapping):
            return dict(convert_to_json_schema(dict(given)))
        if inspect.isclass(given):
            return dict(convert_to_json_schema(given))
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigurationError(
            f"this is no schema of an answer: {given!r}; give {FORMS}"
        ) from error
    raise ConfigurationError(f"response_format={given!r} is none of the known forms; give {FORMS}")
