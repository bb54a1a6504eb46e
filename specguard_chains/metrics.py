"""What one request has cost and how verification went, summed over its steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specguard_chains.decoding.steps import Source, Step, Verdict


@dataclass(frozen=True, slots=True)
class Metrics:
    """Speculative counters of a request, named like vLLM's where vLLM has the figure."""

    num_steps: int
    num_drafts: int
    """Steps that were drafted and judged."""
    num_accepted_steps: int
    num_draft_tokens: int
    """Tokens that the draft sampled, over all candidates."""
    num_accepted_tokens: int
    """Of these, the ones that are in the answer."""
    num_regenerated_tokens: int
    """Tokens that the target sampled, over all candidates."""
    num_salvaged_tokens: int
    """Of these, the ones that the rejected steps had right: computed several at a time. With
    speculate_rewrites also proposed ones."""
    num_proposed_tokens: int
    """Tokens proposed to the target while it wrote steps of its own (speculate_rewrites)."""
    num_early_rejections: int
    """Drafted steps that were rejected before they were complete."""
    num_paused_steps: int
    """Steps of which nothing was drafted: after rejections, or as answers were too slow."""
    acceptance_rate: float | None
    """Accepted of judged steps; None where the decoder does not verify."""
    steps_by_source: dict[str, int]
    num_target_passes: int
    """Passes in which the target wrote (speculative decoding)."""
    mean_accepted_length: float | None
    """Tokens per such pass of the steps written so; None without speculative decoding."""
    draft_tokens_read: int
    """Tokens that the draft read without writing them: prompt and foreign steps."""
    target_tokens_read: int
    draft_tokens_reused: int
    """Prompt tokens that the draft had cached from an earlier request."""
    target_tokens_reused: int
    draft_seconds: float
    verify_seconds: float
    select_seconds: float
    target_seconds: float

    @classmethod
    def of(cls, steps: Sequence[Step]) -> Metrics:
        """Sum up the steps of one request."""
        judged = [step for step in steps if step.verdict is not Verdict.UNVERIFIED]
        accepted = [step for step in judged if step.verdict is Verdict.ACCEPTED]
        sources = Counter(str(step.source) for step in steps)
        passes = sum(step.tokens.target_passes for step in steps)
        return cls(
            num_steps=len(steps),
            num_drafts=len(judged),
            num_accepted_steps=len(accepted),
            num_draft_tokens=sum(step.tokens.drafted for step in steps),
            num_accepted_tokens=sum(step.tokens.kept for step in steps),
            num_regenerated_tokens=sum(step.tokens.regenerated for step in steps),
            num_salvaged_tokens=sum(step.tokens.salvaged for step in steps),
            num_proposed_tokens=sum(step.tokens.proposed for step in steps),
            num_early_rejections=sum(step.rejected_early for step in steps),
            num_paused_steps=sum(step.paused for step in steps),
            acceptance_rate=len(accepted) / len(judged) if judged else None,
            steps_by_source={str(source): sources[str(source)] for source in Source},
            num_target_passes=passes,
            mean_accepted_length=(
                sum(s.answer_tokens for s in steps if s.tokens.target_passes) / passes
                if passes
                else None
            ),
            draft_tokens_read=sum(step.tokens.draft_read for step in steps),
            target_tokens_read=sum(step.tokens.target_read for step in steps),
            draft_tokens_reused=sum(step.tokens.draft_reused for step in steps),
            target_tokens_reused=sum(step.tokens.target_reused for step in steps),
            draft_seconds=sum(step.seconds.draft for step in steps),
            verify_seconds=sum(step.seconds.verify for step in steps),
            select_seconds=sum(step.seconds.select for step in steps),
            target_seconds=sum(step.seconds.target for step in steps),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        return asdict(self)
