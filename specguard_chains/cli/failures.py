"""What a command does about errors: one clear line or one JSON object, and an exit code."""

from __future__ import annotations

import logging
import traceback
from functools import wraps
from typing import Any

import typer
from rich.text import Text

from specguard_chains.cli.parameters import Command, option, present
from specguard_chains.cli.streams import ERR, print_json
from specguard_chains.errors import ConfigurationError, SpecGuardError

FAILED, MISUSED, INTERRUPTED = 1, 2, 130


class UsageError(ConfigurationError):
    """The command line itself is wrong."""


def reports_errors(command: Command) -> Command:
    """Turn the errors of a command into messages and exit codes; add the option --debug.

    With `as_json` among the command's arguments, an error is an event on standard output.
    """

    @wraps(command)
    def guarded(*, debug: bool, **arguments: Any) -> None:
        _log_to_stderr(logging.DEBUG if debug else logging.WARNING)
        try:
            command(**arguments)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except (typer.Exit, BrokenPipeError):  # a reader that has seen enough is no error
            raise
        except Exception as error:
            # An ImportError names what to install; anything else is a fault of this program.
            expected = isinstance(error, SpecGuardError | ImportError)
            if debug or not expected:
                traceback.print_exc()
            if arguments.get("as_json"):
                print_json({"event": "error", "type": type(error).__name__, "message": str(error)})
            elif expected:
                print_error(error)
            raise typer.Exit(MISUSED if isinstance(error, UsageError) else FAILED) from None

    help_ = "Show the traceback of an error and all log messages."
    debug = option("debug", bool, False, "--debug", help=help_)
    return present(guarded, command, added=[debug])


def print_error(error: Exception) -> None:
    """Print an error on one line."""
    _print_labelled("error", str(error))


class _Lines(logging.Handler):
    """Log records in the form of errors, above the bars that may be drawn on standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record."""
        _print_labelled(record.levelname.lower(), self.format(record))


def _print_labelled(label: str, text: str) -> None:
    style = {"error": "bold red", "warning": "yellow"}.get(label, "dim")
    ERR.print(Text.assemble((f"{label}: ", style), text), soft_wrap=not ERR.is_terminal)


def _log_to_stderr(level: int) -> None:
    logger = logging.getLogger("specguard_chains")
    if not any(isinstance(handler, _Lines) for handler in logger.handlers):
        logger.addHandler(_Lines())
    logger.setLevel(level)
