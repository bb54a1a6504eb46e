"""`specguard pull` and `specguard models`: the model files on this machine."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.box import ASCII, SIMPLE_HEAD
from rich.filesize import decimal
from rich.table import Table

from specguard_chains.cli.failures import UsageError, reports_errors
from specguard_chains.cli.streams import ERR, OUT, print_json
from specguard_chains.console import fetch_progress
from specguard_chains.models import (
    DEFAULT_PAIR,
    FILES,
    PAIRS,
    CachedModel,
    FileState,
    ModelFile,
    cache_folder,
    cached_models,
    fetch,
)

ROOM_FOR_FILES = 110
"""Columns from which the table has room for file names."""


@reports_errors
def pull(
    name: Annotated[
        str, typer.Argument(metavar="PAIR|MODEL", help="A pair or a model; see specguard models.")
    ] = DEFAULT_PAIR,
) -> None:
    """Fetch the models of a pair, or one model.

    They are verified by SHA-256. An interrupted download goes on where it was.
    """
    for file in _files(name):
        with fetch_progress(ERR) as progress:
            path = fetch(file, progress=progress)
        OUT.print(f"{file.name}: ready, {decimal(file.size)}, {file.licence}", soft_wrap=True)
        OUT.print(f"  {path}", soft_wrap=True)


@reports_errors
def models(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a model.")] = False,
) -> None:
    """List the known models: what is here, where.

    Fetch them with `specguard pull`.
    """
    listing = cached_models()
    if as_json:
        for model in listing:
            print_json(_row(model))
        return
    for pair in PAIRS.values():
        default = " (default)" if pair.name == DEFAULT_PAIR else ""
        OUT.print(f"pair {pair.name}{default}", style="bold", soft_wrap=True)
        OUT.print(f"  {pair.draft.name} -> {pair.target.name}", soft_wrap=True)
    OUT.print(_table(listing))
    OUT.print(f"in {cache_folder()}", soft_wrap=True)


def _files(name: str) -> list[ModelFile]:
    """Return the files that a name stands for, each once."""
    if name in PAIRS:
        pair = PAIRS[name]
        return list(dict.fromkeys((pair.draft, pair.target)))
    if name in FILES:
        return [FILES[name]]
    raise UsageError(
        f"there is no pair or model {name!r}; pairs: {', '.join(PAIRS)}; models: {', '.join(FILES)}"
    )


def _row(model: CachedModel) -> dict[str, str | int]:
    file = FILES[model.name]
    return {
        "name": model.name,
        "role": model.role,
        "state": str(model.state),
        "path": str(model.path),
        "size": model.size,
        "full_size": file.size,
        "licence": file.licence,
        "sha256": file.sha256,
    }


def _table(listing: list[CachedModel]) -> Table:
    table = Table(box=ASCII if OUT.options.ascii_only else SIMPLE_HEAD)
    table.add_column("model", no_wrap=True)
    table.add_column("state")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("licence")
    wide = OUT.width >= ROOM_FOR_FILES
    if wide:
        table.add_column("file", no_wrap=True)
    for model in listing:
        file = FILES[model.name]
        row = [model.name, _state(model, file), decimal(file.size), file.licence, file.file]
        ready = model.state is FileState.READY
        table.add_row(*(row if wide else row[:-1]), style="" if ready else "dim")
    return table


def _state(model: CachedModel, file: ModelFile) -> str:
    match model.state:
        case FileState.PARTIAL:
            return f"{model.size / file.size:.0%} here"
        case FileState.ABSENT:
            return "not here"
        case state:
            return str(state)
