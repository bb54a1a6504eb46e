"""How verification goes, from recorded runs of `specguard bench`.

A recorded score can be held against another threshold. What the run has not seen stays unknown:

    higher    Rejects what had been accepted below it. Known, but that such a step is drafted as far
              as rejected steps were, and that the steps after it are the same.
    lower     Accepts steps that were rejected. Of a step that was given up early only an upper
              bound of the score is known, and of one that was not drafted (`patience`) nothing, so
              that there is nothing to go by; a run with early_rejection=off and without patience
              knows all scores.

Shares are taken over the steps of all answers that are complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from specguard_chains.decoding.steps import Source
from specguard_chains.errors import EvaluationError
from specguard_chains.evaluation.results import Result, StepResult
from specguard_chains.planning.recorded import (
    Shape,
    candidates_of,
    pending_of,
    prompt_read,
    salvaged_tokens,
)
from specguard_chains.planning.settings import Acceptance, Speculating, Workload


@dataclass(frozen=True, slots=True)
class Recorded:
    """The complete answers of an arm that judges steps."""

    results: tuple[Result, ...]
    shape: Shape = field(default_factory=Shape)

    @classmethod
    def of(cls, results: Sequence[Result], shape: Shape | None = None) -> Recorded:
        """Take the answers of an arm that are complete.

        Raises:
            EvaluationError: There are none.
        """
        complete = tuple(result for result in results if result.error is None and result.steps)
        if not complete:
            raise EvaluationError(
                "the run has no complete answer of this arm; let `specguard bench` go on"
            )
        return cls(complete, shape or Shape())

    @property
    def steps(self) -> list[StepResult]:
        """Every step of every answer."""
        return [step for result in self.results for step in result.steps]

    @property
    def threshold(self) -> float | None:
        """The threshold of the run; None if it has none, or several."""
        found = {step.threshold for step in self.steps if step.threshold is not None}
        return found.pop() if len(found) == 1 else None

    @property
    def given_up(self) -> int:
        """How many steps were rejected early."""
        return sum(step.rejected_early for step in self.steps)

    @property
    def paused(self) -> int:
        """How many steps were not drafted, as too many before them were rejected."""
        return sum(int(result.metrics.get("num_paused_steps", 0)) for result in self.results)

    @property
    def candidates(self) -> int:
        """How many candidates were drawn at a time, at most."""
        return max(map(candidates_of, self.results))

    @property
    def drafted_candidates(self) -> float:
        """How many of them the draft drew at a time, on the average."""
        drawn = [step.num_candidates for step in self.steps if step.drafted]
        return fmean(drawn) if drawn else 1.0

    def workload(self) -> Workload:
        """Return the sizes of the answers, on the average."""
        tokens = [result.tokens for result in self.results]
        return Workload(
            prompt_tokens=fmean(prompt_read(result, self.shape) for result in self.results),
            answer_tokens=fmean(tokens),
            step_tokens=sum(tokens) / len(self.steps),
        )

    def knows(self, threshold: float) -> bool:
        """Whether it is known which steps pass a threshold."""
        own = self.threshold
        return own is not None and (threshold >= own or not (self.given_up or self.paused))

    def acceptance(self, threshold: float | None = None) -> Acceptance:
        """Return how verification goes, at the run's own threshold or at another one.

        Raises:
            EvaluationError: The run does not know the scores that decide at that threshold.
        """
        if threshold is not None and not self.knows(threshold):
            raise EvaluationError(self.unknown(threshold))
        kept = [[self._passes(step, threshold) for step in r.steps] for r in self.results]
        every = [passes for of_answer in kept for passes in of_answer]
        rejected = [step for step in self.steps if step.source == Source.TARGET]
        tokens = sum(step.answer_tokens for step in rejected)
        drafted = sum(step.drafted / (step.num_candidates or 1) for step in rejected)
        written = sum(step.regenerated for step in rejected)
        right = sum(map(salvaged_tokens, self.results))
        return Acceptance(
            rate=fmean(every),
            length=_length(self.steps, every),
            drafted_of_rejected=drafted / tokens if tokens else 1.0,
            salvaged=min(right / written, 1.0) if written else 0.0,
            undrafted=_undrafted(rejected),
            untouched=fmean(map(all, kept)),
        )

    def _passes(self, step: StepResult, threshold: float | None) -> bool:
        """Whether the draft's step is kept."""
        kept = step.source == Source.DRAFT
        own = self.threshold
        if threshold is None or own is None or step.score is None:
            return kept
        if threshold >= own:
            return kept and step.score >= threshold
        # One that was rejected in spite of its score was the target's to write.
        return kept or threshold <= step.score < own

    def unknown(self, threshold: float) -> str:
        """Return in words why it is not known which steps pass a threshold."""
        if self.threshold is None:
            return f"the run has no threshold to compare {threshold:g} with; plan for it as it is"
        return (
            f"which steps pass the threshold {threshold:g} is not known: of {len(self.steps)} "
            f"steps {self.given_up} were given up early at {self.threshold:g}, so that only upper "
            f"bounds of their scores are recorded, and {self.paused} were not drafted; record a "
            "run with early_rejection=off and without patience"
        )


def _length(steps: Sequence[StepResult], passes: Sequence[bool]) -> float:
    """Return the tokens of a step that passes, as a share of those of one that does not."""
    lengths: tuple[list[int], list[int]] = ([], [])
    for step, passed in zip(steps, passes, strict=True):
        lengths[passed].append(step.answer_tokens)
    rejected, accepted = lengths
    if not (any(rejected) and any(accepted)):
        return 1.0
    return fmean(accepted) / fmean(rejected)


def _undrafted(rejected: Sequence[StepResult]) -> float:
    """Return which share of the target's steps was not drafted, one at least counted as drafted."""
    n = len(rejected)
    return min(sum(not step.drafted for step in rejected), n - 1) / n if n else 0.0


def speculating_of(results: Sequence[Result]) -> Speculating:
    """Return how a recorded run of speculative decoding has gone.

    Raises:
        EvaluationError: It has no complete answer, or nothing was proposed in it.
    """
    complete = Recorded.of(results).results
    sums = [
        sum(result.metrics[name] for result in complete)
        for name in ("num_target_passes", "num_draft_tokens")
    ]
    passes, drafted = sums
    if not (passes and drafted):
        raise EvaluationError("nothing was drafted in this run; record one of speculative decoding")
    return Speculating(
        drafted=drafted / passes,
        tokens_per_pass=max(sum(result.tokens for result in complete) / passes, 1.0),
        pending=fmean(map(pending_of, complete)),
    )
