"""A bar for commands that work through problems."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from specguard_chains.cli.streams import ERR


@contextmanager
def problems_bar(doing: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a bar while problems are worked on; call what is yielded after each."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("problems"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=ERR, disable=not total) as bars:
        task = bars.add_task(doing, total=total)
        yield lambda: bars.advance(task)
