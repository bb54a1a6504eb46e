"""One level of a tree: whatever is drafted, the next token has the target's law. Exactly."""

from __future__ import annotations

import numpy as np
import pytest

from specguard_chains.decoding.acceptance import (
    Branching,
    Choose,
    Independent,
    Law,
    Likeliest,
    WithoutReplacement,
    chooser,
    likeliest,
)
from tests.unit_tests.enumeration import law_of

VOCABULARY = 6
BRANCHINGS = [Independent(), WithoutReplacement(), Likeliest()]


def name(value: object) -> str:
    return type(value).__name__ if isinstance(value, tuple(map(type, BRANCHINGS))) else str(value)


def random_law(seed: int) -> Law:
    rng = np.random.default_rng(seed)
    law = rng.dirichlet(np.full(VOCABULARY, 0.7))
    if seed % 3 == 0:  # as top-p leaves it
        law[rng.permutation(VOCABULARY)[: 1 + seed % 4]] = 0.0
    return law / law.sum()


def next_token(p: Law, q: Law, n: int, branching: Branching, choose: Choose) -> int:
    r = p
    for token in branching.draw(q, n, choose):
        accepted = branching.acceptance(r, q, token)
        if choose(np.array([accepted, 1 - accepted])) == 0:
            return token
        r, q = branching.reject(r, q, token)
    return choose(r)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("branching", BRANCHINGS, ids=name)
@pytest.mark.parametrize("seed", range(8))
def test_the_next_token_has_the_targets_law(seed: int, branching: Branching, n: int) -> None:
    p, q = random_law(seed), random_law(seed + 100)
    law = law_of(lambda choose: next_token(p, q, n, branching, choose))
    np.testing.assert_allclose([law[x] for x in range(VOCABULARY)], p, atol=1e-12)


@pytest.mark.parametrize(
    ("drawing", "accepting"),
    [(Likeliest(), Independent()), (WithoutReplacement(), Independent())],
    ids=name,
)
def test_the_rule_of_another_drawing_would_be_wrong(
    drawing: Branching, accepting: Branching
) -> None:
    """The enumeration can fail."""
    p, q = random_law(1), random_law(101)
    law = law_of(lambda choose: next_token(p, q, 3, Mixed(drawing, accepting), choose))
    assert max(abs(law[x] - p[x]) for x in range(VOCABULARY)) > 0.001


class Mixed:
    """Draws by one rule and accepts by another."""

    def __init__(self, drawing: Branching, accepting: Branching) -> None:
        self.draw = drawing.draw
        self.acceptance = accepting.acceptance
        self.reject = accepting.reject


@pytest.mark.parametrize("branching", BRANCHINGS, ids=name)
def test_laws_that_have_no_token_in_common(branching: Branching) -> None:
    p, q = np.array([0.5, 0.5, 0, 0]), np.array([0, 0, 0.25, 0.75])
    law = law_of(lambda choose: next_token(p, q, 3, branching, choose))
    assert dict(law) == pytest.approx({0: 0.5, 1: 0.5})


@pytest.mark.parametrize("branching", BRANCHINGS[:2], ids=name)
@pytest.mark.parametrize("seed", range(8))
def test_the_targets_own_draws_are_always_accepted(seed: int, branching: Branching) -> None:
    p = random_law(seed)
    for token in np.flatnonzero(p):
        assert branching.acceptance(p, p, int(token)) == 1.0


def test_more_children_are_accepted_more_often() -> None:
    p, q = random_law(1), random_law(101)
    for branching in BRANCHINGS:
        rates = []
        for n in (1, 2, 3, 4):

            def accepted(choose: Choose, n: int = n, branching: Branching = branching) -> bool:
                sizes: list[int] = []

                def noting(law: Law) -> int:
                    sizes.append(len(law))
                    return choose(law)

                next_token(p, q, n, branching, noting)
                return sizes[-1] == 2  # the last choice was to accept

            rates.append(law_of(accepted)[True])
        assert rates == sorted(rates)
        assert rates[0] < rates[-1]


def test_drawing_without_replacement_never_repeats() -> None:
    q = random_law(3)
    possible = np.count_nonzero(q)
    for seed in range(20):
        tokens = WithoutReplacement().draw(q, VOCABULARY, chooser(np.random.default_rng(seed)))
        assert sorted(tokens) == np.flatnonzero(q).tolist()
        assert len(tokens) == possible


def test_the_likeliest_are_drawn_in_their_order() -> None:
    q = np.array([0.1, 0.4, 0.0, 0.3, 0.2, 0.0])
    assert Likeliest().draw(q, 1, likeliest) == [1]
    assert Likeliest().draw(q, 3, likeliest) == [1, 3, 4]
    assert Likeliest().draw(q, 9, likeliest) == [1, 3, 4, 0]


def test_choices_follow_their_law() -> None:
    law = np.array([0.0, 0.2, 0.5, 0.0, 0.3, 0.0])
    choose = chooser(np.random.default_rng(5))
    counts = np.bincount([choose(law) for _ in range(20_000)], minlength=6) / 20_000
    np.testing.assert_allclose(counts, law, atol=0.012)
    assert counts[[0, 3, 5]].sum() == 0
