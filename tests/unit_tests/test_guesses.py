"""Guesses at what a model is about to write: fewer passes, the same candidates."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

from specguard_chains.decoding.arrays import FloatArray
from specguard_chains.decoding.boundaries import Boundary
from specguard_chains.decoding.calibration import Bounds, Calibration
from specguard_chains.decoding.decoder import Request
from specguard_chains.decoding.engine import Candidate, Prompt, Reading, Session
from specguard_chains.decoding.grounding import GroundingSpec
from specguard_chains.decoding.local_drafts import LOOK_TOKENS
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.decoding.specguard import SpecGuardDecoder, VerifyWith
from specguard_chains.decoding.steps import Step, Verdict
from specguard_chains.decoding.trail import LONG, Row, Trail
from specguard_chains.decoding.verification import EnsembleVerifier
from tests.toy_engine import ANSWER, ToyEngine, one_hot, random_policy, scripted_policy

GREEDY, DRAWN = Sampling(temperature=0), Sampling(temperature=1, top_p=1)
PROMPT = Prompt(text="question")
CALIBRATION = Calibration(
    confidence=Bounds(low=-3.0, high=0.0), grounding=Bounds(low=0.0, high=1.0)
)
BOUNDARY = Boundary(delimiter="\n\n", max_tokens=40)


def engine(seed: int = 1, *, vocabulary: str = "bytes") -> ToyEngine:
    return ToyEngine(random_policy(seed), vocabulary=vocabulary)


def guess_of(tokens: tuple[int, ...], candidate: Candidate, vocabulary: str) -> Candidate:
    text = bytes(token for token in tokens if token < 256).decode(errors="replace")
    unread = Reading(np.full(len(tokens), -0.1, dtype=np.float32))
    return Candidate(tokens, text, unread, candidate.ending, vocabulary)


def write(
    n: int, sampling: Sampling, guess: Candidate | None, seed: int
) -> tuple[list[Candidate], int, Session]:
    """Return candidates, how many passes they took, and the session, which goes on with one."""
    model = engine()
    spec = GroundingSpec()
    session = model.open(PROMPT, grounding=spec, state_layer=1)
    session.sample(1, Boundary(delimiter="\n\n", max_tokens=1), GREEDY, seed=[0])  # the prompt
    before = model.forward_passes
    found = session.sample(n, BOUNDARY, sampling, seed=[seed], guess=guess)
    return found, model.forward_passes - before, session


def same(one: Candidate, other: Candidate) -> None:
    assert (one.tokens, one.text, one.ending) == (other.tokens, other.text, other.ending)
    for name in ("logprobs", "grounding", "state"):
        first, second = getattr(one.reading, name), getattr(other.reading, name)
        assert first is not None
        assert np.allclose(first, second, atol=1e-6), name  # cells are summed in another order


@pytest.mark.parametrize("right", ["all", "some", "none", "more"])
@pytest.mark.parametrize("vocabulary", ["bytes", "another"])
@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_a_guess_changes_nothing_but_the_passes(
    n: int, sampling: Sampling, right: str, vocabulary: str, seed: int
) -> None:
    plain, passes, session = write(n, sampling, None, seed)
    tokens = plain[-1].tokens
    wrong = (ord("Z"),) * 9
    guessed = {
        "all": tokens,
        "some": tokens[: len(tokens) // 2] + wrong,
        "none": wrong,
        "more": tokens + wrong,
    }[right]
    guess = guess_of(guessed, plain[-1], vocabulary)
    fast, fewer, guided = write(n, sampling, guess, seed)
    for one, other in zip(plain, fast, strict=True):
        same(one, other)
    assert fewer <= passes
    for candidate in plain:
        with closing(session), closing(guided):
            session.accept(candidate)
            guided.accept(candidate)
            after = [s.sample(1, BOUNDARY, sampling, seed=[7]) for s in (session, guided)]
            same(after[0][0], after[1][0])
        break


def test_a_right_guess_takes_a_pass_for_each_block() -> None:
    (plain,), passes, _ = write(1, GREEDY, None, 0)
    assert passes == len(plain.tokens)
    guess = guess_of(plain.tokens, plain, "bytes")
    (fast,), fewer, session = write(1, GREEDY, guess, 0)
    same(plain, fast)
    assert fewer == -(-len(plain.tokens) // LONG)
    assert session.counters.written == 1 + len(plain.tokens)


def test_a_candidate_that_followed_goes_on_where_the_guess_went_wrong() -> None:
    (plain,), passes, _ = write(1, GREEDY, None, 0)
    half = len(plain.tokens) // 2
    guess = guess_of((*plain.tokens[:half], ord("Z"), ord("Z")), plain, "bytes")
    (fast,), fewer, _ = write(1, GREEDY, guess, 0)
    same(plain, fast)
    assert fewer == passes - half + 1


def test_blocks_end_before_doubtful_tokens_and_are_bounded() -> None:
    logprobs = [0.0] * 100
    logprobs[2] = logprobs[10] = -1.0
    trail = Trail(range(100), logprobs)
    assert trail.block(0) == list(range(10)), "a doubt so near is not worth a pass of its own"
    assert trail.block(10) == list(range(10, 10 + LONG))
    assert trail.block(95) == list(range(95, 100))
    assert trail.block(97) == [97], "so few are computed one by one"


def test_a_trail_knows_how_far_it_was_computed() -> None:
    trail = Trail([5, 6, 7, 8])
    assert (trail.reach, trail.row(1)) == (0, None)
    rows = [Row(np.full(2, i, dtype=np.float32)) for i in range(3)]
    trail.keep(0, rows)
    assert trail.reach == 3
    assert trail.row(0) is None
    assert trail.row(3) is rows[2]
    assert trail.row(4) is None
    assert trail.follows([5])
    assert trail.follows([5, 6, 7])
    assert not trail.follows([5, 7])
    assert not trail.follows([5, 6, 7, 8, 9])


@pytest.mark.parametrize("verify_with", ["draft", "target"])
@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("seed", range(6))
def test_salvage_changes_no_text(
    seed: int, k: int, sampling: Sampling, verify_with: VerifyWith
) -> None:
    request = Request(Prompt(text=f"question {seed}"), sampling, seed=seed, max_tokens=120)

    def answer(*, salvage: bool) -> tuple[list[Step], int]:
        # The target is the draft but for small differences: many of its tokens are the same.
        near = random_policy(1)
        far = random_policy(2)
        draft = ToyEngine(near)
        target = ToyEngine(lambda tokens: near(tokens) + np.float32(0.2) * far(tokens))
        decoder = SpecGuardDecoder(
            draft,
            target,
            EnsembleVerifier(CALIBRATION, confidence_weight=0.5, threshold=0.5),
            num_candidates=k,
            verify_with=verify_with,
            salvage=salvage,
        )
        return list(decoder.decode(request)), target.forward_passes

    (with_it, fewer), (without, passes) = answer(salvage=True), answer(salvage=False)
    assert [step.text for step in with_it] == [step.text for step in without]
    assert [step.verdict for step in with_it] == [step.verdict for step in without]
    assert sum(step.tokens.salvaged for step in without) == 0
    rejected = [step for step in with_it if step.verdict is Verdict.REJECTED]
    assert all(step.tokens.salvaged <= step.tokens.regenerated for step in with_it)
    assert all(step.tokens.salvaged == 0 for step in with_it if step not in rejected)
    assert fewer <= passes
    if sampling.greedy and rejected:
        assert sum(step.tokens.salvaged for step in rejected) > 0
        assert fewer < passes


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("length", [3, 12, 40])
def test_what_was_read_just_now_is_not_computed_again(sampling: Sampling, length: int) -> None:
    boundary = Boundary(delimiter="!", max_tokens=length)

    def session_of(model: ToyEngine) -> Session:
        return model.open(PROMPT, grounding=GroundingSpec(), state_layer=1)

    (plain,) = session_of(engine()).sample(1, boundary, sampling, seed=[3])
    half = plain.tokens[:-1]
    guess = guess_of((*half, ord("Z")), plain, "bytes")
    model = engine()
    session = session_of(model)
    session.read(guess)
    read, before = session.counters.read, model.computed_tokens
    (fast,) = session.sample(1, boundary, sampling, seed=[3], guess=guess)
    same(plain, fast)
    beyond = max(len(guess.tokens) - LONG, 0)  # with the wrong token at the end
    assert model.computed_tokens - before == 1 + beyond
    assert session.counters.read + session.counters.written == model.computed_tokens
    assert session.counters.read <= read
    session.accept(fast)
    (after,) = session.sample(1, boundary, sampling, seed=[4])
    other = session_of(engine())
    other.accept(plain)
    same(other.sample(1, boundary, sampling, seed=[4])[0], after)


def test_the_target_reads_a_step_while_it_is_drafted_and_stops_it() -> None:
    """A long step that the target finds unlikely from its 20th token on."""
    written = "a" * 19 + "b" * 100 + ".\n\n"
    draft = ToyEngine(scripted_policy(written))
    target = ToyEngine(scripted_policy("a" * 60 + ".\n\n"))

    def decode(*, early: bool) -> list[Step]:
        decoder = SpecGuardDecoder(
            draft,
            target,
            EnsembleVerifier(CALIBRATION, confidence_weight=1, threshold=0.5),
            num_candidates=1,
            verify_with="target",
            early_rejection=early,
        )
        prompt = Prompt(text="question")
        return list(decoder.decode(Request(prompt, GREEDY, max_tokens=200)))

    stopped, whole = decode(early=True)[0], decode(early=False)[0]
    assert stopped.text == whole.text
    assert (stopped.rejected_early, whole.rejected_early) == (True, False)
    assert (stopped.tokens.drafted, whole.tokens.drafted) == (2 * LOOK_TOKENS, len(written))
    assert (stopped.tokens.salvaged, whole.tokens.salvaged) == (19, 19)
    prompt = len(target.encode(Prompt(text="question")))
    assert stopped.tokens.target_read == prompt + 2 * LOOK_TOKENS - 19
    assert stopped.score is not None
    assert stopped.score < 0.5


def doubting(at: int) -> ToyEngine:
    """A draft that finds one of its tokens less likely than even, and no other."""
    written = b"a" * 30 + b".\n\n"

    def policy(tokens: tuple[int, ...]) -> FloatArray:
        place = len(tokens) - 1 - tokens.index(ANSWER) if ANSWER in tokens else 0
        return one_hot(written[place % len(written)], -2.0 if place == at else -0.01)

    return ToyEngine(policy)


@pytest.mark.parametrize(
    ("at", "looks"), [(1, [4, 20]), (3, [4, 20]), (4, [5, 21]), (17, [16, 20]), (99, [16, 32])]
)
def test_a_step_is_looked_at_soon_after_a_token_that_the_draft_doubts(
    at: int, looks: list[int]
) -> None:
    """Every 16 tokens, but after 4 if one of them is unlikely, or at once behind more of them."""
    seen: list[int] = []

    def look(step: Candidate) -> bool:
        seen.append(len(step.tokens))
        return True

    session = doubting(at).open(Prompt(text="question"))
    (step,) = session.sample(1, Boundary(), GREEDY, seed=[1], look=look)
    assert seen == looks
    (without,) = doubting(at).open(Prompt(text="question")).sample(1, Boundary(), GREEDY, seed=[1])
    assert step.tokens == without.tokens
