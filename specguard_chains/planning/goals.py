"""Which recorded arm meets a stated goal: as accurate as the target, or within so many seconds.

Unlike `advice`, which predicts time, this looks at answers that were recorded: how often each arm
of a run is right, and how long it took. Several thresholds in one run are several arms, and the
choice among them calibrates the threshold. All arms are compared over the problems that each of
them has attempted; an attempt that ended in an error counts as wrong. Times are compared over the
problems that each of them has completed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from specguard_chains.errors import EvaluationError
from specguard_chains.evaluation.arms import CONTROLS, ORACLE
from specguard_chains.evaluation.figures import ProblemKey, Results
from specguard_chains.evaluation.paired_shares import (
    difference_interval,
    is_above,
    problems_needed,
)
from specguard_chains.evaluation.summary import Run
from specguard_chains.evaluation.wording import between, listed, points

TOLERANCE_POINTS = 5.0
"""By which accuracy may be below the target's. If both are right on the same problems, 73 of them
show that much; 2 points would take 189."""
PROPOSING = frozenset(
    {
        *("decoder", "draft", "speculate_with", "num_speculative_tokens"),
        *("adaptive_speculation", "speculative_tree", "speculative_children"),
    }
)
"""Options in which speculative decoding may differ from the target without writing other text."""


@dataclass(frozen=True, slots=True)
class Measured:
    """An arm over the problems that all arms have attempted."""

    arm: str
    right: int
    problems: int
    seconds: float
    """Of an answer, on the average of the problems that all arms have completed."""
    wins: int = 0
    """Problems that the target alone has not solved, and this arm has."""
    losses: int = 0
    exact: bool = False
    """Whether what it writes is the target's own by construction."""

    @property
    def difference(self) -> float:
        """To the target's accuracy, as a share."""
        return (self.wins - self.losses) / self.problems

    @property
    def interval(self) -> tuple[float, float] | None:
        """Of the difference."""
        return difference_interval(self.wins, self.losses, self.problems)

    def not_below(self, tolerance: float) -> bool:
        """Whether it is at least as accurate as the target, to a share of tolerance."""
        return self.exact or is_above(-tolerance, self.wins, self.losses, self.problems)

    def needed(self, tolerance: float) -> int | None:
        """Return on how many problems that would show, None if its accuracy is lower."""
        return problems_needed(-tolerance, self.wins, self.losses, self.problems)


@dataclass(frozen=True, slots=True)
class Compared:
    """The arms of a run that can be chosen, over the same problems."""

    problems: int
    target: str | None
    arms: tuple[Measured, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """What to take."""

    arm: str
    met: bool
    """Whether it meets the goal."""
    reason: str
    others: tuple[str, ...] = ()
    """Why others that are faster are not taken, a sentence each."""


def compare(run: Run) -> Compared:
    """Return the arms of a run that can be chosen; controls, which choose nothing, cannot.

    Raises:
        EvaluationError: There is no problem that all of them have attempted, or completed.
    """
    by_arm = {arm: own for arm, own in run.by_arm().items() if _can_be_chosen(run, arm)}
    common = set.intersection(*(set(own) for own in by_arm.values())) if by_arm else set()
    if not common:
        counts = listed([f"{arm} has {len(own)}" for arm, own in by_arm.items()] or ["there is no"])
        raise EvaluationError(
            f"no problem has been attempted by every arm that can be chosen ({counts}); let "
            "`specguard bench` go on"
        )
    target = by_arm.get(run.target) if run.target else None
    exact = {arm for arm in by_arm if _is_exact(run, arm)}
    answering = {
        arm: own for arm, own in by_arm.items() if any(own[key].error is None for key in common)
    }
    if not answering:
        raise EvaluationError("no arm has a complete answer; see the errors in results.jsonl")
    completed = {key for key in common if all(own[key].error is None for own in answering.values())}
    if not completed:
        raise EvaluationError(
            f"none of the {len(common)} problems has been completed by every arm, so that their "
            "times cannot be compared; see the errors in results.jsonl"
        )
    arms = [
        _measured(arm, own, common, completed, target, exact=arm in exact)
        for arm, own in answering.items()
    ]
    notes = tuple(_notes(by_arm, common, completed))
    return Compared(len(common), run.target, tuple(arms), notes)


def as_accurate(compared: Compared, tolerance_points: float = TOLERANCE_POINTS) -> Choice:
    """Return the fastest arm whose accuracy is not below the target's, which may be the target.

    An arm is not below it if the whole 95 % interval of its difference is above minus the
    tolerance, or if it writes the target's own text.

    Raises:
        EvaluationError: The target alone is none of the arms.
    """
    alone = next((each for each in compared.arms if each.arm == compared.target), None)
    if alone is None:
        raise EvaluationError(
            "there is no accuracy to hold the others against: run the target alone on the same "
            "problems, as the arm target of --decoders"
        )
    tolerance = tolerance_points / 100
    rivals = [each for each in compared.arms if each is not alone]
    shown = [each for each in rivals if each.not_below(tolerance)]
    best = min([alone, *shown], key=lambda each: each.seconds)
    faster = [each for each in rivals if each.seconds < best.seconds]
    others = tuple(_why_not(each, tolerance_points) for each in faster)
    if best is alone:
        what = "is faster and shown to be not below it" if faster else "is faster"
        return Choice(best.arm, True, f"nothing else {what}", others)
    how = "the text is the target's"
    if not best.exact:
        how = f"{_against(best)}, which is less than {tolerance_points:g} points below"
    times = f"{best.seconds:.2f} s an answer, the target alone {alone.seconds:.2f} s"
    return Choice(best.arm, True, f"{times}; {how}", others)


def within(compared: Compared, seconds: float) -> Choice:
    """Return the most accurate arm that takes so long at most, on the average; ties by time."""
    fitting = [each for each in compared.arms if each.seconds <= seconds]
    if not fitting:
        fastest = min(compared.arms, key=lambda each: each.seconds)
        reason = f"it is the fastest, and takes {fastest.seconds:.2f} s an answer"
        return Choice(fastest.arm, False, reason)
    best = max(fitting, key=lambda each: (each.right, -each.seconds))
    which = "the only arm that takes" if len(fitting) == 1 else "the most of the arms that take"
    return Choice(
        best.arm,
        True,
        f"{best.right} of {best.problems} right, {which} at most {seconds:g} s an answer; it takes "
        f"{best.seconds:.2f} s",
    )


def verdicts(arms: Sequence[Measured], tolerance_points: float) -> dict[str, str]:
    """Return for each arm in two words whether its accuracy is not below the target's."""
    tolerance = tolerance_points / 100

    def verdict(each: Measured) -> str:
        if each.exact:
            return "the same text"
        if each.not_below(tolerance):
            return "not below"
        needed = each.needed(tolerance)
        return "lower so far" if needed is None else f"{needed} problems"

    return {each.arm: verdict(each) for each in arms}


def _can_be_chosen(run: Run, arm: str) -> bool:
    return run.controlled(arm) is None and run.decoder(arm) not in (ORACLE, *CONTROLS)


def _is_exact(run: Run, arm: str) -> bool:
    """Whether an arm writes the target's text, or at a temperature above 0 text of its law."""
    if run.target is None or run.decoder(arm) != "speculative":
        return False
    arms = run.settings.arms
    speculative, alone = (
        {name: value for name, value in arms.get(each, {}).items() if name not in PROPOSING}
        for each in (arm, run.target)
    )
    return speculative == alone


def _measured(
    arm: str,
    own: Results,
    common: set[ProblemKey],
    completed: set[ProblemKey],
    target: Results | None,
    *,
    exact: bool,
) -> Measured:
    pairs = [(own[key].right, target[key].right) for key in common] if target else []
    return Measured(
        arm=arm,
        right=sum(own[key].right for key in common),
        problems=len(common),
        seconds=fmean(own[key].seconds for key in completed),
        wins=sum(mine and not theirs for mine, theirs in pairs),
        losses=sum(theirs and not mine for mine, theirs in pairs),
        exact=exact,
    )


def _notes(
    by_arm: Mapping[str, Results], common: set[ProblemKey], completed: set[ProblemKey]
) -> Iterator[str]:
    asked = max(map(len, by_arm.values()))
    if asked > len(common):
        behind = [f"{arm} {len(own)}" for arm, own in by_arm.items() if len(own) < asked]
        of = f", of {asked}: {listed(behind)}" if behind else ""
        yield f"Only {len(common)} problems have been attempted by every arm{of}."
    for arm, own in by_arm.items():
        failed = [own[key].error for key in common if own[key].error is not None]
        if len(failed) == len(common):
            yield f"{arm}: every attempt ended in an error ({failed[0]}); left out."
        elif failed:
            yield f"{arm}: {len(failed)} attempts ended in an error and count as wrong."
    if len(completed) < len(common):
        of = f"{len(completed)} of {len(common)} problems"
        yield f"Times are over what every arm has completed, {of}."


def _against(each: Measured) -> str:
    """Return an arm's difference to the target in words."""
    ends = between(each.interval, points).strip()
    return f"its accuracy differs from the target's by {points(each.difference)} points {ends}"


def _why_not(each: Measured, tolerance_points: float) -> str:
    is_faster = f"{each.arm} takes {each.seconds:.2f} s, but {_against(each)}"
    needed = each.needed(tolerance_points / 100)
    if needed is None:
        return (
            f"{is_faster}, so far no less than {tolerance_points:g} points below: more problems "
            "would help only if it did better on them."
        )
    return (
        f"{is_faster}: {each.problems} problems are too few to say that it is less than "
        f"{tolerance_points:g} points below. If it goes on like this, {needed} would show it."
    )
