"""Costs of passes: between and beyond what was measured."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from specguard_chains.decoding.steps import Source
from specguard_chains.errors import ConfigurationError
from specguard_chains.planning.costs import Costs, Curve, Kind, PairCosts
from tests.unit_tests.planning_costs import PAIR, TARGET

CURVE = Curve(sizes=(2, 4, 8), seconds=(2.0, 3.0, 7.0))


@pytest.mark.parametrize(
    ("size", "seconds"),
    [(2, 2.0), (3, 2.5), (4, 3.0), (6, 5.0), (8, 7.0), (10, 9.0), (1, 1.0), (0.5, 0.5), (0, 0.0)],
)
def test_in_between_and_beyond(size: float, seconds: float) -> None:
    assert CURVE.at(size) == pytest.approx(seconds)


def test_one_size_is_the_cost_of_that_many() -> None:
    assert Curve(sizes=(1,), seconds=(0.5,)).at(4) == 2.0


def test_noise_never_makes_a_larger_pass_cheaper_than_the_largest_measured() -> None:
    assert Curve(sizes=(1, 8), seconds=(2.0, 1.0)).at(100) == 1.0


@pytest.mark.parametrize(
    ("sizes", "seconds"),
    [((), ()), ((1, 1), (1.0, 1.0)), ((2, 1), (1.0, 1.0)), ((0,), (1.0,)), ((1,), (0.0,))],
)
def test_curves_that_cannot_be_are_refused(
    sizes: tuple[int, ...], seconds: tuple[float, ...]
) -> None:
    with pytest.raises(ValidationError):
        Curve(sizes=sizes, seconds=seconds)


def test_another_ratio_scales_all_that_the_draft_does() -> None:
    assert PAIR.ratio == pytest.approx(1.6)
    at_8 = PAIR.at_ratio(8)
    assert at_8.ratio == pytest.approx(8)
    assert at_8.draft.token_s == pytest.approx(0.004)
    assert at_8.draft.read.at(64) == pytest.approx(PAIR.draft.read.at(64) / 5)
    assert at_8.target == PAIR.target


def test_costs_survive_json() -> None:
    assert PairCosts.model_validate_json(PAIR.model_dump_json()) == PAIR


def test_attention_that_was_not_measured_is_not_guessed() -> None:
    with pytest.raises(ConfigurationError, match="small were measured without attention"):
        PAIR.of(Source.DRAFT, attention=True)


def test_a_pass_that_was_not_measured_names_what_is_missing() -> None:
    server = TARGET.model_copy(update={"verify": None, "missing": ("it shows no logits",)})
    with pytest.raises(ConfigurationError, match=r"large .* it shows no logits"):
        server.seconds(Kind.VERIFY, 4)
    assert isinstance(server, Costs)
