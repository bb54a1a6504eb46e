"""`specguard signals`: how well each signal tells good steps from bad ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from specguard_chains.cli.failures import reports_errors
from specguard_chains.cli.problem_parameters import Avoid, Limit, Skip, TrainingData
from specguard_chains.cli.progress import problems_bar
from specguard_chains.cli.settings import takes_options
from specguard_chains.cli.streams import ERR, OUT
from specguard_chains.cli.training_problems import training_problems
from specguard_chains.console import fetch_progress
from specguard_chains.decoding.grounding import GroundingForm
from specguard_chains.decoding.rewards import ValueHead
from specguard_chains.decoding.steps import Source
from specguard_chains.evaluation import signal_report
from specguard_chains.evaluation.checking import AnswerChecker
from specguard_chains.evaluation.lines import Lines, open_lines
from specguard_chains.evaluation.problems import Problem, prompt_for
from specguard_chains.evaluation.recordings import Recorder, Recording
from specguard_chains.evaluation.signal_table import Row, table
from specguard_chains.evaluation.signals import (
    ReadSignals,
    SignalReader,
    labelled,
    read_signals,
)
from specguard_chains.options import SpecGuardOptions
from specguard_chains.rewards import reward
from specguard_chains.roles import load_engine

MAX_TOKENS = 600
RECORDINGS, SIGNALS = "recordings.jsonl", "signals.jsonl"
DRAFT_FORMS: tuple[GroundingForm, ...] = ("sparse", "dense", "renormalised", "sinkless", "direct")
TARGET_FORMS: tuple[GroundingForm, ...] = ("sparse", "direct")


@reports_errors
@takes_options(
    *("pair", "draft", "target", "n_ctx", "n_threads", "n_gpu_layers", "max_tokens", "seed"),
    *("grounding_layers", "reward_model"),
    max_tokens=MAX_TOKENS,
    seed=0,
    n_ctx=2048,
)
def signals(
    options: SpecGuardOptions,
    data: TrainingData,
    out: Annotated[
        Path,
        typer.Option(
            metavar="folder", help="Where all is kept; a run that was interrupted goes on there."
        ),
    ],
    limit: Limit = None,
    skip: Skip = 0,
    avoid: Avoid = None,
) -> None:
    """Measure what the signals of a pair are worth.

    The draft writes steps; a step is good if the target, going on greedily from it, still reaches
    the right answer. The table shows how well each signal tells good steps from bad ones. Choose
    settings by its even half, and report the odd one.
    """
    problems = training_problems(data, avoid or [], limit=limit, skip=skip, seed=options.seed or 0)
    recordings = _record(options, problems, out / RECORDINGS)
    read = _read(options, problems, recordings, out / SIGNALS)
    by_problem = {recording.problem: recording for recording in recordings}
    steps = [step for each in read for step in labelled(by_problem[each.problem], each)]
    rows = table(steps, signal_report.combinations(steps))
    signal_report.write(out, rows, steps, recordings, read)
    _print(rows)
    ERR.print(f"the table is in {out}: signals.md, signals.json", soft_wrap=True)


def _record(options: SpecGuardOptions, problems: Sequence[Problem], path: Path) -> list[Recording]:
    """Return the problems' drafted steps, those that are in the file already and new ones."""
    with open_lines(path, Recording.model_validate_json) as lines:
        known = {recording.problem: recording for recording in lines.records}
        if missing := [problem for problem in problems if problem.id not in known]:
            known |= {recording.problem: recording for recording in _new(options, missing, lines)}
    return [known[problem.id] for problem in problems]


def _new(
    options: SpecGuardOptions, problems: Sequence[Problem], lines: Lines[Recording]
) -> Iterator[Recording]:
    """Record problems, each on the disk before it is yielded."""
    with fetch_progress(ERR) as progress:
        draft, target = (
            load_engine(options, source, progress=progress, attention=False) for source in Source
        )
    with AnswerChecker() as checker, problems_bar("recording", len(problems)) as advance:
        recorder = Recorder(
            draft,
            target,
            checker,
            max_tokens=options.max_tokens or MAX_TOKENS,
            seed=options.seed or 0,
        )
        for problem in problems:
            recording = recorder.record(problem)
            lines.append(recording.model_dump_json())
            advance()
            yield recording


def _read(
    options: SpecGuardOptions,
    problems: Sequence[Problem],
    recordings: Iterable[Recording],
    path: Path,
) -> list[ReadSignals]:
    """Return the signals of all drafted steps, those in the file and new ones."""
    pairs = [pair for pair in zip(problems, recordings, strict=True) if pair[1].steps]
    with open_lines(path, ReadSignals.model_validate_json) as lines:
        known = {signals.problem: signals for signals in lines.records}
        missing = [pair for pair in pairs if pair[0].id not in known]
        readers = _readers(options) if missing else []
        with problems_bar("reading", len(missing)) as advance:
            for problem, recording in missing:
                known[problem.id] = read_signals(readers, prompt_for(problem), recording)
                lines.append(known[problem.id].model_dump_json())
                advance()
    return [known[problem.id] for problem, _ in pairs]


def _readers(options: SpecGuardOptions) -> list[SignalReader]:
    with fetch_progress(ERR) as progress:
        draft, target = (
            load_engine(options, source, progress=progress, attention=True, states=states)
            for source, states in ((Source.DRAFT, True), (Source.TARGET, False))
        )
    layers = options.grounding_layers
    head = reward(options, draft.name)
    return [
        SignalReader(
            draft,
            "draft",
            DRAFT_FORMS,
            layers,
            entropy=True,
            head=head if isinstance(head, ValueHead) else None,
        ),
        SignalReader(target, "target", TARGET_FORMS, layers, entropy=True),
    ]


def _print(rows: Sequence[Row]) -> None:
    shown = Table(box=SIMPLE_HEAD)
    for column in ("signal", "even half", "odd half", "95 % interval", "over length"):
        shown.add_column(column, justify="left" if column == "signal" else "right")
    for row in rows:
        shown.add_row(*signal_report.cells(row))
    OUT.print(shown)
