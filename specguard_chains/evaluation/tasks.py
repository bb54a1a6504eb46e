"""What a run is to solve: every problem by every arm, in turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from specguard_chains.errors import EvaluationError
from specguard_chains.evaluation.arms import LENGTH, Arm, draft_alone
from specguard_chains.evaluation.folder import ResultsLog
from specguard_chains.evaluation.problems import Problem
from specguard_chains.evaluation.results import Key


@dataclass(frozen=True, slots=True)
class Task:
    """A problem for an arm."""

    data: str
    index: int
    """Of the problem in its data set."""
    problem: Problem
    arm: Arm

    @property
    def key(self) -> Key:
        """What its result is recorded under."""
        return (self.data, self.problem.id, self.arm.label)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run is to solve."""

    data: Mapping[str, Sequence[Problem]]
    """Problems by the name of their data set."""
    arms: Sequence[Arm]
    seed: int = 0

    def __post_init__(self) -> None:
        """Validate."""
        for name, problems in self.data.items():
            for id_, times in Counter(problem.id for problem in problems).items():
                if times > 1:
                    raise EvaluationError(f"{name} has {times} problems with the id {id_!r}")

    def tasks(self) -> Iterator[Task]:
        """Yield everything that is to be done, in order."""
        for name, problems in self.data.items():
            for index, problem in enumerate(problems):
                for arm in turns(self.arms, index):
                    yield Task(name, index, problem, arm)

    def pending(self, log: ResultsLog) -> list[Task]:
        """Return what is to be done and is not recorded yet.

        Raises:
            EvaluationError: A recorded problem was another one.
        """
        for name, problems in self.data.items():
            for problem in problems:
                log.check(name, problem)
        return [task for task in self.tasks() if task.key not in log]

    def seed_of(self, task: Task) -> int:
        """Return the seed of a problem, the same for all arms."""
        name = f"{self.seed}/{task.data}/{task.problem.id}"
        return int.from_bytes(blake2b(name.encode(), digest_size=4).digest())


def turns(arms: Sequence[Arm], index: int) -> list[Arm]:
    """Return the order of the arms on a problem: another one begins each time.

    What a control goes by comes before it all the same.
    """
    first = index % len(arms)
    order: dict[str, Arm] = {}
    for arm in (*arms[first:], *arms[:first]):
        order |= {needed.label: needed for needed in _needed(arm, arms)}
        order[arm.label] = arm
    return list(order.values())


def _needed(control: Arm, arms: Sequence[Arm]) -> Iterator[Arm]:
    """Yield the arms whose results a control is matched by."""
    for arm in arms:
        by_length = control.controls is not None and control.options.decoder == LENGTH
        if arm.label == control.controls or (by_length and arm is draft_alone(arms)):
            yield arm
