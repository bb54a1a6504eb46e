"""`specguard plan`: what a pair costs on this machine, and which way of writing is the fastest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from specguard_chains.cli.failures import UsageError, reports_errors
from specguard_chains.cli.plan_goals import Goal, check_goal, differing, flags, print_choice
from specguard_chains.cli.plan_tables import print_plan
from specguard_chains.cli.progress import bar_columns
from specguard_chains.cli.settings import takes_options
from specguard_chains.cli.streams import ERR
from specguard_chains.console import fetch_progress
from specguard_chains.decoding.grounding import GroundingSpec
from specguard_chains.decoding.steps import Source
from specguard_chains.evaluation.summary import Run
from specguard_chains.options import SpecGuardOptions
from specguard_chains.planning.assumptions import (
    RATE,
    assumed_settings,
    assumed_speculation,
    in_words,
)
from specguard_chains.planning.costs import PairCosts
from specguard_chains.planning.from_results import read_run
from specguard_chains.planning.goals import TOLERANCE_POINTS
from specguard_chains.planning.measure import Told, measure_pair
from specguard_chains.planning.plan import load_costs
from specguard_chains.planning.plan import plan as planned
from specguard_chains.planning.plots import write_plot
from specguard_chains.planning.settings import Workload
from specguard_chains.roles import load_engine

USUAL = Workload()
N_CTX = 2048
MEASURED = {
    *("pair", "draft", "target", "n_ctx", "n_threads", "n_gpu_layers", "max_retries"),
    *("grounding", "grounding_layers"),
}
"""Options that say what is measured, and how."""
JUDGING = {
    *("num_candidates", "num_target_candidates", "verify_with", "doubt_margin"),
    *("patience", "pause_steps", "early_rejection", "salvage"),
}
"""Options that the arms of a run have already."""


@reports_errors
@takes_options(
    *("pair", "draft", "target", "n_ctx", "n_threads", "n_gpu_layers", "max_retries"),
    *("num_candidates", "num_speculative_tokens", "confidence_weight", "verify_with"),
    *("num_target_candidates", "doubt_margin", "patience", "pause_steps"),
    *("grounding", "grounding_layers", "early_rejection", "salvage"),
    n_ctx=N_CTX,
)
def plan(
    options: SpecGuardOptions,
    results: Annotated[
        Path | None,
        typer.Option(
            metavar="folder",
            help="A run of specguard bench with this pair, for how often steps are accepted and "
            "how long answers are; without, both are assumed.",
        ),
    ] = None,
    goal: Annotated[
        Goal | None,
        typer.Option(
            help="Take the fastest arm of the run whose accuracy is not below the target's: its "
            "paired 95 % interval is above minus --tolerance, or its text is the target's. Nothing "
            "is measured.",
        ),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=100,
            help="By how many points accuracy may be below the target's, for --goal accuracy; by "
            f"default {TOLERANCE_POINTS:g}.",
        ),
    ] = None,
    at_most: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Take the most accurate arm of the run whose answers take so many seconds at "
            "most, on the average. Nothing is measured.",
        ),
    ] = None,
    costs: Annotated[
        Path | None,
        typer.Option(metavar="file", help="A plan whose costs to take; nothing is measured then."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="file", help="Where to write the plan with its costs, as JSON."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="file", help="Where to draw other cost ratios, as SVG."),
    ] = None,
    acceptance: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help=f"Share of drafted steps accepted, where no run tells it; by default {RATE}.",
        ),
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Of a prompt; by default 150, or as in the run."),
    ] = None,
    answer_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Of an answer; by default 200, or as in the run."),
    ] = None,
    step_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Of a step; by default 30, or as in the run."),
    ] = None,
) -> None:
    """Measure what a pair costs, and predict which setting is the fastest.

    The time of an answer is predicted for each way of writing it, beside the target alone. It says
    nothing of how often answers are right: specguard bench measures that.

    With --goal or --at-most it chooses among the arms that a run has recorded instead, and prints
    the options to set. Several thresholds are several arms of one run: specguard bench --data
    training.jsonl --decoders target,a=specguard:threshold=0.6,b=specguard:threshold=0.8. Choose on
    training problems: figures on those that have chosen a setting flatter it.
    """
    only_planned = {"costs": costs, "out": out, "plot": plot, "acceptance": acceptance is not None}
    sizes = {"prompt_tokens": prompt_tokens, "answer_tokens": answer_tokens}
    elsewhere = only_planned | sizes | {"step_tokens": step_tokens}
    elsewhere |= differing(options, n_ctx=N_CTX)
    if check_goal(goal, at_most, tolerance, results, **elsewhere):
        assert results is not None
        print_choice(results, at_most, tolerance)
        return
    _check(results, acceptance, out, plot)
    known = None if costs is None else load_costs(costs)
    _check_used(options, costs, results)
    known = known or _measured(options)
    found = None if results is None else read_run(results, known)
    workload = _sized(
        USUAL if found is None else found.workload, prompt_tokens, answer_tokens, step_tokens
    )
    if found is None:
        rate = RATE if acceptance is None else acceptance
        settings = assumed_settings(options, known, rate, workload)
    else:
        settings = found.settings
        if not any(each.method == "speculative" for each in settings):
            settings = [*settings, *assumed_speculation(options, known)]
    notes = [*(found.notes if found else ()), *in_words(settings), *_missing(known)]
    checks = found.checks if found else ()
    made = planned(known, settings, workload, checks=checks, notes=notes)
    print_plan(made)
    if out is not None:
        made.save(out)
        ERR.print(f"the plan is in {out}", soft_wrap=True)
    if plot is not None:
        write_plot(made, plot)
        ERR.print(f"the chart is in {plot}", soft_wrap=True)


def _measured(options: SpecGuardOptions) -> PairCosts:
    """Return the pair's costs, measured behind a bar."""
    with fetch_progress(ERR) as progress:
        draft, target = (load_engine(options, source, progress=progress) for source in Source)
        without = options.model_copy(update={"confidence_weight": 1.0})
        plain = load_engine(without, Source.DRAFT, progress=progress)
    roles = {"draft": draft, "target": target}
    other = "target" if options.verify_with == "draft" else "draft"
    shown = [role for role in (options.verify_with, other) if roles[role].capabilities.attention]
    reader = shown[0] if shown and options.confidence_weight < 1 else None
    ERR.print("measuring; about a minute for a pair of 0.5 and 1.5 billion weights on two cores")
    with _bar() as told:
        return measure_pair(
            draft,
            target,
            plain_draft=plain,
            grounding=GroundingSpec.named(options.grounding, layers=options.grounding_layers),
            attention_of=reader,
            threads=options.n_threads,
            told=told,
        )


@contextmanager
def _bar() -> Iterator[Told]:
    with Progress(*bar_columns("passes"), console=ERR) as bars:
        task = bars.add_task("measuring", total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


def _sized(usual: Workload, prompt: int | None, answer: int | None, step: int | None) -> Workload:
    """Return the sizes of answers, those that are given in place of the usual ones."""
    given = {"prompt_tokens": prompt, "answer_tokens": answer, "step_tokens": step}
    return usual.model_copy(update={name: n for name, n in given.items() if n is not None})


def _missing(costs: PairCosts) -> list[str]:
    return [f"{note}." for each in (costs.draft, costs.target) for note in each.missing]


def _check_used(options: SpecGuardOptions, costs: Path | None, results: Path | None) -> None:
    """Refuse options that known costs or results make meaningless."""
    given = [name for name, differs in differing(options, n_ctx=N_CTX).items() if differs]
    for flag, source, told in (("--costs", costs, MEASURED), ("--results", results, JUDGING)):
        if source is not None and (idle := [name for name in given if name in told]):
            raise UsageError(
                f"what {flags(idle)} would set is as {source} tells it: leave that out, or {flag}"
            )


def _check(results: Path | None, acceptance: float | None, *written: Path | None) -> None:
    """Refuse what would fail after a minute of work."""
    if results is not None:
        Run.read(results)
        if acceptance is not None:
            raise UsageError(
                f"--acceptance {acceptance} is what a run tells: give either it or --results"
            )
    for path in filter(None, written):
        if not path.parent.is_dir():
            raise UsageError(f"{path} cannot be written: there is no folder {path.parent}")
