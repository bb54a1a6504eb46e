"""Bounds from samples, and calibration files: written, read, damaged."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from specguard_chains.decoding.boundaries import Boundary
from specguard_chains.decoding.calibration import FALLBACK, Bounds, Calibration
from specguard_chains.decoding.constraint import Constraint
from specguard_chains.decoding.engine import Prompt
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.errors import CalibrationError
from tests.toy_engine import ToyEngine, random_policy

CALIBRATION = Calibration(
    confidence=Bounds(low=-5.25, high=-0.125),
    grounding=Bounds(low=0.1, high=1 / 3),
    draft="small",
    target="lårge",
    verify_with="target",
    grounding_form="dense",
    grounding_layers=2,
    problems=50,
    steps=321,
)


@pytest.mark.parametrize(
    ("value", "expected"), [(-3, 0), (-2, 0), (-1.5, 0.25), (-1, 0.5), (0, 1), (7, 1)]
)
def test_low_becomes_0_and_high_1_and_the_rest_is_clipped(value: float, expected: float) -> None:
    assert Bounds(low=-2, high=0).normalise(value) == pytest.approx(expected)


def test_infinite_values_are_clipped() -> None:
    bounds = Bounds(low=-2, high=0)
    assert (bounds.normalise(-np.inf), bounds.normalise(np.inf)) == (0.0, 1.0)


def test_bounds_are_the_percentiles_of_a_sample() -> None:
    values = np.random.default_rng(0).permutation(np.arange(1001) / 10)
    bounds = Bounds.of(list(values))
    assert (bounds.low, bounds.high) == (pytest.approx(1.0), pytest.approx(99.0))
    narrow = Bounds.of(list(values), percentiles=(25, 50))
    assert (narrow.low, narrow.high) == (pytest.approx(25.0), pytest.approx(50.0))


def test_an_outlier_hardly_moves_the_bounds() -> None:
    values = list(np.linspace(0, 1, 200))
    with_outlier = Bounds.of([*values, -1e6])
    assert with_outlier.low == pytest.approx(Bounds.of(values).low, abs=0.01)


def test_two_different_values_suffice() -> None:
    bounds = Bounds.of([1.0, 2.0])
    assert 1.0 <= bounds.low < bounds.high <= 2.0


@pytest.mark.parametrize("values", [[0.5], [0.5, 0.5, 0.5], [], [0.5] * 1000 + [0.7]])
def test_no_bounds_come_from_values_that_do_not_differ(values: list[float]) -> None:
    with pytest.raises(CalibrationError, match="calibrate on more problems"):
        Bounds.of(values)


def test_no_bounds_come_from_values_that_are_no_numbers() -> None:
    with pytest.raises(CalibrationError):
        Bounds.of([0.0, 0.5, np.nan, 1.0])


@pytest.mark.parametrize(("low", "high"), [(1, 1), (2, 1), (0, np.nan), (-np.inf, 0), (0, np.inf)])
def test_bounds_must_be_finite_and_in_order(low: float, high: float) -> None:
    with pytest.raises(ValidationError):
        Bounds(low=low, high=high)


def test_a_saved_calibration_is_read_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "pair.json"
    for calibration in (CALIBRATION, FALLBACK):
        calibration.save(path)
        assert Calibration.load(path) == calibration
        assert path.read_text(encoding="utf-8").endswith("}\n")


def test_fields_left_out_take_their_defaults(tmp_path: Path) -> None:
    path = tmp_path / "pair.json"
    bounds = {"low": 0, "high": 1}
    path.write_text(json.dumps({"confidence": bounds, "grounding": bounds}))
    assert Calibration.load(path).source == "calibrated"


def test_the_fallback_says_that_it_is_one() -> None:
    assert FALLBACK.source == "fallback"


DAMAGED = {
    "empty": b"",
    "cut off": CALIBRATION.model_dump_json().encode()[:50],
    "another format": b"low,high\n0,1\n",
    "a list": b"[1, 2]",
    "bounds missing": b'{"confidence": {"low": 0, "high": 1}}',
    "bounds out of order": CALIBRATION.model_dump_json().replace("-5.25", "5.25").encode(),
    "an unknown field": b'{"surprise": 1, ' + CALIBRATION.model_dump_json().encode()[1:],
    "not UTF-8": CALIBRATION.model_dump_json().encode("latin-1"),
    "binary": bytes(range(256)),
}


@pytest.mark.parametrize("data", DAMAGED.values(), ids=list(DAMAGED))
def test_a_damaged_file_is_named_with_a_remedy(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "pair.json"
    path.write_bytes(data)
    with pytest.raises(CalibrationError, match=r"(?s)pair\.json.*`specguard calibrate`") as error:
        Calibration.load(path)
    assert error.value.__cause__ is not None


def test_a_missing_file_is_named_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"(?s)none\.json.*`specguard calibrate`"):
        Calibration.load(tmp_path / "none.json")


def test_a_folder_is_no_calibration(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError):
        Calibration.load(tmp_path)


@pytest.mark.parametrize("by", ["who wrote it", "who reads it"])
def test_a_grammar_never_lowers_the_confidence_that_bounds_are_for(by: str) -> None:
    constraint = Constraint.regex(r"[a-d]{6}\.")
    boundary, warm = Boundary("\n\n", max_tokens=20), Sampling(temperature=1, top_p=1)
    for seed in range(5):
        engine, prompt = ToyEngine(random_policy(seed)), Prompt(text="?")
        with closing(engine.open(prompt, constraint=constraint)) as held:
            (step,) = held.sample(1, boundary, warm, seed=[seed])
            within = (step.reading if by == "who wrote it" else held.read(step)).logprobs
        with closing(engine.open(prompt)) as free:
            without = free.read(step).logprobs
        assert (within >= without - 1e-5).all()
        assert within.min() > without.min()
        assert within[len("abcdab")] == pytest.approx(0.0, abs=1e-6), "there is no choice"
