"""Settings as a run of `specguard bench` has recorded them, and whether costs explain its times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import BaseModel, ConfigDict

from specguard_chains.decoding.sampling import Sampling
from specguard_chains.errors import EvaluationError
from specguard_chains.evaluation.results import Result
from specguard_chains.evaluation.summary import Run
from specguard_chains.options import SPECGUARD, SpecGuardOptions, drafts_one_first
from specguard_chains.planning.acceptance import Recorded, speculating_of
from specguard_chains.planning.assumptions import (
    DRAFT,
    TARGET,
    attention_of,
    looks,
)
from specguard_chains.planning.costs import PairCosts
from specguard_chains.planning.model import predict
from specguard_chains.planning.recorded import Shape, work_of
from specguard_chains.planning.settings import Method, Setting, Workload
from specguard_chains.planning.work import seconds_of

METHODS: dict[str, Method] = {
    "specguard": "specguard",
    "specguard-greedy": "specguard",
    "rsd": "rsd",
    "speculative": "speculative",
    "target": "target",
    "draft": "draft",
}
"""Decoders whose costs can be told from counts, and how they work."""
UNPLANNED = {
    "speculate_rewrites": "its target's speculative decoding is not in a plan",
    "max_slowdown": "what it drafts goes by the clock, and a plan is to tell the time",
}
"""Options of SpecGuard with which they cannot, and why."""
LATER: dict[str, Any] = {
    "num_target_candidates": None,
    "target_confidence": None,
    "doubt_margin": None,
}
"""Options that runs may be older than, and the values that stand for what these did."""
THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.9)
"""That recorded scores are held against, as far as they tell."""


class Check(BaseModel):
    """A recorded time beside the one that the recorded counts amount to."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    arm: str
    answers: int
    measured_s: float
    """Mean seconds of an answer."""
    counted_s: float
    """By the counts of each answer."""
    predicted_s: float
    """By this arm's mean acceptance and sizes alone, as a plan does it."""

    def deviation(self, seconds: float) -> float:
        """Return by how much some seconds miss those that were measured, as a share of these."""
        return seconds / self.measured_s - 1


@dataclass(frozen=True, slots=True)
class FromResults:
    """What a run says."""

    settings: list[Setting]
    workload: Workload
    checks: list[Check]
    notes: list[str]


def read_run(folder: Path, costs: PairCosts) -> FromResults:
    """Return the settings of a run, at its thresholds and others, and the sizes of its answers.

    The sizes are those of the first arm that judges steps, or else of the first one.

    Raises:
        EvaluationError: There are no results, or none that say anything.
    """
    run = Run.read(folder)
    complete = {
        arm: [result for result in results.values() if result.error is None and result.steps]
        for arm, results in run.by_arm().items()
        if run.decoder(arm) in METHODS and not _unplanned(run, arm)
    }
    arms = {arm: results for arm, results in complete.items() if results}
    if not arms:
        raise EvaluationError(
            f"{folder} has no complete answer of {', '.join(METHODS)}; let `specguard bench` go on"
        )
    settings, notes, checks = [TARGET, DRAFT], [], []
    for arm in run.arms:
        if run.decoder(arm) == "speculative" and not costs.can_speculate:
            notes.append(f"{arm}: this pair has not got one vocabulary and logits; left out.")
            continue
        if run.decoder(arm) == "speculative" and _option(run, arm, "speculate_with") == "prompt":
            notes.append(f"{arm}: a plan is of pairs, and this arm has no draft; left out.")
            continue
        if why := _unplanned(run, arm):
            notes.append(f"{arm}: {why}; left out.")
            continue
        if arm not in arms:
            notes.append(f"{arm}: nothing can be told from its counts; left out.")
            continue
        found, said = _settings(run, arm, arms[arm], costs)
        notes += said
        settings += [] if found[0] in (TARGET, DRAFT) else found
        checks.append(_check(run, found[0], arm, arms[arm], costs))
    judging = [arm for arm in arms if METHODS[run.decoder(arm)] in ("specguard", "rsd")]
    sizes_of = (judging or list(arms))[0]
    notes.append(f"The sizes of answers are those of {sizes_of}, {len(arms[sizes_of])} answers.")
    workload = Recorded.of(arms[sizes_of], _shape(run, sizes_of, costs)).workload()
    return FromResults(settings, workload, checks, notes)


def _settings(
    run: Run, arm: str, results: Sequence[Result], costs: PairCosts
) -> tuple[list[Setting], list[str]]:
    """Return an arm as settings, as it has run and at other thresholds, and what is not known."""
    method = METHODS[run.decoder(arm)]
    if method in ("target", "draft"):
        return [TARGET if method == "target" else DRAFT], []
    if method == "speculative":
        speculating = speculating_of(results)
        return [Setting(label=arm, method=method, speculating=speculating, assumed=False)], []
    shape = _shape(run, arm, costs)
    recorded = Recorded.of(results, shape)
    own = recorded.threshold

    def setting(threshold: float | None) -> Setting:
        as_recorded = threshold == own
        return Setting(
            label=arm if as_recorded else f"{arm} at {threshold:g}",
            method=method,
            candidates=recorded.candidates,
            target_candidates=shape.target_candidates,
            drafted_candidates=recorded.drafted_candidates,
            one_first=shape.one_first,
            verify_with=shape.verify_with,
            looks=shape.looks,
            attention_of=shape.attention_of,
            acceptance=recorded.acceptance(None if as_recorded else threshold),
            threshold=threshold,
            assumed=False,
        )

    others = [each for each in THRESHOLDS if each != own]
    known = [each for each in others if recorded.knows(each)]
    notes = [f"{arm}: {recorded.unknown(each)}." for each in others if each not in known][-1:]
    if method == "specguard" and shape.attention_of is None and _weighs_grounding(run, arm):
        notes.append(
            f"{arm}: its grounding was read from attention, which the costs were measured without."
        )
    return [setting(own), *map(setting, known)], notes


def _check(
    run: Run, setting: Setting, arm: str, results: Sequence[Result], costs: PairCosts
) -> Check:
    shape = _shape(run, arm, costs)
    counted = [seconds_of(work_of(result, shape), costs).total for result in results]
    return Check(
        arm=arm,
        answers=len(results),
        measured_s=fmean(result.seconds for result in results),
        counted_s=fmean(counted),
        predicted_s=predict(setting, Recorded.of(results, shape).workload(), costs).total_s,
    )


def _shape(run: Run, arm: str, costs: PairCosts) -> Shape:
    if not run.decoder(arm).startswith("specguard"):
        return Shape(target_candidates=1)
    option = partial(_option, run, arm)
    sampling = Sampling(temperature=option("temperature"), top_k=option("top_k"))
    greedy = sampling.greedy or run.decoder(arm) == "specguard-greedy"
    drafted = 1 if greedy else option("num_candidates")
    rewritten = 1 if greedy else option("num_target_candidates") or drafted
    one_first = drafts_one_first(drafted, option("doubt_margin"), option("target_confidence"))
    judge, early = option("verify_with"), option("early_rejection")
    # The target has looked at steps in progress for as long as its candidates are an option.
    looked = "num_target_candidates" in run.settings.defaults
    return Shape(
        verify_with=judge,
        attention_of=attention_of(option("confidence_weight"), judge, costs),
        target_candidates=rewritten,
        one_first=one_first,
        looks=looked and looks(judge, costs, early=early, at_once=1 if one_first else drafted),
    )


def _weighs_grounding(run: Run, arm: str) -> bool:
    return bool(_option(run, arm, "confidence_weight") < 1)


def _unplanned(run: Run, arm: str) -> str | None:
    """Return why an arm's costs cannot be told from counts, None if they can."""
    if run.decoder(arm) not in SPECGUARD:
        return None
    return next((why for name, why in UNPLANNED.items() if _option(run, arm, name)), None)


def _option(run: Run, arm: str, name: str) -> Any:
    """Return the value that an option had in an arm."""
    before = LATER.get(name, SpecGuardOptions.model_fields[name].default)
    usual = run.settings.defaults.get(name, before)
    return run.settings.arms.get(arm, {}).get(name, usual)
