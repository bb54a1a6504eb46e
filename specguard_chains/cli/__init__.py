"""The command `specguard`: one file for each group of commands."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from specguard_chains.cli import (
    ask,
    bench,
    calibrate,
    chat,
    model_files,
    plan,
    signals,
    train_reward,
)
from specguard_chains.cli.streams import OUT

app = typer.Typer(
    name="specguard",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    *(ask.ask, chat.chat, model_files.pull, model_files.models, calibrate.calibrate),
    *(bench.bench, signals.signals, train_reward.train_reward, plan.plan),
):
    app.command()(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        OUT.print(f"specguard {version('specguard_chains')}")
        raise typer.Exit


@app.callback()
def specguard(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """A small model drafts, every step is checked, a larger model rewrites the steps that fail."""


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="replace")  # a model may write what the terminal cannot show
    app()


__all__ = ["app", "main"]
