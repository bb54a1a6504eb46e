"""Do the signals mean anything? How well each tells good steps from bad ones.

The measure is the area under the ROC curve (AUROC): the chance that a good step has the higher
value, 0.5 for a signal that knows nothing. Steps of one problem are alike, so intervals come from
drawing problems, not steps. Long steps fail more often, so each signal is also shown beside the
step's length alone: what a signal adds to the length is its own.

Combinations are logistic regressions. They are fitted on the even half of the problems and judged
on the odd half; single signals need no fit, and the table shows both halves.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specguard_chains.errors import EvaluationError
from specguard_chains.evaluation.statistics import Estimate, auroc_difference, auroc_estimate

LENGTH = "length"
MISSING = (
    "combinations of signals are fitted by scikit-learn, which is missing: pip install "
    '"specguard_chains[bench]"'
)

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LabelledStep:
    """A drafted step's signals and whether it is good."""

    problem: str
    data: str
    good: bool
    signals: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Row:
    """How well a signal, or a combination, tells good steps from bad ones."""

    name: str
    even: float | None
    """AUROC on the half on which choices are made."""
    odd: Estimate | None
    """AUROC on the other half, with its interval."""
    over_length: Estimate | None
    """What it adds there to the length alone: both together against the length."""
    fitted: bool = False
    """Whether it was fitted, on the even half."""


def halves(steps: Sequence[LabelledStep]) -> tuple[list[LabelledStep], list[LabelledStep]]:
    """Return the steps of every second problem, by order of appearance in each data set."""
    order: dict[str, dict[str, int]] = {}
    for step in steps:
        known = order.setdefault(step.data, {})
        known.setdefault(step.problem, len(known))
    even = [step for step in steps if order[step.data][step.problem] % 2 == 0]
    odd = [step for step in steps if order[step.data][step.problem] % 2 == 1]
    return even, odd


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
    scores = [
        _scores(names, even, half) if fitted else _column(names[0], half) for half in (even, odd)
    ]
    problems = [step.problem for step in odd]
    labels = _labels(odd)
    joined = _scores((*names, LENGTH), even, odd) if LENGTH not in names else None
    return Row(
        " + ".join(names),
        _auroc(scores[0], even),
        None if _one_class(odd) else auroc_estimate(scores[1], labels, problems),
        None
        if joined is None or _one_class(odd)
        else auroc_difference(joined, _column(LENGTH, odd), labels, problems),
        fitted,
    )


def fit(names: Sequence[str], steps: Sequence[LabelledStep]) -> Any:
    """Return a logistic regression on standardised signals.

    Raises:
        EvaluationError: scikit-learn is missing, or the steps are all good or all bad.
    """
    try:
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler
    except ImportError as error:
        raise EvaluationError(MISSING) from error
    if _one_class(steps):
        raise EvaluationError(
            f"the {len(steps)} steps are all good or all bad; record more problems"
        )
    model = make_pipeline(StandardScaler(), LogisticRegression(C=1.0, max_iter=1000))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model.fit(_matrix(names, steps), _labels(steps))


def _scores(
    names: Sequence[str], train: Sequence[LabelledStep], steps: Sequence[LabelledStep]
) -> Floats:
    if _one_class(train) or not steps:
        return np.zeros(len(steps))
    scores: Floats = fit(names, train).decision_function(_matrix(names, steps))
    return scores


def _auroc(scores: Floats, steps: Sequence[LabelledStep]) -> float | None:
    if _one_class(steps):
        return None
    estimate = auroc_estimate(scores, _labels(steps), [step.problem for step in steps])
    return None if estimate is None else estimate.value


def _one_class(steps: Sequence[LabelledStep]) -> bool:
    return len({step.good for step in steps}) < 2


def _labels(steps: Sequence[LabelledStep]) -> NDArray[np.bool_]:
    return np.array([step.good for step in steps], dtype=np.bool_)


def _column(name: str, steps: Sequence[LabelledStep]) -> Floats:
    return np.array([step.signals[name] for step in steps], dtype=np.float64)


def _matrix(names: Sequence[str], steps: Sequence[LabelledStep]) -> Floats:
    return np.stack([_column(name, steps) for name in names], axis=1)
