"""Files that are written as a whole."""

from __future__ import annotations

from pathlib import Path

from specguard_chains.errors import EvaluationError


def replace_file(path: Path, text: str) -> None:
    """Write a file as a whole, so that no reader ever sees half of it.

    Raises:
        EvaluationError: It cannot be written.
    """
    unfinished = path.with_name(f"{path.name}.tmp")
    try:
        unfinished.write_text(text, encoding="utf-8", newline="\n")
        unfinished.replace(path)
    except OSError as error:
        raise EvaluationError(f"{path} cannot be written: {error}") from error
