"""Which recorded setting meets a goal, as `specguard plan --goal` and `--at-most` print it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rich.box import ASCII, SIMPLE_HEAD
from rich.table import Table

from specguard_chains.cli.failures import UsageError
from specguard_chains.cli.streams import OUT
from specguard_chains.evaluation.statistics import wilson_interval
from specguard_chains.evaluation.summary import Run
from specguard_chains.evaluation.wording import NONE, between, listed, percent, points
from specguard_chains.options import SpecGuardOptions
from specguard_chains.planning.arm_options import (
    as_flags,
    as_python,
    options_of,
    younger_options,
)
from specguard_chains.planning.compared import Compared, compare
from specguard_chains.planning.goals import (
    TOLERANCE_POINTS,
    Choice,
    as_accurate,
    verdicts,
    within,
)

Goal = Literal["accuracy"]


def check_goal(
    goal: Goal | None,
    at_most: float | None,
    tolerance: float | None,
    results: Path | None,
    **elsewhere: object,
) -> bool:
    """Return whether a goal is given; refuse what says nothing beside it.

    Args:
        goal: What is asked for.
        at_most: The other goal.
        tolerance: Of the first.
        results: The run that is chosen from.
        elsewhere: Parameters that only a plan from costs has, None unless they are given.
    """
    if tolerance is not None and goal is None:
        raise UsageError(f"--tolerance {tolerance:g} is of --goal accuracy: give that too")
    if goal is None and at_most is None:
        return False
    flag = f"--goal {goal}" if goal else f"--at-most {at_most:g}"
    if goal is not None and at_most is not None:
        raise UsageError(f"--goal {goal} and --at-most {at_most:g} are two goals: give one")
    if results is None:
        raise UsageError(f"{flag} chooses from a run of specguard bench: give it with --results")
    if given := [name for name, value in elsewhere.items() if value]:
        raise UsageError(
            f"{flag} looks at nothing but the run, in which {flags(given)} would change nothing: "
            "leave that out"
        )
    return True


def flags(names: Sequence[str]) -> str:
    """Return parameters as they are written on the command line, in a row."""
    return listed([f"--{name.replace('_', '-')}" for name in names])


def differing(options: SpecGuardOptions, **defaults: object) -> dict[str, bool]:
    """Return the options that a command line has given, as far as they are not the command's."""
    usual = {name: field.default for name, field in SpecGuardOptions.model_fields.items()}
    return {
        name: getattr(options, name) != (usual | defaults)[name]
        for name in sorted(options.model_fields_set)
    }


def print_choice(folder: Path, at_most: float | None, tolerance: float | None) -> None:
    """Print the arms of a run, which of them to take, and its options to be pasted."""
    run = Run.read(folder)
    compared = compare(run)
    points_below = TOLERANCE_POINTS if tolerance is None else tolerance
    choice = as_accurate(compared, points_below) if at_most is None else within(compared, at_most)
    _print_arms(run, compared, None if at_most is not None else points_below)
    _print_taken(choice, compared)
    for sentence in choice.others:
        OUT.print(f"- {sentence}", soft_wrap=True, markup=False)
    options = options_of(run.settings, choice.arm)
    OUT.print("its options, for commands and in Python:")
    for form in (as_flags(options) or "(the defaults)", as_python(options)):
        OUT.print(f"    {form}", soft_wrap=True, markup=False, highlight=False)
    for note in [*compared.notes, *_younger(run)]:
        OUT.print(f"- {note}", soft_wrap=True, markup=False)
    OUT.print(
        "These problems have chosen the setting, which flatters it on them: measure it on others "
        "before you report how often it is right.",
        soft_wrap=True,
    )


def _print_taken(choice: Choice, compared: Compared) -> None:
    alone = " alone" if choice.arm == compared.target == "target" else ""
    taken = "take" if choice.met else "no recorded arm meets the goal; nearest"
    line = f"{taken}: {choice.arm}{alone}: {choice.reason}."
    OUT.print(line, style="bold", soft_wrap=True, markup=False)


def _print_arms(run: Run, compared: Compared, tolerance_points: float | None) -> None:
    box = ASCII if OUT.options.ascii_only else SIMPLE_HEAD
    where = f", on {run.settings.cpu}" if run.settings.cpu else ""
    title = f"problems in common: {compared.problems}, of {listed(run.data)}{where}"
    table = Table(title=title, title_justify="left", box=box, padding=(0, 1, 0, 0))
    table.add_column("arm", overflow="fold")
    judged = tolerance_points is not None and compared.target is not None
    said = verdicts(compared.arms, tolerance_points or 0.0) if judged else {}
    columns = ["right", "accuracy", "to the target", "seconds", *(["shown"] if judged else [])]
    for column in columns:
        table.add_column(column, justify="right")
    for each in compared.arms:
        share = percent(each.right / each.problems)
        ends = between(wilson_interval(each.right, each.problems), percent).strip()
        difference = NONE
        if compared.target not in (None, each.arm):
            difference = f"{points(each.difference)} {between(each.interval, points).strip()}"
        verdict = NONE if each.arm == compared.target else said.get(each.arm, NONE)
        cells = [f"{each.right}/{each.problems}", f"{share} {ends}", difference]
        table.add_row(each.arm, *cells, f"{each.seconds:.2f}", *([verdict] if judged else []))
    OUT.print(table)
    if judged:
        OUT.print(
            "to the target: points, with the 95 % interval of the paired difference. shown: "
            f"whether that is above -{tolerance_points:g}, or how many problems would show it.",
            soft_wrap=True,
        )


def _younger(run: Run) -> list[str]:
    if not (names := younger_options(run.settings)):
        return []
    return [
        f"The run is older than these options, whose defaults it did not test: {listed(names)}."
    ]
