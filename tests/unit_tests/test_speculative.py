"""Speculative decoding writes what the target alone would: by law, by text, and in its costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import count, pairwise
from typing import Any

import numpy as np
import pytest

from specguard_chains.decoding.acceptance import Choose
from specguard_chains.decoding.baselines import SoloDecoder
from specguard_chains.decoding.boundaries import Boundary
from specguard_chains.decoding.decoder import Request
from specguard_chains.decoding.engine import Capabilities, Prompt
from specguard_chains.decoding.sampling import Sampling, distribution
from specguard_chains.decoding.speculation import Children, Speculation
from specguard_chains.decoding.speculative import SpeculativeDecoder
from specguard_chains.decoding.speculative_session import SpeculativeSession
from specguard_chains.decoding.steps import Source, Step, Verdict
from specguard_chains.errors import ConfigurationError, DecodingCancelled
from specguard_chains.metrics import Metrics
from tests.toy_engine import END, VOCABULARY, FloatArray, Policy, ToyEngine, random_policy
from tests.unit_tests.enumeration import law_of

GREEDY = Sampling(temperature=0)
PLAIN = Sampling(temperature=1, top_p=1)
CHAIN = (1, 1, 1, 1)
SHAPES = [(1,), (1, 1, 1), CHAIN, (2, 2), (3, 1, 1), (2, 1, 2)]


def engine(seed: int, **settings: Any) -> ToyEngine:
    return ToyEngine(random_policy(seed), **settings)


def request(seed: int = 0, sampling: Sampling = GREEDY, **settings: Any) -> Request:
    settings = {"max_tokens": 120} | settings
    return Request(Prompt(text=f"question {seed}"), sampling=sampling, seed=seed, **settings)


def text(steps: Sequence[Step]) -> str:
    return "".join(step.text for step in steps)


def alone(target: ToyEngine, asked: Request) -> list[Step]:
    return list(SoloDecoder(target, Source.TARGET).decode(asked))


# --- the law, by enumeration


def small_policy(seed: int, tokens: Sequence[int]) -> Policy:
    """A random table over the last two tokens, with nothing but a few tokens in it."""

    def logits(seen: tuple[int, ...]) -> FloatArray:
        row = np.full(VOCABULARY, -1e4, dtype=np.float32)
        noise = np.random.default_rng([seed, *seen[-2:]]).normal(size=len(tokens))
        row[list(tokens)] = 1.5 * noise
        return row

    return logits


def exact_law(target: ToyEngine, prompt: Prompt, tokens: int, sampling: Sampling) -> dict[Any, Any]:
    """The law of a step of so many tokens by the definition: one token after the other."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    start = tuple(target.encode(prompt))
    for _ in range(tokens):
        longer: dict[tuple[int, ...], float] = {}
        for path, probability in law.items():
            if END in path:
                longer[path] = probability
                continue
            row = distribution(target.policy((*start, *path)), sampling)
            for token in np.flatnonzero(row):
                longer[(*path, int(token))] = probability * float(row[token])
        law = longer
    return law


def spoken_law(
    draft: ToyEngine, target: ToyEngine, speculation: Speculation, tokens: int, sampling: Sampling
) -> dict[Any, Any]:
    prompt = Prompt(text="q")
    session = SpeculativeSession(draft.open(prompt), target.open(prompt), speculation)
    boundary = Boundary("\0", max_tokens=tokens)

    def write(choose: Choose) -> tuple[int, ...]:
        return session.write(boundary, sampling, choose).tokens

    return law_of(write)


SIX = (*b"abcde", END)


@pytest.mark.parametrize("children", ["independent", "without-replacement", "likeliest"])
@pytest.mark.parametrize("widths", [(1,), (2,)], ids=["chain", "tree"])
@pytest.mark.parametrize("seed", range(2))
def test_two_tokens_of_six_have_the_targets_law(
    seed: int, widths: tuple[int, ...], children: Children
) -> None:
    draft, target = (ToyEngine(small_policy(s, SIX)) for s in (seed, seed + 50))
    speculation = Speculation(widths, children)
    law = spoken_law(draft, target, speculation, 2, PLAIN)
    expected = exact_law(target, Prompt(text="q"), 2, PLAIN)
    assert law.keys() == expected.keys()
    assert law == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("adaptive", [False, True], ids=["fixed", "adaptive"])
@pytest.mark.parametrize("sampling", [PLAIN, Sampling(temperature=0.8, top_p=0.9)], ids=str)
@pytest.mark.parametrize(
    ("widths", "children"),
    [
        ((1, 1), "independent"),
        ((1, 1), "likeliest"),
        ((2, 1), "independent"),
        ((2, 1), "without-replacement"),
        ((2, 2), "likeliest"),
        ((1, 2), "without-replacement"),
    ],
)
def test_longer_steps_have_the_targets_law(
    widths: tuple[int, ...], children: Children, sampling: Sampling, adaptive: bool
) -> None:
    letters = b"ab" if (widths, children) == ((2, 1), "independent") else b"abc"
    draft, target = (ToyEngine(small_policy(s, letters)) for s in (7, 8))
    speculation = Speculation(widths, children, adaptive=adaptive, min_confidence=0.5)
    law = spoken_law(draft, target, speculation, 3, sampling)
    expected = exact_law(target, Prompt(text="q"), 3, sampling)
    assert law == pytest.approx(expected, abs=1e-6)


def test_the_draft_has_another_law() -> None:
    """What the tests above compare is not the same anyway."""
    draft, target = (ToyEngine(small_policy(s, b"abc")) for s in (7, 8))
    one, other = (exact_law(e, Prompt(text="q"), 3, PLAIN) for e in (draft, target))
    assert max(abs(one[path] - other[path]) for path in one) > 0.05


def test_sampled_answers_follow_the_targets_law() -> None:
    """Chi-square over the first two tokens, through the decoder and its seeds."""
    draft, target = (ToyEngine(small_policy(s, SIX)) for s in (3, 4))
    decoder = SpeculativeDecoder(draft, target, Speculation((2, 1), "without-replacement"))
    seen: Counter[str] = Counter()
    for seed in range(1500):
        asked = Request(Prompt(text="q"), sampling=PLAIN, seed=seed, max_tokens=2)
        seen[text(list(decoder.decode(asked)))] += 1
    expected: Counter[str] = Counter()
    for path, probability in exact_law(target, Prompt(text="q"), 2, PLAIN).items():
        expected[bytes(t for t in path if t != END).decode()] += 1500 * probability
    cells = [name for name in expected if expected[name] >= 5]
    rest = sum(expected[name] for name in expected if name not in cells)
    chi_square = sum((seen[name] - expected[name]) ** 2 / expected[name] for name in cells)
    chi_square += (sum(seen[name] for name in seen if name not in cells) - rest) ** 2 / rest
    degrees = len(cells)
    assert chi_square < degrees + 3.3 * (2 * degrees) ** 0.5, "beyond the 99.9th percentile"


# --- the text, at temperature 0


@pytest.mark.parametrize("adaptive", [False, True], ids=["fixed", "adaptive"])
@pytest.mark.parametrize("widths", SHAPES, ids=str)
@pytest.mark.parametrize("draft", [1, 2], ids=["random draft", "same draft"])
@pytest.mark.parametrize("seed", range(3))
def test_greedy_text_is_the_targets_own(
    seed: int, draft: int, widths: tuple[int, ...], adaptive: bool
) -> None:
    decoder = SpeculativeDecoder(engine(draft), engine(2), Speculation(widths, adaptive=adaptive))
    steps, expected = list(decoder.decode(request(seed))), alone(engine(2), request(seed))
    assert [step.text for step in steps] == [step.text for step in expected]
    assert [step.finish_reason for step in steps] == [step.finish_reason for step in expected]
    assert [step.answer_tokens for step in steps] == [step.answer_tokens for step in expected]


def test_a_draft_that_is_always_wrong_changes_nothing() -> None:
    right = random_policy(2)

    def wrong(tokens: tuple[int, ...]) -> FloatArray:
        return -right(tokens)

    decoder = SpeculativeDecoder(ToyEngine(wrong), ToyEngine(right), Speculation(CHAIN))
    steps = list(decoder.decode(request(5)))
    assert text(steps) == text(alone(engine(2), request(5)))
    assert sum(step.tokens.kept for step in steps) == 0
    assert all(step.tokens.target_passes == step.answer_tokens for step in steps)


@pytest.mark.parametrize("stop", [("a",), (".", "ab"), ("é",)], ids=str)
@pytest.mark.parametrize("max_tokens", [1, 2, 7, 60])
def test_stop_strings_and_limits_cut_where_they_always_do(
    max_tokens: int, stop: tuple[str, ...]
) -> None:
    asked = request(4, stop=stop, max_tokens=max_tokens)
    steps = list(SpeculativeDecoder(engine(1), engine(2)).decode(asked))
    expected = alone(engine(2), asked)
    assert text(steps) == text(expected)
    assert steps[-1].finish_reason == expected[-1].finish_reason


def test_the_context_can_be_filled() -> None:
    engines = [engine(seed, context_length=40) for seed in (1, 2)]
    asked = request(3, max_tokens=None)
    steps = list(SpeculativeDecoder(*engines).decode(asked))
    assert text(steps) == text(alone(engine(2, context_length=40), asked))


@pytest.mark.parametrize("shorter", [0, 1], ids=["draft", "target"])
def test_the_shorter_context_of_both_counts(shorter: int) -> None:
    endless = [random_policy(seed, end=-40) for seed in (1, 2)]
    engines = [ToyEngine(policy, context_length=50) for policy in endless]
    engines[shorter].context_length = 40
    steps = list(SpeculativeDecoder(*engines).decode(request(3, max_tokens=None)))
    whole = text(alone(ToyEngine(endless[1]), request(3)))
    assert whole.startswith(text(steps))
    assert sum(step.answer_tokens for step in steps) == 40 - len("question 3") - 1
    assert steps[-1].finish_reason == "length"


# --- costs


@pytest.mark.parametrize("sampling", [GREEDY, PLAIN, Sampling()], ids=str)
@pytest.mark.parametrize("shared", [True, False])
def test_the_same_model_twice_accepts_everything(shared: bool, sampling: Sampling) -> None:
    draft = engine(3)
    target = draft if shared else engine(3)
    decoder = SpeculativeDecoder(draft, target, Speculation((1, 1, 1), adaptive=False))
    for seed in range(4):
        for step in decoder.decode(request(seed, sampling)):
            tokens = step.tokens
            cut = 4 * tokens.target_passes - step.answer_tokens
            assert 0 <= cut < 4, "all but the last block are whole"
            assert tokens.kept >= step.answer_tokens - tokens.target_passes


def test_figures_say_what_was_drafted_and_kept() -> None:
    steps = list(SpeculativeDecoder(engine(1), engine(2)).decode(request(1)))
    for step in steps:
        assert step.source is Source.TARGET
        assert step.verdict is Verdict.UNVERIFIED
        assert 0 <= step.tokens.kept <= step.tokens.drafted
        assert step.tokens.regenerated <= step.tokens.target_passes
        assert step.tokens.kept + step.tokens.regenerated == step.answer_tokens
        assert step.seconds.draft > 0
        assert step.seconds.target > 0
    metrics = Metrics.of(steps)
    assert metrics.num_target_passes == sum(step.tokens.target_passes for step in steps)
    assert metrics.mean_accepted_length == pytest.approx(
        sum(step.answer_tokens for step in steps) / metrics.num_target_passes
    )
    assert Metrics.of(alone(engine(2), request(1))).mean_accepted_length is None


def test_a_tree_needs_fewer_passes_than_a_chain() -> None:
    passes = []
    for widths in ((1, 1, 1), (3, 2, 1)):
        decoder = SpeculativeDecoder(engine(1), engine(2), Speculation(widths, adaptive=False))
        steps = [step for seed in range(6) for step in decoder.decode(request(seed))]
        passes.append(sum(step.tokens.target_passes for step in steps))
    assert passes[1] < passes[0]


def test_a_rejected_block_leaves_no_trace() -> None:
    """What was accepted is computed once: a step costs its passes, nothing is read again."""
    target = engine(2)
    steps = list(SpeculativeDecoder(engine(1), target, Speculation(CHAIN)).decode(request(2)))
    passes = sum(step.tokens.target_passes for step in steps)
    assert target.forward_passes <= passes + 1, "the prompt's pass comes first"


def test_depth_adapts_to_what_is_accepted() -> None:
    speculation = Speculation((1,) * 6)
    assert speculation.next_depth(2, drafted=2, accepted=2) == 4
    assert speculation.next_depth(5, drafted=5, accepted=5) == 6
    assert speculation.next_depth(6, drafted=6, accepted=6) == 6
    assert speculation.next_depth(4, drafted=1, accepted=1) == 6, "a draft that stops is not wrong"
    assert speculation.next_depth(4, drafted=4, accepted=3) == 3
    assert speculation.next_depth(1, drafted=1, accepted=0) == 1
    assert Speculation((1, 1), adaptive=False).next_depth(2, drafted=2, accepted=0) == 2


def test_an_adaptive_draft_proposes_less_in_vain() -> None:
    in_vain = []
    for adaptive in (False, True):
        decoder = SpeculativeDecoder(engine(1), engine(2), Speculation((1,) * 6, adaptive=adaptive))
        steps = list(decoder.decode(request(1)))
        in_vain.append(sum(step.tokens.drafted - step.tokens.kept for step in steps))
    assert in_vain[1] < in_vain[0] / 2


# --- refusals, and what goes wrong


def test_other_vocabularies_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"one vocabulary.*specguard"):
        SpeculativeDecoder(engine(1, vocabulary="other"), engine(2))


@pytest.mark.parametrize("role", [0, 1])
def test_engines_that_cannot_do_it_are_refused(role: int) -> None:
    engines = [engine(1), engine(2)]
    engines[role].capabilities = Capabilities(in_process=True, max_candidates=64)
    with pytest.raises(ConfigurationError, match="needs logits, which toy does not give"):
        SpeculativeDecoder(*engines)
    engines[role].capabilities = Capabilities(logits=True, max_candidates=3)
    with pytest.raises(ConfigurationError, match="has 4 branches, more than the 3"):
        SpeculativeDecoder(*engines, Speculation((2, 2)))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"widths": ()}, "one token or more"),
        ({"widths": (1, 0)}, "one token or more"),
        ({"children": "some"}, "unknown children 'some'"),
        ({"min_confidence": 1.5}, r"min_confidence must lie in \[0, 1\], not 1.5"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Speculation(**wrong)


@pytest.mark.parametrize("polls", [0, 1, 3, 8, 20])
def test_a_cancelled_request_leaves_both_engines_usable(polls: int) -> None:
    decoder, asked = SpeculativeDecoder(engine(1), engine(2)), count()
    with pytest.raises(DecodingCancelled):
        list(decoder.decode(request(1, cancelled=lambda: next(asked) >= polls)))
    assert text(list(decoder.decode(request(1)))) == text(alone(engine(2), request(1)))


def test_equal_seeds_give_equal_answers_and_others_do_not() -> None:
    decoder = SpeculativeDecoder(engine(1), engine(2), Speculation((2, 2), "without-replacement"))
    answers = [
        text(list(decoder.decode(Request(Prompt(text="q"), PLAIN, seed=seed, max_tokens=40))))
        for seed in (1, 1, 2, 3)
    ]
    assert answers[0] == answers[1]
    assert all(one != other for one, other in pairwise(answers[1:]))
