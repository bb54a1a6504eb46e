"""Which passes a recorded answer has taken, from what a bench keeps of it (`evaluation.results`).

Steps say who wrote how many tokens, so that the order in which each model read what the other one
wrote follows. The sums of the answer's metrics give the rest: the prompt is what the draft (or the
only model) read beyond the target's steps; what the target read beyond the prompt and accepted
steps was computed in vain while it salvaged. Not recorded are the sizes of salvaging blocks, see
`work.BLOCK`, and how long each of several candidates was: the longest decides on the passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from specguard_chains.decoding.steps import Source
from specguard_chains.evaluation.results import Result, StepResult
from specguard_chains.planning.costs import Kind
from specguard_chains.planning.work import BLOCK, Passes, Work, decode, read, verify


@dataclass(frozen=True, slots=True)
class Shape:
    """The settings of an arm that decide which passes its counts stand for."""

    verify_with: Literal["draft", "target"] = "draft"
    attention_of: Literal["draft", "target"] | None = None
    candidates: int | None = None
    """That the target draws at a time; None takes the most that the draft has drawn."""


def work_of(result: Result, shape: Shape | None = None) -> Work:
    """Return the passes that a recorded answer has taken."""
    shape = shape or Shape()
    prompt = prompt_read(result)
    if result.metrics["num_target_passes"]:
        return _speculative(result, prompt)
    return Work(
        draft=tuple(_draft(result, prompt)),
        target=tuple(_target(result, prompt, shape)),
        draft_calls=sum(step.drafted > 0 for step in result.steps),
        target_calls=sum(step.regenerated > 0 for step in result.steps),
        draft_attention=shape.attention_of == "draft",
        target_attention=shape.attention_of == "target",
    )


def prompt_read(result: Result) -> float:
    """Return how many tokens of the prompt were read, by the draft if it took part."""
    metrics = result.metrics
    if passes := metrics["num_target_passes"]:  # each but the first reads one token more
        tokens = metrics["target_tokens_read"] - metrics["num_draft_tokens"] - (passes - 1)
    elif any(step.drafted for step in result.steps):
        tokens = metrics["draft_tokens_read"] - sum(_foreign_runs(result.steps))
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
        draft=(read(prompt), decode(drafted)),
        target=(read(prompt), Passes(Kind.VERIFY, 1 + drafted / passes, passes)),
    )


def _draft(result: Result, prompt: float) -> Iterator[Passes]:
    if not any(step.drafted for step in result.steps):
        return
    yield read(prompt)
    for step in result.steps:
        k = step.num_candidates or 1
        chosen = step.answer_tokens if step.source == Source.DRAFT else step.drafted / k
        yield from _side_by_side(step.drafted, chosen, k)
    yield from map(read, _foreign_runs(result.steps))


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


def _foreign_runs(steps: Iterable[StepResult]) -> Iterator[int]:
    """Yield how many tokens of the target the draft reads at a time, before it drafts again."""
    pending = 0
    for step in steps:
        if step.drafted and pending:
            yield pending
            pending = 0
        if step.source == Source.TARGET:
            pending += step.answer_tokens


def _target(result: Result, prompt: float, shape: Shape) -> Iterator[Passes]:
    """Yield the target's passes over what it reads, then those in which it writes."""
    k, was_read, pending = shape.candidates or candidates_of(result), 0.0, prompt
    for step in result.steps:
        judged = shape.verify_with == "target" and step.judged and not step.rejected_early
        if pending and (judged or step.regenerated):
            was_read, waiting, pending = was_read + pending, pending, 0.0
            yield read(waiting)
        if judged:
            chosen = step.drafted / (step.num_candidates or 1)
            was_read += chosen
            yield from verify(chosen)
        elif step.source == Source.DRAFT:
            pending += step.answer_tokens
    written = sum(step.regenerated for step in result.steps)
    right = salvaged_tokens(result)
    alone = 1 - right / written if written else 1.0
    for step in result.steps:
        for each in _side_by_side(step.regenerated, step.answer_tokens, k):
            yield replace(each, times=alone * each.times)
    if right:
        in_vain = max(result.metrics["target_tokens_read"] - was_read, 0.0)
        yield Passes(Kind.VERIFY, BLOCK, (right / k + in_vain) / BLOCK)
