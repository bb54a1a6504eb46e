"""What must hold of every decoder, whatever the models: METHODS.md calls them identities."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from specguard_chains.decoding.baselines import SoloDecoder
from specguard_chains.decoding.boundaries import StepShape
from specguard_chains.decoding.calibration import Bounds, Calibration
from specguard_chains.decoding.decoder import Decoder, Request
from specguard_chains.decoding.engine import Candidate, Prompt, Reading
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.decoding.specguard import SpecGuardDecoder, VerifyWith
from specguard_chains.decoding.steps import Judgement, Source, Step, Verdict
from specguard_chains.decoding.verification import EnsembleVerifier, Situation
from tests.toy_engine import ToyEngine, random_policy

CALIBRATION = Calibration(
    confidence=Bounds(low=-3.0, high=0.0), grounding=Bounds(low=0.0, high=1.0)
)
GREEDY = Sampling(temperature=0)
SEEDS = range(12)


@dataclass(frozen=True)
class Fixed:
    """Gives the same verdict always, or alternates."""

    accept: bool | None
    needs_confidence: bool = False
    needs_grounding: bool = False
    state_layer: int | None = None
    asks_others: bool = False

    def can_accept(self, confidence: float, grounding: float | None) -> bool:
        return True

    def judge(self, candidate: Candidate, reading: Reading, situation: Situation) -> Judgement:
        accept = sum(candidate.tokens) % 2 == 0 if self.accept is None else self.accept
        return Judgement(Verdict.ACCEPTED if accept else Verdict.REJECTED)


def request(seed: int = 0, sampling: Sampling = GREEDY, max_tokens: int = 200) -> Request:
    prompt = Prompt(text=f"question {seed}")
    return Request(prompt, sampling=sampling, seed=seed, max_tokens=max_tokens)


def text_of(decoder: Decoder, request: Request) -> str:
    return "".join(step.text for step in decoder.decode(request))


def engine(seed: int) -> ToyEngine:
    return ToyEngine(random_policy(seed))


def solo(seed: int, source: Source) -> SoloDecoder:
    return SoloDecoder(engine(seed), source)


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_accepted_is_the_targets_own_text(seed: int) -> None:
    decoder = SpecGuardDecoder(engine(1), engine(2), Fixed(accept=False))
    assert text_of(decoder, request(seed)) == text_of(solo(2, Source.TARGET), request(seed))


@pytest.mark.parametrize("seed", SEEDS)
def test_everything_accepted_is_the_drafts_own_text(seed: int) -> None:
    verifier = EnsembleVerifier(CALIBRATION, threshold=0)
    decoder = SpecGuardDecoder(engine(1), engine(2), verifier, num_candidates=1)
    steps = list(decoder.decode(request(seed)))
    assert {step.source for step in steps} == {Source.DRAFT}
    assert "".join(s.text for s in steps) == text_of(solo(1, Source.DRAFT), request(seed))
    assert sum(s.tokens.target_read for s in steps) == 0, "the target is read only when needed"


@pytest.mark.parametrize("accept", [True, False, None])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_same_model_twice_writes_its_own_text(
    seed: int, shared: bool, accept: bool | None
) -> None:
    draft = engine(3)
    target = draft if shared else engine(3)
    decoder = SpecGuardDecoder(draft, target, Fixed(accept))
    assert text_of(decoder, request(seed)) == text_of(solo(3, Source.DRAFT), request(seed))


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1, top_p=1)], ids=str)
@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("verify_with", ["draft", "target"])
@pytest.mark.parametrize("seed", SEEDS)
def test_early_rejection_changes_no_text(
    seed: int, verify_with: VerifyWith, k: int, sampling: Sampling
) -> None:
    verifier = EnsembleVerifier(CALIBRATION, confidence_weight=0.5, threshold=0.5)

    def steps(early: bool) -> list[Step]:
        decoder = SpecGuardDecoder(
            engine(1),
            engine(2),
            verifier,
            num_candidates=k,
            early_rejection=early,
            verify_with=verify_with,
        )
        return list(decoder.decode(request(seed, sampling)))

    with_it, without = steps(True), steps(False)
    assert [s.text for s in with_it] == [s.text for s in without]
    assert [s.verdict for s in with_it] == [s.verdict for s in without]
    drafted = [sum(s.tokens.drafted for s in steps) for steps in (with_it, without)]
    assert drafted[0] <= drafted[1]
    for step, other in zip(with_it, without, strict=True):
        if step.verdict is Verdict.ACCEPTED:
            assert step.chosen == other.chosen
            assert step.score == pytest.approx(other.score, abs=1e-5)


def test_early_rejection_saves_drafting_and_both_verdicts_occur() -> None:
    verifier = EnsembleVerifier(CALIBRATION, confidence_weight=0.5, threshold=0.5)
    decoder = SpecGuardDecoder(engine(1), engine(2), verifier, num_candidates=1)
    steps = [step for seed in SEEDS for step in decoder.decode(request(seed))]
    assert {step.verdict for step in steps} == {Verdict.ACCEPTED, Verdict.REJECTED}
    assert any(step.rejected_early for step in steps)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1, top_p=0.9)], ids=str)
@pytest.mark.parametrize("delimiter", ["\n\n", ".", "ab"])
def test_steps_add_up_to_the_answer(sampling: Sampling, delimiter: str) -> None:
    decoder = SpecGuardDecoder(
        engine(1), engine(2), Fixed(None), shape=StepShape(delimiter, max_tokens=17)
    )
    for seed in SEEDS:
        steps = list(decoder.decode(request(seed, sampling)))
        text = "".join(step.text for step in steps)
        assert [step.number for step in steps] == list(range(1, len(steps) + 1))
        assert all(text[slice(*step.span)] == step.text for step in steps)
        assert [s.finish_reason for s in steps[:-1]] == [None] * (len(steps) - 1)
        assert steps[-1].finish_reason in ("stop", "length")
        assert sum(step.answer_tokens for step in steps) <= 200
        if steps[-1].finish_reason == "length":
            assert sum(step.answer_tokens for step in steps) == 200


@pytest.mark.parametrize("verify_with", ["draft", "target"])
@pytest.mark.parametrize("k", [1, 4])
def test_the_same_request_again_gives_the_same_steps(k: int, verify_with: str) -> None:
    verifier = EnsembleVerifier(CALIBRATION, confidence_weight=0.5, threshold=0.5)
    decoder = SpecGuardDecoder(
        engine(1), engine(2), verifier, num_candidates=k, verify_with=verify_with
    )
    sources = set()
    for seed in SEEDS:
        sampled = request(seed, Sampling(temperature=1, top_p=0.95))
        first, again = list(decoder.decode(sampled)), list(decoder.decode(sampled))
        assert [(s.text, s.source, s.chosen) for s in again] == [
            (s.text, s.source, s.chosen) for s in first
        ]
        for one, other in zip(first, again, strict=True):
            for signal in ("score", "confidence", "grounding"):
                assert getattr(one, signal) == pytest.approx(getattr(other, signal), abs=1e-5)
        assert again[0].tokens.draft_reused == len(decoder.draft.encode(sampled.prompt))
        sources |= {step.source for step in first}
    assert sources == {Source.DRAFT, Source.TARGET}


def test_verifying_with_the_target_reads_its_own_signals() -> None:
    def first_step(verify_with: str) -> Step:
        decoder = SpecGuardDecoder(
            engine(1),
            engine(2),
            EnsembleVerifier(CALIBRATION, threshold=0),
            num_candidates=1,
            verify_with=verify_with,
        )
        return next(decoder.decode(request(0)))

    by_draft, by_target = first_step("draft"), first_step("target")
    assert by_draft.text == by_target.text
    assert by_draft.confidence != by_target.confidence
    assert by_target.tokens.target_read >= by_target.answer_tokens
