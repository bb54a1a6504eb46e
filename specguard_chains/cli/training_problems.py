"""Problems to train or to choose settings on, none of which is evaluated on."""

from __future__ import annotations

from collections.abc import Sequence

from specguard_chains.cli.failures import UsageError
from specguard_chains.cli.streams import ERR
from specguard_chains.evaluation.problems import Problem, load_problems, near_duplicates


def training_problems(
    data: Sequence[str], avoid: Sequence[str], *, limit: int | None, skip: int, seed: int
) -> list[Problem]:
    """Return problems without those that resemble one to avoid, and say which were left out.

    The data sets take turns, so that a run that is stopped early has some of each.

    Raises:
        UsageError: None is left.
    """
    sets = [load_problems(source, limit=limit, skip=skip, seed=seed) for source in data]
    longest = max(map(len, sets), default=0)
    problems = [each[i] for i in range(longest) for each in sets if i < len(each)]
    tested = [problem for source in avoid for problem in load_problems(source, seed=seed)]
    alike = {training for training, _, _ in near_duplicates(problems, tested)}
    if alike:
        ERR.print(
            f"{len(alike)} problems resemble problems to avoid and are left out: "
            f"{', '.join(sorted(alike))}",
            soft_wrap=True,
        )
    kept = [problem for problem in problems if problem.id not in alike]
    if not kept:
        raise UsageError(f"--data {', '.join(data)} has no problems after the first {skip}")
    return kept
