"""Command-line parameters that a decorator adds to a command."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

Command = Callable[..., None]


def option(name: str, kind: Any, default: Any, *flags: str, **details: Any) -> inspect.Parameter:
    """Return a keyword parameter that typer makes an option of."""
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, typer.Option(*flags, **details)],
    )


def present(
    wrapper: Command,
    command: Command,
    *,
    added: Sequence[inspect.Parameter],
    removed: Sequence[str] = (),
) -> Command:
    """Let the wrapper of a command show the command's parameters, less some, and more."""
    shown = inspect.signature(command, eval_str=True)
    kept = [parameter for name, parameter in shown.parameters.items() if name not in removed]
    every = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in kept]
    signature = shown.replace(parameters=[*every, *added])
    wrapper.__signature__ = signature  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    return wrapper
