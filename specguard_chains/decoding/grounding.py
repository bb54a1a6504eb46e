"""Attention-based grounding (ABGV, paper section 3.2): how much of a token rests on its context.

With A^(l) the head-averaged attention of layer l over the last L layers and I the context (the
prompt and the accepted steps), the paper rolls attention out and sums the columns of the context:

    R = A^(L) ... A^(2) A^(1),        G(t) = sum over j in I of R[t, j].

Nobody needs R. With u_0 the indicator of I, u_l = A^(l) u_(l-1) gives G = u_L at the step's rows,
and attention is causal, so a row's value needs only earlier ones: each token costs one dot product
a layer, at the moment that the model computes its attention row. No attention matrix is kept.

The same rows say what a token leans on: the attention that it pays to the tokens of each passage
of the prompt, a mean over the L layers. That is not rolled out: so the default draft, below three
passages in turned orders, leans on the right one more often (docs/evidence.md, Passages), while the
rolled-out form prefers what stands first.

Tokens are addressed by *slot*: whatever indexes the columns of an attention row. That is the
position in a plain cache and the KV cell in llama.cpp, where cells of k candidates interleave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Literal, get_args

import numpy as np

from specguard_chains.decoding.arrays import FloatArray, IntArray
from specguard_chains.errors import ConfigurationError

GroundingForm = Literal["sparse", "dense", "renormalised", "sinkless", "direct"]
Span = tuple[int, int]
"""The positions of the first token and of the one after the last."""


@dataclass(frozen=True, slots=True)
class GroundingSpec:
    """Which attention is rolled out, and how its rows are cleaned first."""

    layers: int = 3
    """Number of last layers (paper: 3)."""
    threshold: float = 0.01
    """Entries below it are dropped, in each head, before the heads are averaged (paper: 0.01)."""
    renormalise: bool = False
    """Rescale the rows to sum 1 after dropping. The informative form does not."""
    sink: bool = True
    """Count the attention that reaches the first token, on which models rest what they need not."""
    direct: bool = False
    """Sum what each layer pays to the context itself, a mean over the layers, not rolled out."""
    passages: tuple[tuple[Span, ...], ...] = ()
    """Where each of P passages stands in the prompt. They have no token in common."""

    def __post_init__(self) -> None:
        """Validate, so that a wrong value never reaches a model."""
        if self.layers < 1:
            raise ConfigurationError(f"grounding layers must be at least 1, not {self.layers}")
        if not 0 <= self.threshold < 1:
            raise ConfigurationError(
                f"grounding threshold must lie in [0, 1), not {self.threshold}"
            )

    @classmethod
    def named(
        cls, form: GroundingForm, *, layers: int = 3, threshold: float = 0.01
    ) -> GroundingSpec:
        """Return one of the named forms.

        These are sparse (default), dense, renormalised, and of the sparse one sinkless (without the
        first token's column) and direct (not rolled out).
        """
        if form not in get_args(GroundingForm):
            raise ConfigurationError(
                f"unknown grounding form {form!r}; use one of {', '.join(get_args(GroundingForm))}"
            )
        return cls(
            layers,
            0.0 if form == "dense" else threshold,
            form == "renormalised",
            sink=form != "sinkless",
            direct=form == "direct",
        )

    @property
    def before_passages(self) -> float:
        """How many of a prompt's first tokens stand before all passages: inf if there are none."""
        return min((start for spans in self.passages for start, _ in spans), default=inf)

    def same_but_for_passages(self, other: GroundingSpec) -> bool:
        """Whether grounding is read alike."""
        return replace(self, passages=()) == replace(other, passages=())

    @property
    def form(self) -> GroundingForm:
        """The name of this form."""
        if self.direct or not self.sink:
            return "direct" if self.direct else "sinkless"
        if self.threshold == 0:
            return "dense"
        return "renormalised" if self.renormalise else "sparse"


def average_heads(attention: FloatArray, spec: GroundingSpec) -> FloatArray:
    """Clean attention probabilities and average the heads.

    Args:
        attention: Probabilities, shape (heads, rows, columns).
        spec: What to drop, and whether to renormalise.

    Returns:
        Shape (rows, columns), float32.
    """
    kept = attention if spec.threshold == 0 else attention * (attention >= spec.threshold)
    rows: FloatArray = kept.mean(axis=0, dtype=np.float32)
    if spec.renormalise:
        rows /= np.maximum(rows.sum(axis=1, keepdims=True), np.finfo(np.float32).tiny)
    return rows


OUTSIDE, INSIDE = 0, 1  # the step in progress is outside I (its grounding), or inside (later steps)


class Rollout:
    """Rolled-out attention mass, one number per slot and layer.

    Two values are carried side by side: what reaches a token if the step in progress is *not* part
    of the context (its grounding), and if it *is* (what later steps see once it is accepted).
    """

    def __init__(self, spec: GroundingSpec, slots: int) -> None:
        """Reserve room for `slots` slots."""
        self.spec = spec
        # [layer, slot, which]; layer 0 is the indicator of I.
        self._mass = np.zeros((spec.layers + 1, slots, 2), dtype=np.float32)
        # [layer, slot, passage]; layer 0 is the indicator of the passage, for every layer.
        self._leaning = np.zeros((spec.layers + 1, slots, len(spec.passages)), dtype=np.float32)

    def change_passages(self, spec: GroundingSpec) -> None:
        """Tell of other passages from now on; what was read so far stands before all of them."""
        self.spec = spec
        self._leaning = np.zeros((*self._mass.shape[:2], len(spec.passages)), dtype=np.float32)

    def begin(self, slots: IntArray, *, context: bool, positions: Sequence[int] | IntArray) -> None:
        """Announce tokens that the model is about to compute, as context or as a step."""
        self._mass[0, slots, OUTSIDE] = context
        self._mass[0, slots, INSIDE] = 1.0
        if not self.spec.sink:
            self._mass[0, slots[np.asarray(positions) == 0]] = 0.0
        if self.spec.passages:
            self._leaning[0, slots] = self._membership(positions)

    def absorb(self, layer: int, attention: FloatArray, slots: IntArray) -> None:
        """Take in the attention rows of announced tokens, layer by layer from the first.

        Args:
            layer: 0 for the lowest of the last L layers.
            attention: Probabilities, shape (heads, rows, columns); masked columns are 0.
            slots: The rows' own slots, shape (rows,).
        """
        self.absorb_averaged(layer, average_heads(attention, self.spec), slots)

    def absorb_averaged(self, layer: int, rows: FloatArray, slots: IntArray) -> None:
        """Take in attention rows whose heads were cleaned and averaged before.

        Args:
            layer: 0 for the lowest of the last L layers.
            rows: What `average_heads` returns, shape (rows, columns).
            slots: The rows' own slots, shape (rows,).
        """
        below = 0 if self.spec.direct else layer
        self._mass[layer + 1, slots] = rows @ self._mass[below, : rows.shape[1]]
        if self.spec.passages:
            self._leaning[layer + 1, slots] = rows @ self._leaning[0, : rows.shape[1]]

    def move(self, sources: IntArray, targets: IntArray) -> None:
        """Let tokens lie in other slots from now on, as a cache does that closes its holes."""
        self._mass[:, targets] = self._mass[:, sources]
        self._leaning[:, targets] = self._leaning[:, sources]

    def take_over(self, other: Rollout) -> None:
        """Know what a rollout of the same form knows, of the same slots.

        If its passages are others, the tokens in question stand before all passages of both.
        """
        self._mass[:] = other._mass
        if self.spec == other.spec:
            self._leaning[:] = other._leaning

    def export(self, slots: IntArray) -> FloatArray:
        """Return what is known of tokens before all passages, for `restore`."""
        return self._mass[:, slots]

    def restore(self, slots: IntArray, known: FloatArray) -> None:
        """Know of tokens what a rollout of the same form has exported."""
        self._mass[:, slots] = known
        self._leaning[:, slots] = 0.0

    def grounding(self, slots: IntArray) -> FloatArray:
        """Return G of tokens whose rows were absorbed in all layers; shape (len(slots),)."""
        if self.spec.direct:
            mean: FloatArray = self._mass[1:, slots, OUTSIDE].mean(axis=0)
            return mean
        values: FloatArray = self._mass[-1, slots, OUTSIDE]
        return values

    def passages(self, slots: IntArray) -> FloatArray | None:
        """Return the attention paid to each passage, shape (len(slots), P); None without them."""
        return self._leaning[1:, slots].mean(axis=0) if self.spec.passages else None

    def commit(self, slots: IntArray) -> None:
        """Make a step's tokens part of the context."""
        self._mass[:, slots, OUTSIDE] = self._mass[:, slots, INSIDE]

    def _membership(self, positions: Sequence[int] | IntArray) -> FloatArray:
        """Return 1 where a token is of a passage, else 0; shape (tokens, P)."""
        places = np.asarray(positions)
        members = np.zeros((len(places), len(self.spec.passages)), dtype=np.float32)
        for column, spans in zip(members.T, self.spec.passages, strict=True):
            for start, end in spans:
                column[(start <= places) & (places < end)] = 1.0
        return members


def rollout_reference(attention: FloatArray, context: int, spec: GroundingSpec) -> FloatArray:
    """Return G by the paper's own formula, for tests and one-off analyses.

    Args:
        attention: Full causal probabilities of the last L layers, (layers, heads, N, N).
        context: The number of leading tokens that form I.
        spec: How rows are cleaned; its `layers` must equal the first axis.

    Returns:
        Grounding of the tokens after the context, shape (N - context,).
    """
    layers = [average_heads(layer, spec).astype(np.float64) for layer in attention]
    rolled = (
        np.mean(layers, axis=0)
        if spec.direct
        else np.linalg.multi_dot([*layers[::-1], np.eye(attention.shape[-1])])
    )
    first = 0 if spec.sink else 1
    mass: FloatArray = rolled[context:, first:context].sum(axis=1).astype(np.float32)
    return mass


def passages_reference(attention: FloatArray, context: int, spec: GroundingSpec) -> FloatArray:
    """Return the attention paid to each passage, by tokens after the context: (N - context, P)."""
    rows = np.mean([average_heads(layer, spec) for layer in attention], axis=0)[context:]
    of_passages = [
        np.concatenate([rows[:, start:end] for start, end in spans], axis=1).sum(axis=1)
        for spans in spec.passages
    ]
    return np.stack(of_passages, axis=1).astype(np.float32)
