"""The figures of a request are the sums over its steps."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest

from specguard_chains.decoding.decoder import Request
from specguard_chains.decoding.engine import Prompt
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.decoding.specguard import SpecGuardDecoder
from specguard_chains.decoding.steps import Source, Step, StepSeconds, StepTokens, Verdict
from specguard_chains.decoding.verification import EnsembleVerifier
from specguard_chains.metrics import Metrics
from tests.toy_engine import ToyEngine, random_policy
from tests.unit_tests.test_verification import CALIBRATION

STEP = Step(
    number=1,
    text="a",
    source=Source.DRAFT,
    verdict=Verdict.ACCEPTED,
    score=0.75,
    confidence=-0.5,
    grounding=0.5,
    threshold=0.7,
    rejected_early=False,
    num_candidates=2,
    chosen=1,
    candidates=("b", "a"),
    tokens=StepTokens(
        drafted=1,
        kept=10,
        regenerated=100,
        draft_read=1_000,
        target_read=10_000,
        draft_reused=100_000,
        target_reused=1_000_000,
    ),
    seconds=StepSeconds(draft=1.0, verify=10.0, target=100.0),
    span=(0, 1),
    answer_tokens=10,
)
REJECTED = replace(STEP, source=Source.TARGET, verdict=Verdict.REJECTED)
EARLY = replace(REJECTED, rejected_early=True)
UNVERIFIED = replace(STEP, verdict=Verdict.UNVERIFIED, source=Source.TARGET)


def test_tokens_and_seconds_are_summed() -> None:
    metrics = Metrics.of([STEP, REJECTED, EARLY, STEP])
    assert metrics.num_draft_tokens == 4
    assert metrics.num_accepted_tokens == 40
    assert metrics.num_regenerated_tokens == 400
    assert metrics.draft_tokens_read == 4_000
    assert metrics.target_tokens_read == 40_000
    assert metrics.draft_tokens_reused == 400_000
    assert metrics.target_tokens_reused == 4_000_000
    seconds = (metrics.draft_seconds, metrics.verify_seconds, metrics.target_seconds)
    assert seconds == (4.0, 40.0, 400.0)


def test_verdicts_and_sources_are_counted() -> None:
    metrics = Metrics.of([STEP, REJECTED, EARLY, STEP, STEP])
    assert (metrics.num_steps, metrics.num_drafts) == (5, 5)
    assert metrics.num_accepted_steps == 3
    assert metrics.num_early_rejections == 1
    assert metrics.acceptance_rate == pytest.approx(0.6)
    assert metrics.steps_by_source == {"draft": 3, "target": 2}


def test_steps_that_were_not_judged_have_no_acceptance_rate() -> None:
    metrics = Metrics.of([UNVERIFIED, UNVERIFIED])
    assert (metrics.num_steps, metrics.num_drafts, metrics.num_accepted_steps) == (2, 0, 0)
    assert metrics.acceptance_rate is None
    assert metrics.steps_by_source == {"draft": 0, "target": 2}
    assert Metrics.of([UNVERIFIED, STEP, REJECTED]).acceptance_rate == 0.5


def test_nothing_accepted_is_a_rate_of_zero() -> None:
    assert Metrics.of([REJECTED]).acceptance_rate == 0.0


def test_a_request_without_steps_has_cost_nothing() -> None:
    metrics = Metrics.of([])
    assert metrics.acceptance_rate is None
    assert metrics.steps_by_source == {"draft": 0, "target": 0}
    others = metrics.to_dict()
    del others["acceptance_rate"], others["steps_by_source"]
    assert not any(others.values())


def test_the_figures_are_plain_values() -> None:
    metrics = Metrics.of([STEP, EARLY])
    plain = metrics.to_dict()
    assert list(plain) == [field.name for field in fields(Metrics)]
    assert json.loads(json.dumps(plain)) == plain
    assert Metrics(**plain) == metrics


@pytest.mark.parametrize("verify_with", ["draft", "target"])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("salvage", [True, False])
def test_the_tokens_are_those_that_the_engines_have_computed(
    k: int, verify_with: str, salvage: bool
) -> None:
    draft, target = ToyEngine(random_policy(1)), ToyEngine(random_policy(2))
    decoder = SpecGuardDecoder(
        draft,
        target,
        EnsembleVerifier(CALIBRATION, confidence_weight=0.9, threshold=0.3),
        num_candidates=k,
        verify_with=verify_with,
        early_rejection=False,
        salvage=salvage,
    )
    verdicts = set()
    for seed in range(8):
        before = draft.computed_tokens, target.computed_tokens
        request = Request(Prompt(text="question"), Sampling(1, 1), seed=seed, max_tokens=120)
        steps = list(decoder.decode(request))
        metrics = Metrics.of(steps)
        computed = draft.computed_tokens - before[0], target.computed_tokens - before[1]
        assert metrics.draft_tokens_read + metrics.num_draft_tokens == computed[0]
        counted = metrics.target_tokens_read + metrics.num_regenerated_tokens
        if k > 1 and salvage:  # what candidates have in common with the guess is computed once
            assert 0 <= counted - computed[1] <= metrics.num_salvaged_tokens
        else:
            assert counted == computed[1]
        accepted = [step for step in steps if step.source is Source.DRAFT]
        assert metrics.num_accepted_tokens == sum(step.answer_tokens for step in accepted)
        assert metrics.num_accepted_steps == len(accepted)
        assert metrics.num_draft_tokens >= metrics.num_accepted_tokens
        verdicts |= {step.verdict for step in steps}
    assert verdicts == {Verdict.ACCEPTED, Verdict.REJECTED}
