"""Problems to train or to choose settings on, none of which is evaluated on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count, zip_longest

from specguard_chains.cli.failures import UsageError
from specguard_chains.cli.streams import ERR
from specguard_chains.evaluation.problems import (
    Problem,
    data_name,
    load_problems,
    near_duplicates,
)


def training_problems(
    data: Sequence[str], avoid: Sequence[str], *, limit: int | None, skip: int, seed: int
) -> dict[Problem, int]:
    """Return problems without those that resemble one to avoid, and say which were left out.

    With each comes its place in its source, from 0: by this `--only even` and `odd` of the bench
    take one half of them. The data sets take turns, so that a run that is stopped early has some of
    each.

    Raises:
        UsageError: None is left, or two data sets have the same name.
    """
    sets: dict[str, list[tuple[Problem, int]]] = {}
    for source in data:
        if (name := data_name(source)) in sets:
            raise UsageError(
                f"--data {source}: there is another one called {name}; give it once, or rename the "
                "file"
            )
        problems = load_problems(source, limit=limit, skip=skip, seed=seed)
        sets[name] = list(zip(problems, count(skip)))
    turns = [each for turn in zip_longest(*sets.values()) for each in turn if each is not None]
    kept = set(apart([problem for problem, _ in turns], avoid, seed=seed))
    if not kept:
        raise UsageError(f"--data {', '.join(data)} has no problems after the first {skip}")
    return {problem: place for problem, place in turns if problem in kept}


def apart(problems: Sequence[Problem], avoid: Sequence[str], *, seed: int = 0) -> list[Problem]:
    """Return the problems that resemble none to avoid, and say which were left out."""
    tested = [problem for source in avoid for problem in load_problems(source, seed=seed)]
    alike = {
        (name, training)
        for name in {problem.data for problem in problems}  # ids are unique within a data set
        for training, _, _ in near_duplicates([p for p in problems if p.data == name], tested)
    }
    if alike:
        ERR.print(
            f"{len(alike)} problems resemble problems to avoid and are left out: "
            f"{', '.join(sorted(problem for _, problem in alike))}",
            soft_wrap=True,
        )
    return [problem for problem in problems if (problem.data, problem.id) not in alike]
