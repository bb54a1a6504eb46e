"""Benchmarks from the hub, through the `datasets` library.

Each has fields of its own; here they become `id`, `question`, `answer` and `choices`, as in a file
of problems.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from specguard_chains.errors import EvaluationError
from specguard_chains.evaluation.choices import LETTERS, Place

logger = logging.getLogger("specguard_chains.evaluation")

Row = Mapping[str, Any]
"""A line of a data set: its fields by name."""

REMEDY = 'give a file of JSON lines with "question" and "answer" instead'
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(?::[^:]*){0,2}")


def _plain(row: Row) -> Row:
    """Fields of the most usual names."""
    fields: dict[str, Any] = {
        "question": _first(row, "question", "problem", "Question", "prompt"),
        "answer": _first(row, "answer", "Answer", "final_answer", "expected_answer"),
    }
    choices = _first(row, "choices", "options")
    return fields if choices is None else {**fields, "choices": choices}


def _first(row: Row, *names: str) -> Any:
    return next((row[name] for name in names if name in row), None)


def _svamp(row: Row) -> Row:
    return {"question": f"{row['Body'].strip()} {row['Question'].strip()}", "answer": row["Answer"]}


def _asdiv(row: Row) -> Row:
    """The answer comes with its unit: "9 (apples)"."""
    answer = str(row["answer"]).split(" (")[0]
    return {"question": f"{row['body'].strip()} {row['question'].strip()}", "answer": answer}


def _olympiad(row: Row) -> Row:
    return {"question": row["question"], "answer": ", ".join(row["final_answer"] or ())}


def _aqua(row: Row) -> Row:
    answer = Place(LETTERS.index(row["correct"]))
    return {"question": row["question"], "choices": row["options"], "answer": answer}


def _mmlu(row: Row) -> Row:
    return {**_plain(row), "answer": Place(row["answer"])}


def _arc(row: Row) -> Row:
    """The right option is named by its label, a letter or a number."""
    choices = row["choices"]
    answer = Place(list(choices["label"]).index(row["answerKey"]))
    return {"question": row["question"], "choices": choices["text"], "answer": answer}


@dataclass(frozen=True, slots=True)
class Benchmark:
    """Where a data set lies on the hub, and what its fields mean."""

    path: str
    config: str | None = None
    split: str = "test"
    fields: Callable[[Row], Row] = _plain
    """Returns the `question`, the `answer` and, if they are to be chosen from, the `choices`."""


KNOWN = {
    "gsm8k": Benchmark("openai/gsm8k", "main"),
    "math500": Benchmark("HuggingFaceH4/MATH-500"),
    "svamp": Benchmark("ChilleD/SVAMP", fields=_svamp),
    "asdiv": Benchmark("EleutherAI/asdiv", split="validation", fields=_asdiv),
    "gaokao2023en": Benchmark("MARIO-Math-Reasoning/Gaokao2023-Math-En", split="train"),
    "olympiadbench": Benchmark(
        "Hothan/OlympiadBench", "OE_TO_maths_en_COMP", "train", fields=_olympiad
    ),
    "aqua": Benchmark("deepmind/aqua_rat", "raw", fields=_aqua),
    "mmlu": Benchmark("cais/mmlu", "all", fields=_mmlu),
    "arc-challenge": Benchmark("allenai/ai2_arc", "ARC-Challenge", fields=_arc),
}
"""The benchmarks that have a short name."""
_BY_PATH = {benchmark.path: name for name, benchmark in KNOWN.items()}


def find_benchmark(source: str) -> tuple[str, Benchmark] | None:
    """Return a benchmark and its short name, by that name or as `owner/name:config:split`."""
    if source in KNOWN:
        return source, KNOWN[source]
    if not _HUB_NAME.fullmatch(source):
        return None
    path, config, split = (*source.split(":"), "", "")[:3]
    name = _BY_PATH.get(path, path.rsplit("/")[-1])
    benchmark = KNOWN[name] if path in _BY_PATH else Benchmark(path)
    if config:
        benchmark = replace(benchmark, config=config)
    return name, replace(benchmark, split=split) if split else benchmark


def hub_rows(name: str, benchmark: Benchmark) -> Iterator[tuple[str, Row]]:
    """Yield where each problem stands, for messages, and its fields.

    Problems that the data set gives no answer to are left out, and logged.

    Raises:
        EvaluationError: The data set cannot be had, or has other fields.
    """
    where = ":".join(filter(None, (benchmark.path, benchmark.config, benchmark.split)))
    for number, row in enumerate(_fetched(benchmark)):
        try:
            fields = dict(benchmark.fields(row))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise EvaluationError(
                f"{where}, row {number}: unexpected fields {sorted(row)} ({error!r}); {REMEDY}"
            ) from error
        if fields["answer"] in (None, ""):
            logger.warning("%s, row %d is left out: it has no answer", where, number)
            continue
        yield f"{where}, row {number}", {"id": f"{name}/{number}", **fields}


def _fetched(benchmark: Benchmark) -> Iterable[Row]:
    """Return the rows of a data set, from the hub or from the cache of `datasets`."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise EvaluationError(
            f"{benchmark.path} is on the hub, which needs the datasets library: "
            f'pip install "specguard_chains[bench]"; or {REMEDY}'
        ) from error
    try:
        rows: Iterable[Row] = load_dataset(benchmark.path, benchmark.config, split=benchmark.split)
    except Exception as error:  # the library lets through what its many back ends raise
        raise EvaluationError(
            f"cannot get {benchmark.path} from the hub ({type(error).__name__}: {error}); {REMEDY}"
        ) from error
    return rows
