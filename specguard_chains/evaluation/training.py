"""Training a value head: does the draft's hidden state at a step's end know how the answer ends?

Each step of a sampled solution is an example, its label whether the whole solution is right
(outcome supervision). The head is a logistic regression whose strength of regularisation is chosen
by cross-validation over problems. How well it does is measured on problems that neither the fit nor
that choice has seen (nested cross-validation).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specguard_chains.decoding.engine import Engine, Prompt
from specguard_chains.decoding.rewards import ValueHead
from specguard_chains.errors import EvaluationError
from specguard_chains.evaluation.regression import FOLDS, held_out_scores, regression, splits
from specguard_chains.evaluation.solutions import Solutions, steps_of, text_candidate
from specguard_chains.evaluation.statistics import Estimate, auroc, auroc_estimate

STRENGTHS = tuple(10.0**power for power in range(-5, 1))
"""Inverse regularisation strengths that are tried."""


@dataclass(frozen=True, slots=True)
class Examples:
    """Hidden states at the ends of N steps, with what became of their solutions."""

    states: NDArray[np.float32]
    """Shape (N, width)."""
    right: NDArray[np.bool_]
    problems: tuple[Hashable, ...]
    """Of each step; steps of one problem stay together in every split."""
    last: NDArray[np.bool_]
    """Whether the step is the last of its solution."""

    def of(self, places: NDArray[Any]) -> Examples:
        """Return those at some places, or those that a mask has."""
        problems = tuple(self.problems[i] for i in np.arange(len(self.problems))[places])
        return Examples(self.states[places], self.right[places], problems, self.last[places])


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
    """Return a value head that was fitted on all examples, judged by nested cross-validation.

    Args:
        examples: What it learns from.
        draft: The model's name.
        layer: Where the states come from.
        seed: Of the splits into folds.
        facts: What else the head's file is to say of the training.

    Raises:
        EvaluationError: scikit-learn is missing, or there are too few problems.
    """
    scores = unseen_scores(examples, seed=seed)
    best = _best_strength(examples, seed)
    model = regression(best).fit(examples.states, examples.right)
    scaler, fitted = model[-2:]
    weights = fitted.coef_[0] / scaler.scale_
    bias = float(fitted.intercept_[0] - weights @ scaler.mean_)
    ends = examples.last
    by_step = _auroc(scores, examples)
    by_solution = _auroc(scores[ends], examples.of(ends))
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


def unseen_scores(examples: Examples, *, seed: int = 0) -> NDArray[np.float64]:
    """Return each example's score by a head whose fit and regularisation saw other problems alone.

    Raises:
        EvaluationError: scikit-learn is missing, or there are too few problems.
    """
    if (n := len(set(examples.problems))) < FOLDS:
        raise EvaluationError(
            f"{n} problems are too few to train a value head and to judge it; give at least "
            f"{FOLDS}, better a hundred"
        )
    scores = np.zeros(len(examples.problems))
    for train, test in splits(examples.problems, seed=seed):
        others = examples.of(train)
        model = regression(_best_strength(others, seed)).fit(others.states, others.right)
        scores[test] = model.decision_function(examples.states[test])
    return scores


def _best_strength(examples: Examples, seed: int) -> float:
    """Return the strength that does best by cross-validation over the examples' problems."""

    def worth(strength: float) -> float:
        scores = held_out_scores(
            examples.states, examples.right, examples.problems, strength=strength, seed=seed
        )
        if scores is None:
            raise EvaluationError(
                "the solutions are all right or all wrong, but perhaps for those to a few "
                "problems; add harder or easier problems"
            )
        return auroc(scores, examples.right) or 0.0

    return max(STRENGTHS, key=lambda strength: (worth(strength), -strength))


def _auroc(scores: NDArray[np.float64], examples: Examples) -> Estimate | None:
    return auroc_estimate(scores, examples.right, examples.problems)


def _plain(estimate: Estimate | None) -> list[float] | None:
    """Return value and interval, rounded."""
    if estimate is None:
        return None
    return [round(x, 4) for x in (estimate.value, *(estimate.interval or ()))]
