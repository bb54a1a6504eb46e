"""Which recorded arm meets a stated goal: as accurate as the target, or within so many seconds.

Unlike `advice`, which predicts time, this looks at answers that were recorded: how often each arm
of a run is right, and how long it took. Several thresholds in one run are several arms, and the
choice among them calibrates the threshold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specguard_chains.errors import EvaluationError
from specguard_chains.evaluation.wording import between, points
from specguard_chains.planning.compared import Compared, Measured

TOLERANCE_POINTS = 5.0
"""By which accuracy may be below the target's. If both are right on the same problems, 73 of them
show that much; 2 points would take 189."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What to take."""

    arm: str
    met: bool
    """Whether it meets the goal."""
    reason: str
    others: tuple[str, ...] = ()
    """Why others that are faster are not taken, a sentence each."""


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
