"""Which problems a command works on: the parameters that such commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from specguard_chains.evaluation.problems import Half

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
Only = Annotated[
    Half,
    typer.Option(
        help="Which of the problems: those at even places from 0, at odd ones, or all. Choose "
        "settings on one half and report the other; --skip and --limit count within it."
    ),
]
Avoid = Annotated[
    list[str] | None,
    typer.Option(
        metavar="file|name",
        help="Problems that will be evaluated on: those that resemble one are left out.",
    ),
]
