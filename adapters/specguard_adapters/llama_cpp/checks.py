"""Checks at load time: that attention and hidden states are what this package takes them for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from specguard_adapters.llama_cpp.context import Context
from specguard_adapters.llama_cpp.settings import ContextSettings
from specguard_adapters.llama_cpp.tap import AttentionTap
from specguard_adapters.llama_cpp.weights import VERSION, Weights
from specguard_chains.decoding.arrays import FloatArray, IntArray
from specguard_chains.errors import (
    AttentionUnavailableError,
    EngineError,
    StatesUnavailableError,
)

KNOWN_VERSION = "0.3.36"


class FullAttention:
    """A `Sink` that keeps everything: for checks and tests on short texts of one sequence."""

    def __init__(self, layers: int) -> None:
        """Start empty."""
        self._rows: list[list[FloatArray]] = [[] for _ in range(layers)]
        self.cells = np.zeros(0, dtype=np.intp)

    def begin(self, cells: IntArray) -> None:
        """See `Sink.begin`."""
        self.cells = np.concatenate([self.cells, cells])

    def absorb(self, layer: int, attention: FloatArray, cells: IntArray) -> None:
        """See `Sink.absorb`."""
        self._rows[layer].append(attention.copy())

    def missing(self) -> list[int]:
        """Return the layers that gave nothing."""
        return [layer for layer, rows in enumerate(self._rows) if not rows]

    def matrix(self) -> FloatArray:
        """Return the attention among all tokens seen, shape (layers, heads, N, N)."""
        return np.stack([self._by_position(rows) for rows in self._rows])

    def _by_position(self, blocks: list[FloatArray]) -> FloatArray:
        width = max(block.shape[2] for block in blocks)
        padded = [np.pad(b, ((0, 0), (0, 0), (0, width - b.shape[2]))) for b in blocks]
        rows: FloatArray = np.concatenate(padded, axis=1)[:, :, self.cells]
        return rows


def read_attention(context: Context, tokens: Sequence[int], layers: range) -> FullAttention:
    """Return the attention of some layers over tokens at the start of an empty context."""
    assert context.tap is not None
    attention = FullAttention(len(layers))
    for start in range(0, len(tokens), context.n_batch):
        block = tokens[start : start + context.n_batch]
        positions = range(start, start + len(block))
        context.tap.listen(attention, layers)
        context.decode(block, positions, [(0,)] * len(block), all_logits=False)
    return attention


def check_states(weights: Weights, settings: ContextSettings) -> None:
    """Check on a few tokens that hidden states are what this package takes them for.

    Raises:
        StatesUnavailableError: They are not.
    """
    tokens = list(range(min(5, weights.n_vocab)))
    small = replace(settings, cells=256, n_batch=64, n_ubatch=64)
    tap = AttentionTap()
    context = Context(weights, small, tap)
    try:
        tap.listen(None, state_layer=0)
        context.decode(tokens, range(len(tokens)), [(0,)] * len(tokens), all_logits=True)
        shapes = [states.shape for states in tap.states]
        problem = None if shapes == [(len(tokens), weights.n_embd)] else f"their shape is {shapes}"
    except EngineError as error:
        problem = str(error)
    finally:
        context.close()
    if problem:
        raise StatesUnavailableError(
            f"the hidden states of {weights.path.name} cannot be read with llama-cpp-python "
            f"{VERSION}: {problem}; load the model with states=False{_or_known_version()}"
        )


def check_attention(weights: Weights, settings: ContextSettings, layers: int) -> None:
    """Check on a few tokens that the last layers' attention is what this package takes it for.

    Raises:
        AttentionUnavailableError: It is not; the message names what differs.
    """
    tokens = list(range(min(5, weights.n_vocab)))
    small = replace(settings, cells=256, n_batch=64, n_ubatch=64)
    context = Context(weights, small, AttentionTap())
    try:
        seen = read_attention(context, tokens, range(weights.n_layer - layers, weights.n_layer))
        problem = _oddity(seen, len(tokens))
    except EngineError as error:
        problem = str(error)
    finally:
        context.close()
    if problem:
        raise AttentionUnavailableError(
            f"the attention of {weights.path.name} cannot be read with llama-cpp-python {VERSION}: "
            f"{problem}; load the model with attention=False{_or_known_version()}"
        )


def _or_known_version() -> str:
    """Return what else may help: the version that models are known to be read with."""
    return "" if VERSION == KNOWN_VERSION else f", or install the version {KNOWN_VERSION}"


def _oddity(seen: FullAttention, tokens: int) -> str | None:
    """Return what is wrong with the attention among the first tokens of an empty context."""
    if missing := seen.missing():
        return f"no attention seen in {missing} of the layers"
    if seen.cells.tolist() != list(range(tokens)):
        return f"{tokens} tokens lie in the cells {seen.cells.tolist()}"
    attention = seen.matrix()
    sums = attention.sum(axis=-1)
    if not np.allclose(sums, 1, atol=1e-3):
        return f"rows sum to {sums.min():.3f} to {sums.max():.3f} instead of 1"
    if np.triu(attention, 1).any():
        return "tokens attend to later ones"
    return None
