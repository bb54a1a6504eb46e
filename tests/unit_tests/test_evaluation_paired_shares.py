"""Differences of paired shares, against published figures and exact probabilities."""

from __future__ import annotations

from math import comb
from statistics import NormalDist

import pytest

from specguard_chains.errors import EvaluationError
from specguard_chains.evaluation.paired_shares import (
    difference_interval,
    is_above,
    problems_needed,
)

Z2 = NormalDist().inv_cdf(0.975) ** 2


def test_a_published_interval() -> None:
    # Complete response before and after consolidation therapy (Cavo et al. 2012), as computed by
    # the R package contingencytables.
    assert difference_interval(6, 16, 161) == pytest.approx((-0.1240, -0.0054), abs=5e-5)


def test_few_problems_leave_room_even_if_both_are_right_on_the_same_ones() -> None:
    for n in (1, 4, 60):
        low = -Z2 / (n + Z2)
        assert difference_interval(0, 0, n) == pytest.approx((low, -low))
    assert difference_interval(0, 0, 0) is None


def test_the_ends_of_shares() -> None:
    interval = difference_interval(0, 20, 20)
    assert interval is not None
    assert interval[0] == -1
    assert interval[1] == pytest.approx(-difference_interval(20, 0, 20)[0])  # type: ignore[index]


def test_what_is_above_is_what_the_interval_is_above() -> None:
    low, _ = difference_interval(7, 5, 60) or (0, 0)
    assert is_above(low - 1e-6, 7, 5, 60)
    assert not is_above(low + 1e-6, 7, 5, 60)
    assert not is_above(-0.5, 0, 0, 0)


def test_what_is_not_so_is_seldom_shown() -> None:
    """An accuracy of exactly the tolerance below is called not below in about 2.5 % of all runs."""
    n, wins, losses = 60, 0.05, 0.10
    wrong = sum(
        comb(n, w) * comb(n - w, x) * wins**w * losses**x * (1 - wins - losses) ** (n - w - x)
        for w in range(n + 1)
        for x in range(n + 1 - w)
        if is_above(wins - losses, w, x, n)
    )
    assert 0.015 < wrong < 0.035


def test_how_many_problems_would_show_it() -> None:
    assert problems_needed(-0.05, 0, 0, 12) == 73
    n = problems_needed(-0.05, 3, 5, 60)
    assert n is not None
    assert is_above(-0.05, 3 * n / 60, 5 * n / 60, n)
    assert not is_above(-0.05, 3 * (n - 1) / 60, 5 * (n - 1) / 60, n - 1)


def test_a_lower_accuracy_is_not_shown_by_more_problems() -> None:
    assert problems_needed(-0.05, 2, 5, 60) is None
    assert problems_needed(-0.05, 0, 0, 0) is None


@pytest.mark.parametrize("points_below", range(1, 21))
def test_an_accuracy_of_just_the_tolerance_below_is_not_shown_by_any_number(
    points_below: int,
) -> None:
    """Whatever the tolerance is as a float: 0.07 of 100 is not 7."""
    assert problems_needed(-points_below / 100, 0, points_below, 100) is None


def test_what_cannot_be_counted_is_an_error() -> None:
    with pytest.raises(EvaluationError, match="3 wins and 2 losses of 4 problems"):
        difference_interval(3, 2, 4)
    with pytest.raises(EvaluationError, match=r"confidence is 1\.5"):
        is_above(0, 1, 1, 4, confidence=1.5)
