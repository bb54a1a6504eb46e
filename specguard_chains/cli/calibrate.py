"""`specguard calibrate`: the bounds of a pair's signals, measured on training problems."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.progress import Progress

from specguard_chains.calibrations import file_name, own_folder, signals
from specguard_chains.calibrations.fitting import fit, read_questions
from specguard_chains.cli.answering import load
from specguard_chains.cli.failures import UsageError, reports_errors
from specguard_chains.cli.problem_parameters import Avoid
from specguard_chains.cli.progress import bar_columns
from specguard_chains.cli.settings import takes_options
from specguard_chains.cli.streams import ERR, OUT
from specguard_chains.cli.training_problems import apart
from specguard_chains.decoding.calibration import FALLBACK, Calibration
from specguard_chains.decoding.specguard import SpecGuardDecoder
from specguard_chains.decoding.steps import Step
from specguard_chains.errors import CalibrationError
from specguard_chains.evaluation.problems import Problem
from specguard_chains.options import SpecGuardOptions

MAX_TOKENS = 600


@reports_errors
@takes_options(
    *("pair", "draft", "target", "n_ctx", "n_threads", "n_gpu_layers", "max_retries"),
    *("verify_with", "grounding", "grounding_layers"),
    *("step_delimiter", "max_step_tokens", "max_tokens"),
    max_tokens=MAX_TOKENS,
)
def calibrate(
    options: SpecGuardOptions,
    data: Annotated[
        Path,
        typer.Option(metavar="file", help='Problems: one JSON object a line with a "question".'),
    ],
    limit: Annotated[int, typer.Option(min=1, help="How many problems to solve.")] = 50,
    skip: Annotated[int, typer.Option(min=0, help="Lines to skip first.")] = 0,
    avoid: Avoid = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="file", help="Where to write; by default where it is looked for."),
    ] = None,
) -> None:
    """Find the bounds of a pair's signals.

    The draft solves problems; the range of its signals over all steps becomes their bounds. Use
    problems for training, not the ones that you evaluate on.
    """
    questions = _questions(data, limit, skip, avoid or [])
    decoder = _load(options)
    path = _writable(out or own_folder() / _name(decoder))
    calibration = _fit(decoder, questions, options.max_tokens or MAX_TOKENS)
    calibration.save(path)
    _report(calibration, path)


def _questions(data: Path, limit: int, skip: int, avoid: Sequence[str]) -> list[str]:
    """Return the questions of some lines without those that resemble one to avoid."""
    read = [
        Problem(id=f"{data.stem}/{line}", question=question, answer="", data=data.stem)
        for line, question in read_questions(data, limit, skip).items()
    ]
    if not read:
        raise CalibrationError(f"{data} has no problems after the first {skip} lines")
    if not (kept := apart(read, avoid)):
        raise CalibrationError(
            f"all {len(read)} problems of {data} resemble problems to avoid; give others"
        )
    return [problem.question for problem in kept]


def _load(options: SpecGuardOptions) -> SpecGuardDecoder:
    """Return the pair's decoder, with bounds that do not matter.

    Without them the ones that are being replaced would be read, and missed or found broken. Where
    attention is shown it is read, so that one file has the bounds for every confidence_weight.
    """
    with TemporaryDirectory() as folder:
        unused = Path(folder) / "unused.json"
        FALLBACK.save(unused)
        changes = {"calibration": str(unused), "num_candidates": 1, "confidence_weight": 0.5}
        decoder = load(options.model_copy(update=changes))
    assert isinstance(decoder, SpecGuardDecoder)
    return decoder


def _name(decoder: SpecGuardDecoder) -> str:
    return file_name(
        decoder.draft.name,
        decoder.target.name,
        signals(decoder.verify_with, decoder.grounding_from),
        decoder.grounding,
    )


def _writable(path: Path) -> Path:
    """Return the path once it is sure that a file can be written there; minutes of work follow."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a"):
            pass
        if path.stat().st_size == 0:
            path.unlink()
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error}); choose another --out") from error
    return path


def _fit(decoder: SpecGuardDecoder, questions: list[str], max_tokens: int) -> Calibration:
    """Solve the problems behind a bar."""
    columns = bar_columns("problems, {task.fields[steps]} steps")
    with Progress(*columns, console=ERR) as bars:
        task = bars.add_task("solving", total=len(questions), steps=0)
        steps = 0

        def on_step(problem: int, step: Step) -> None:
            nonlocal steps
            steps += 1
            done = problem + (step.finish_reason is not None)
            bars.update(task, completed=done, steps=steps)

        return fit(decoder, questions, max_tokens=max_tokens, on_step=on_step)


def _report(calibration: Calibration, path: Path) -> None:
    OUT.print(f"{calibration.steps} steps of {calibration.problems} problems", style="bold")
    for name in ("confidence", "grounding"):
        bounds = getattr(calibration, name)
        OUT.print(f"{name:10} {bounds.low:8.3f} to {bounds.high:.3f}")
    OUT.print(f"written to {path}", soft_wrap=True)
