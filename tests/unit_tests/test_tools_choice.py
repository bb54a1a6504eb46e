"""All forms in which users say which tools are to be called."""

from __future__ import annotations

from typing import Any

import pytest

from specguard_chains.errors import ConfigurationError
from specguard_chains.tools.choice import ToolChoice, tool_names

NAMES = ["add", "weather"]


@pytest.mark.parametrize(
    ("given", "choice"),
    [
        (None, ToolChoice("auto")),
        (False, ToolChoice("auto")),
        ("auto", ToolChoice("auto")),
        ({"type": "auto"}, ToolChoice("auto")),
        ("none", ToolChoice("none")),
        ({"type": "none"}, ToolChoice("none")),
        ("any", ToolChoice("required")),
        ("required", ToolChoice("required")),
        (True, ToolChoice("required")),
        ({"type": "any"}, ToolChoice("required")),
        ("add", ToolChoice("required", "add")),
        ({"type": "function", "function": {"name": "add"}}, ToolChoice("required", "add")),
        ({"type": "function", "name": "add"}, ToolChoice("required", "add")),
        ({"type": "tool", "name": "add"}, ToolChoice("required", "add")),
    ],
)
def test_every_form_is_understood(given: Any, choice: ToolChoice) -> None:
    assert ToolChoice.of(given, NAMES) == choice


def test_a_tool_may_be_called_like_a_mode() -> None:
    assert ToolChoice.of("any", ["any"]) == ToolChoice("required", "any")


@pytest.mark.parametrize(("given", "parallel"), [(None, True), (True, True), (False, False)])
def test_parallel_calls_can_be_ruled_out(given: bool | None, parallel: bool) -> None:
    assert ToolChoice.of("any", NAMES, parallel=given).parallel is parallel


@pytest.mark.parametrize(
    "given", ["wether", {"type": "tool", "name": "wether"}, {"function": {"name": "wether"}}]
)
def test_an_unknown_tool_is_refused_with_the_known_ones(given: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"did you mean 'weather'\? known are: 'add', 'we"):
        ToolChoice.of(given, NAMES)


@pytest.mark.parametrize("given", [3, {"type": "allowed_tools"}, ["add"], {}])
def test_what_is_no_choice_is_refused(given: Any) -> None:
    with pytest.raises(ConfigurationError, match="none of the known forms"):
        ToolChoice.of(given, NAMES)


def test_nothing_can_be_required_without_tools() -> None:
    with pytest.raises(ConfigurationError, match="there are no tools"):
        ToolChoice.of("any", [])
    with pytest.raises(ConfigurationError, match="known are: none"):
        ToolChoice.of("add", [])
    assert ToolChoice.of("auto", []) == ToolChoice()


def tool(name: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def test_names_of_tools() -> None:
    assert tool_names([tool("add"), tool("größe_2"), tool("files.read-all")]) == [
        "add",
        "größe_2",
        "files.read-all",
    ]


@pytest.mark.parametrize("name", ["", "two words", 'a"b', "a{", None, 3, "x" * 129])
def test_names_that_no_model_can_write_are_refused(name: Any) -> None:
    with pytest.raises(ConfigurationError, match="a tool cannot be called"):
        tool_names([tool(name)])
    with pytest.raises(ConfigurationError, match="a tool cannot be called None"):
        tool_names([{"type": "web_search"}])


def test_names_of_tools_are_unique() -> None:
    with pytest.raises(ConfigurationError, match="several tools are called 'add'"):
        tool_names([tool("add"), tool("add")])


@pytest.mark.parametrize("given", ["no", "false", 0, 1, []])
def test_parallel_calls_are_ruled_out_by_false_alone(given: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"parallel_tool_calls=.*True, False or None"):
        ToolChoice.of("any", NAMES, parallel=given)
