"""Do the signals mean anything? How well each tells good steps from bad ones.

The measure is the area under the ROC curve (AUROC): the chance that a good step has the higher
value, 0.5 for a signal that knows nothing. Steps of one problem are alike, so intervals come from
drawing problems, not steps. Long steps fail more often, so each signal is also shown beside the
step's length alone: what a signal adds to the length is its own.

The table shows both halves of the problems: choices are made on the even one, so that what is
reported is the odd one. Combinations are logistic regressions. On the odd half they are judged as
fitted on all of the even half; there each step is scored by a fit to other problems
(cross-validation), or what was fitted would look better than what needs no fit.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specguard_chains.errors import EvaluationError
from specguard_chains.evaluation.regression import held_out_scores, regression
from specguard_chains.evaluation.statistics import (
    Estimate,
    auroc,
    auroc_difference,
    auroc_estimate,
)

LENGTH = "length"

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LabelledStep:
    """A drafted step's signals and whether it is good."""

    problem: str
    data: str
    place: int
    """Of the problem in its data set, from 0."""
    good: bool
    signals: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Row:
    """How well a signal, or a combination, tells good steps from bad ones."""

    name: str
    even: float | None
    """AUROC on the half on which choices are made; of what is fitted, by cross-validation there."""
    odd: Estimate | None
    """AUROC on the other half, with its interval; None if there is none, or nothing to fit on."""
    over_length: Estimate | None
    """What it adds there to the length alone: both together against the length."""
    fitted: bool = False
    """Whether it was fitted: for the odd half on all of the even one."""


def halves(steps: Sequence[LabelledStep]) -> tuple[list[LabelledStep], list[LabelledStep]]:
    """Return the steps of problems at even places of their data sets, and of those at odd ones.

    These are the halves that `--only even` and `odd` of the bench solve: what is chosen on the one
    can be reported on the other there too.
    """
    even = [step for step in steps if step.place % 2 == 0]
    return even, [step for step in steps if step.place % 2 == 1]


def table(steps: Sequence[LabelledStep], combinations: Sequence[Sequence[str]] = ()) -> list[Row]:
    """Return a row for each signal and each combination, the best on the even half first.

    Args:
        steps: All with the same signals.
        combinations: Names of signals that are fitted together.

    Raises:
        EvaluationError: There are no steps, or their signals differ.
    """
    if not steps:
        raise EvaluationError("no steps with signals; record some problems first")
    names = sorted(steps[0].signals)
    if any(sorted(step.signals) != names for step in steps):
        raise EvaluationError("the steps have different signals; read them anew")
    even, odd = halves(steps)
    rows = [_row((name,), even, odd, fitted=False) for name in names]
    rows += [_row(tuple(names), even, odd, fitted=True) for names in combinations]
    return sorted(rows, key=lambda row: -1.0 if row.even is None else row.even, reverse=True)


def _row(
    names: tuple[str, ...],
    even: Sequence[LabelledStep],
    odd: Sequence[LabelledStep],
    *,
    fitted: bool,
) -> Row:
    scores = _scores(names, even, odd) if fitted else _column(names[0], odd)
    return Row(
        " + ".join(names),
        _auroc(_held_out(names, even) if fitted else _column(names[0], even), even),
        None if scores is None else auroc_estimate(scores, _labels(odd), _problems(odd)),
        None if LENGTH in names else _over_length(names, even, odd),
        fitted,
    )


def _over_length(
    names: Sequence[str], even: Sequence[LabelledStep], odd: Sequence[LabelledStep]
) -> Estimate | None:
    joined = _scores((*names, LENGTH), even, odd)
    if joined is None:
        return None
    return auroc_difference(joined, _column(LENGTH, odd), _labels(odd), _problems(odd))


def fit(names: Sequence[str], steps: Sequence[LabelledStep]) -> Any:
    """Return a logistic regression on standardised signals.

    Raises:
        EvaluationError: scikit-learn is missing, or the steps are all good or all bad.
    """
    if _one_class(steps):
        raise EvaluationError(
            f"the {len(steps)} steps are all good or all bad; record more problems"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return regression().fit(_matrix(names, steps), _labels(steps))


def _scores(
    names: Sequence[str], train: Sequence[LabelledStep], steps: Sequence[LabelledStep]
) -> Floats | None:
    """Return each step's score by a fit to others, None if there is nothing to fit or to score."""
    if _one_class(train) or not steps:
        return None
    scores: Floats = fit(names, train).decision_function(_matrix(names, steps))
    return scores


def _held_out(names: Sequence[str], steps: Sequence[LabelledStep]) -> Floats | None:
    """Return each step's score by a fit to other problems, None if these are too few."""
    if not steps:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return held_out_scores(_matrix(names, steps), _labels(steps), _problems(steps))


def _auroc(scores: Floats | None, steps: Sequence[LabelledStep]) -> float | None:
    return None if scores is None else auroc(scores, _labels(steps))


def _one_class(steps: Sequence[LabelledStep]) -> bool:
    return len({step.good for step in steps}) < 2


def _problems(steps: Sequence[LabelledStep]) -> list[tuple[str, str]]:
    return [(step.data, step.problem) for step in steps]


def _labels(steps: Sequence[LabelledStep]) -> NDArray[np.bool_]:
    return np.array([step.good for step in steps], dtype=np.bool_)


def _column(name: str, steps: Sequence[LabelledStep]) -> Floats:
    return np.array([step.signals[name] for step in steps], dtype=np.float64)


def _matrix(names: Sequence[str], steps: Sequence[LabelledStep]) -> Floats:
    return np.stack([_column(name, steps) for name in names], axis=1)
