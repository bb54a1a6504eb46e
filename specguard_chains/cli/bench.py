"""`specguard bench`: how often decoders are right, and how long they take, on problems."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import ASCII, SIMPLE_HEAD
from rich.table import Table

from specguard_chains.cli.answering import load
from specguard_chains.cli.bench_progress import Tally, progress
from specguard_chains.cli.failures import UsageError, reports_errors
from specguard_chains.cli.problem_parameters import Limit, Only, Skip
from specguard_chains.cli.settings import takes_options
from specguard_chains.cli.streams import ERR, OUT
from specguard_chains.decoding.decoder import Decoder
from specguard_chains.errors import ConfigurationError, EvaluationError, SpecGuardError
from specguard_chains.evaluation import report, summary
from specguard_chains.evaluation.arms import Arm, parse_arms
from specguard_chains.evaluation.checking import AnswerChecker
from specguard_chains.evaluation.folder import ResultsLog, open_run
from specguard_chains.evaluation.problems import Half, Problem, data_name, load_problems
from specguard_chains.evaluation.runner import Runner
from specguard_chains.evaluation.settings import RunSettings
from specguard_chains.evaluation.tasks import Plan
from specguard_chains.options import SpecGuardOptions

MAX_TOKENS = 600
DECODERS = "target,draft,specguard-greedy"
OTHERWISE = frozenset(
    {
        *("decoder", "acceptance_rate", "max_accepted_tokens"),  # an arm's own
        *("stop", "critical_steps", "tool_instruction", "schema_instruction", "max_queue"),
        *("max_parallel", "prompt_cache", "prompt_cache_gib"),
        "api_key",
    }
)
"""Options that the command does not have."""
SHARED = tuple(name for name in SpecGuardOptions.model_fields if name not in OTHERWISE)


@reports_errors
@takes_options(*SHARED, max_tokens=MAX_TOKENS, seed=0)
def bench(
    options: SpecGuardOptions,
    out: Annotated[
        Path,
        typer.Option(
            metavar="folder",
            help="Where results and reports are; a run that was interrupted goes on there.",
        ),
    ],
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="file|name",
            help='Problems: a file with one JSON object a line, with "question" and "answer", or '
            "the name of a known benchmark; can be given several times.",
        ),
    ] = None,
    decoders: Annotated[
        str,
        typer.Option(
            metavar="list",
            help="What is compared: [label=]decoder[:option=value]..., with commas in between. "
            "random@X and length@X accept as often as X, but at random or by length; oracle knows "
            "the answers. Those without variety are greedy unless a temperature is given.",
        ),
    ] = DECODERS,
    limit: Limit = None,
    skip: Skip = 0,
    only: Only = "all",
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Solve nothing; write the reports anew.")
    ] = False,
) -> None:
    """Compare decoders on problems: accuracy, time and acceptance.

    All decoders solve each problem in turn, from cold caches. The results are written as they come:
    the same command goes on where it was interrupted, and more problems or decoders can be added
    later. A comparison with chance, for example:

    specguard bench --data gsm8k --out gsm8k --decoders target,x=rsd,random@x
    """
    if not report_only:
        arms = _arms(decoders, options)
        problems = _problems(data, limit=limit, skip=skip, seed=options.seed or 0, only=only)
        _run(options, arms, problems, out, only)
    figures = summary.summarise(out)
    summary.per_problem(out)
    report.write(out)
    _print_tables(figures)
    written = ("summary.json", "problems.csv", "report.md", "report.html", "accuracy.svg")
    OUT.print(
        f"in {out}: {', '.join(name for name in written if (out / name).exists())}", soft_wrap=True
    )


def _arms(decoders: str, options: SpecGuardOptions) -> tuple[Arm, ...]:
    try:
        return parse_arms(decoders, options)
    except EvaluationError as error:
        raise UsageError(f"--decoders: {error}") from error


def _problems(
    sources: Sequence[str] | None, *, limit: int | None, skip: int, seed: int, only: Half
) -> dict[str, Sequence[Problem]]:
    """Return the problems by the name of their data set."""
    if not sources:
        raise UsageError("--data is missing: give a file of problems or a benchmark's name")
    problems: dict[str, Sequence[Problem]] = {}
    for source in sources:
        name = data_name(source)
        if name in problems:
            raise UsageError(f"--data {source}: there is another one called {name}")
        problems[name] = load_problems(source, limit=limit, skip=skip, seed=seed, only=only)
        if not problems[name]:
            raise UsageError(f"--data {source} has no problems after the first {skip}")
    return problems


def _run(
    options: SpecGuardOptions,
    arms: Sequence[Arm],
    problems: Mapping[str, Sequence[Problem]],
    out: Path,
    only: Half,
) -> None:
    """Solve what is not solved yet."""
    plan = Plan(problems, arms, options.seed or 0)
    settings = RunSettings.of(
        options, arms, list(problems), plan.seed, only=only, arguments=sys.argv
    )
    with open_run(out, settings) as log:
        try:
            _solve(plan, log)
        except EvaluationError:
            raise  # the same command would end in it again
        except (KeyboardInterrupt, SpecGuardError):
            if len(log):
                ERR.print(
                    f"{len(log)} results are kept in {out}; the same command goes on from there",
                    soft_wrap=True,
                )
            raise


def _solve(plan: Plan, log: ResultsLog) -> None:
    tasks = list(plan.tasks())
    pending = plan.pending(log)
    if not pending:
        OUT.print(f"nothing to solve: all {len(tasks)} results are there")
        return
    waiting = {task.arm.label: task.arm for task in pending}.values()
    decoders = {arm.label: _loaded(arm) for arm in waiting}
    done = [result for task in tasks if (result := log.get(task.key)) is not None]
    begun = {result.arm for result in done}
    for arm in waiting:
        if arm.label in begun and arm.options.max_slowdown is not None:
            ERR.print(
                f"the account of seconds that {arm.label} drafts by (max_slowdown) begins anew, as "
                "it is no result: some answers will be drafted less than in one go",
                soft_wrap=True,
            )
    with AnswerChecker() as checker, progress(Tally(done, pending)) as view:
        runner = Runner(plan, log, checker)
        for arm in waiting:
            if arm.same_for_all:
                runner.take(arm, decoders[arm.label])
        runner.on_begin, runner.on_end = view.begin, view.end
        runner.run()


def _loaded(arm: Arm) -> Decoder:
    """Return an arm's decoder, or say which arm it is that has none."""
    try:
        return load(arm.options)
    except ConfigurationError as error:
        raise EvaluationError(f"arm {arm.label!r}: {error}") from error


def _print_tables(figures: Mapping[str, Any]) -> None:
    """Print what has come out of it, for each data set and for all."""
    parts = {name: part["decoders"] for name, part in figures["data"].items()}
    if len(parts) > 1:
        parts["all"] = figures["decoders"]
    for name, rows in parts.items():
        box = ASCII if OUT.options.ascii_only else SIMPLE_HEAD
        table = Table(title=name, title_justify="left", box=box, padding=(0, 1, 0, 0))
        table.add_column("decoder", overflow="fold")
        for column in ("right", "95 % interval", "seconds", "time ratio", "accepted"):
            table.add_column(column, justify="right", no_wrap=True)
        for label, row in rows.items():
            table.add_row(label, *_cells(row))
        OUT.print(table)
    rows_of_all = [row for part in figures["data"].values() for row in part["decoders"].values()]
    errors, total = (sum(row[name] for row in rows_of_all) for name in ("errors", "n"))
    if errors:
        ERR.print(f"{errors} of {total} results are errors, which count as wrong answers")


def _cells(row: Mapping[str, Any]) -> list[str]:
    low, high = row["accuracy_interval"]
    seconds, ratio, accepted = row["seconds"], row["time_ratio"], row["acceptance_by_step"]
    return [
        f"{row['correct']}/{row['n']} = {row['accuracy']:.1%}",
        f"{low:.0%} to {high:.0%}",
        "–" if seconds is None else f"{seconds:.1f}",
        "–" if ratio is None else f"{ratio:.2f}",
        "–" if accepted is None else f"{accepted:.0%}",
    ]
