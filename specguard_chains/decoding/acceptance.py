"""Which drafted tokens the target keeps, so that what comes out has the target's law exactly.

p is the target's law of the next token and q the draft's, after identical temperature and top-p
processing (Leviathan et al. 2211.17192, Chen et al. 2302.01318). The children of a node are tried
in the order in which they were drawn; r is what is left of p when some of them were rejected. If
all are, the token is drawn from r. How children are drawn decides how likely one is accepted:

    independently from q      accept x with min(1, r(x) / q(x)), else r <- norm(max(0, r - q))
    without replacement       the same, and q <- q without x, renormalised
    the likeliest ones        accept x with r(x), else r <- r without x, renormalised

A chain has one child at every node: then the first two are the same. At temperature 0 all laws put
everything on one token, and the third rule follows the child that equals the target's choice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

Law = npt.NDArray[np.float64]
"""Probabilities of tokens, shape (vocabulary,)."""
Choose = Callable[[Law], int]
"""Draws an index from a law. All chance goes through it, so that a test can enumerate it."""


class Branching(Protocol):
    """How the children of a node are drawn, and with what probability each is accepted."""

    def draw(self, q: Law, n: int, choose: Choose) -> list[int]:
        """Return n tokens, or as many as there are, to be tried in this order."""
        ...

    def acceptance(self, r: Law, q: Law, token: int) -> float:
        """Return the probability with which the next child is accepted."""
        ...

    def reject(self, r: Law, q: Law, token: int) -> tuple[Law, Law]:
        """Return r and q after the child's rejection."""
        ...


class Independent:
    """Children are drawn from q, each for itself; the same token may come twice."""

    def draw(self, q: Law, n: int, choose: Choose) -> list[int]:
        """See `Branching.draw`."""
        return [choose(q) for _ in range(n)]

    def acceptance(self, r: Law, q: Law, token: int) -> float:
        """See `Branching.acceptance`."""
        return min(1.0, float(r[token] / q[token]))

    def reject(self, r: Law, q: Law, token: int) -> tuple[Law, Law]:
        """See `Branching.reject`."""
        return _normalised(np.maximum(r - q, 0.0), r), q


class WithoutReplacement(Independent):
    """Children are drawn from q, each from what its elder siblings have left."""

    def draw(self, q: Law, n: int, choose: Choose) -> list[int]:
        """See `Branching.draw`."""
        tokens: list[int] = []
        for _ in range(min(n, int(np.count_nonzero(q)))):
            tokens.append(choose(q))
            q = _without(q, tokens[-1])
        return tokens

    def reject(self, r: Law, q: Law, token: int) -> tuple[Law, Law]:
        """See `Branching.reject`."""
        return super().reject(r, q, token)[0], _without(q, token)


class Likeliest:
    """Children are the n tokens that the draft finds likeliest: there is no chance in them."""

    def draw(self, q: Law, n: int, choose: Choose) -> list[int]:
        """See `Branching.draw`."""
        head = np.argpartition(-q, n - 1)[:n] if n < len(q) else np.arange(len(q))
        return [int(token) for token in head[np.argsort(-q[head], kind="stable")] if q[token] > 0]

    def acceptance(self, r: Law, q: Law, token: int) -> float:
        """See `Branching.acceptance`."""
        return float(r[token])

    def reject(self, r: Law, q: Law, token: int) -> tuple[Law, Law]:
        """See `Branching.reject`."""
        return _without(r, token), q


def _without(law: Law, token: int) -> Law:
    left = law.copy()
    left[token] = 0.0
    return _normalised(left, law)


def _normalised(weights: Law, instead: Law) -> Law:
    """Return weights as a law. Only rounding can leave none, and then never matters."""
    total = weights.sum()
    return weights / total if total > 0 else instead


def chooser(rng: np.random.Generator) -> Choose:
    """Return what draws with a generator."""

    def choose(law: Law) -> int:
        cumulative = np.cumsum(law)
        index = np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right")
        return int(index)

    return choose


def likeliest(law: Law) -> int:
    """Draw as temperature 0 does: the likeliest token, without chance."""
    return int(law.argmax())
