"""Which tools an answer may or must call, in all forms in which LangChain lets users say so."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

from specguard_chains.errors import ConfigurationError

Mode = Literal["auto", "none", "required"]

_NAME = re.compile(r"[\w.-]{1,128}")
_MODES: dict[Any, Mode] = {
    None: "auto",
    False: "auto",
    True: "required",
    "auto": "auto",
    "none": "none",
    "any": "required",
    "required": "required",
}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """What an answer may or must call."""

    mode: Mode = "auto"
    """auto: text or calls; none: text; required: calls."""
    name: str | None = None
    """The one tool that is to be called, None if the model chooses."""
    parallel: bool = True
    """Whether one answer may hold several calls."""

    @classmethod
    def of(cls, given: Any, names: Sequence[str], *, parallel: Any = None) -> ToolChoice:
        """Return the choice that a user states.

        Args:
            given: None, "auto", "none", "any", "required", a bool, a tool's name, or a dict that
                names a tool as OpenAI or Anthropic do.
            names: The tools that there are.
            parallel: True, False or None: whether one answer may hold several calls; None is yes.

        Raises:
            ConfigurationError: It is in none of these forms, or names no known tool.
        """
        if not isinstance(parallel, bool | None):
            raise ConfigurationError(
                f"parallel_tool_calls={parallel!r} must be True, False or None; False allows one "
                "call at a time"
            )
        several = parallel is not False
        stated = _stated(given)
        if isinstance(stated, bool | None) or (stated in _MODES and stated not in names):
            mode = _MODES[stated]
            if mode == "required" and not names:
                raise ConfigurationError(
                    f"tool_choice={given!r} asks for a call, but there are no tools; bind some, or "
                    'use "auto"'
                )
            return cls(mode, parallel=several)
        if stated not in names:
            close = get_close_matches(stated, names, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            known = ", ".join(map(repr, names)) or "none"
            raise ConfigurationError(
                f"tool_choice={given!r} names no tool that is bound; {hint}known are: {known}"
            )
        return cls("required", stated, several)


def tool_names(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of tools.

    Args:
        tools: As OpenAI describes them: {"type": "function", "function": {"name": …}}.

    Raises:
        ConfigurationError: A tool has no name, one that no model can write, or another one's.
    """
    names = [_name(tool) for tool in tools]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ConfigurationError(
            f"several tools are called {twice[0]!r}; give each a name of its own"
        )
    return names


def _name(tool: Mapping[str, Any]) -> str:
    function = tool.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"a tool cannot be called {name!r}; a name has 1 to 128 letters, digits and the "
            f"characters _ - . (in {dict(tool)})"
        )
    return name


def _stated(given: Any) -> str | bool | None:
    """Return a mode or a tool's name."""
    if given is None or isinstance(given, bool | str):
        return given
    if isinstance(given, Mapping):
        function = given.get("function")
        name = function.get("name") if isinstance(function, Mapping) else given.get("name")
        if isinstance(name, str):
            return name
        if (kind := given.get("type")) in ("auto", "none", "any"):
            return str(kind)
    raise ConfigurationError(
        f"tool_choice={given!r} is none of the known forms: None, True, False, 'auto', 'none', "
        "'any', 'required', a tool's name, or {'type': 'function', 'function': {'name': …}}"
    )
