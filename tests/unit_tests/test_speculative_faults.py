"""What could break speculative decoding: interruptions, odd pairs of models, books that are off."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import numpy as np
import pytest

from specguard_chains.decoding.arrays import FloatArray
from specguard_chains.decoding.boundaries import Boundary
from specguard_chains.decoding.decoder import Request
from specguard_chains.decoding.engine import Capabilities, LogitSession, Prompt
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.decoding.speculation import Children, Speculation
from specguard_chains.decoding.speculative import SpeculativeDecoder
from specguard_chains.decoding.speculative_session import SpeculativeSession
from specguard_chains.decoding.token_tree import TokenTree
from specguard_chains.errors import ConfigurationError, ContextOverflowError, DecodingCancelled
from tests.toy_engine import ANSWER, VOCABULARY, Policy, ToyEngine, random_policy
from tests.unit_tests.test_speculative import (
    GREEDY,
    PLAIN,
    SIX,
    alone,
    engine,
    exact_law,
    request,
    small_policy,
    spoken_law,
    text,
)

PROMPT = Prompt(text="q")
TWELVE = Boundary("\0", max_tokens=12)
TREE = Speculation((2, 1, 1), "without-replacement", adaptive=False)


def endless(seed: int) -> ToyEngine:
    return ToyEngine(random_policy(seed, end=-40))


def pair_session(speculation: Speculation = TREE, **settings: int) -> SpeculativeSession:
    draft, target = (engine(seed, **settings).open(PROMPT) for seed in (1, 2))
    return SpeculativeSession(draft, target, speculation)


# --- the law


@pytest.mark.parametrize("children", ["independent", "without-replacement", "likeliest"])
@pytest.mark.parametrize("min_confidence", [0.4, 0.6, 0.8])
@pytest.mark.parametrize(
    ("widths", "tokens"), [((1, 1, 1), 4), ((2, 1), 3), ((1, 2), 3)], ids=["chain", "fork", "Y"]
)
def test_where_an_adaptive_draft_stops_does_not_bend_the_law(
    widths: tuple[int, ...], tokens: int, min_confidence: float, children: Children
) -> None:
    """Of two tokens, so that blocks of every depth occur: each of them in a run of its own."""
    draft, target = (ToyEngine(small_policy(s, b"ab")) for s in (7, 8))
    speculation = Speculation(widths, children, min_confidence=min_confidence)
    law = spoken_law(draft, target, speculation, tokens, PLAIN)
    assert law == pytest.approx(exact_law(target, PROMPT, tokens, PLAIN), abs=1e-6)


@pytest.mark.parametrize("children", ["independent", "without-replacement", "likeliest"])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.7, top_p=0.6),
        Sampling(temperature=1.3, top_p=1, top_k=2),
        Sampling(temperature=1, top_p=1, min_p=0.4),
        Sampling(temperature=1, top_p=0.9, top_k=3, min_p=0.2),
    ],
    ids=str,
)
def test_filters_apply_to_both_laws_alike(sampling: Sampling, children: Children) -> None:
    draft, target = (ToyEngine(small_policy(s, SIX)) for s in (3, 4))
    law = spoken_law(draft, target, Speculation((2,), children), 2, sampling)
    assert law == pytest.approx(exact_law(target, PROMPT, 2, sampling), abs=1e-6)


def padded(policy: Policy, rows: int, level: float) -> Policy:
    """The same model with `rows` more rows of logits, for ids that mean nothing."""

    def logits(tokens: tuple[int, ...]) -> FloatArray:
        assert max(tokens) < VOCABULARY + rows, "a token is not in the vocabulary"
        meant = tuple(token if token < VOCABULARY else ANSWER for token in tokens)
        return np.concatenate([policy(meant), np.full(rows, level, dtype=np.float32)])

    return logits


@pytest.mark.parametrize("rows", [(8, 0), (0, 8), (3, 8)], ids=str)
@pytest.mark.parametrize("sampling", [GREEDY, PLAIN], ids=str)
def test_models_of_one_vocabulary_may_have_more_rows_than_tokens(
    sampling: Sampling, rows: tuple[int, int]
) -> None:
    draft, target = (
        ToyEngine(padded(random_policy(seed), n, level=-1e4))
        for seed, n in zip((1, 2), rows, strict=True)
    )
    for seed in range(3):
        asked = request(seed, sampling)
        steps = list(SpeculativeDecoder(draft, target, Speculation((3, 2))).decode(asked))
        if sampling is GREEDY:
            assert text(steps) == text(alone(target, asked))


@pytest.mark.parametrize("rows", [(8, 0), (0, 8)], ids=str)
def test_a_row_without_a_token_can_be_likely(rows: tuple[int, int]) -> None:
    draft, target = (
        ToyEngine(padded(random_policy(seed), n, level=2.0))
        for seed, n in zip((1, 2), rows, strict=True)
    )
    for seed in range(6):
        decoder = SpeculativeDecoder(draft, target, Speculation((3, 2)))
        assert list(decoder.decode(request(seed, PLAIN)))


def test_the_models_may_write_the_prompt_differently() -> None:
    """One vocabulary does not mean one chat template."""
    draft, target = endless(1), endless(2)
    plain = draft.encode
    draft.encode = lambda prompt: [*b"Be brief. ", *plain(prompt)]  # type: ignore[method-assign]
    session = SpeculativeSession(draft.open(PROMPT), target.open(PROMPT), TREE)
    start = session.length
    steps = []
    for number in range(3):
        steps += session.sample(1, TWELVE, GREEDY, seed=(number,))
        session.accept(steps[-1])
    session.rollback(start + len(steps[0].tokens))
    assert session.sample(1, TWELVE, GREEDY, seed=(1,))[0].tokens == steps[1].tokens


# --- interruptions


@pytest.mark.parametrize("role", [0, 1], ids=["draft", "target"])
def test_a_session_goes_on_after_it_was_cancelled_anywhere(role: int) -> None:
    for poll in count():
        polls, armed = count(), [False]

        def cancelled(
            poll: int = poll, polls: count[int] = polls, armed: list[bool] = armed
        ) -> bool:
            return armed[0] and next(polls) >= poll

        draft, target = (
            engine(seed).open(PROMPT, cancelled=cancelled if seed - 1 == role else None)
            for seed in (1, 2)
        )
        session, undisturbed = SpeculativeSession(draft, target, TREE), pair_session()
        for each in (session, undisturbed):
            each.accept(each.sample(1, TWELVE, PLAIN, seed=(1,))[0])
        armed[0] = True
        try:
            session.sample(1, TWELVE, PLAIN, seed=(2,))
        except DecodingCancelled:
            armed[0] = False
        if armed[0]:  # it was through before this poll
            break
        assert session.length == undisturbed.length
        repeated, expected = (
            each.sample(1, TWELVE, PLAIN, seed=(2,)) for each in (session, undisturbed)
        )
        assert repeated[0].tokens == expected[0].tokens
    assert poll > 5


def test_a_watch_that_raises_leaves_no_trace() -> None:
    session, undisturbed = pair_session(), pair_session()

    def watch(*_: object) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.sample(1, TWELVE, PLAIN, seed=(1,), watch=watch)
    assert (session.length, session.room) == (undisturbed.length, undisturbed.room)
    repeated, expected = (
        each.sample(2, TWELVE, PLAIN, seed=(1,)) for each in (session, undisturbed)
    )
    assert [c.tokens for c in repeated] == [c.tokens for c in expected]


def test_a_step_that_one_context_has_no_room_for_leaves_no_trace() -> None:
    draft, target = endless(2), endless(2)
    draft.context_length = 5
    session = SpeculativeSession(
        draft.open(PROMPT), target.open(PROMPT), Speculation((1,), adaptive=False)
    )
    length = session.length
    with pytest.raises(ContextOverflowError):
        session.write(TWELVE, GREEDY, lambda law: int(law.argmax()))
    assert session.length == length


def test_a_closed_session_refuses_work() -> None:
    session = pair_session()
    (step,) = session.sample(1, TWELVE, GREEDY, seed=(1,))
    session.accept(step)
    session.close()
    session.close()
    refused: list[Callable[[], object]] = [
        lambda: session.sample(1, TWELVE, GREEDY, seed=(1,)),
        lambda: session.read(step),
        lambda: session.accept(step),
        lambda: session.rollback(2),
    ]
    for work in refused:
        with pytest.raises(Exception, match="closed"):
            work()


def test_a_tree_that_has_not_grown_has_no_new_logits() -> None:
    session: LogitSession = engine(2).open(PROMPT)
    tree = TokenTree((1,))
    session.logits(tree)
    assert session.logits(tree).shape == (0, VOCABULARY)


# --- costs


@pytest.mark.parametrize(
    "more",
    [0, 1, 4, 5],
)
def test_a_prompt_that_goes_on_reuses_what_is_known_of_it(more: int) -> None:
    known = [*b"question", ANSWER]
    asked = list(known)
    draft, target = engine(1), engine(2)
    for each in (draft, target):
        each.encode = lambda prompt: list(asked)  # type: ignore[method-assign]
    decoder = SpeculativeDecoder(draft, target)
    list(decoder.decode(request(0, max_tokens=20)))
    asked += b"!!!!!"[:more]
    steps = list(decoder.decode(request(0, max_tokens=20)))
    assert sum(step.tokens.draft_reused for step in steps) == len(known)
    assert sum(step.tokens.target_reused for step in steps) == len(known)


def test_stopping_at_an_unlikely_token_is_no_rejection() -> None:
    """A draft that is always right and never sure drafts one token at a time, not ever fewer."""
    draft, target = endless(2), endless(2)
    speculation = Speculation((1, 1, 1, 1), min_confidence=1.0)
    session = SpeculativeSession(draft.open(PROMPT), target.open(PROMPT), speculation)
    for number in range(3):
        session.accept(session.sample(1, TWELVE, GREEDY, seed=(number,))[0])
    assert session._depth == 4


def test_a_tree_that_is_deeper_than_a_candidate_may_be_is_refused() -> None:
    """In a full context its branches would not fit: llama.cpp then fails in the middle."""
    draft, target = engine(1), engine(2)
    for each in (draft, target):
        each.capabilities = Capabilities(logits=True, max_candidates=8, max_candidate_tokens=2)
    SpeculativeDecoder(draft, target, Speculation((1,) * 8))
    SpeculativeDecoder(draft, target, Speculation((4, 2)))
    with pytest.raises(ConfigurationError, match="candidate_tokens"):
        SpeculativeDecoder(draft, target, Speculation((8, 1, 1)))


@pytest.mark.parametrize("sampling", [GREEDY, PLAIN], ids=str)
def test_accepted_tokens_behind_a_steps_end_are_not_kept(sampling: Sampling) -> None:
    decoder = SpeculativeDecoder(engine(2), engine(2), Speculation((1,) * 6, adaptive=False))
    for seed in range(6):
        for step in decoder.decode(request(seed, sampling)):
            assert step.tokens.kept <= step.answer_tokens


def test_one_seed_gives_one_answer_whatever_came_before() -> None:
    used, fresh = (SpeculativeDecoder(engine(1), engine(2)) for _ in range(2))
    for seed in range(4):
        list(used.decode(Request(PROMPT, PLAIN, seed=seed, max_tokens=30)))
    asked = Request(PROMPT, PLAIN, seed=9, max_tokens=30)
    assert text(list(used.decode(asked))) == text(list(fresh.decode(asked)))
