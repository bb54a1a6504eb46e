"""Logistic regressions of steps, and steps' scores by ones that were fitted on other problems."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specguard_chains.errors import EvaluationError

FOLDS = 5
"""Into how many parts problems are split; of fewer problems, each is one."""
MISSING = (
    "regressions are fitted by scikit-learn, which is missing: pip install "
    '"specguard_chains[bench]"'
)
Split = tuple[NDArray[np.intp], NDArray[np.intp]]
"""Places of the steps to fit on, and of those to score."""


def regression(strength: float = 1.0) -> Any:
    """Return a logistic regression on standardised features that is not fitted yet.

    It reckons in double precision: in single precision it may not converge.

    Args:
        strength: Inverse strength of the regularisation.

    Raises:
        EvaluationError: scikit-learn is missing.
    """
    try:
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import FunctionTransformer, StandardScaler
    except ImportError as error:
        raise EvaluationError(MISSING) from error
    widen = FunctionTransformer(np.asarray, kw_args={"dtype": np.float64})
    return make_pipeline(widen, StandardScaler(), LogisticRegression(C=strength, max_iter=2000))


def splits(problems: Sequence[Hashable], *, seed: int = 0) -> list[Split]:
    """Return the splits of a cross-validation that keep the steps of a problem together.

    Args:
        problems: The problem of each step; at least two.
        seed: Of the order in which problems are dealt out.

    Raises:
        EvaluationError: scikit-learn is missing.
    """
    try:
        from sklearn.model_selection import GroupKFold
    except ImportError as error:
        raise EvaluationError(MISSING) from error
    numbers: dict[Hashable, int] = {}
    groups = np.array([numbers.setdefault(problem, len(numbers)) for problem in problems])
    folds = GroupKFold(min(FOLDS, len(numbers)), shuffle=True, random_state=seed)
    return list(folds.split(groups, groups=groups))


def held_out_scores(
    features: NDArray[Any],
    labels: NDArray[np.bool_],
    problems: Sequence[Hashable],
    *,
    strength: float = 1.0,
    seed: int = 0,
) -> NDArray[np.float64] | None:
    """Return each step's score by a regression that was fitted on other problems.

    None if the problems are too few for that: there is one, or all labels but those of one part are
    the same.

    Args:
        features: Shape (steps, features).
        labels: Whether each step is right.
        problems: The problem of each step.
        strength: Inverse strength of the regularisation.
        seed: Of the splits.

    Raises:
        EvaluationError: scikit-learn is missing.
    """
    if len(set(problems)) < 2:
        return None
    folds = splits(problems, seed=seed)
    if any(len(set(labels[train].tolist())) < 2 for train, _ in folds):
        return None
    from sklearn.model_selection import cross_val_predict

    scores: NDArray[np.float64] = cross_val_predict(
        regression(strength), features, labels, cv=folds, method="decision_function"
    )
    return scores
