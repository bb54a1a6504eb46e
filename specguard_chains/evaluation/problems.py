"""The problems that decoders are compared on: where they come from, and how they are asked."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from specguard_chains.calibrations.fitting import reasoning_prompt
from specguard_chains.decoding.engine import Prompt
from specguard_chains.errors import EvaluationError
from specguard_chains.evaluation.choices import arranged, lettered
from specguard_chains.evaluation.hub import KNOWN, Benchmark, find_benchmark, hub_rows
from specguard_chains.evaluation.overlap import near_duplicates

__all__ = ["Half", "Problem", "data_name", "load_problems", "near_duplicates", "prompt_for"]

Half = Literal["all", "even", "odd"]
"""Which of the problems: those at even places from 0, at odd ones, or all."""

CHOICE_INSTRUCTION = (
    r"Please reason step by step, and put the letter of the right option within \boxed{}."
)


@dataclass(frozen=True, slots=True)
class Problem:
    """A question with a known answer."""

    id: str
    question: str
    answer: str
    """The right answer: a number, LaTeX or words; of choices, the right one's letter."""
    data: str = ""
    """The name of the data set."""
    choices: tuple[str, ...] = ()
    """The options in the order in which they are shown, without their letters."""

    @property
    def digest(self) -> str:
        """What tells it apart from another problem of the same id."""
        content = json.dumps([self.question, self.answer, *self.choices])
        return sha256(content.encode()).hexdigest()[:12]


def load_problems(
    source: str | os.PathLike[str],
    *,
    limit: int | None = None,
    skip: int = 0,
    seed: int = 0,
    only: Half = "all",
) -> list[Problem]:
    """Return problems from a file or from the hub.

    Args:
        source: A file of JSON lines with `question`, `answer` and, as they may be, `id` (by default
            the file's name and the line's number) and `choices` or `options`; a benchmark's name
            (gsm8k, math500, svamp, asdiv, gaokao2023en, olympiadbench, aqua, mmlu, arc-challenge);
            or any data set of the hub, as owner/name:config:split (by default the test split).
            "#### 18" at the end of an answer, as in GSM8K, is the answer 18.
        limit: How many problems at most.
        skip: How many to leave out first.
        seed: Options are shuffled by it and the problem's id, `answer` becomes the right letter.
        only: Every second one of the source's problems; `skip` and `limit` count these.

    A file is read as far as needed, and only what is returned must be a problem.

    Raises:
        EvaluationError: The source cannot be found or read, a line is no problem, or two problems
            have the same id. The message names the file and the line.
    """
    if skip < 0 or (limit is not None and limit < 0):
        raise EvaluationError(f"skip is {skip} and limit {limit}; they must not be negative")
    if only not in ("all", "even", "odd"):
        raise EvaluationError(f'only is {only!r}; it must be "all", "even" or "odd"')
    name, rows = _open(source)
    start, step = {"all": (0, 1), "even": (0, 2), "odd": (1, 2)}[only]
    stop = None if limit is None else start + step * (skip + limit)
    selected = islice(rows, start + step * skip, stop, step)
    problems: dict[str, Problem] = {}
    for where, row in selected:
        try:
            problem = _problem(row, name, seed)
        except ValueError as error:
            raise EvaluationError(f"{where}: {error}") from error
        if problem.id in problems:
            raise EvaluationError(f"{where}: the id {problem.id!r} has come before; make it unique")
        problems[problem.id] = problem
    return list(problems.values())


def data_name(source: str | os.PathLike[str]) -> str:
    """Return the name of a source's data set: a file's name, or the benchmark's."""
    benchmark = _benchmark(source)
    return benchmark[0] if benchmark else Path(source).stem


def prompt_for(problem: Problem) -> Prompt:
    """Return the prompt that asks for steps and a boxed answer: of choices, the letter."""
    if not problem.choices:
        return reasoning_prompt(problem.question)
    question = f"{problem.question}\n\n{lettered(problem.choices)}"
    return Prompt(
        messages=[
            {"role": "system", "content": CHOICE_INSTRUCTION},
            {"role": "user", "content": question},
        ]
    )


def _benchmark(source: str | os.PathLike[str]) -> tuple[str, Benchmark] | None:
    """Return the benchmark that a source names, unless there is such a file."""
    if not isinstance(source, str) or Path(source).is_file():
        return None
    return None if source.endswith((".jsonl", ".json")) else find_benchmark(source)


def _open(source: str | os.PathLike[str]) -> tuple[str, Iterable[tuple[str, Mapping[str, Any]]]]:
    """Return the data set's name and its rows, each with where it stands."""
    if benchmark := _benchmark(source):
        return benchmark[0], hub_rows(*benchmark)
    path = Path(source)
    if not path.is_file():
        raise EvaluationError(
            f"{source} is neither a file nor a known benchmark; give a file of JSON lines with "
            f'"question" and "answer", one of {", ".join(KNOWN)}, or a data set of the hub as '
            "owner/name:config:split"
        )
    return path.stem, _lines(path)


def _lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the objects of a file of JSON lines; empty lines count as lines alone."""
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    where = f"{path}, line {number}"
                    yield where, {"id": f"{path.stem}/{number}", **_object(line, where)}
    except OSError as error:
        raise EvaluationError(f"cannot read {path} ({error}); give a file that can") from error


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except ValueError as error:
        raise EvaluationError(f"{where}: not JSON ({error}); write one object a line") from error
    if not isinstance(row, dict):
        raise EvaluationError(f"{where}: a JSON {type(row).__name__}; write one object a line")
    return row


def _problem(row: Mapping[str, Any], data: str, seed: int) -> Problem:
    """Return a row as a problem; a ValueError says what it lacks."""
    problem_id, question = _id(row["id"]), row.get("question")
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f'"question" is {question!r}; it must be a text')
    choices = row.get("choices", row.get("options"))
    if choices is None:
        return Problem(problem_id, question, _free_answer(row.get("answer")), data)
    if not isinstance(choices, list) or not all(isinstance(text, str) for text in choices):
        raise ValueError(f'"choices" is {choices!r}; it must be a list of texts')
    gold = row.get("answer")
    if isinstance(gold, bool) or not isinstance(gold, str | int):
        raise ValueError(f'"answer" is {gold!r}; it must be a letter, a place or an option\'s text')
    shown, letter = arranged(choices, gold, seed=seed, problem_id=problem_id)
    return Problem(problem_id, question, letter, data, shown)


def _id(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int) or not str(value).strip():
        raise ValueError(f'"id" is {value!r}; it must be a text or a whole number')
    return str(value)


def _free_answer(answer: Any) -> str:
    if isinstance(answer, int | float) and not isinstance(answer, bool) and math.isfinite(answer):
        return str(int(answer)) if answer == int(answer) else repr(answer)
    if not isinstance(answer, str) or not answer.strip():
        raise ValueError(f'"answer" is {answer!r}; it must be a text or a number')
    answer, marked, number = answer.rpartition("####")
    return number.strip().replace(",", "") if marked else number.strip()
