"""The sampler against a full sort in double precision, and its draws against its distribution."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from specguard_chains.decoding.sampling import (
    FloatArray,
    Sampling,
    distribution,
    draw,
    generators,
    logprob,
    ranked,
)
from specguard_chains.errors import ConfigurationError, EngineError


def softmax(logits: FloatArray, temperature: float) -> npt.NDArray[np.float64]:
    scaled = logits.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    return weights / weights.sum()


def reference(logits: FloatArray, sampling: Sampling) -> npt.NDArray[np.float64]:
    """Temperature, top_k, top_p, min_p one after the other, on a fully sorted vocabulary."""
    probabilities = softmax(logits, sampling.temperature)
    order = sorted(range(len(logits)), key=lambda token: (-probabilities[token], token))
    if sampling.top_k:
        order = order[: sampling.top_k]
    if sampling.top_p < 1:
        wanted = sampling.top_p * probabilities[order].sum()
        reached, nucleus = 0.0, []
        for token in order:
            nucleus.append(token)
            reached += probabilities[token]
            if reached >= wanted:
                break
        order = nucleus
    order = [t for t in order if probabilities[t] >= sampling.min_p * probabilities.max()]
    kept = np.zeros(len(logits))
    kept[order] = probabilities[order] / probabilities[order].sum()
    return kept


def normal(seed: int, size: int = 300, spread: float = 3.0) -> FloatArray:
    return (spread * np.random.default_rng(seed).normal(size=size)).astype(np.float32)


def peak_and_tail(seed: int) -> FloatArray:
    """One likely token and 2,000 unlikely ones that together weigh something."""
    logits = np.random.default_rng(seed).uniform(-12.5, -11.6, size=2001).astype(np.float32)
    logits[seed] = 0.0
    return logits


def assert_same(logits: FloatArray, sampling: Sampling) -> None:
    ours, expected = distribution(logits, sampling), reference(logits, sampling)
    assert ours.shape == logits.shape
    possible = 1e-12  # less is lost beside the cumulative 1
    np.testing.assert_array_equal(ours > possible, expected > possible)
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-7)


SINGLE = [
    Sampling(temperature=t, top_p=p, top_k=k, min_p=m)
    for t, p, k, m in [
        *((t, 1, 0, 0) for t in (0.2, 0.7, 1, 2.5)),
        *((1, p, 0, 0) for p in (0.01, 0.3, 0.8, 0.95, 0.999)),
        *((1, 1, k, 0) for k in (2, 3, 40, 299, 300, 1000)),
        *((1, 1, 0, m) for m in (0.001, 0.05, 0.5, 1)),
    ]
]
TOGETHER = [
    Sampling(temperature=0.7, top_p=0.8),
    Sampling(temperature=0.7, top_p=0.8, top_k=20),
    Sampling(temperature=1.5, top_p=0.9, top_k=50, min_p=0.05),
    Sampling(temperature=0.6, top_p=1, top_k=5, min_p=0.3),
    Sampling(temperature=2.0, top_p=0.99, min_p=0.01),
]


@pytest.mark.parametrize("sampling", [*SINGLE, *TOGETHER], ids=str)
def test_filters_equal_a_full_sort(sampling: Sampling) -> None:
    for seed in range(10):
        assert_same(normal(seed), sampling)
        assert_same(normal(seed, size=3), sampling)
    assert_same(normal(0, size=1), sampling)


@pytest.mark.parametrize("top_p", [0.5, 0.97, 0.985, 0.99, 0.999])
def test_top_p_reaches_into_a_long_tail(top_p: float) -> None:
    sampling = Sampling(temperature=1, top_p=top_p)
    for seed in range(3):
        assert_same(peak_and_tail(seed), sampling)
        kept = np.count_nonzero(distribution(peak_and_tail(seed), sampling))
        assert (kept > 1) == (top_p > 0.985)


@pytest.mark.parametrize("top_k", [2, 3, 100, 2000])
def test_top_k_reaches_into_a_long_tail(top_k: int) -> None:
    for seed in range(3):
        sampling = Sampling(temperature=1, top_p=1, top_k=top_k)
        assert np.count_nonzero(distribution(peak_and_tail(seed), sampling)) == top_k
        assert_same(peak_and_tail(seed), sampling)


def test_top_p_is_taken_of_what_top_k_has_left() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], dtype=np.float32))
    # 0.4 of 0.7 is 0.57: the second is needed for 0.6, though 0.4 + 0.3 of all would be too.
    both = distribution(logits, Sampling(temperature=1, top_k=2, top_p=0.56))
    np.testing.assert_allclose(both, [1, 0, 0, 0], atol=1e-6)
    both = distribution(logits, Sampling(temperature=1, top_k=2, top_p=0.6))
    np.testing.assert_allclose(both, [4 / 7, 3 / 7, 0, 0], atol=1e-6)


@pytest.mark.parametrize("top_p", [0.2, 0.25, 1e-9])
def test_top_p_keeps_the_token_that_reaches_it_and_at_least_one(top_p: float) -> None:
    even = np.zeros(4, dtype=np.float32)
    kept = distribution(even, Sampling(temperature=1, top_p=top_p))
    assert kept.tolist() == [1, 0, 0, 0]


def test_among_equally_likely_tokens_the_lowest_stays() -> None:
    even = np.zeros(6, dtype=np.float32)
    two = distribution(even, Sampling(temperature=1, top_p=1, top_k=2))
    assert two.tolist() == [0.5, 0.5, 0, 0, 0, 0]
    half = distribution(even, Sampling(temperature=1, top_p=0.5))
    np.testing.assert_allclose(half, [1 / 3, 1 / 3, 1 / 3, 0, 0, 0], rtol=1e-6)


@pytest.mark.parametrize("sampling", [*SINGLE, *TOGETHER], ids=str)
def test_a_shift_of_all_logits_changes_nothing(sampling: Sampling) -> None:
    logits = np.round(normal(1) * 16) / 16  # so that the shift is exact
    shifted = logits + np.float32(1024)
    np.testing.assert_array_equal(distribution(logits, sampling), distribution(shifted, sampling))


@pytest.mark.parametrize(
    "sampling",
    [Sampling(1, 1), Sampling(0.7, 0.8), Sampling(1, 1, 5), Sampling(1, 0.9, 8, 0.1)],
    ids=str,
)
@pytest.mark.parametrize("seed", [1, 2])
def test_draws_follow_the_distribution(sampling: Sampling, seed: int) -> None:
    logits, draws = normal(seed, size=12, spread=1.0), 5000
    (rng,) = generators((seed,), 1)
    counts = np.bincount([draw(logits, sampling, rng)[0] for _ in range(draws)], minlength=12)
    expected = reference(logits, sampling) * draws
    assert not counts[expected == 0].any()
    likely = expected > 0
    chi_square = ((counts - expected)[likely] ** 2 / expected[likely]).sum()
    freedom = np.count_nonzero(likely) - 1
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom)


class Edge:
    """Draws the extreme numbers of a uniform generator."""

    def __init__(self, value: float) -> None:
        self.value = value

    def random(self) -> float:
        return self.value


@pytest.mark.parametrize("sampling", [Sampling(1, 1), Sampling(1, 0.999), Sampling(1, 1, 4)])
def test_impossible_tokens_are_never_drawn(sampling: Sampling) -> None:
    logits = np.array([-np.inf, 0, -np.inf, -1, -np.inf], dtype=np.float32)
    (rng,) = generators((0,), 1)
    drawn = [draw(logits, sampling, rng) for _ in range(300)]
    drawn += [draw(logits, sampling, Edge(value)) for value in (0.0, 1 - 2**-53)]
    assert {token for token, _ in drawn} == {1, 3}
    assert np.isfinite([logprob for _, logprob in drawn]).all()


@pytest.mark.parametrize("sampling", [*SINGLE, *TOGETHER], ids=str)
def test_extreme_draws_stay_within_what_is_kept(sampling: Sampling) -> None:
    for seed in range(20):
        logits = normal(seed)
        kept = np.flatnonzero(distribution(logits, sampling))
        for value in (0.0, 1 - 2**-53):
            assert draw(logits, sampling, Edge(value))[0] in kept


GREEDY = [Sampling(temperature=0), Sampling(temperature=0, top_k=7, min_p=0.5), Sampling(1, 1, 1)]


@pytest.mark.parametrize("sampling", GREEDY, ids=str)
def test_greedy_takes_the_likeliest_and_the_lowest_of_equals(sampling: Sampling) -> None:
    assert sampling.greedy
    (rng,) = generators((0,), 1)
    for seed in range(20):
        logits = np.minimum(np.round(normal(seed, size=50, spread=1.0)), 1)
        assert np.count_nonzero(logits == logits.max()) > 1
        likeliest = logits.tolist().index(logits.max())
        assert draw(logits, sampling, rng)[0] == likeliest
        assert distribution(logits, sampling).tolist() == np.eye(50)[likeliest].tolist()


def test_sampling_at_a_temperature_is_not_greedy() -> None:
    assert not Sampling(temperature=1e-3).greedy
    assert not Sampling(top_k=2).greedy


@pytest.mark.parametrize("temperature", [1e-3, 1e-20, 1e-38, 1e-40, 1e-50, 5e-324])
def test_a_tiny_temperature_is_as_good_as_greedy(temperature: float) -> None:
    (rng,) = generators((0,), 1)
    for sampling in (Sampling(temperature), Sampling(temperature, 1), Sampling(temperature, 1, 5)):
        logits = normal(3, size=20, spread=5.0)
        assert draw(logits, sampling, rng)[0] == logits.argmax()
        assert distribution(logits, sampling)[logits.argmax()] == 1.0


def test_a_huge_temperature_is_as_good_as_uniform() -> None:
    even = distribution(normal(0, size=8), Sampling(temperature=1e30, top_p=1))
    np.testing.assert_allclose(even, 1 / 8, rtol=1e-5)


@pytest.mark.parametrize("sampling", [*GREEDY, *TOGETHER, Sampling(1, 1)], ids=str)
def test_the_log_probability_is_the_raw_one(sampling: Sampling) -> None:
    (rng,) = generators((5,), 1)
    for seed in range(20):
        logits = normal(seed) + np.float32(50)
        token, logprob = draw(logits, sampling, rng)
        assert logprob == pytest.approx(np.log(softmax(logits, 1.0)[token]), abs=2e-5)


def test_log_probabilities_survive_large_logits() -> None:
    for shift in (-3e4, 0, 3e4):
        logits = np.array([0, 1, 2], dtype=np.float32) + np.float32(shift)
        assert logprob(logits, 1) == pytest.approx(1 - np.log(np.exp([0, 1, 2]).sum()), abs=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0, 1])
def test_logits_that_are_no_numbers_are_refused(bad: float, temperature: float) -> None:
    logits = np.array([0, bad, 2], dtype=np.float32)
    with pytest.raises(EngineError, match="logits"):
        draw(logits, Sampling(temperature=temperature), np.random.default_rng(0))


def test_a_temperature_too_cold_for_float32_is_greedy() -> None:
    logits = np.array([0, 1, 2], dtype=np.float32)
    assert draw(logits, Sampling(temperature=1e-46), np.random.default_rng(0))[0] == 2


def test_the_logits_given_are_left_as_they_are() -> None:
    logits = normal(0)
    (rng,) = generators((0,), 1)
    for sampling in (*SINGLE, *TOGETHER, *GREEDY):
        draw(logits, sampling, rng)
        distribution(logits, sampling)
    np.testing.assert_array_equal(logits, normal(0))


def test_a_candidates_generator_does_not_depend_on_how_many_there_are() -> None:
    def numbers(n: int, seed: tuple[int, ...] = (7, 1, True)) -> list[list[float]]:
        return [rng.random(5).tolist() for rng in generators(seed, n)]

    assert numbers(9)[:4] == numbers(4)
    assert numbers(4)[:1] == numbers(1)
    streams = numbers(9) + numbers(9, (7, 1, False)) + numbers(9, (7, 2, True)) + numbers(9, (8, 1))
    assert len({tuple(stream) for stream in streams}) == 4 * 9


def test_equal_seeds_draw_equal_tokens() -> None:
    logits = normal(0)

    def tokens() -> list[int]:
        (rng,) = generators((3, 1), 1)
        return [draw(logits, Sampling(1, 1), rng)[0] for _ in range(50)]

    assert tokens() == tokens()


@pytest.mark.parametrize("n", [1, 2, 5, 200])
@pytest.mark.parametrize("seed", range(3))
def test_ranked_tokens_are_the_likeliest_with_their_probabilities(n: int, seed: int) -> None:
    logits = normal(seed)
    logits[::7] = -np.inf  # forbidden
    found = ranked(logits, n)
    probabilities = softmax(logits, 1.0)
    order = np.argsort(-probabilities, kind="stable")[:n]
    assert [token for token, _ in found] == [t for t in order if probabilities[t] > 0]
    assert [p for _, p in found] == pytest.approx([probabilities[t] for t, _ in found], rel=1e-5)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("inf")),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", float("nan")),
        ("top_k", -1),
        ("min_p", -0.01),
        ("min_p", 1.5),
        ("min_p", float("nan")),
    ],
)
def test_wrong_values_are_named(name: str, value: float) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} .* not {value}"):
        Sampling(**{name: value})
