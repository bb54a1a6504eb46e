"""Figures of one arm: how often it is right, how long it takes, and how verification went.

An attempt that ended in an error counts as wrong. Its seconds say nothing about the time that an
answer takes, so that figures of time are those of complete answers. An arm is compared with another
one over the problems that both have attempted, and in time over those that both have answered in
turns: a machine is not always equally fast, so that an arm that was added later is timed on the
problems that came after it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import fmean
from typing import Any

from specguard_chains.decoding.steps import FinishReason
from specguard_chains.evaluation.paired_shares import difference_interval
from specguard_chains.evaluation.results import Result, StepResult
from specguard_chains.evaluation.statistics import mcnemar_p, ratio_of_sums, wilson_interval

ProblemKey = tuple[str, str]
"""Data set and problem."""
Results = Mapping[ProblemKey, Result]
"""An arm's results, in the order of the problems."""
Figures = dict[str, Any]
Pairs = Sequence[tuple[Result, Result]]

PARTS = ("draft", "verify", "select", "target")
"""What an arm's seconds are spent on, as far as it is recorded."""
RESAMPLES = 2_000
"""Enough for the ends of an interval to be sure to 0.35 points of its confidence."""
TURN_S = 1800.0
"""Results of a problem that began within this time of each other were written in turns."""


def figures_of(results: Results, target: Results | None = None) -> Figures:
    """Return the figures of an arm that has results.

    Args:
        results: Of the arm.
        target: Of the target alone, which the arm is compared with; None if it did not take part.
    """
    every = list(results.values())
    return {
        **_accuracy(every),
        **_against(results, target),
        **_time(every),
        **_time_ratio(results, target),
        **_verification(every),
        "peak_rss_mb": max(result.peak_rss_mb for result in every),
    }


def control_figures(control: Results, label: str, controlled: Results) -> Figures:
    """Return how well a control is matched, and by how much the arm that it controls is better.

    Args:
        control: Results of the control.
        label: Of the arm that it controls.
        controlled: Results of that arm.
    """
    pairs = _pairs(controlled, control)
    gain = _between(controlled, control)
    return {
        "of": label,
        "n": gain["pairs"],
        "acceptance_by_step": acceptance([own for _, own in pairs]),
        "acceptance_of_controlled": acceptance([theirs for theirs, _ in pairs]),
        "gain": gain["difference"],
        "gain_interval": gain["difference_interval"],
        "mcnemar_p": gain["mcnemar_p"],
    }


def pairwise_figures(results: Mapping[str, Results]) -> Figures:
    """Return each arm beside every other one: {arm: {other: figures}}."""
    return {
        arm: {
            other: {**_between(own, theirs), **_time_ratio(own, theirs)}
            for other, theirs in results.items()
            if other != arm
        }
        for arm, own in results.items()
    }


def timed_apart(results: Results, other: Results) -> tuple[int, int]:
    """Return on how many problems two arms were not timed in turns, and how many both answered."""
    pairs = _answered(results, other)
    return sum(not _in_turns(*pair) for pair in pairs), len(pairs)


def judged_steps(results: Collection[Result]) -> list[StepResult]:
    """Return the steps that the decoder has verified."""
    return [step for result in results for step in result.steps if step.judged]


def acceptance(results: Collection[Result]) -> float | None:
    """Return the accepted share of the judged steps."""
    judged = judged_steps(results)
    return _share(sum(step.accepted for step in judged), len(judged))


def _accuracy(results: Sequence[Result]) -> Figures:
    n, correct = len(results), sum(result.right for result in results)
    return {
        "n": n,
        "correct": correct,
        "accuracy": correct / n,
        "accuracy_interval": wilson_interval(correct, n),
        "errors": sum(result.error is not None for result in results),
        "checker_timeouts": sum(result.timed_out for result in results),
        "cut_by_length": sum(result.finish_reason == FinishReason.LENGTH for result in results),
    }


def _against(results: Results, target: Results | None) -> Figures:
    """Return how an arm compares with the target, which is not compared with itself."""
    both = _between(results, target or {})
    itself = results is target
    return {
        "pairs": both["pairs"],
        "only_right": both["only_right"],
        "only_target_right": both["only_other_right"],
        "difference_to_target": both["difference"],
        "difference_interval": None if itself else both["difference_interval"],
        "mcnemar_p": None if itself else both["mcnemar_p"],
    }


def _between(one: Results, other: Results) -> Figures:
    """Return how often an arm is right where another one is not, and the other way round."""
    pairs = _pairs(one, other)
    right, others = _rights(pairs)
    wins, losses = discordant(right, others)
    return {
        "pairs": len(pairs),
        "only_right": wins,
        "only_other_right": losses,
        "difference": _share(wins - losses, len(pairs)),
        "difference_interval": difference_interval(wins, losses, len(pairs)),
        "mcnemar_p": mcnemar_p(right, others),
    }


def _time(results: Sequence[Result]) -> Figures:
    """Return means over the problems that were answered."""
    answered = [result for result in results if result.error is None]
    total, tokens = (sum(getattr(r, name) for r in answered) for name in ("seconds", "tokens"))
    spent = {part: _mean([_seconds(result, part) for result in answered]) for part in PARTS}
    seconds = _mean([result.seconds for result in answered])
    rest = None if seconds is None else seconds - sum(part or 0.0 for part in spent.values())
    per_token = _share(total, tokens)
    return {
        "seconds": seconds,
        "ms_per_token": None if per_token is None else 1000 * per_token,
        "seconds_by": {**spent, "other": rest},
        "answer_tokens": _mean([result.tokens for result in answered]),
        "steps": _mean([len(result.steps) for result in answered]),
    }


def _time_ratio(results: Results, target: Results | None) -> Figures:
    pairs = [pair for pair in _answered(results, target or {}) if _in_turns(*pair)]
    ratio = ratio_of_sums(
        [own.seconds for own, _ in pairs],
        [theirs.seconds for _, theirs in pairs],
        resamples=RESAMPLES,
    )
    return {
        "timed_pairs": len(pairs),
        "time_ratio": ratio.value if ratio else None,
        "time_ratio_interval": None if ratio is None or results is target else ratio.interval,
    }


def _in_turns(one: Result, other: Result) -> bool:
    """Whether the machine was the same for both, as far as that is recorded."""
    if one.started is None or other.started is None:
        return one.started == other.started
    return abs(one.started - other.started) < TURN_S


def _verification(results: Sequence[Result]) -> Figures:
    """Return counts over all that was written, also before an error."""
    steps = [step for result in results for step in result.steps]
    judged = judged_steps(results)
    drafted, kept, regenerated = (
        sum(getattr(step, name) for step in steps) for name in ("drafted", "kept", "regenerated")
    )
    return {
        "judged_steps": len(judged),
        "accepted_steps": sum(step.accepted for step in judged),
        "early_rejections": sum(step.rejected_early for step in steps),
        "acceptance_by_step": acceptance(results),
        "acceptance_by_token": (
            _share(kept, sum(result.tokens for result in results)) if drafted else None
        ),
        "tokens": {"drafted": drafted, "kept": kept, "regenerated": regenerated},
    }


def _seconds(result: Result, part: str) -> float:
    return sum(step.seconds.get(part, 0.0) for step in result.steps)


def _pairs(one: Results, other: Results) -> Pairs:
    """Return both results of each problem that both have attempted."""
    return [(result, other[key]) for key, result in one.items() if key in other]


def _answered(one: Results, other: Results) -> Pairs:
    """Return both results of each problem that both have answered."""
    return [(a, b) for a, b in _pairs(one, other) if a.error is None and b.error is None]


def _rights(pairs: Pairs) -> tuple[list[bool], list[bool]]:
    return [one.right for one, _ in pairs], [other.right for _, other in pairs]


def discordant(one: Sequence[bool], other: Sequence[bool]) -> tuple[int, int]:
    """Return how many problems only the first has right, and how many only the second."""
    pairs = list(zip(one, other, strict=True))
    return sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs)


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
