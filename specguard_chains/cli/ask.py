"""`specguard ask`: one question, one answer."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from specguard_chains.cli.answering import Message, answer, load, view_for
from specguard_chains.cli.failures import INTERRUPTED, UsageError, reports_errors
from specguard_chains.cli.settings import takes_options
from specguard_chains.options import SpecGuardOptions

AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object a line: steps, then the result.")
]
System = Annotated[
    str | None,
    typer.Option(metavar="text", help="A system message: what the model is told beforehand."),
]


@reports_errors
@takes_options()
def ask(
    question: Annotated[
        str,
        typer.Argument(help="The question; - reads it from standard input."),
    ],
    options: SpecGuardOptions,
    as_json: AsJson = False,
    system: System = None,
) -> None:
    """Answer a question, step by verified step."""
    text = sys.stdin.read() if question == "-" else question
    if not text.strip():
        raise UsageError("the question is empty; give it as an argument, or - and standard input")
    messages = [*opening(system), {"role": "user", "content": text}]
    if answer(load(options), options, messages, view_for(as_json)).stopped:
        raise typer.Exit(INTERRUPTED)


def opening(system: str | None) -> list[Message]:
    """Return the messages that come before the first question."""
    return [{"role": "system", "content": system}] if system else []
