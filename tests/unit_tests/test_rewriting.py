"""The target's steps written at a draft's pace: the same answers, and honest books."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from specguard_chains.assembly import assemble
from specguard_chains.decoding.acceptance import Choose
from specguard_chains.decoding.boundaries import Boundary, StepShape
from specguard_chains.decoding.calibration import Bounds, Calibration
from specguard_chains.decoding.decoder import Request
from specguard_chains.decoding.engine import Prompt
from specguard_chains.decoding.pacing import Patience
from specguard_chains.decoding.rewriting import Proposer, SpeculativeRewriting
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.decoding.specguard import SpecGuardDecoder, VerifyWith
from specguard_chains.decoding.speculation import Speculation
from specguard_chains.decoding.speculative_session import SpeculativeSession
from specguard_chains.decoding.steps import Review, Source, Step
from specguard_chains.decoding.verification import EnsembleVerifier
from specguard_chains.errors import ConfigurationError
from specguard_chains.metrics import Metrics
from specguard_chains.options import SpecGuardOptions
from tests.toy_engine import ToyEngine
from tests.unit_tests.enumeration import law_of
from tests.unit_tests.test_identities import Fixed
from tests.unit_tests.test_parallel import policy
from tests.unit_tests.test_speculative import exact_law, small_policy

GREEDY = Sampling(temperature=0)
CALIBRATION = Calibration(
    confidence=Bounds(low=-3.0, high=0.0), grounding=Bounds(low=0.0, high=1.0)
)
CONFIDENCE = EnsembleVerifier(CALIBRATION, confidence_weight=1.0, threshold=0.5)
FIXED = Speculation((1, 1, 1), adaptive=False)
PROPOSERS: tuple[Proposer, ...] = ("draft", "prompt")


def engine(seed: int, **settings: Any) -> ToyEngine:
    """Every token of the sequence changes what comes next, of whoever sees another sequence."""
    return ToyEngine(policy(1, 1 + seed / 10), **settings)


def request(seed: int = 0, **settings: Any) -> Request:
    settings = {"sampling": GREEDY, "max_tokens": 200} | settings
    return Request(Prompt(text=f"question {seed}"), seed=seed, **settings)


def steps_of(rewriting: SpeculativeRewriting | None, asked: Request, **settings: Any) -> list[Step]:
    settings = {"verifier": Fixed(None), "num_candidates": 1} | settings
    draft = settings.pop("draft", None) or engine(1)
    decoder = SpecGuardDecoder(draft, engine(2), rewriting=rewriting, **settings)
    return list(decoder.decode(asked))


def told(steps: Sequence[Step]) -> list[tuple[Any, ...]]:
    return [(step.text, step.source, step.verdict, step.span, step.score) for step in steps]


@pytest.mark.parametrize("salvage", [True, False], ids=["salvage", "from scratch"])
@pytest.mark.parametrize("verify_with", ["draft", "target"])
@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.parametrize("adaptive", [True, False], ids=["adaptive", "fixed"])
@pytest.mark.parametrize("seed", range(4))
def test_greedy_answers_are_the_same(
    seed: int, adaptive: bool, proposer: Proposer, verify_with: VerifyWith, salvage: bool
) -> None:
    rewriting = SpeculativeRewriting(Speculation(adaptive=adaptive), proposer)
    how: dict[str, Any] = {"verify_with": verify_with, "salvage": salvage}
    for verifier in (Fixed(None), Fixed(False), Fixed(True), CONFIDENCE):
        for patience in (None, Patience(1, 2)):
            how |= {"verifier": verifier, "patience": patience}
            one, other = (steps_of(each, request(seed), **how) for each in (rewriting, None))
            assert told(one) == told(other)
            assert one[-1].finish_reason == other[-1].finish_reason


@pytest.mark.parametrize("proposer", PROPOSERS)
def test_hand_back_critical_steps_and_reviews_go_together_with_it(proposer: Proposer) -> None:
    def review(step: Step) -> Review:
        return Review.REGENERATE if step.number % 2 else Review.KEEP

    rewriting = SpeculativeRewriting(FIXED, proposer)
    for how, asked in (
        ({"hand_back": 2}, request(3)),
        ({}, request(3, critical_steps="target")),
        ({"shape": StepShape(max_tokens=7)}, request(4)),
    ):
        one, other = (steps_of(each, asked, **how) for each in (rewriting, None))
        assert told(one) == told(other)
    reviewed = steps_of(rewriting, request(5, review=review, max_reviews=2))
    assert "".join(step.text for step in reviewed)
    assert any(Review.REGENERATE in step.reviews for step in reviewed)


@pytest.mark.parametrize("proposer", PROPOSERS)
def test_a_rewritten_step_counts_what_the_target_wrote_and_what_it_kept(proposer: Proposer) -> None:
    rewriting = SpeculativeRewriting(FIXED, proposer)
    steps = [step for seed in range(6) for step in steps_of(rewriting, request(seed))]
    assert {step.source for step in steps} == set(Source)
    for step in steps:
        if step.source is Source.TARGET:
            assert step.tokens.regenerated == step.answer_tokens >= step.tokens.salvaged
            assert step.tokens.kept == 0
        else:
            assert (step.tokens.kept, step.tokens.regenerated) == (step.answer_tokens, 0)
            assert step.tokens.proposed == 0
        assert step.tokens.drafted >= step.tokens.kept
        assert not (step.paused and step.tokens.drafted), "proposals are no drafts of steps"
    metrics = Metrics.of(steps)
    assert metrics.num_proposed_tokens > 0
    assert metrics.mean_accepted_length is not None


def test_versions_that_are_not_kept_are_counted_too() -> None:
    """The target samples three candidates, one after the other, and any may be chosen."""
    how = {"num_target_candidates": 3, "verifier": Fixed(False), "draft": engine(2)}
    asked = request(0, sampling=Sampling(temperature=1, top_p=1))
    for step in steps_of(SpeculativeRewriting(FIXED), asked, **how):
        assert step.tokens.regenerated >= step.answer_tokens
        assert step.tokens.salvaged <= step.tokens.regenerated
        assert step.tokens.target_passes <= step.tokens.regenerated


def test_a_good_draft_saves_passes_of_the_target() -> None:
    """The draft writes as the target does, and is rejected all the same."""
    rewriting = SpeculativeRewriting(FIXED)
    how = {"draft": engine(2), "verifier": Fixed(False), "salvage": False}
    steps = [step for seed in range(40) for step in steps_of(rewriting, request(seed), **how)]
    tokens = sum(step.answer_tokens for step in steps)
    passes = sum(step.tokens.target_passes for step in steps)
    assert passes <= tokens / 2.5
    assert sum(step.tokens.salvaged for step in steps) >= tokens / 2


def test_a_rejected_step_is_proposed_at_once() -> None:
    how = {"draft": engine(2), "verifier": Fixed(False)}
    rewriting = SpeculativeRewriting(FIXED)
    steps = [step for seed in range(6) for step in steps_of(rewriting, request(seed), **how)]
    for step in steps:
        assert step.tokens.target_passes <= step.answer_tokens // 16 + 1
        assert step.tokens.proposed <= 3


def test_an_accepted_step_is_not_computed_again() -> None:
    """What the sessions hold of a drafted step stays, although its writer could go back."""
    draft, target = engine(1), engine(2)
    counts = []
    for rewriting in (SpeculativeRewriting(FIXED), None):
        decoder = SpecGuardDecoder(draft, target, Fixed(True), 1, rewriting=rewriting)
        for each in (draft, target):
            each.clear()
        before = draft.forward_passes, target.forward_passes
        list(decoder.decode(request(0)))
        counts.append((draft.forward_passes - before[0], target.forward_passes - before[1]))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("guess", [b"aab", b"bca", b"c"], ids=bytes.decode)
def test_a_guess_leaves_the_targets_law(guess: bytes) -> None:
    draft, target = (ToyEngine(small_policy(seed, b"abc")) for seed in (7, 8))
    prompt, plain = Prompt(text="q"), Sampling(temperature=1, top_p=1)
    session = SpeculativeSession(draft.open(prompt), target.open(prompt), Speculation((1,)))
    boundary = Boundary("\0", max_tokens=3)

    def write(choose: Choose) -> tuple[int, ...]:
        return session.write(boundary, plain, choose, guess=tuple(guess)).tokens

    assert law_of(write) == pytest.approx(exact_law(target, prompt, 3, plain), abs=1e-6)


def test_what_cannot_work_is_refused() -> None:
    rewriting = SpeculativeRewriting()
    shared, grounded = engine(1), EnsembleVerifier(CALIBRATION, confidence_weight=0.5)
    for one in (rewriting, SpeculativeRewriting(proposer="prompt")):
        with pytest.raises(ConfigurationError, match="is draft and target"):
            SpecGuardDecoder(shared, shared, Fixed(None), rewriting=one)
    with pytest.raises(ConfigurationError, match="no grounding; leave out speculate_rewrites"):
        SpecGuardDecoder(engine(1), engine(2), grounded, rewriting=rewriting)
    with pytest.raises(ConfigurationError, match="different ones; leave out speculate_rewrites"):
        foreign = engine(1, vocabulary="words")
        SpecGuardDecoder(foreign, engine(2), Fixed(None), rewriting=rewriting)
    decoder = SpecGuardDecoder(engine(1), engine(2), Fixed(None), rewriting=rewriting)
    passages = Prompt(text="question", passages=("a passage",))
    with pytest.raises(ConfigurationError, match="passages need attention"):
        list(decoder.decode(Request(passages)))
    assert list(decoder.decode(request())), "the decoder works on"


def test_the_options_name_it() -> None:
    models = {"draft": engine(1), "target": engine(2), "decoder": "specguard-greedy"}
    asked = {"speculate_rewrites": True, "num_speculative_tokens": 2, "speculate_with": "prompt"}
    decoders = [assemble(SpecGuardOptions(**models | more)) for more in ({}, asked)]
    rewritings = [each.rewriting for each in decoders if isinstance(each, SpecGuardDecoder)]
    assert rewritings == [None, SpeculativeRewriting(Speculation((1, 1)), "prompt")]
