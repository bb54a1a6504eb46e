"""The settings that a plan compares where nothing is recorded, and what it assumes of them."""

from __future__ import annotations

from typing import Literal

from specguard_chains.options import SpecGuardOptions
from specguard_chains.planning.costs import PairCosts
from specguard_chains.planning.settings import Acceptance, Setting, Speculating

RATE = 0.5
"""Of steps, accepted."""
DRAFTED_OF_REJECTED = 0.6
"""Of a rejected step that is given up early."""
SALVAGED = 0.3
"""Of the step that replaces it."""
TOKEN_RATE = 0.7
"""Of tokens that speculative decoding proposes."""

TARGET = Setting(label="target", method="target")
DRAFT = Setting(label="draft", method="draft")


def assumed_settings(
    options: SpecGuardOptions, costs: PairCosts, rate: float = RATE
) -> list[Setting]:
    """Return the settings that are to choose from, if a share of all steps is accepted."""
    early = options.early_rejection and options.verify_with == "draft"
    salvaged = SALVAGED if options.salvage and costs.target.logits else 0.0
    acceptance = Acceptance(
        rate=rate, drafted_of_rejected=DRAFTED_OF_REJECTED if early else 1.0, salvaged=salvaged
    )
    specguard = Setting(
        label="specguard-greedy",
        method="specguard",
        verify_with=options.verify_with,
        attention_of=attention_of(options.confidence_weight, options.verify_with, costs),
        acceptance=acceptance,
    )
    settings = [TARGET, DRAFT, specguard]
    if (k := options.num_candidates) > 1:
        change = {"label": f"specguard, {k} candidates", "candidates": k}
        settings.append(specguard.model_copy(update=change))
    whole = acceptance.model_copy(update={"drafted_of_rejected": 1.0})
    settings.append(Setting(label="rsd", method="rsd", acceptance=whole))
    return [*settings, *assumed_speculation(options, costs)]


def assumed_speculation(options: SpecGuardOptions, costs: PairCosts) -> list[Setting]:
    """Return speculative decoding, if the pair can do it."""
    if not costs.can_speculate:
        return []
    speculating = Speculating.at(TOKEN_RATE, options.num_speculative_tokens)
    return [Setting(label="speculative", method="speculative", speculating=speculating)]


def attention_of(
    confidence_weight: float, verify_with: Literal["draft", "target"], costs: PairCosts
) -> Literal["draft", "target"] | None:
    """Return whose attention is read, None if none is or can be.

    That is the model whose confidence is judged, if it shows its attention, else the other one.
    """
    if confidence_weight == 1:
        return None
    measured = {"draft": costs.draft_with_attention, "target": costs.target_with_attention}
    other: Literal["draft", "target"] = "target" if verify_with == "draft" else "draft"
    for role in (verify_with, other):
        if measured[role] is not None:
            return role
    return None


def in_words(settings: list[Setting]) -> list[str]:
    """Return what is assumed of settings, a sentence each."""
    said = []
    judging = [each for each in settings if each.assumed and each.judges and each.acceptance]
    if judging:
        first = judging[0].acceptance
        assert first is not None
        said.append(
            f"Assumed, not measured: {first.rate:.0%} of the steps are accepted, whoever judges "
            f"them, independently of each other; a rejected step is given up after "
            f"{first.drafted_of_rejected:.0%} of its tokens (rsd drafts it to the end), and "
            f"{first.salvaged:.0%} of the target's tokens were drafted right. --results takes "
            "these figures from a run of specguard bench."
        )
    if any(each.assumed and each.speculating for each in settings):
        said.append(
            f"Assumed, not measured: {TOKEN_RATE:.0%} of the tokens that speculative decoding "
            "proposes are accepted."
        )
    return said
