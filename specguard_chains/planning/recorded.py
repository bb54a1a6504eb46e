"""Which passes a recorded answer has taken, from what a bench keeps of it (`evaluation.results`).

Steps say who wrote how many tokens, so that the order in which each model read what the other one
wrote follows. The sums of the answer's metrics give the rest: the prompt is what the draft (or the
only model) read beyond the target's steps; what the target read beyond the prompt, accepted steps
and those that it judged, it computed while it salvaged. A salvaged token counts as written, not as
read, so that one which had been read in order to judge the step takes nothing. The draft does not
read it again either. Not recorded are the sizes of blocks, see `work.BLOCK` and `work.LOOK`, and
how long each of several candidates was: the longest decides on the passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from specguard_chains.decoding.local import READ_BLOCK
from specguard_chains.decoding.steps import Source
from specguard_chains.evaluation.results import Result, StepResult
from specguard_chains.planning.costs import Kind
from specguard_chains.planning.work import (
    BLOCK,
    LOOK,
    Passes,
    Work,
    decode,
    proposing,
    read,
    verify,
)


@dataclass(frozen=True, slots=True)
class Shape:
    """The settings of an arm that decide which passes its counts stand for."""

    verify_with: Literal["draft", "target"] = "draft"
    attention_of: Literal["draft", "target"] | None = None
    target_candidates: int | None = None
    """That the target draws at a time; None takes the most that the draft has drawn."""
    one_first: bool = False
    """Whether the draft began with one candidate and drew the others in doubt."""
    looks: bool = False
    """Whether the target, as the judge, has read steps while they were drafted."""

    def rewrites(self, result: Result) -> int:
        """Return how many candidates the target has drawn at a time."""
        return self.target_candidates or candidates_of(result)

    def was_read(self, step: StepResult) -> bool:
        """Whether the target has read what was drafted of a step before the verdict."""
        if self.verify_with == "target":
            return step.judged
        if step.target_confidence is not None:
            return True
        return self.attention_of == "target" and step.judged and not step.rejected_early


def work_of(result: Result, shape: Shape | None = None) -> Work:
    """Return the passes that a recorded answer has taken."""
    shape = shape or Shape()
    prompt = prompt_read(result, shape)
    if result.metrics["num_target_passes"]:
        return _speculative(result, prompt)
    return Work(
        draft=tuple(_draft(result, prompt, shape)),
        target=tuple(_target(result, prompt, shape)),
        draft_calls=sum(step.drafted > 0 for step in result.steps),
        target_calls=sum((step.regenerated > 0) + shape.was_read(step) for step in result.steps),
        draft_attention=shape.attention_of == "draft",
        target_attention=shape.attention_of == "target",
    )


def prompt_read(result: Result, shape: Shape | None = None) -> float:
    """Return how many tokens of the prompt were read, by the draft if it took part."""
    metrics, shape = result.metrics, shape or Shape()
    if passes := metrics["num_target_passes"]:  # each but the first reads one token more
        tokens = metrics["target_tokens_read"] - metrics["num_draft_tokens"] - (passes - 1)
    elif any(step.drafted for step in result.steps):
        tokens = metrics["draft_tokens_read"] - sum(_foreign_runs(result, shape))
    else:
        tokens = metrics["target_tokens_read"]
    return max(float(tokens), 0.0)


def salvaged_tokens(result: Result) -> int:
    """Return how many of the target's tokens the draft had right; older runs salvaged none."""
    return int(result.metrics.get("num_salvaged_tokens", 0))


def candidates_of(result: Result) -> int:
    """Return how many candidates were drawn at a time, at most: a draft may begin with one."""
    return max((step.num_candidates for step in result.steps), default=1) or 1


def _speculative(result: Result, prompt: float) -> Work:
    passes, drafted = (result.metrics[f"num_{what}"] for what in ("target_passes", "draft_tokens"))
    return Work(
        draft=proposing(prompt, pending_of(result), drafted / passes, passes),
        target=(read(prompt), Passes(Kind.VERIFY, 1 + drafted / passes, passes)),
    )


def pending_of(result: Result) -> float:
    """Return how many tokens the draft of speculative decoding has read before it proposed some.

    That is if it has proposed some in each pass; else it has read them all the same, but together.
    """
    tokens = result.metrics["draft_tokens_read"] - prompt_read(result)
    return max(float(tokens / result.metrics["num_target_passes"]), 1.0)


def _draft(result: Result, prompt: float, shape: Shape) -> Iterator[Passes]:
    if not any(step.drafted for step in result.steps):
        return
    yield read(prompt)
    for step in result.steps:
        k = step.num_candidates or 1
        if shape.one_first and k > 1:
            yield decode(step.drafted / k)
            yield decode(step.drafted / k, k - 1)
            continue
        chosen = step.answer_tokens if step.source == Source.DRAFT else step.drafted / k
        yield from _side_by_side(step.drafted, chosen, k)
    yield from map(read, _foreign_runs(result, shape))


def _side_by_side(tokens: float, chosen: float, k: int) -> Iterator[Passes]:
    """Yield the passes in which k candidates are written that have so many tokens together.

    Of their lengths only the chosen one's is known; the others are taken for equally long.
    """
    if k == 1 or not tokens:
        yield decode(tokens, k)
        return
    others = max(tokens - chosen, 0.0) / (k - 1)
    yield decode(min(chosen, others), k)
    yield decode(chosen - others, 1) if chosen > others else decode(others - chosen, k - 1)


def _foreign_runs(result: Result, shape: Shape) -> Iterator[float]:
    """Yield how many tokens of the target the draft reads at a time, before it drafts again.

    It holds those that it has drafted itself, but for the last one of a step that it gave up itself
    as soon as that was drawn.
    """
    pending, k = 0.0, shape.rewrites(result)
    for step in result.steps:
        if step.drafted and pending:
            yield pending
            pending = 0.0
        if step.source == Source.TARGET:
            uncomputed = step.rejected_early and shape.verify_with == "draft"
            held = step.drafted / (step.num_candidates or 1) - uncomputed
            pending += step.answer_tokens - min(step.salvaged / k, held)


def _target(result: Result, prompt: float, shape: Shape) -> Iterator[Passes]:
    """Yield the target's passes over what it reads, then those in which it writes."""
    k, known, pending = shape.rewrites(result), 0.0, prompt
    for step in result.steps:
        judged = shape.was_read(step)
        if pending and (judged or step.regenerated):
            known, waiting, pending = known + pending, pending, 0.0
            yield read(waiting)
        if judged:
            passes = list(_judged(step, shape))
            known += sum(each.size * each.times for each in passes)
            yield from passes
        elif step.source == Source.DRAFT:
            pending += step.answer_tokens
    written = sum(step.regenerated for step in result.steps)
    right = salvaged_tokens(result)
    alone = 1 - right / written if written else 1.0
    for step in result.steps:
        for each in _side_by_side(step.regenerated, step.answer_tokens, k):
            yield replace(each, times=alone * each.times)
    in_blocks = max(result.metrics["target_tokens_read"] + right / k - known, 0.0)
    yield Passes(Kind.VERIFY, BLOCK, in_blocks / BLOCK)


def _judged(step: StepResult, shape: Shape) -> Iterator[Passes]:
    """Yield the passes in which the target reads a step that was drafted."""
    k = step.num_candidates or 1
    tokens = step.drafted / k
    yield from verify(tokens, block=LOOK if shape.looks else READ_BLOCK)
    if shape.one_first and k > 1:  # the one that is selected in the end, if it is another
        yield from verify(tokens, (k - 1) / k)
