"""`specguard signals`: how well each signal tells good steps from bad ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from specguard_chains import calibrations
from specguard_chains.cli.failures import UsageError, reports_errors
from specguard_chains.cli.problem_parameters import Avoid, Limit, Skip, TrainingData
from specguard_chains.cli.progress import problems_bar
from specguard_chains.cli.settings import takes_options
from specguard_chains.cli.streams import ERR, OUT
from specguard_chains.cli.training_problems import training_problems
from specguard_chains.console import fetch_progress
from specguard_chains.decoding.calibration import FALLBACK, Bounds
from specguard_chains.decoding.grounding import GroundingForm, GroundingSpec
from specguard_chains.decoding.rewards import ValueHead
from specguard_chains.decoding.steps import Source
from specguard_chains.evaluation import signal_report
from specguard_chains.evaluation.checking import AnswerChecker
from specguard_chains.evaluation.lines import Lines
from specguard_chains.evaluation.problems import Problem, prompt_for
from specguard_chains.evaluation.recordings import Recorder, Recording
from specguard_chains.evaluation.records import ProblemKey, RecordFile, models_of
from specguard_chains.evaluation.signal_table import Row, table
from specguard_chains.evaluation.signals import (
    ReadSignals,
    SignalReader,
    labelled,
    read_signals,
)
from specguard_chains.evaluation.threshold_table import threshold_table
from specguard_chains.options import SpecGuardOptions
from specguard_chains.rewards import is_text_reward, reward
from specguard_chains.roles import engine_name, load_engine

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
    settings by its even half (the problems of bench's --only even), and report the odd one.
    """
    head = _head(options)
    recorded, read_again = _files(options, head, out)
    for file in (recorded, read_again):
        file.check()
    places = training_problems(data, avoid or [], limit=limit, skip=skip, seed=options.seed or 0)
    problems = list(places)
    recordings = _record(options, problems, recorded)
    read = _read(options, head, problems, recordings, read_again)
    by_key = {ProblemKey.of(problem): place for problem, place in places.items()}
    steps = labelled(recordings, read, by_key)
    rows = table(steps, signal_report.combinations(steps))
    answers = signal_report.whole_answers(recordings, read, by_key)
    bounds = _bounds(options)
    kept = [] if bounds is None else threshold_table(steps, "target.confidence_min", bounds)
    signal_report.write(out, rows, steps, answers, recordings, kept)
    _print(rows)
    ERR.print(f"the table is in {out}: signals.md, signals.json", soft_wrap=True)


def _head(options: SpecGuardOptions) -> ValueHead | None:
    """Return the draft's value head: the one that is named, or known for it."""
    if is_text_reward(options):
        raise UsageError(
            f"--reward-model {options.reward_model} is no value head; give a .json file that "
            "`specguard train-reward` has written"
        )
    head = reward(options, engine_name(options, Source.DRAFT))
    return head if isinstance(head, ValueHead) else None


def _bounds(options: SpecGuardOptions) -> Bounds | None:
    """Return the bounds of the target's confidence on this pair, None if they are not known."""
    draft, target = (engine_name(options, source) for source in Source)
    found = calibrations.find(draft, target, "target", None, GroundingSpec())
    return None if found.source == FALLBACK.source else found.confidence


def _files(
    options: SpecGuardOptions, head: ValueHead | None, out: Path
) -> tuple[RecordFile[Recording], RecordFile[ReadSignals]]:
    """Return the files of recordings and of signals, with what each depends on."""
    recorded = models_of(options, tuple(Source)) | {
        "max_tokens": options.max_tokens or MAX_TOKENS,
        "seed": options.seed or 0,
    }
    read = recorded | {
        "grounding_layers": options.grounding_layers,
        # A head may be trained anew under its name, or be found where there was none.
        "value_head": None if head is None else head.digest,
    }
    return (
        RecordFile(out / RECORDINGS, Recording, recorded, "--out"),
        RecordFile(out / SIGNALS, ReadSignals, read, "--out"),
    )


def _record(
    options: SpecGuardOptions, problems: Sequence[Problem], file: RecordFile[Recording]
) -> list[Recording]:
    """Return the problems' drafted steps, those that are in the file already and new ones."""
    keys = [ProblemKey.of(problem) for problem in problems]
    with file.opened() as lines:
        known = {recording.key: recording for recording in lines.records}
        missing = [problem for problem, key in zip(problems, keys, strict=True) if key not in known]
        if missing:
            known |= {recording.key: recording for recording in _new(options, missing, lines)}
    return [known[key] for key in keys]


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
    head: ValueHead | None,
    problems: Sequence[Problem],
    recordings: Iterable[Recording],
    file: RecordFile[ReadSignals],
) -> list[ReadSignals]:
    """Return the signals of all drafted steps, those in the file and new ones."""
    pairs = [pair for pair in zip(problems, recordings, strict=True) if pair[1].steps]
    with file.opened() as lines:
        known = {signals.key: signals for signals in lines.records}
        missing = [pair for pair in pairs if pair[1].key not in known]
        readers = _readers(options, head) if missing else []
        with problems_bar("reading", len(missing)) as advance:
            for problem, recording in missing:
                read = read_signals(readers, prompt_for(problem), recording)
                known[recording.key] = read
                lines.append(read.model_dump_json())
                advance()
    return [known[recording.key] for _, recording in pairs]


def _readers(options: SpecGuardOptions, head: ValueHead | None) -> list[SignalReader]:
    with fetch_progress(ERR) as progress:
        draft, target = (
            load_engine(options, source, progress=progress, attention=True, states=states)
            for source, states in ((Source.DRAFT, True), (Source.TARGET, False))
        )
    layers = options.grounding_layers
    return [
        SignalReader(draft, "draft", DRAFT_FORMS, layers, entropy=True, head=head),
        SignalReader(target, "target", TARGET_FORMS, layers, entropy=True),
    ]


def _print(rows: Sequence[Row]) -> None:
    shown = Table(
        box=SIMPLE_HEAD,
        caption="fitted: even half by cross-validation, odd half as fitted on the even one",
        caption_justify="left",
    )
    for column in ("signal", "even half", "odd half", "95 % interval", "over length"):
        shown.add_column(column, justify="left" if column == "signal" else "right")
    for row in rows:
        shown.add_row(*signal_report.cells(row))
    OUT.print(shown)
