"""Records in a file of JSON lines, which a run that is killed can go on with."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from specguard_chains.errors import EvaluationError

Record = TypeVar("Record", bound=BaseModel)


def read_lines(path: Path, kind: type[Record]) -> list[Record]:
    """Return a file's records; none if there is no such file. A torn last line is left out.

    Raises:
        EvaluationError: A line is no such record, or the file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise EvaluationError(f"{path} cannot be read: {error}") from error
    records = []
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        try:
            records.append(kind.model_validate_json(line))
        except ValidationError as error:
            raise EvaluationError(
                f"line {number} of {path} is no {kind.__name__}: {error}; move the file away and "
                "run the command again"
            ) from error
    return records


def append_line(path: Path, record: BaseModel) -> None:
    """Add a record to a file, behind its last whole line.

    Raises:
        EvaluationError: The file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
            file.write(record.model_dump_json().encode() + b"\n")
    except OSError as error:
        raise EvaluationError(f"{path} cannot be written: {error}") from error
