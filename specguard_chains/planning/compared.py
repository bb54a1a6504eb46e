"""The recorded arms of a run that can be chosen, side by side over the same problems.

All are compared over the problems that each of them has attempted; an attempt that ended in an
error counts as wrong. Times are compared over the problems that each of them has completed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean

from specguard_chains.errors import EvaluationError
from specguard_chains.evaluation.arms import CONTROLS, ORACLE
from specguard_chains.evaluation.figures import ProblemKey, Results, discordant, timed_apart
from specguard_chains.evaluation.paired_shares import (
    difference_interval,
    is_above,
    problems_needed,
)
from specguard_chains.evaluation.summary import Run
from specguard_chains.evaluation.wording import listed

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
    notes = *_notes(by_arm, common, completed), *_timed_apart(answering, completed, run.target)
    return Compared(len(common), run.target, tuple(arms), notes)


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
    alone = own if target is None else target
    wins, losses = discordant(*([each[key].right for key in common] for each in (own, alone)))
    return Measured(
        arm=arm,
        right=sum(own[key].right for key in common),
        problems=len(common),
        seconds=fmean(own[key].seconds for key in completed),
        wins=wins,
        losses=losses,
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


def _timed_apart(
    by_arm: Mapping[str, Results], completed: set[ProblemKey], target: str | None
) -> Iterator[str]:
    beside = target if target is not None and target in by_arm else next(iter(by_arm))
    for arm, own in by_arm.items():
        times, n = timed_apart({key: own[key] for key in completed}, by_arm[beside])
        if times:
            yield (
                f"{arm} was timed apart from {beside} on {times} of {n} problems: the machine may "
                "have been faster or slower then."
            )
