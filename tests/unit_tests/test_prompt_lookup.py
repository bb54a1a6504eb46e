"""Prompt lookup: the index against brute force, the target's law and text, and no draft."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specguard_chains.assembly import assemble
from specguard_chains.decoding.acceptance import Choose
from specguard_chains.decoding.arrays import FloatArray
from specguard_chains.decoding.boundaries import Boundary
from specguard_chains.decoding.constraint import Constraint
from specguard_chains.decoding.decoder import Request
from specguard_chains.decoding.engine import Candidate, Prompt
from specguard_chains.decoding.prompt_lookup import (
    LONGEST_MATCH,
    OCCURRENCES,
    NGramIndex,
    PromptText,
)
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.decoding.speculation import Speculation
from specguard_chains.decoding.speculative import SpeculativeDecoder
from specguard_chains.decoding.speculative_session import SpeculativeSession
from specguard_chains.decoding.steps import Review
from specguard_chains.errors import ConfigurationError, DecodingCancelled
from specguard_chains.metrics import Metrics
from specguard_chains.options import SpecGuardOptions
from tests.toy_engine import ANSWER, END, ToyEngine, one_hot, random_policy
from tests.unit_tests.enumeration import law_of
from tests.unit_tests.test_speculative import (
    GREEDY,
    PLAIN,
    alone,
    engine,
    exact_law,
    request,
    small_policy,
    text,
)
from tests.unit_tests.toy_evaluation import run

CHAIN = Speculation((1,) * 8)
FIXED = Speculation((1,) * 8, adaptive=False)


def decoder(target: ToyEngine, speculation: Speculation = CHAIN) -> SpeculativeDecoder:
    return SpeculativeDecoder(None, target, speculation)


# --- the index


def longest_by_definition(tokens: Sequence[int], n: int) -> tuple[int, int]:
    """The longest agreement of the end with the latest places where its last n tokens occur."""
    ends = [end for end in range(n, len(tokens)) if tokens[end - n : end] == tokens[-n:]]
    best = (0, 0)
    for end in ends[-OCCURRENCES:]:
        lengths = range(n, min(end, LONGEST_MATCH) + 1)
        length = max(k for k in lengths if tokens[end - k : end] == tokens[-k:])
        best = max(best, (end, length), key=lambda found: (found[1], found[0]))
    return best


edits = st.lists(st.one_of(st.lists(st.integers(0, 2), max_size=6), st.integers(0, 30)))


@settings(deadline=None, database=None)
@given(start=st.lists(st.integers(0, 2), max_size=40), edits=edits, n=st.integers(1, 4))
def test_the_index_finds_what_a_search_of_the_text_finds(
    start: list[int], edits: list[list[int] | int], n: int
) -> None:
    index, tokens = NGramIndex(start, n), list(start)
    for edit in edits:
        if isinstance(edit, int):
            index.cut(edit)
            del tokens[edit:]
        else:
            index.extend(edit)
            tokens += edit
        assert index.tokens == tokens
        assert index.longest() == longest_by_definition(tokens, n)


def test_what_is_cut_leaves_nothing_behind() -> None:
    index = NGramIndex(b"abcabcabc")
    index.cut(0)
    assert not index._ends


def test_a_text_of_one_token_is_searched_as_fast_as_any() -> None:
    index = NGramIndex([1] * 20_000)
    assert index.longest() == (19_999, LONGEST_MATCH)


def test_a_copy_goes_on_over_and_over() -> None:
    index = NGramIndex(b"x abab")
    assert bytes(index.after(4, 5)) == b"ababa"
    assert index.after(4, 0) == []


# --- what is proposed


def prompt_text(seen: bytes, **settings: Any) -> PromptText:
    target = engine(2)
    target.encode = lambda prompt: list(seen)  # type: ignore[method-assign]
    return PromptText(target.open(Prompt(text="q"), **settings))


@pytest.mark.parametrize(
    ("seen", "adaptive", "copied"),
    [
        (b"the cat sat. the c", True, b"at"),
        (b"the cat sat. the c", False, b"at sat. "),
        (b"one two. one t", True, b"wo"),
        (b"one two. one two. on", True, b"e two"),
        (b"abcdefgh", False, b""),
        (b"ab ab", False, b""),
        (b"abcX abcY abc", False, b"Y abcY a"),
    ],
    ids=str,
)
def test_what_followed_is_proposed_the_more_the_longer_the_match(
    seen: bytes, adaptive: bool, copied: bytes
) -> None:
    lookup = prompt_text(seen)
    assert bytes(lookup.propose(8, adaptive=adaptive)) == copied
    assert lookup.counters.written == len(copied)


def test_the_longest_match_wins_over_the_latest() -> None:
    assert bytes(prompt_text(b"a cat: 1. the cat: 2. a cat: ").propose(1, adaptive=True)) == b"1"


def test_nothing_is_proposed_that_the_grammar_forbids() -> None:
    lookup = prompt_text(b"abcd abcd abc", constraint=Constraint.regex("d a?[xyz]*"))
    assert bytes(lookup.propose(8, adaptive=False)) == b"d a"
    lookup = prompt_text(b"abcd" + b"abc", constraint=Constraint.regex("x*"))
    assert lookup.propose(8, adaptive=False) == []


# --- the law


@pytest.mark.parametrize("adaptive", [False, True], ids=["fixed", "adaptive"])
@pytest.mark.parametrize("sampling", [PLAIN, Sampling(temperature=0.8, top_p=0.9)], ids=str)
@pytest.mark.parametrize("letters", [b"ab", (*b"ab", END)], ids=["endless", "with an end"])
def test_steps_have_the_targets_law(
    letters: Sequence[int], sampling: Sampling, adaptive: bool
) -> None:
    target, prompt = ToyEngine(small_policy(8, letters)), Prompt(text="abbabaabab")
    target.encode = lambda prompt: list(b"abbabaabab")  # type: ignore[method-assign]
    session = target.open(prompt)
    speculation = Speculation((1,) * 4, adaptive=adaptive)
    speculative = SpeculativeSession(PromptText(session), session, speculation)
    drafted = 0

    def write(choose: Choose) -> tuple[int, ...]:
        nonlocal drafted
        tokens = speculative.write(Boundary("\0", max_tokens=4), sampling, choose).tokens
        drafted = speculative._draft.counters.written
        return tokens

    law = law_of(write)
    assert law == pytest.approx(exact_law(target, prompt, 4, sampling), abs=1e-6)
    assert drafted > len(law), "the proposals are what is tested"


# --- the text


@pytest.mark.parametrize("speculation", [CHAIN, FIXED, Speculation((1,))], ids=str)
@pytest.mark.parametrize("max_step_tokens", [5, 256])
@pytest.mark.parametrize("parallel", [1, 2])
def test_greedy_text_is_the_targets_own(
    parallel: int, max_step_tokens: int, speculation: Speculation
) -> None:
    kept = 0
    for seed in range(6):
        copies = decoder(engine(seed, max_parallel=parallel), speculation)
        steps, expected = list(copies.decode(request(seed))), alone(engine(seed), request(seed))
        assert text(steps) == text(expected)
        assert [step.finish_reason for step in steps] == [step.finish_reason for step in expected]
        kept += sum(step.tokens.kept for step in steps)
    assert kept > 40


@pytest.mark.parametrize("stop", [("a",), (".", "ab"), ("é",)], ids=str)
@pytest.mark.parametrize("max_tokens", [1, 2, 7, 60])
def test_stop_strings_and_limits_cut_where_they_always_do(
    max_tokens: int, stop: tuple[str, ...]
) -> None:
    asked = request(4, stop=stop, max_tokens=max_tokens)
    steps, expected = list(decoder(engine(2), FIXED).decode(asked)), alone(engine(2), asked)
    assert text(steps) == text(expected)
    assert steps[-1].finish_reason == expected[-1].finish_reason


@pytest.mark.parametrize("sampling", [GREEDY, PLAIN], ids=str)
def test_the_context_can_be_filled(sampling: Sampling) -> None:
    target = ToyEngine(random_policy(2, end=-40), context_length=60)
    steps = list(decoder(target, FIXED).decode(request(3, sampling, max_tokens=None)))
    assert sum(step.answer_tokens for step in steps) == 60 - len("question 3") - 1
    assert steps[-1].finish_reason == "length"


def test_equal_seeds_give_equal_answers_and_others_do_not() -> None:
    copies = decoder(engine(2))
    answers = [text(list(copies.decode(request(seed, PLAIN)))) for seed in (1, 1, 2)]
    assert answers[0] == answers[1] != answers[2]


@pytest.mark.parametrize("polls", [0, 1, 3, 8])
def test_a_cancelled_request_leaves_the_engine_usable(polls: int) -> None:
    copies, asked = decoder(engine(2), FIXED), count()
    with pytest.raises(DecodingCancelled):
        list(copies.decode(request(1, cancelled=lambda: next(asked) >= polls)))
    assert text(list(copies.decode(request(1)))) == text(alone(engine(2), request(1)))


def test_a_step_that_is_written_anew_is_forgotten() -> None:
    """What a reviewer has turned down is no text to copy from."""
    said: list[Review] = []

    def review(step: Any) -> Review:
        said.append(Review.REGENERATE if len(said) % 2 == 0 else Review.KEEP)
        return said[-1]

    target = engine(2)
    steps = list(decoder(target, FIXED).decode(request(1, review=review, max_tokens=60)))
    assert said.count(Review.REGENERATE) == len(steps)
    session = target.open(Prompt(text="question 1"))
    lookup = PromptText(session)
    speculative = SpeculativeSession(lookup, session, FIXED)
    first, other = (
        speculative.sample(1, Boundary(max_tokens=20), PLAIN, seed=(seed,))[0] for seed in (1, 2)
    )
    assert first.tokens != other.tokens
    for step in (first, other):  # one that was written before the latest, and one after it
        speculative.accept(step)
        assert lookup._index.tokens == list(session.tokens)
    speculative.rollback(session.length - len(other.tokens))
    assert lookup._index.tokens == list(session.tokens)


def test_a_step_of_another_vocabulary_is_taken_over_as_text() -> None:
    session = engine(2).open(Prompt(text="q"))
    lookup = PromptText(session)
    speculative = SpeculativeSession(lookup, session, FIXED)
    (step,) = (
        ToyEngine(random_policy(1, end=-40), vocabulary="other")
        .open(Prompt(text="q"))
        .sample(1, Boundary(max_tokens=9), GREEDY, seed=(1,))
    )
    assert isinstance(step, Candidate)
    speculative.accept(step)
    assert lookup._index.tokens == list(session.tokens)
    speculative.rollback(2)
    assert lookup._index.tokens == list(session.tokens) == [ord("q"), ANSWER]


# --- costs


def echo(tokens: tuple[int, ...]) -> FloatArray:
    """Repeats the prompt, over and over."""
    start = tokens.index(ANSWER) if ANSWER in tokens else len(tokens)
    return one_hot(tokens[(len(tokens) - start - 1) % start])


def test_an_answer_that_repeats_its_prompt_takes_few_passes() -> None:
    asked = Request(Prompt(text="The quick brown fox jumps. "), GREEDY, max_tokens=108)
    target = ToyEngine(echo)
    steps = list(decoder(target, Speculation((1,) * 31)).decode(asked))
    assert text(steps) == "The quick brown fox jumps. " * 4
    metrics = Metrics.of(steps)
    assert metrics.num_target_passes < 20
    assert metrics.num_draft_tokens - 5 < metrics.num_accepted_tokens
    assert metrics.num_accepted_tokens + metrics.num_target_passes == 108
    assert target.forward_passes <= metrics.num_target_passes + 1, "the prompt's pass comes first"


def test_a_rejection_ends_the_match() -> None:
    """The token that the target wrote instead has not followed there."""
    lookup = prompt_text(b"the cat sat. the c")
    assert lookup.propose(8, adaptive=True)
    lookup.extend(b"u")
    assert lookup.propose(8, adaptive=True) == []


# --- the option


def test_no_draft_is_looked_for() -> None:
    target = engine(2)
    options = SpecGuardOptions(
        draft="no-such-file.gguf",
        target=target,
        decoder="speculative",
        speculate_with="prompt",
        num_speculative_tokens=31,
    )
    assembled = assemble(options)
    assert isinstance(assembled, SpeculativeDecoder)
    assert assembled.engines == (target,)
    assert assembled.speculation == Speculation((1,) * 31)
    with_draft = options.model_copy(update={"speculate_with": "draft", "draft": engine(1)})
    assert len(assemble(with_draft).engines) == 2


def test_a_tree_is_refused() -> None:
    options = SpecGuardOptions(
        target=engine(2), decoder="speculative", speculate_with="prompt", speculative_tree=[2, 1]
    )
    with pytest.raises(ConfigurationError, match=r"a chain, not a tree of widths \(2, 1\)"):
        assemble(options)


def test_it_can_take_part_in_an_evaluation(tmp_path: Path) -> None:
    results = run(tmp_path, arms="target,lookup=speculative:speculate_with=prompt")
    answers = {(result.arm, result.problem): result.text for result in results}
    assert len(answers) == 6
    for (arm, problem), answer in answers.items():
        assert answer == answers["target", problem], arm
