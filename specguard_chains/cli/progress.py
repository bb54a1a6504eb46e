"""The bars of commands that work for long."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from specguard_chains.cli.streams import ERR


def bar_columns(unit: str) -> tuple[ProgressColumn, ...]:
    """Return the columns of every bar that counts: what is done, how much of it, the time left."""
    return (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeRemainingColumn(compact=True),
    )


@contextmanager
def problems_bar(doing: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a bar while problems are worked on; call what is yielded after each."""
    with Progress(*bar_columns("problems"), console=ERR, disable=not total) as bars:
        task = bars.add_task(doing, total=total)
        yield lambda: bars.advance(task)
