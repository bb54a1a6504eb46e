"""The ensemble verdict: score, monotonicity, extreme thresholds, and what it needs to see."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from specguard_chains.decoding.boundaries import Ending
from specguard_chains.decoding.calibration import Bounds, Calibration
from specguard_chains.decoding.decoder import Request
from specguard_chains.decoding.engine import Candidate, Prompt, Reading
from specguard_chains.decoding.steps import Judgement, Verdict
from specguard_chains.decoding.verification import EnsembleVerifier, Situation
from specguard_chains.errors import AttentionUnavailableError, ConfigurationError

CALIBRATION = Calibration(
    confidence=Bounds(low=-4.0, high=-1.0), grounding=Bounds(low=0.2, high=0.7)
)
NOWHERE = Situation(Request(Prompt(text="q")), 1, (), draft=None, target=None, tokens_left=9)
CONFIDENCES = [-100.0, -4.0, -3.5, -2.0, -1.1, -1.0, 0.0]
GROUNDINGS = [0.0, 0.2, 0.3, 0.55, 0.7, 1.0]


def reading(logprobs: list[float], grounding: list[float] | None = None) -> Reading:
    return Reading(np.float32(logprobs), None if grounding is None else np.float32(grounding))


def judge(verifier: EnsembleVerifier, read: Reading, ending: Ending = Ending.BOUNDARY) -> Judgement:
    candidate = Candidate((1, 2), "ab", read, ending, "bytes")
    return verifier.judge(candidate, read, NOWHERE)


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
def test_the_score_is_the_weighted_mean_of_the_normalised_minima(beta: float) -> None:
    verifier = EnsembleVerifier(CALIBRATION, confidence_weight=beta)
    judgement = judge(verifier, reading([-0.5, -2.5, -1.0], [0.9, 0.45, 0.6]))
    assert judgement.score == pytest.approx(beta * 0.5 + (1 - beta) * 0.5)
    assert judgement.confidence == -2.5
    assert judgement.grounding == pytest.approx(0.45)
    assert judgement.threshold == 0.7


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("confidence", CONFIDENCES)
@pytest.mark.parametrize("grounding", GROUNDINGS)
def test_both_signals_are_clipped(confidence: float, grounding: float, beta: float) -> None:
    expected = beta * np.interp(confidence, [-4, -1], [0, 1])
    expected += (1 - beta) * np.interp(grounding, [0.2, 0.7], [0, 1])
    score = EnsembleVerifier(CALIBRATION, beta).score(confidence, grounding)
    assert score == pytest.approx(expected)
    assert 0 <= score <= 1


def test_the_defaults_are_the_papers() -> None:
    verifier = EnsembleVerifier(CALIBRATION)
    assert (verifier.confidence_weight, verifier.threshold) == (0.3, 0.7)


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.3, 0.7, 1.0])
def test_a_lower_signal_never_scores_more(beta: float) -> None:
    verifier = EnsembleVerifier(CALIBRATION, beta)
    table = [[verifier.score(c, g) for g in GROUNDINGS] for c in CONFIDENCES]
    assert (np.diff(table, axis=0) >= 0).all()
    assert (np.diff(table, axis=1) >= 0).all()


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.7, 1.0])
def test_once_a_step_cannot_be_accepted_it_never_will(beta: float, threshold: float) -> None:
    verifier = EnsembleVerifier(CALIBRATION, beta, threshold)
    for confidence, grounding in product(CONFIDENCES, [*GROUNDINGS, None]):
        if verifier.can_accept(confidence, grounding):
            continue
        for lower, less in product(CONFIDENCES, GROUNDINGS):
            if lower <= confidence and (grounding is None or less <= grounding):
                verdict = judge(verifier, reading([lower], [less])).verdict
                assert verdict is Verdict.REJECTED


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_a_step_is_accepted_exactly_if_it_can_be(beta: float) -> None:
    verifier = EnsembleVerifier(CALIBRATION, beta, threshold=0.5)
    verdicts = set()
    for confidence, grounding in product(CONFIDENCES, GROUNDINGS):
        read = reading([confidence], [grounding])
        verdict = judge(verifier, read).verdict
        verdicts.add(verdict)
        can = verifier.can_accept(read.confidence, read.min_grounding)
        assert (verdict is Verdict.ACCEPTED) == can
    assert verdicts == {Verdict.ACCEPTED, Verdict.REJECTED}


def test_threshold_0_accepts_everything_and_1_only_the_best() -> None:
    worst, nearly, best = (reading([c], [g]) for c, g in [(-99, 0), (-1.1, 0.69), (-0.5, 0.9)])
    for percent in range(101):
        everything, only_the_best = (
            EnsembleVerifier(CALIBRATION, percent / 100, threshold) for threshold in (0, 1)
        )
        assert judge(everything, worst).verdict is Verdict.ACCEPTED
        assert judge(only_the_best, best).verdict is Verdict.ACCEPTED
        assert judge(only_the_best, nearly).verdict is Verdict.REJECTED


def test_impossible_tokens_are_no_trouble() -> None:
    verifier = EnsembleVerifier(CALIBRATION, 0.5)
    assert verifier.score(-np.inf, 0.7) == pytest.approx(0.5)


def test_a_grounding_not_known_yet_counts_as_the_best() -> None:
    verifier = EnsembleVerifier(CALIBRATION)
    for confidence in CONFIDENCES:
        assert verifier.score(confidence, None) == verifier.score(confidence, 1.0)


def test_without_weight_grounding_need_not_be_read() -> None:
    verifier = EnsembleVerifier(CALIBRATION, confidence_weight=1, threshold=0.5)
    assert not verifier.needs_grounding
    assert EnsembleVerifier(CALIBRATION, confidence_weight=0.99).needs_grounding
    judgement = judge(verifier, reading([-2.0]))
    assert judgement.verdict is Verdict.ACCEPTED
    assert judgement.score == pytest.approx(2 / 3)
    assert judgement.grounding is None


def test_missing_grounding_is_an_error_with_a_remedy() -> None:
    with pytest.raises(AttentionUnavailableError, match=r"GroundingSpec or .*confidence_weight=1"):
        judge(EnsembleVerifier(CALIBRATION), reading([-1.0]))


def test_a_step_rejected_early_is_rejected_and_may_lack_grounding() -> None:
    for grounding in (None, [0.9]):
        verifier = EnsembleVerifier(CALIBRATION, threshold=0)
        judgement = judge(verifier, reading([-1.0], grounding), ending=Ending.REJECTED_EARLY)
        assert judgement.verdict is Verdict.REJECTED
        assert judgement.rejected_early
    assert not judge(verifier, reading([-1.0], [0.9])).rejected_early


@pytest.mark.parametrize("name", ["confidence_weight", "threshold"])
@pytest.mark.parametrize("value", [-0.01, 1.01, float("nan")])
def test_wrong_values_are_named(name: str, value: float) -> None:
    with pytest.raises(ConfigurationError, match=rf"{name} must lie in \[0, 1\], not {value}"):
        EnsembleVerifier(CALIBRATION, **{name: value})
