"""Drafting pauses after rejections, and further candidates that are drafted only in doubt."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specguard_chains.decoding.calibration import Bounds, Calibration
from specguard_chains.decoding.decoder import Request
from specguard_chains.decoding.engine import Prompt
from specguard_chains.decoding.pacing import Pacing, Patience
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.decoding.specguard import SpecGuardDecoder
from specguard_chains.decoding.steps import Judgement, Source, Step, Verdict
from specguard_chains.decoding.verification import EnsembleVerifier
from specguard_chains.errors import ConfigurationError
from specguard_chains.metrics import Metrics
from tests.toy_engine import ToyEngine, random_policy

CALIBRATION = Calibration(
    confidence=Bounds(low=-3.0, high=0.0), grounding=Bounds(low=0.0, high=1.0)
)
DRAWN = Sampling(temperature=1, top_p=1)
ACCEPTED, REJECTED = Judgement(Verdict.ACCEPTED), Judgement(Verdict.REJECTED)


def drafted(patience: Patience | None, verdicts: str) -> str:
    """Return what happens step by step: the verdict where it is drafted, else a dash."""
    pacing, coming, happened = Pacing(patience), iter(verdicts), ""
    while True:
        if pacing.pauses():
            happened += "-"
            continue
        if (verdict := next(coming, None)) is None:
            return happened
        happened += verdict
        pacing.note({"a": ACCEPTED, "r": REJECTED}.get(verdict, replace(REJECTED, critical=True)))


@pytest.mark.parametrize(
    ("verdicts", "happened"),
    [
        ("aaaa", "aaaa"),
        ("rarara", "rarara"),
        ("rra", "rr---a"),
        ("rrrr", "rr---r------r------------"),
        ("rrarrr", "rr---arr---r------"),
        ("cccc", "cccc"),
        ("rcr", "rcr---"),
    ],
)
def test_after_rejections_in_a_row_the_target_goes_on_alone(verdicts: str, happened: str) -> None:
    assert drafted(Patience(rejections=2, steps=3), verdicts) == happened


def test_without_patience_every_step_is_drafted() -> None:
    assert drafted(None, "rrrrrrrr") == "rrrrrrrr"


@pytest.mark.parametrize("wrong", [{"rejections": 0}, {"steps": 0}])
def test_patience_needs_numbers_from_one(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match="not 0"):
        Patience(**wrong)


def answer(seed: int, verifier: EnsembleVerifier, **settings: object) -> list[Step]:
    decoder = SpecGuardDecoder(
        ToyEngine(random_policy(1)), ToyEngine(random_policy(2)), verifier, **settings
    )
    prompt = Prompt(text=f"question {seed}")
    return list(decoder.decode(Request(prompt, DRAWN, seed=seed, max_tokens=150)))


@pytest.mark.parametrize("seed", range(6))
def test_a_pause_costs_the_draft_nothing_and_is_told(seed: int) -> None:
    never = EnsembleVerifier(CALIBRATION, threshold=1.0)
    steps = answer(seed, never, patience=Patience(1, 2))
    assert [step.paused for step in steps[:4]] == [False, True, True, False][: len(steps)]
    for step in steps:
        assert step.source is Source.TARGET
        assert (step.tokens.drafted == step.tokens.draft_read == 0) or not step.paused
        assert step.verdict is (Verdict.UNVERIFIED if step.paused else Verdict.REJECTED)
        assert step.num_candidates == (0 if step.paused else 4)
    assert Metrics.of(steps).num_paused_steps == sum(step.paused for step in steps)
    alone = answer(seed, never)
    assert "".join(step.text for step in steps) == "".join(step.text for step in alone)


def test_further_candidates_are_drafted_only_in_doubt() -> None:
    verifier = EnsembleVerifier(CALIBRATION, threshold=0.6, doubt_margin=0.1)
    steps = [
        step
        for seed in range(12)
        for step in answer(seed, verifier, num_candidates=4, one_first=True)
    ]
    assert {step.num_candidates for step in steps} == {1, 4}
    for step in steps:
        assert step.score is not None
        if step.num_candidates == 1:
            near = abs(step.score - 0.6) < 0.1
            assert not near or step.rejected_early
    assert {step.verdict for step in steps if step.num_candidates == 4} == {
        Verdict.ACCEPTED,
        Verdict.REJECTED,
    }


@pytest.mark.parametrize("rewrites", [None, 1, 3])
def test_the_target_has_a_number_of_candidates_of_its_own(rewrites: int | None) -> None:
    never = EnsembleVerifier(CALIBRATION, threshold=1.0)
    steps = answer(1, never, num_candidates=3, num_target_candidates=rewrites)
    assert {step.num_candidates for step in steps} == {3}
    usual = answer(1, never, num_candidates=3)
    if rewrites == 1:
        written = sum(step.tokens.regenerated for step in steps)
        assert written == sum(step.answer_tokens for step in steps)
        assert written < sum(step.tokens.regenerated for step in usual)
    else:
        assert [step.text for step in steps] == [step.text for step in usual]


@pytest.mark.parametrize("wrong", [0, -1])
def test_the_target_needs_a_candidate(wrong: int) -> None:
    verifier = EnsembleVerifier(CALIBRATION)
    with pytest.raises(ConfigurationError, match=f"num_target_candidates must be .* not {wrong}"):
        answer(0, verifier, num_target_candidates=wrong)


def test_each_model_needs_room_for_its_own_candidates_only() -> None:
    small, large = ToyEngine(random_policy(1)), ToyEngine(random_policy(2))
    large.capabilities = replace(large.capabilities, max_candidates=1)
    verifier = EnsembleVerifier(CALIBRATION)
    SpecGuardDecoder(small, large, verifier, num_candidates=4, num_target_candidates=1)
    for rewrites, asked in ((2, "num_target_candidates=2"), (None, "num_candidates=4")):
        with pytest.raises(ConfigurationError, match=rf"^{asked} is more than the 1 that"):
            SpecGuardDecoder(
                small, large, verifier, num_candidates=4, num_target_candidates=rewrites
            )


@pytest.mark.parametrize("seed", range(8))
def test_early_rejection_changes_no_text_where_one_candidate_comes_first(seed: int) -> None:
    verifier = EnsembleVerifier(CALIBRATION, threshold=0.6, doubt_margin=0.1)
    with_it, without = (
        answer(seed, verifier, num_candidates=3, one_first=True, early_rejection=early)
        for early in (True, False)
    )
    assert [step.text for step in with_it] == [step.text for step in without]
    assert [step.verdict for step in with_it] == [step.verdict for step in without]


@pytest.mark.parametrize("hand_back", [1, 5, 300])
@pytest.mark.parametrize("seed", range(4))
def test_the_target_gives_a_rejected_step_back(seed: int, hand_back: int) -> None:
    verifier = EnsembleVerifier(CALIBRATION, threshold=0.6)
    steps = answer(seed, verifier, num_candidates=1, hand_back=hand_back)
    for step in steps:
        if step.verdict is Verdict.REJECTED:
            assert step.answer_tokens <= step.tokens.drafted + hand_back
    whole = answer(seed, verifier, num_candidates=1)
    if hand_back == 300:
        assert [step.text for step in steps] == [step.text for step in whole]


def test_hand_back_needs_a_token() -> None:
    with pytest.raises(ConfigurationError, match="hand_back must be 1 or more"):
        answer(0, EnsembleVerifier(CALIBRATION), hand_back=0)


@pytest.mark.parametrize("limit", [-100.0, -1.5, 0.0])
def test_in_doubt_the_target_decides(limit: float) -> None:
    verifier = EnsembleVerifier(CALIBRATION, threshold=0.6, doubt_margin=0.2)
    steps = [
        step
        for seed in range(8)
        for step in answer(seed, verifier, num_candidates=1, target_confidence=limit)
    ]
    asked = [step for step in steps if step.target_confidence is not None]
    assert asked
    for step in steps:
        assert step.score is not None
        near = abs(step.score - 0.6) < 0.2 and not step.rejected_early
        assert (step.target_confidence is not None) == near
        if step.target_confidence is None:
            assert step.verdict is (Verdict.ACCEPTED if step.score >= 0.6 else Verdict.REJECTED)
        else:
            kept = step.target_confidence >= limit
            assert step.verdict is (Verdict.ACCEPTED if kept else Verdict.REJECTED)
            assert step.tokens.target_read > 0
    if limit == -100.0:
        assert {step.verdict for step in asked} == {Verdict.ACCEPTED}
