"""The statistics themselves: known decoders and signals come out within their intervals."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import NormalDist

import numpy as np
import pytest

from specguard_chains.errors import EvaluationError
from specguard_chains.evaluation import statistics
from specguard_chains.evaluation.statistics import (
    Estimate,
    auroc,
    auroc_difference,
    auroc_estimate,
    mcnemar_p,
    ratio_of_sums,
    sign_test_p,
    wilson_interval,
)


def covered(estimate: Estimate | None, truth: float) -> bool:
    assert estimate is not None
    assert estimate.interval is not None
    low, high = estimate.interval
    assert low <= estimate.value <= high
    return low <= truth <= high


class TestWilson:
    @pytest.mark.parametrize(
        ("correct", "n", "low", "high"),
        [
            (0, 10, 0.0, 0.2775),
            (10, 10, 0.7225, 1.0),
            (5, 10, 0.2366, 0.7634),
            (1, 1, 0.2065, 1.0),
            (81, 263, 0.2553, 0.3662),  # Newcombe 1998, table I
        ],
    )
    def test_published_values(self, correct: int, n: int, low: float, high: float) -> None:
        assert wilson_interval(correct, n) == pytest.approx((low, high), abs=6e-5)

    def test_more_confidence_is_wider(self) -> None:
        ninety = wilson_interval(7, 20, confidence=0.9)
        ninety_nine = wilson_interval(7, 20, confidence=0.99)
        assert ninety is not None
        assert ninety_nine is not None
        assert ninety_nine[0] < ninety[0] < 0.35 < ninety[1] < ninety_nine[1]

    def test_nothing_has_no_share(self) -> None:
        assert wilson_interval(0, 0) is None

    @pytest.mark.parametrize(("correct", "n"), [(1, 0), (-1, 3), (4, 3)])
    def test_impossible_shares_are_refused(self, correct: int, n: int) -> None:
        with pytest.raises(EvaluationError, match=f"{correct} of {n}"):
            wilson_interval(correct, n)

    @pytest.mark.parametrize(("accuracy", "n"), [(0.65, 60), (0.9, 60), (0.3, 24)])
    def test_a_decoder_of_known_accuracy_is_covered(self, accuracy: float, n: int) -> None:
        rights = np.random.default_rng(1).binomial(n, accuracy, size=4000)
        intervals = {k: wilson_interval(k, n) or (0, 0) for k in range(n + 1)}
        inside = [intervals[k][0] <= accuracy <= intervals[k][1] for k in rights]
        assert 0.925 < np.mean(inside) < 0.98


class TestMcNemar:
    @pytest.mark.parametrize(
        ("wins", "losses", "p"),
        [
            (0, 0, 1.0),
            (1, 0, 1.0),
            (5, 0, 2 / 32),
            (0, 6, 2 / 64),
            (8, 2, 2 * (1 + 10 + 45) / 1024),
            (2, 8, 2 * (1 + 10 + 45) / 1024),
            (3, 3, 1.0),
            (4, 3, 1.0),
        ],
    )
    def test_hand_calculated_values(self, wins: int, losses: int, p: float) -> None:
        first = [True] * wins + [False] * losses + [True, True, False]
        second = [False] * wins + [True] * losses + [True, True, False]
        assert mcnemar_p(first, second) == pytest.approx(p)
        assert sign_test_p(wins, losses) == pytest.approx(p)

    def test_many_problems_fit(self) -> None:
        assert sign_test_p(1000, 1000) == 1.0
        z = 199 / math.sqrt(2200)  # with continuity correction
        assert sign_test_p(1200, 1000) == pytest.approx(2 * NormalDist().cdf(-z), rel=0.05)

    def test_no_problems_have_no_p(self) -> None:
        assert mcnemar_p([], []) is None

    def test_equal_decoders_are_seldom_told_apart(self) -> None:
        wins = np.random.default_rng(2).binomial(20, 0.5, size=4000)
        assert 0.01 < np.mean([sign_test_p(int(k), int(20 - k)) < 0.05 for k in wins]) <= 0.05


class TestRatios:
    def test_it_agrees_with_the_closed_form(self) -> None:
        rng = np.random.default_rng(6)
        target = rng.gamma(4, 4, 500)
        arm = target * rng.gamma(20, 0.04, 500)
        found = ratio_of_sums(arm, target, seed=2)
        assert found is not None
        assert found.interval is not None
        ratio = arm.sum() / target.sum()
        half = 1.96 * (arm - ratio * target).std() / target.mean() / math.sqrt(500)
        assert found.value == pytest.approx(ratio)
        assert found.interval == pytest.approx((ratio - half, ratio + half), abs=half * 0.08)

    def test_a_constant_ratio_is_certain(self) -> None:
        seconds = np.random.default_rng(7).gamma(2, 5, 40)
        found = ratio_of_sums(0.5 * seconds, seconds)
        assert found is not None
        assert found.value == pytest.approx(0.5)
        assert found.interval == pytest.approx((0.5, 0.5))

    def test_sums_are_compared_not_ratios(self) -> None:
        found = ratio_of_sums([1, 10], [2, 2])
        assert found is not None
        assert found.value == pytest.approx(11 / 4)

    def test_a_known_ratio_is_covered(self) -> None:
        rng, inside = np.random.default_rng(8), []
        for trial in range(300):
            target = rng.gamma(4, 4, 60)
            arm = target * rng.gamma(9, 0.1, 60)
            inside.append(covered(ratio_of_sums(arm, target, seed=trial, resamples=2000), 0.9))
        assert 0.89 < np.mean(inside) < 0.985

    def test_zero_seconds_have_no_ratio(self) -> None:
        assert ratio_of_sums([1, 2], [0, 0]) is None
        assert ratio_of_sums([], []) is None
        assert ratio_of_sums([1, 2], [0, 4]) == Estimate(0.75, None)
        assert ratio_of_sums([0] * 10, [1, 4] * 5) == Estimate(0.0, (0.0, 0.0))

    def test_negative_seconds_are_refused(self) -> None:
        with pytest.raises(EvaluationError, match="negative"):
            ratio_of_sums([1, -1], [1, 1])


def normal_signal(
    rng: np.random.Generator, truth: float, problems: int, steps: int
) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Return scores of steps with a known AUROC; steps of one problem have much in common."""
    shift = math.sqrt(2) * NormalDist().inv_cdf(truth)
    of_step = np.repeat(np.arange(problems), steps)
    labels = rng.random(problems)[of_step] < 0.5  # right as a whole
    common = rng.normal(size=problems)[of_step]
    scores = math.sqrt(0.7) * common + math.sqrt(0.3) * rng.normal(size=of_step.size)
    return scores + shift * labels, labels, of_step.tolist()


class TestAuroc:
    @pytest.mark.parametrize(
        ("scores", "labels", "expected"),
        [
            ([1, 2, 3, 4], [0, 0, 1, 1], 1.0),
            ([1, 2, 3, 4], [1, 1, 0, 0], 0.0),
            ([1, 3, 2, 4], [0, 0, 1, 1], 0.75),
            ([1, 1, 1, 1], [0, 1, 0, 1], 0.5),
            ([1, 2, 2, 3], [0, 0, 1, 1], 0.875),
            ([0.5, -math.pi], [True, False], 1.0),
        ],
    )
    def test_hand_calculated_values(
        self, scores: list[float], labels: list[int], expected: float
    ) -> None:
        assert auroc(scores, labels) == pytest.approx(expected)

    def test_it_is_the_share_of_pairs_in_order(self) -> None:
        rng = np.random.default_rng(9)
        scores, labels = rng.integers(0, 12, 300), rng.random(300) < 0.4
        true, false = scores[labels][:, None], scores[~labels][None, :]
        expected = np.mean((true > false) + 0.5 * (true == false))
        assert auroc(scores, labels) == pytest.approx(expected)

    @pytest.mark.parametrize("labels", [[], [1], [0, 0, 0], [True, True]])
    def test_one_class_has_none(self, labels: list[int]) -> None:
        assert auroc(range(len(labels)), labels) is None
        assert auroc_estimate(range(len(labels)), labels, labels) is None
        assert auroc_difference(range(len(labels)), labels, labels, labels) is None

    def test_a_resample_is_what_it_says(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(statistics, "FEWEST", 2)
        # "a" alone is ordered rightly, "b" wrongly; both together are right in 3 of 4 pairs.
        scores, labels, problems = [1, 4, 2, 3], [0, 1, 1, 0], ["a", "a", "b", "b"]
        assert auroc_estimate(scores, labels, problems) == Estimate(0.75, (0.0, 1.0))
        inner = auroc_estimate(scores, labels, problems, confidence=0.4)
        assert inner == Estimate(0.75, (0.75, 0.75))

    def test_resamples_of_one_class_are_left_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(statistics, "FEWEST", 2)
        found = auroc_estimate([1, 2, 3, 3], [0, 0, 1, 1], ["a", "a", "b", "c"])
        assert found == Estimate(1.0, (1.0, 1.0))
        half_of_them = auroc_estimate([1, 2, 3, 4], [0, 1, 1, 1], ["a", "b", "b", "b"])
        assert half_of_them == Estimate(1.0, None)
        one = auroc_estimate([1, 2, 3], [0, 1, 0], ["a", "a", "a"])
        assert one == Estimate(0.5, None)

    def test_blocks_do_not_change_the_interval(self, monkeypatch: pytest.MonkeyPatch) -> None:
        given = normal_signal(np.random.default_rng(10), 0.7, 30, 4)
        whole = auroc_estimate(*given)
        monkeypatch.setattr("specguard_chains.evaluation.statistics._BLOCK", 1000)
        assert auroc_estimate(*given) == whole

    def test_a_signal_of_known_auroc_is_covered(self) -> None:
        rng, inside, naive = np.random.default_rng(11), [], []
        for trial in range(150):
            scores, labels, problems = normal_signal(rng, 0.78, 80, 5)
            found = auroc_estimate(scores, labels, problems, seed=trial, resamples=400)
            inside.append(covered(found, 0.78))
            alone = auroc_estimate(scores, labels, range(400), seed=trial, resamples=400)
            naive.append(covered(alone, 0.78))
        assert 0.88 < np.mean(inside) <= 0.99
        assert np.mean(naive) < 0.8  # as if steps were independent: why problems are drawn

    def test_chance_is_covered(self) -> None:
        rng, inside = np.random.default_rng(12), []
        for trial in range(150):
            scores, labels, problems = normal_signal(rng, 0.5, 60, 3)
            inside.append(
                covered(auroc_estimate(scores, labels, problems, seed=trial, resamples=400), 0.5)
            )
        assert 0.88 < np.mean(inside) <= 0.99

    def test_a_difference_is_paired(self) -> None:
        scores, labels, problems = normal_signal(np.random.default_rng(13), 0.75, 80, 3)
        same = auroc_difference(scores, np.exp(scores), labels, problems)
        assert same == Estimate(0.0, (0.0, 0.0))
        noise = np.random.default_rng(14).normal(size=scores.size)
        better = auroc_difference(scores, noise, labels, problems)
        assert better is not None
        assert better.interval is not None
        assert better.interval[0] > 0
        alone, chance = auroc(scores, labels), auroc(noise, labels)
        assert alone is not None
        assert chance is not None
        assert better.value == pytest.approx(alone - chance)

    def test_many_steps_take_seconds(self) -> None:
        given = normal_signal(np.random.default_rng(15), 0.8, 1000, 8)
        start = time.perf_counter()
        covered(auroc_estimate(*given), 0.8)
        assert time.perf_counter() - start < 20


PAIRED: list[Callable[..., object]] = [mcnemar_p, ratio_of_sums, auroc]


class TestInput:
    @pytest.mark.parametrize("figure", PAIRED)
    def test_unpaired_figures_are_refused(self, figure: Callable[..., object]) -> None:
        with pytest.raises(EvaluationError, match=r"shapes \(2,\) and \(3,\)"):
            figure([1, 0], [1, 0, 1])
        with pytest.raises(EvaluationError, match="shapes"):
            figure([[1, 0]], [[1, 0]])

    @pytest.mark.parametrize("figure", PAIRED)
    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_what_is_no_number_is_refused(self, figure: Callable[..., object], bad: float) -> None:
        with pytest.raises(EvaluationError, match="finite"):
            figure([1, bad], [1, 0])
        with pytest.raises(EvaluationError, match="finite"):
            figure([1, 0], [bad, 0])

    def test_every_step_has_a_problem(self) -> None:
        with pytest.raises(EvaluationError, match="2 problems for 3 steps"):
            auroc_estimate([1, 2, 3], [0, 1, 1], ["a", "b"])

    def test_a_seed_gives_the_same_interval(self) -> None:
        one, other = np.random.default_rng(16).gamma(2, 2, size=(2, 30))
        assert ratio_of_sums(one, other, seed=4) == ratio_of_sums(one, other, seed=4)
        assert ratio_of_sums(one, other, seed=4) != ratio_of_sums(one, other, seed=5)

    @pytest.mark.parametrize("n", [1, 2, 7, 8])
    def test_few_problems_have_no_interval(self, n: int) -> None:
        """It would be the range of the data, however far off the truth that is."""
        found = ratio_of_sums([1.0, *[2.0] * (n - 1)], [1.0] * n)
        area = auroc_estimate([0, 1] * n, [0, 1] * n, [i // 2 for i in range(2 * n)])
        for estimate in (found, area):
            assert estimate is not None
            assert (estimate.interval is None) == (n < 8)

    @pytest.mark.parametrize("bad", [{"confidence": 1.0}, {"confidence": 0.0}, {"resamples": 0}])
    def test_settings_are_checked(self, bad: dict[str, float]) -> None:
        with pytest.raises(EvaluationError, match=next(iter(bad))):
            ratio_of_sums([1, 2, 3] * 4, [1, 1, 1] * 4, **bad)  # type: ignore[arg-type]
