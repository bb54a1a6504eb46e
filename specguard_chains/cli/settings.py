"""The settings of `SpecGuardOptions` as command-line options, by the same names."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import astuple
from functools import wraps
from types import UnionType
from typing import Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from specguard_chains.cli.failures import UsageError
from specguard_chains.cli.parameters import Command, option, present
from specguard_chains.options import SpecGuardOptions

WORDING = {
    "draft": "The small model: a GGUF file, a known name, a folder or hub name (transformers), "
    "or a server's openai://host:port/model; overrides the pair's.",
    "target": "The large model, named in the same ways; overrides the pair's.",
    "speculative_tree": "Children of every drafted token at the next depth; given several times, "
    "a tree in place of a chain.",
    "n_ctx": "Context length in tokens; by default 4096 for models in this process, and a server's "
    "own.",
    "n_threads": "Threads that compute; by default the machine's cores.",
    "max_tokens": "Most tokens of an answer, within what the context has room for.",
    "stop": "The answer is cut before this string; can be given several times.",
    "step_delimiter": r"What ends a step; \n is a line break.",
    "seed": "Equal seeds give equal answers; by default each request draws a new one.",
}
"""Descriptions, where the field's own speaks of Python values."""
SECRETS = {"api_key"}
"""Come from the environment: others could read a command line."""


def takes_options(*names: str, **defaults: Any) -> Callable[[Command], Command]:
    """Give a command the parameter `options`, filled from command-line options.

    Args:
        names: The settings that the command has; all if none is named.
        defaults: Values that are this command's own defaults.
    """
    chosen = names or tuple(name for name in SpecGuardOptions.model_fields if name not in SECRETS)

    def decorate(command: Command) -> Command:
        @wraps(command)
        def with_options(**arguments: Any) -> None:
            given = {name: arguments.pop(name) for name in chosen}
            given = {name: value for name, value in given.items() if value is not None}
            command(options=build(defaults | given), **arguments)

        added = [
            _parameter(name, field, defaults.get(name, field.default))
            for name, field in SpecGuardOptions.model_fields.items()
            if name in chosen
        ]
        return present(with_options, command, added=added, removed=["options"])

    return decorate


def build(given: dict[str, Any]) -> SpecGuardOptions:
    """Return the options from the values of a command line, numbers still being text.

    Raises:
        UsageError: A value is not allowed.
    """
    if delimiter := given.get("step_delimiter"):
        given = given | {"step_delimiter": delimiter.replace(r"\n", "\n").replace(r"\t", "\t")}
    try:
        return SpecGuardOptions(**given)
    except ValidationError as error:
        raise UsageError("; ".join(map(_complaint, error.errors()))) from error


def allowed(field: FieldInfo) -> str:
    """Return in words what values a setting may have, such as "a number from 0 to 1"."""
    kind = _kind(field)
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(get_args(kind))
    if get_origin(kind) is list and kind != list[str]:
        return "whole numbers from 1 to 64, each with the option in front of it"
    if kind not in (int, float):
        return "text that is not empty"
    return " ".join(filter(None, ["a whole number" if kind is int else "a number", _range(field)]))


def _range(field: FieldInfo) -> str:
    """Return the limits of a number in words, such as "from 0 to 1"."""
    words = {Ge: "at least {}", Gt: "more than {}", Le: "at most {}", Lt: "less than {}"}
    limits = {type(limit): astuple(limit)[0] for limit in field.metadata if type(limit) in words}
    if limits.keys() == {Ge, Le}:
        return f"from {limits[Ge]} to {limits[Le]}"
    return " and ".join(words[limit].format(value) for limit, value in limits.items())


def _parameter(name: str, field: FieldInfo, default: Any) -> inspect.Parameter:
    """Return the option of a setting; its value stays text, for the model to validate."""
    flag = name.replace("_", "-")
    details = {"help": _help(name, field, default), "show_default": False}
    kind = _kind(field)
    if kind is bool:
        return option(name, bool | None, None, f"--{flag}/--no-{flag}", **details)
    many = get_origin(kind) is list
    value = list[str] | None if many else str | None
    return option(name, value, None, f"--{flag}", metavar=_metavar(kind), **details)


def _help(name: str, field: FieldInfo, default: Any) -> str:
    """Return a setting's description, range and default."""
    facts = [_range(field)]
    if isinstance(default, bool):
        facts.append(f"default {'on' if default else 'off'}")
    elif default is not None:
        facts.append("default " + str(default).replace("\n", r"\n"))
    remark = ", ".join(filter(None, facts))
    text = WORDING.get(name, field.description or "")
    return f"{text}  [{remark}]" if remark else text


def _kind(field: FieldInfo) -> Any:
    """Return the type of a setting's values, without None; several types count as text."""
    kind = field.annotation
    if isinstance(kind, UnionType):
        kinds = [part for part in get_args(kind) if part is not type(None)]
        return kinds[0] if len(kinds) == 1 else str
    return kind


def _metavar(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    return {int: "integer", float: "number"}.get(kind, "text")


def _complaint(error: Any) -> str:
    """Return one line that names the option, its value and what is allowed."""
    if not error["loc"]:
        return str(error["msg"])
    name = str(error["loc"][0])
    value = error["input"]
    flag = "--" + name.replace("_", "-")
    return f"{flag} {value!s} is not possible: give {allowed(SpecGuardOptions.model_fields[name])}"
