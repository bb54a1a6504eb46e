"""How models write tool calls and reasoning, found out from their chat templates."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from specguard_chains.errors import ConfigurationError
from specguard_chains.templates import ChatTemplate


class CallStyle(StrEnum):
    """How several calls follow each other."""

    REPEATED = "repeated"
    """Each call stands alone, between its own marks: {"name": …, "arguments": {…}}."""
    LISTED = "listed"
    """All calls are one JSON list."""
    NAMED = "named"
    """The name stands before the arguments: name{…}."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The form in which a model's template writes tool calls."""

    name: str
    opening: str = ""
    """Text before a call. Control tokens do not count: they are no text."""
    closing: str = ""
    """Text after a call."""
    arguments: Literal["arguments", "parameters"] = "arguments"
    """The key of the arguments."""
    style: CallStyle = CallStyle.REPEATED
    separator: str = "\n"
    """Between two calls that each stand alone."""


HERMES = ToolFormat("hermes", "<tool_call>\n", "\n</tool_call>")
"""Qwen, Hermes and most others; also what a model without a form of its own is told to write."""

LLAMA3 = ToolFormat("llama3", arguments="parameters", separator="; ")
"""Llama 3.1 and later: a bare object, sometimes after the control token <|python_tag|>."""

MISTRAL = ToolFormat("mistral", style=CallStyle.LISTED, separator=", ")
"""Mistral up to 2025: the control token [TOOL_CALLS] and a list."""

MISTRAL_NAMED = ToolFormat("mistral-named", style=CallStyle.NAMED, separator="")
"""Mistral since then: [TOOL_CALLS]name[ARGS]{…}, in which the marks are control tokens."""


_NAME_AFTER_MARK = re.compile(r"""\[ARGS\]|\[TOOL_CALLS\]['"]\s*[+~]\s*[\w.\[\]'"]*name""")


def detect(template: str | None) -> ToolFormat:
    """Return the form that a chat template writes calls in; HERMES where it has none.

    Args:
        template: Its Jinja source.
    """
    source = template or ""
    if "[TOOL_CALLS]" in source:
        return MISTRAL_NAMED if _NAME_AFTER_MARK.search(source) else MISTRAL
    if "<tool_call>" in source:
        return HERMES
    if "<|python_tag|>" in source or ("ipython" in source and '"parameters": ' in source):
        return LLAMA3
    return HERMES


def renders_tools(template: str | None) -> bool:
    """Whether prompts that a template renders tell the model of its tools.

    Args:
        template: Its Jinja source.
    """
    return _PROBE["function"]["name"] in _rendered(template or "", [_PROBE])


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """The marks between which a model thinks before it answers."""

    opening: str = "<think>"
    closing: str = "</think>"
    opened: bool = False
    """The prompt already ends with the opening mark, so that the answer begins inside."""


KNOWN_REASONING_TAGS = (
    ReasoningTags(),
    ReasoningTags("<thinking>", "</thinking>"),
    ReasoningTags("<seed:think>", "</seed:think>"),
    ReasoningTags("[THINK]", "[/THINK]"),
)


def reasoning_tags(template: str | None) -> ReasoningTags | None:
    """Return the reasoning marks that a chat template knows, None where it knows none.

    Args:
        template: Its Jinja source.
    """
    source = template or ""
    for tags in KNOWN_REASONING_TAGS:
        if tags.closing in source:
            opened = _rendered(source).rstrip().endswith(tags.opening)
            return ReasoningTags(tags.opening, tags.closing, opened)
    return None


_PROBE: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe_of_the_template",
        "description": "Does nothing.",
        "parameters": {"type": "object", "properties": {}},
    },
}


def _rendered(source: str, tools: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return a short prompt."""
    try:
        return ChatTemplate(source).render([{"role": "user", "content": "Hello"}], tools)
    except ConfigurationError:  # reported by the call that needs the template
        return ""
