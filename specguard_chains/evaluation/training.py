"""Training a value head: does the draft's hidden state at a step's end know how the answer ends?

Each step of a sampled solution is an example, its label whether the whole solution is right
(outcome supervision). The head is a logistic regression whose strength of regularisation is chosen
by cross-validation over problems; how well it does is measured on problems that it has not seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specguard_chains.decoding.engine import Engine, Prompt
from specguard_chains.decoding.rewards import ValueHead
from specguard_chains.errors import EvaluationError
from specguard_chains.evaluation.solutions import Solutions, steps_of, text_candidate
from specguard_chains.evaluation.statistics import Estimate, auroc_estimate

STRENGTHS = tuple(10.0**power for power in range(-5, 1))
"""Inverse regularisation strengths that are tried."""
FOLDS = 5
MISSING = (
    "value heads are fitted by scikit-learn, which is missing: pip install "
    '"specguard_chains[bench]"'
)


@dataclass(frozen=True, slots=True)
class Examples:
    """Hidden states at the ends of N steps, with what became of their solutions."""

    states: NDArray[np.float32]
    """Shape (N, width)."""
    right: NDArray[np.bool_]
    problems: tuple[str, ...]
    """Of each step; steps of one problem stay together in every split."""
    last: NDArray[np.bool_]
    """Whether the step is the last of its solution."""


@dataclass(frozen=True, slots=True)
class Trained:
    """A value head, and how well it did on problems that it had not seen."""

    head: ValueHead
    by_step: Estimate | None
    """AUROC over steps: does the solution of this step end right?"""
    by_solution: Estimate | None
    """AUROC over solutions, by their last steps."""


def read_states(
    engine: Engine, layer: int, prompt: Prompt, solutions: Solutions
) -> Iterator[tuple[NDArray[np.float32], bool, bool]]:
    """Yield (state, right, last) of every step of a problem's solutions.

    Raises:
        StatesUnavailableError: The engine does not give hidden states of this layer.
    """
    with engine.exclusive(), closing(engine.open(prompt, state_layer=layer)) as session:
        start = session.length
        for solution in solutions.solutions:
            texts = steps_of(solution.text)
            for number, text in enumerate(texts, start=1):
                candidate = text_candidate(text, ends=number == len(texts))
                if not session.fits(candidate):
                    break
                state = session.read(candidate).state
                assert state is not None
                yield state, solution.right, number == len(texts)
                session.accept(candidate)
            session.rollback(start)


def train(examples: Examples, *, draft: str, layer: int, seed: int = 0, **facts: Any) -> Trained:
    """Return a value head that was fitted on all examples, judged by cross-validation.

    Args:
        examples: What it learns from.
        draft: The model's name.
        layer: Where the states come from.
        seed: Of the split into folds.
        facts: What else the head's file is to say of the training.

    Raises:
        EvaluationError: scikit-learn is missing, or there are too few problems.
    """
    held_out = {c: _held_out(examples, c, seed) for c in STRENGTHS}
    aurocs = {c: _auroc(scores, examples) for c, scores in held_out.items()}
    best = max(STRENGTHS, key=lambda c: (known.value if (known := aurocs[c]) else 0.0, -c))
    model = _fit(examples.states, examples.right, best)
    scaler, regression = model[0], model[-1]
    weights = regression.coef_[0] / scaler.scale_
    bias = float(regression.intercept_[0] - weights @ scaler.mean_)
    by_step = aurocs[best]
    ends = examples.last
    by_solution = auroc_estimate(
        held_out[best][ends],
        examples.right[ends],
        [p for p, last in zip(examples.problems, ends, strict=True) if last],
    )
    training = facts | {
        "problems": len(set(examples.problems)),
        "solutions": int(ends.sum()),
        "steps": len(ends),
        "right": round(float(examples.right[ends].mean()), 4),
        "regularisation": best,
        "auroc_by_step": _plain(by_step),
        "auroc_by_solution": _plain(by_solution),
    }
    head = ValueHead(
        draft=draft,
        layer=layer,
        weights=tuple(float(f"{weight:.4g}") for weight in weights),
        bias=round(bias, 4),
        training=training,
    )
    return Trained(head, by_step, by_solution)


def _held_out(examples: Examples, strength: float, seed: int) -> NDArray[np.float64]:
    """Return each example's score by a model that was fitted on other problems."""
    names = sorted(set(examples.problems))
    if len(names) < FOLDS:
        raise EvaluationError(
            f"{len(names)} problems are too few to train a value head and to judge it; give at "
            f"least {FOLDS}, better a hundred"
        )
    order = np.random.default_rng(seed).permutation(len(names))
    fold_of = {names[i]: place % FOLDS for place, i in enumerate(order)}
    folds = np.array([fold_of[problem] for problem in examples.problems])
    scores = np.zeros(len(folds))
    for fold in range(FOLDS):
        train, test = folds != fold, folds == fold
        model = _fit(examples.states[train], examples.right[train], strength)
        scores[test] = model.decision_function(examples.states[test])
    return scores


def _fit(states: NDArray[np.float32], right: NDArray[np.bool_], strength: float) -> Any:
    try:
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler
    except ImportError as error:
        raise EvaluationError(MISSING) from error
    if len(set(right.tolist())) < 2:
        raise EvaluationError(
            "the solutions are all right or all wrong; add harder or easier problems"
        )
    model = make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=2000))
    return model.fit(states, right)


def _auroc(scores: NDArray[np.float64], examples: Examples) -> Estimate | None:
    return auroc_estimate(scores, examples.right, examples.problems)


def _plain(estimate: Estimate | None) -> list[float] | None:
    """Return value and interval, rounded."""
    if estimate is None:
        return None
    return [round(x, 4) for x in (estimate.value, *(estimate.interval or ()))]
