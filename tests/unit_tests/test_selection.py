"""Self-consistency selection against METHODS.md section 1.2, written out."""

from __future__ import annotations

from itertools import permutations
from math import cos, exp, radians, sin
from typing import Any

import numpy as np
import pytest

from specguard_chains.decoding.selection import (
    FloatArray,
    HashedNgrams,
    Selector,
    lowest_self_alignment,
)
from specguard_chains.errors import ConfigurationError


def similarities(embeddings: FloatArray) -> list[list[float]]:
    """S = E E^T of L2-normalised rows; a zero vector is similar to nothing."""
    unit = [row / (np.linalg.norm(row) or 1.0) for row in embeddings.astype(np.float64)]
    return [[float(a @ b) for b in unit] for a in unit]


def first_best(values: list[float]) -> int:
    """The lowest index among the highest values, which may differ by rounding."""
    return next(i for i, value in enumerate(values) if value >= max(values) - 1e-6)


def by_the_paper(embeddings: FloatArray) -> int:
    """Row softmax, then the lowest diagonal entry."""
    table = similarities(embeddings)
    return first_best([-exp(row[j]) / sum(map(exp, row)) for j, row in enumerate(table)])


def by_agreement(embeddings: FloatArray) -> int:
    return first_best([sum(map(exp, row)) for row in similarities(embeddings)])


def by_mean_cosine(embeddings: FloatArray) -> int:
    return first_best([sum(row) for row in similarities(embeddings)])


def random_embeddings(seed: int) -> FloatArray:
    rng = np.random.default_rng(seed)
    k, dimensions = rng.integers(3, 17), rng.integers(2, 40)
    lengths = rng.lognormal(sigma=2, size=(k, 1))
    return (rng.normal(size=(k, dimensions)) * lengths).astype(np.float32)


def on_circle(*degrees: float) -> FloatArray:
    return np.array([[cos(radians(d)), sin(radians(d))] for d in degrees], dtype=np.float32)


@pytest.mark.parametrize("seed", range(100))
def test_it_is_the_papers_choice_and_the_one_that_the_others_agree_with(seed: int) -> None:
    embeddings = random_embeddings(seed)
    chosen = lowest_self_alignment(embeddings)
    assert chosen == by_the_paper(embeddings)
    assert chosen == by_agreement(embeddings)


def test_it_is_not_the_medoid_by_mean_cosine() -> None:
    # Two that agree fully outweigh a middle one that agrees a little with all.
    embeddings = on_circle(0, 0, 65, 130, 130)
    embeddings = np.vstack([embeddings, on_circle(70)])
    assert by_mean_cosine(embeddings) == 2
    assert lowest_self_alignment(embeddings) == by_agreement(embeddings) != 2


def test_both_rules_differ_now_and_then_on_random_vectors() -> None:
    drawn = [random_embeddings(seed) for seed in range(100)]
    agree = sum(lowest_self_alignment(e) == by_mean_cosine(e) for e in drawn)
    assert 50 < agree < 95


@pytest.mark.parametrize("seed", range(20))
def test_lengths_of_the_vectors_do_not_matter(seed: int) -> None:
    embeddings = random_embeddings(seed)
    scale = np.random.default_rng(seed).lognormal(sigma=3, size=(len(embeddings), 1))
    assert lowest_self_alignment((embeddings * scale).astype(np.float32)) == (
        lowest_self_alignment(embeddings)
    )


@pytest.mark.parametrize("seed", range(20))
def test_the_order_of_the_candidates_does_not_matter(seed: int) -> None:
    embeddings = random_embeddings(seed)
    order = np.random.default_rng(seed).permutation(len(embeddings))
    assert order[lowest_self_alignment(embeddings[order])] == lowest_self_alignment(embeddings)


@pytest.mark.parametrize("k", range(1, 17))
def test_among_equals_the_lowest_index_wins(k: int) -> None:
    rng = np.random.default_rng(k)
    assert lowest_self_alignment(np.tile(rng.normal(size=7), (k, 1)).astype(np.float32)) == 0
    assert lowest_self_alignment(np.eye(k, dtype=np.float32)) == 0


def test_of_two_candidates_neither_is_better_and_the_first_is_chosen() -> None:
    pairs = [random_embeddings(seed)[:2] for seed in range(20)]
    assert [lowest_self_alignment(pair) for pair in pairs] == [0] * 20
    assert [lowest_self_alignment(pair[::-1]) for pair in pairs] == [0] * 20
    texts = ["Add 3 and 4.\n\n", "The sum is 7.\n\n"]
    assert Selector()(texts) == Selector()(texts[::-1]) == 0


@pytest.mark.parametrize("seed", range(10))
def test_equal_candidates_tie_whatever_the_rounding(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(20):
        often, twice, once = rng.normal(size=(3, 300)).astype(np.float32)
        rows = [often, twice, often, once, often, twice]
        order = rng.permutation(len(rows))
        expected = min(i for i, row in enumerate(order) if rows[row] is often)
        assert lowest_self_alignment(np.array(rows)[order]) == expected


def test_zero_vectors_alone_tie() -> None:
    assert lowest_self_alignment(np.zeros((4, 3), dtype=np.float32)) == 0


@pytest.mark.parametrize("at", range(4))
def test_a_zero_vector_agrees_with_nobody(at: int) -> None:
    agreeing = on_circle(0, 10, 20)
    embeddings = np.insert(agreeing, at, 0.0, axis=0)
    assert lowest_self_alignment(embeddings) == by_agreement(embeddings) != at


@pytest.mark.parametrize("blank", ["", "\n\n"])
def test_a_blank_candidate_is_not_the_most_consistent_one(blank: str) -> None:
    texts = ["So x = 4.\n\n", blank, "Thus x = 4.\n\n", "Hence x = 4.\n\n"]
    assert Selector()(texts) != 1


def test_the_embeddings_given_are_left_as_they_are() -> None:
    embeddings = random_embeddings(0)
    before = embeddings.copy()
    lowest_self_alignment(embeddings)
    np.testing.assert_array_equal(embeddings, before)


class Recorder:
    """Embeds texts by their length, and remembers what it was asked."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def __call__(self, texts: list[str]) -> FloatArray:
        self.calls.append(list(texts))
        return on_circle(*(len(text) for text in texts))


def test_another_encoder_can_be_plugged_in() -> None:
    encoder = Recorder()
    texts = ["x" * 10, "x" * 45, "x" * 50, "x" * 89]
    assert Selector(encoder)(texts) == 2
    assert encoder.calls == [texts]


@pytest.mark.parametrize(
    ("vectors", "message"),
    [
        ([[1.0, float("nan")], [0.0, 1.0]], "not finite"),
        (np.ones((1, 2)), r"each of 2 texts; .* shape \(1, 2\)"),
        (np.ones(2), r"shape \(2,\)"),
        ([[1.0], [1.0, 2.0]], "one vector of numbers"),
        (["red", "blue"], "one vector of numbers"),
    ],
)
def test_an_encoder_that_gives_no_vectors_is_named(vectors: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Selector(lambda texts: vectors)(["a", "b"])


def test_lists_are_vectors_too() -> None:
    """As LangChain's `embed_documents` gives them."""
    lists: Any = lambda texts: [[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]  # noqa: E731
    assert Selector(lists)(["a", "b", "c"]) == 1


def test_one_candidate_or_equal_ones_need_no_encoder() -> None:
    encoder = Recorder()
    assert Selector(encoder)(["alone"]) == 0
    assert Selector(encoder)(["same", "same", "same"]) == 0
    assert encoder.calls == []


def test_the_text_that_most_candidates_share_is_chosen_in_any_order() -> None:
    texts = ["x is 12.\n\n", "y is 7, said she.\n\n", "x is 12.\n\n", "quite another\n\n"]
    for shuffled in permutations(texts):
        assert Selector()(shuffled) == shuffled.index("x is 12.\n\n")


def cosine(first: str, second: str) -> float:
    return similarities(HashedNgrams()([first, second]))[0][1]


def test_hashing_gives_one_row_per_text_and_the_same_one_always() -> None:
    texts = ["Add 3 and 4.", "That makes 7.", ""]
    vectors = HashedNgrams(64)(texts)
    assert vectors.shape == (3, 64)
    assert vectors.dtype == np.float32
    assert not vectors[2].any()
    np.testing.assert_array_equal(vectors, HashedNgrams(64)(texts))
    for text, vector in zip(texts, vectors, strict=True):
        np.testing.assert_array_equal(HashedNgrams(64)([text])[0], vector)
    assert HashedNgrams()([]).shape == (0, 4096)


def test_hashing_is_the_same_on_every_machine() -> None:
    (vector,) = HashedNgrams(16)(["ab c"])
    expected = {13: 1, 15: -1, 8: 1, 12: 1}  # "ab", "c", "ab ", "b c"
    assert {i: value for i, value in enumerate(vector) if value} == expected


def test_case_and_white_space_do_not_matter() -> None:
    assert cosine("The Sum  is\n9", " the sum IS 9 ") == pytest.approx(1.0)


@pytest.mark.parametrize("number", [7, 42, 150, 2048])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("She pays {} dollars in all.", "The total is {} ."),
        ("Altogether that makes {}.", "So the answer is {}."),
        ("Altogether that makes ${}.", "{} is what remains"),
        ("(x = {})", "hence x={}, as asked"),
        ("we get \\boxed{{{}}}", "**{}**"),
    ],
)
def test_equal_numbers_bring_texts_closer(first: str, second: str, number: int) -> None:
    equal = cosine(first.format(number), second.format(number))
    assert equal > cosine(first.format(number), second.format(number + 1)) + 1e-6


def test_the_number_that_most_candidates_reach_wins() -> None:
    texts = [
        "First, 17 and 25 are added, which makes 43.",
        "Adding up 17 and 25 we have 42.",
        "17 plus 25 equals 42.",
        "The sum of them is 42.",
    ]
    assert Selector()(texts) != 0
