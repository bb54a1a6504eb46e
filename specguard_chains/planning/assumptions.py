"""The settings that a plan compares where nothing is recorded, and what it assumes of them."""

from __future__ import annotations

from typing import Literal

from specguard_chains.options import SpecGuardOptions, drafts_one_first
from specguard_chains.planning.costs import PairCosts
from specguard_chains.planning.pausing import paced
from specguard_chains.planning.settings import Acceptance, Setting, Speculating, Workload

RATE = 0.5
"""Of drafted steps, accepted."""
DRAFTED_OF_REJECTED = 0.6
"""Of a rejected step that is given up early."""
SALVAGED = 0.3
"""Of the step that replaces it."""
TOKEN_RATE = 0.7
"""Of tokens that speculative decoding proposes."""

TARGET = Setting(label="target", method="target")
DRAFT = Setting(label="draft", method="draft")


def assumed_settings(
    options: SpecGuardOptions,
    costs: PairCosts,
    rate: float = RATE,
    workload: Workload | None = None,
) -> list[Setting]:
    """Return the settings that are to choose from, if a share of all drafted steps is accepted."""
    judge, k = options.verify_with, options.num_candidates
    one_first = drafts_one_first(k, options.doubt_margin, options.target_confidence)
    seen = looks(judge, costs, early=options.early_rejection, at_once=1)
    early = options.early_rejection and (judge == "draft" or seen)
    sizes = workload or Workload()
    whole = _acceptance(options, costs, rate, sizes)
    part = DRAFTED_OF_REJECTED if early else 1.0
    specguard = Setting(
        label="specguard-greedy",
        method="specguard",
        target_candidates=1,
        verify_with=judge,
        looks=seen,
        attention_of=attention_of(options.confidence_weight, judge, costs),
        acceptance=_given_up_after(part, whole),
    )
    settings = [TARGET, DRAFT, specguard]
    if k > 1:
        sampled: dict[str, object] = {
            "label": f"specguard, {k} candidates",
            "candidates": k,
            "target_candidates": options.num_target_candidates,
            "one_first": one_first,
            "drafted_candidates": 1 + _doubtful(options) * (k - 1) if one_first else k,
        }
        if not one_first and judge == "target":  # all of them are complete before one is read
            sampled |= {"looks": False, "acceptance": whole}
        settings.append(specguard.model_copy(update=sampled))
    rival = options.model_copy(update={"decoder": "rsd"})
    settings.append(
        Setting(label="rsd", method="rsd", acceptance=_acceptance(rival, costs, rate, sizes))
    )
    return [*settings, *assumed_speculation(options, costs)]


def _acceptance(
    options: SpecGuardOptions, costs: PairCosts, rate: float, workload: Workload
) -> Acceptance:
    """Return how verification goes if rejected steps are drafted to the end."""
    steps = round(workload.steps)
    kept, drafted = paced(rate, options.pacing(), steps)
    undrafted = (steps - drafted) / (steps - kept) if drafted < steps else 0.0
    return Acceptance(
        rate=kept / steps,
        drafted_of_rejected=1 - undrafted,
        salvaged=(1 - undrafted) * SALVAGED if options.salvage and costs.target.logits else 0.0,
        undrafted=undrafted,
    )


def _given_up_after(part: float, acceptance: Acceptance) -> Acceptance:
    """Return an acceptance where so much of a rejected step is drafted."""
    drafted = part * acceptance.drafted_of_rejected
    return acceptance.model_copy(update={"drafted_of_rejected": drafted})


def looks(
    judge: Literal["draft", "target"], costs: PairCosts, *, early: bool, at_once: int
) -> bool:
    """Return whether the target reads a step while the draft writes it.

    It does so for early rejection, if one candidate is drafted at a time, by a model of this
    process whose tokens are its own.
    """
    together = costs.same_vocabulary and costs.draft.logits
    return judge == "target" and early and at_once == 1 and together


def _doubtful(options: SpecGuardOptions) -> float:
    """Return the share of steps that are doubtful if scores are spread evenly from 0 to 1."""
    return min(2 * options.doubt_margin, 1.0)


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
        said.append(_judging_in_words(judging))
    if any(each.assumed and each.speculating for each in settings):
        said.append(
            f"Assumed, not measured: {TOKEN_RATE:.0%} of the tokens that speculative decoding "
            "proposes are accepted."
        )
    return said


def _judging_in_words(judging: list[Setting]) -> str:
    first = judging[0].acceptance
    assert first is not None
    drafted = 1 - first.undrafted
    paused = doubted = ""
    if first.undrafted:
        paused = (
            f"; after rejections the target goes on alone (patience), so that "
            f"{first.rate:.0%} of the answer's steps are the draft's and "
            f"{first.undrafted:.0%} of the target's are not drafted"
        )
    doubts = [each for each in judging if each.one_first and each.drafted_candidates]
    if doubts and (one := doubts[0]).drafted_candidates:
        share = (one.drafted_candidates - 1) / (one.candidates - 1)
        doubted = f"; {share:.0%} of the steps are in doubt, and more candidates are drafted"
    return (
        f"Assumed, not measured: {first.of_drafted:.0%} of the drafted steps are accepted, whoever "
        f"judges them, independently of each other{paused}{doubted}; a rejected step is given up "
        f"after {first.drafted_of_rejected / drafted:.0%} of its tokens (rsd drafts it to the end),"
        f" and {first.salvaged / drafted:.0%} of the tokens that replace it were drafted right. "
        "--results takes these figures from a run of specguard bench."
    )
