"""Which problems a command works on: the parameters that such commands share."""

from __future__ import annotations

from typing import Annotated

import typer

TrainingData = Annotated[
    list[str],
    typer.Option(
        metavar="file|name",
        help='Training problems: a file with one JSON object a line, with "question" and "answer", '
        "or the name of a known benchmark; can be given several times.",
    ),
]
Limit = Annotated[
    int | None, typer.Option(min=1, help="How many problems of each; by default all.")
]
Skip = Annotated[int, typer.Option(min=0, help="Problems of each to skip first.")]
Avoid = Annotated[
    list[str] | None,
    typer.Option(
        metavar="file|name",
        help="Problems that will be evaluated on: those that resemble one are left out.",
    ),
]
