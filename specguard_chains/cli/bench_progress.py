"""How far an evaluation is: what is being solved, how often each arm was right, the time left."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from specguard_chains.cli.streams import ERR
from specguard_chains.evaluation.results import Result
from specguard_chains.evaluation.tasks import Task


class View(Protocol):
    """Shows a run."""

    def begin(self, task: Task) -> None:
        """An arm starts on a problem."""

    def end(self, result: Result) -> None:
        """It has solved it, or not."""


class Tally:
    """How the arms have done so far."""

    def __init__(self, done: Iterable[Result], pending: Iterable[Task]) -> None:
        """Count what is done and what is not."""
        self._solved: Counter[str] = Counter()
        self._right: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._pending = Counter(task.arm.label for task in pending)
        for result in done:
            self._count(result)

    @property
    def done(self) -> int:
        """Results there are."""
        return self._solved.total()

    @property
    def total(self) -> int:
        """Results there will be."""
        return self.done + self._pending.total()

    def add(self, result: Result) -> None:
        """Count a result that was pending."""
        self._pending[result.arm] -= 1
        self._count(result)

    def accuracies(self) -> str:
        """Return the share of right answers of each arm, in words."""
        shares = (f"{arm} {self._right[arm] / n:.0%}" for arm, n in self._solved.items())
        return " · ".join(shares)

    def time_left(self) -> str:
        """Return how long the rest will take, by the mean time of each arm, in words."""
        if not self.done:
            return "time left unknown"
        usual = sum(self._seconds.values()) / self.done
        seconds = sum(
            n * (self._seconds[arm] / self._solved[arm] if self._solved[arm] else usual)
            for arm, n in self._pending.items()
        )
        return f"{in_words(seconds)} left"

    def _count(self, result: Result) -> None:
        self._solved[result.arm] += 1
        self._right[result.arm] += result.right
        self._seconds[result.arm] += result.seconds


class Lines:
    """A line for each result, where there is no terminal to draw on."""

    def __init__(self, tally: Tally) -> None:
        """Begin."""
        self._tally = tally

    def begin(self, task: Task) -> None:
        """See `View.begin`."""

    def end(self, result: Result) -> None:
        """See `View.end`."""
        tally = self._tally
        tally.add(result)
        facts = [
            f"{tally.done}/{tally.total} {result.problem} {result.arm}: {_outcome(result)}",
            f"{result.seconds:.1f} s",
            tally.time_left(),
        ]
        ERR.print(", ".join(facts), soft_wrap=True)


class Bar(Progress):
    """A bar over all problems and arms, and the arms' accuracies below it."""

    def __init__(self, tally: Tally) -> None:
        """Begin."""
        self._tally = tally  # drawn below as soon as there is a bar
        super().__init__(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}", markup=False),
            console=ERR,
        )
        self._task = self.add_task(
            "starting", total=tally.total, completed=tally.done, left=tally.time_left()
        )

    def begin(self, task: Task) -> None:
        """See `View.begin`."""
        self.update(self._task, description=f"{task.problem.id} {task.arm.label}")

    def end(self, result: Result) -> None:
        """See `View.end`."""
        self._tally.add(result)
        self.update(self._task, completed=self._tally.done, left=self._tally.time_left())

    def get_renderables(self) -> Iterable[RenderableType]:
        """Return the bar and the line below it."""
        yield from super().get_renderables()
        yield Text(self._tally.accuracies(), "dim")


@contextmanager
def progress(tally: Tally) -> Iterator[View]:
    """Give what shows a run, as the terminal allows."""
    if not ERR.is_terminal:
        yield Lines(tally)
        return
    with Bar(tally) as bar:
        yield bar


def in_words(seconds: float) -> str:
    """Return a time such as "2 h 5 min"."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


def _outcome(result: Result) -> str:
    if result.error is not None:
        return f"failed ({result.error})"
    return "right" if result.right else "wrong"
