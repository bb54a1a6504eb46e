"""What a call asks of an answer: which tools it may call, and which form it is to have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from langchain_core.utils.function_calling import convert_to_openai_tool

from specguard_chains.errors import ConfigurationError
from specguard_chains.response_format import ResponseFormat
from specguard_chains.tools.choice import ToolChoice, tool_names

Tool = Mapping[str, Any]
"""As OpenAI describes tools: {"type": "function", "function": {name, description, parameters}}."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a call asks of the answer beside its text."""

    tools: Sequence[Tool] = ()
    choice: ToolChoice = field(default_factory=ToolChoice)
    response: ResponseFormat = field(default_factory=ResponseFormat)
    strict: bool | None = None
    """True refuses schemas that cannot be enforced in full; else they are, as far as they can."""

    @classmethod
    def taken_from(cls, options: dict[str, Any]) -> Asked:
        """Take what is asked out of a call's options.

        Raises:
            ConfigurationError: A tool, the choice of tools or the response format is wrong.
        """
        tools = described(options.pop("tools", None) or ())
        strict = options.pop("strict", None)
        choice = ToolChoice.of(
            options.pop("tool_choice", None),
            tool_names(tools),
            parallel=options.pop("parallel_tool_calls", None),
        )
        response = ResponseFormat.of(
            options.pop("response_format", None),
            reason_first=options.pop("reason_first", False),
        )
        asked = cls(tools, choice, response, response.strict if strict is None else strict)
        if asked.callable and not response.is_json and response.format is not None:
            raise ConfigurationError(
                f"an answer cannot be held to a {response.format} where tools may be called; leave "
                "the tools out, give tool_choice='none', or ask for JSON"
            )
        return asked

    @property
    def callable(self) -> list[Tool]:
        """The tools that may be called."""
        return [] if self.choice.mode == "none" else list(self.tools)

    @property
    def names(self) -> list[str]:
        """Their names."""
        return [tool["function"]["name"] for tool in self.callable]


def described(tools: Sequence[Any], *, strict: bool | None = None) -> list[dict[str, Any]]:
    """Return tools as OpenAI describes them.

    Raises:
        ConfigurationError: One of them cannot be described, or its name will not do.
    """
    return [_described(tool, strict) for tool in tools]


def _described(tool: Any, strict: bool | None) -> dict[str, Any]:
    try:
        openai = convert_to_openai_tool(tool, strict=strict)
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigurationError(
            f"{tool!r} cannot be described as a tool: {error}; give a function, a tool, a pydantic "
            "class, or OpenAI's description of a function"
        ) from error
    tool_names([openai])
    return openai
