"""Drawing tokens from logits, in NumPy.

One sampler serves every local engine, so that the same seed draws the same tokens from the same
logits everywhere. Filters apply in the order temperature, top_k, top_p, min_p; the reported
log-probability is always the raw one (temperature 1, no filter), which the verifier reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specguard_chains.decoding.arrays import FloatArray, IntArray
from specguard_chains.errors import ConfigurationError, EngineError

COLDEST = 1e-5
"""Temperatures below it are greedy: float32 cannot divide by them."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn."""

    temperature: float = 0.7
    """0 is greedy decoding."""
    top_p: float = 0.8
    """Keep the likeliest tokens that together reach this probability; 1 keeps all."""
    top_k: int = 0
    """Keep this many of the likeliest tokens; 0 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this likely relative to the likeliest; 0 keeps all."""

    def __post_init__(self) -> None:
        """Validate, so that a wrong value never reaches a model."""
        if not 0 <= self.temperature < float("inf"):
            raise ConfigurationError(f"temperature must be 0 or more, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ConfigurationError(f"top_p must lie in (0, 1], not {self.top_p}")
        if self.top_k < 0:
            raise ConfigurationError(f"top_k must be 0 (off) or more, not {self.top_k}")
        if not 0 <= self.min_p <= 1:
            raise ConfigurationError(f"min_p must lie in [0, 1], not {self.min_p}")

    @property
    def greedy(self) -> bool:
        """Whether all draws from the same logits are equal."""
        return self.temperature < COLDEST or self.top_k == 1


def generators(seed: Sequence[int], n: int) -> list[np.random.Generator]:
    """Return n independent generators; the i-th does not depend on n."""
    return [np.random.default_rng([*seed, i]) for i in range(n)]


def logprob(logits: FloatArray, token: int) -> float:
    """Return log softmax(logits)[token] in float32 precision, for logits of shape (vocabulary,).

    Raises:
        EngineError: The logits are not finite numbers.
    """
    peak = _peak(logits)
    weights = logits - peak
    np.exp(weights, out=weights)  # in place: a vocabulary's memory is not free
    normaliser = peak + np.log(weights.sum(dtype=np.float64))
    return float(np.float32(logits[token] - normaliser))


def draw(logits: FloatArray, sampling: Sampling, rng: np.random.Generator) -> tuple[int, float]:
    """Return a token drawn from logits of shape (vocabulary,), and its raw log-probability."""
    if sampling.greedy:
        token = int(logits.argmax())
    else:
        tokens, probabilities = _kept(logits, sampling)
        threshold = rng.random() * probabilities[-1]
        token = int(tokens[np.searchsorted(probabilities, threshold, side="right")])
    return token, logprob(logits, token)


def ranked(logits: FloatArray, n: int) -> list[tuple[int, float]]:
    """Return the n likeliest tokens with their raw probabilities, the likeliest first.

    Fewer if there are no more that are possible at all.
    """
    peak = _peak(logits)
    weights = logits - peak
    np.exp(weights, out=weights)
    total = weights.sum(dtype=np.float64)
    if n == 1:
        tokens = np.array([logits.argmax()])
    else:
        tokens = np.argpartition(-logits, n - 1)[:n] if n < len(logits) else np.arange(len(logits))
        tokens = tokens[np.lexsort((tokens, -logits[tokens]))]
    return [(int(token), float(weights[token] / total)) for token in tokens if weights[token] > 0]


def distribution(logits: FloatArray, sampling: Sampling) -> FloatArray:
    """Return the probabilities that `draw` draws from, shape (vocabulary,)."""
    full = np.zeros(logits.shape, dtype=np.float32)
    if sampling.greedy:
        full[logits.argmax()] = 1.0
        return full
    tokens, cumulative = _kept(logits, sampling)
    full[tokens] = np.diff(cumulative, prepend=0.0) / cumulative[-1]
    return full


def _peak(logits: FloatArray) -> np.float32:
    peak: np.float32 = logits.max()
    if not np.isfinite(peak):
        raise EngineError(
            f"the model gave logits whose largest is {peak}; its file or its numerical settings "
            "are faulty"
        )
    return peak


_HEAD = 1e-5
"""Weights, relative to the likeliest token's, that are sorted first."""


def _kept(logits: FloatArray, sampling: Sampling) -> tuple[IntArray, npt.NDArray[np.float64]]:
    """Return the tokens that pass the filters and their cumulative weights."""
    weights = np.exp((logits - _peak(logits)) / np.float32(sampling.temperature))
    if sampling.top_k == 0 and sampling.top_p == 1:
        tokens = np.flatnonzero(weights >= sampling.min_p)
        return tokens, np.cumsum(weights[tokens], dtype=np.float64)

    total = weights.sum(dtype=np.float64)
    # Sorting a whole vocabulary costs milliseconds; mostly its head holds all that can be kept.
    tokens = np.flatnonzero(weights > _HEAD)
    head_suffices = (
        len(tokens) >= sampling.top_k
        if sampling.top_k
        else weights[tokens].sum(dtype=np.float64) >= sampling.top_p * total
    )
    if not head_suffices:
        tokens = np.arange(len(weights))
    tokens = tokens[np.argsort(-weights[tokens], kind="stable")]
    if sampling.top_k:
        tokens = tokens[: sampling.top_k]
        total = weights[tokens].sum(dtype=np.float64)
    cumulative = np.cumsum(weights[tokens], dtype=np.float64)
    size = int(np.searchsorted(cumulative, sampling.top_p * total)) + 1
    size = min(size, int(np.count_nonzero(weights[tokens] >= sampling.min_p)))
    return tokens[:size], cumulative[:size]
