"""Controls: verifiers that know nothing, matched to the acceptance rate of one that should.

A signal that does not beat acceptance at random, or by length alone, at the same rate is worth
nothing. The rate is the accepted share of the judged steps of the controlled arm, over the problems
of the same data set up to the one at hand: the controls depend on nothing that comes later, and a
run that was interrupted goes on as if it had not been.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil

from specguard_chains.errors import EvaluationError
from specguard_chains.evaluation.arms import LENGTH, Arm
from specguard_chains.evaluation.results import Result, StepResult

ENOUGH_STEPS = 50
"""From so many judged steps of its own, a control by length needs no other lengths to go by."""


@dataclass(frozen=True, slots=True)
class History:
    """What has been recorded so far on the data set of the problem at hand."""

    controlled: Sequence[Result]
    """Of the arm that is controlled, with the problem at hand."""
    own: Sequence[Result]
    """Of the control, on earlier problems."""
    drafts: Sequence[Result] = ()
    """Of the draft alone, with the problem at hand."""


def matched(control: Arm, history: History) -> dict[str, float | int]:
    """Return the option by which a control accepts as large a share as the arm that it controls.

    Raises:
        EvaluationError: That arm has judged no step yet.
    """
    judged = _judged(history.controlled)
    if not judged:
        raise EvaluationError(
            f"{control.label} cannot be matched: {control.controls} has judged no step yet"
        )
    rate = sum(step.accepted for step in judged) / len(judged)
    if control.options.decoder == LENGTH:
        return {"max_accepted_tokens": longest_accepted(rate, history.own, history.drafts)}
    return {"acceptance_rate": rate}


def longest_accepted(rate: float, own: Sequence[Result], drafts: Sequence[Result]) -> int:
    """Return the length up to which steps are accepted, in tokens, so that `rate` of them are.

    What the draft writes after its own steps is not as long as what it writes after the target's,
    so the lengths of its solutions only help until the control has seen enough of its own. Many
    steps are equally long: no length accepts exactly `rate` of them. The longest that accepts at
    most this share and the shortest that accepts at least it take turns, as the share of all
    earlier steps is too high or too low.
    """
    judged = _judged(own)
    lengths = [_drafted_tokens(step) for step in judged]
    if len(judged) < ENOUGH_STEPS:
        lengths += [step.answer_tokens for result in drafts for step in result.steps]
    lengths.sort()
    # One that is not known counts as longer than any: without lengths, nothing is accepted.
    too_few = sum(step.accepted for step in judged) < rate * len(judged)
    if too_few:
        return lengths[max(ceil(rate * len(lengths)), 1) - 1] if lengths else 0
    within = [n for n in dict.fromkeys(lengths) if bisect_right(lengths, n) <= rate * len(lengths)]
    return max(within, default=0)


def _judged(results: Iterable[Result]) -> list[StepResult]:
    return [step for result in results for step in result.steps if step.judged]


def _drafted_tokens(step: StepResult) -> int:
    """Return the length of the step that was judged; of a rejected one among several, the mean."""
    return step.kept if step.accepted else round(step.drafted / max(step.num_candidates, 1))
