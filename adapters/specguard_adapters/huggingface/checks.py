"""Checks at load time: that a model computes over cells what it computes by itself."""

from __future__ import annotations

import weakref

import numpy as np
import torch
from transformers import PreTrainedModel

from specguard_adapters.huggingface.attention import SeenLayer
from specguard_adapters.huggingface.cache import HuggingFaceCache
from specguard_adapters.huggingface.model import Model, NotEnoughMemoryError
from specguard_chains.decoding.arrays import FloatArray
from specguard_chains.decoding.grounding import GroundingSpec
from specguard_chains.errors import AttentionUnavailableError, ConfigurationError, EngineError

SHARED, OWN = 5, 3
"""Tokens of the check: of the context, and of each of the two branches behind it."""
TOLERANCE = 1e-3
"""Of float32 logits, relative to their spread; what a wrong mask changes is far larger."""
HALF_TOLERANCE = 0.1
"""The same for formats of 16 bits."""


def check(model: Model, attention_layers: int) -> None:
    """Compute two branches beside each other, and compare them with what the model says of each.

    A model that several engines share is checked once.

    Args:
        model: Not adopted yet; afterwards it is.
        attention_layers: Last layers whose attention must be readable; 0 for none.

    Raises:
        ConfigurationError: The branches do not come out as when they are computed alone.
        AttentionUnavailableError: The attention is not what the module `attention` takes it for.
        EngineError: The memory does not suffice.
    """
    if _checked.get(model.weights, -1) >= attention_layers:
        model.adopt()
        return
    tokens = [int(t) for t in np.linspace(0, model.n_vocab - 1, SHARED + 2 * OWN)]
    shared, ones, others = tokens[:SHARED], tokens[SHARED:-OWN], tokens[-OWN:]
    seen: list[SeenLayer] = []
    try:
        expected = [model.reference([*shared, *own]) for own in (ones, others)]
        model.adopt()
        ours = _side_by_side(model, shared, ones, others, attention_layers, seen)
    except NotEnoughMemoryError:
        raise
    except EngineError as error:
        raise ConfigurationError(
            f"{model.name} cannot be used: {error}; take another kind of model"
        ) from error
    difference = max(map(_difference, ours, expected))
    if not difference <= (TOLERANCE if model.dtype == torch.float32 else HALF_TOLERANCE):
        raise ConfigurationError(
            f"{model.name} cannot be used: its logits change by {difference:.2g} of their spread "
            "if several branches are computed beside each other, so its attention does not follow "
            "masks and positions; take another kind of model"
        )
    if attention_layers and (problem := _oddity(seen, attention_layers, model.dtype)):
        raise AttentionUnavailableError(
            f"the attention of {model.name} cannot be read: {problem}; load the model with "
            "attention=False"
        )
    _checked[model.weights] = attention_layers


_checked: weakref.WeakKeyDictionary[PreTrainedModel, int]
_checked = weakref.WeakKeyDictionary()  # a model -> the attention layers that were checked


def _side_by_side(
    model: Model,
    shared: list[int],
    ones: list[int],
    others: list[int],
    attention_layers: int,
    seen: list[SeenLayer],
) -> list[FloatArray]:
    """Return the logits after the end of the shared tokens and after each of a branch's own."""
    cache = HuggingFaceCache(
        model,
        cells=SHARED + 2 * OWN,
        max_candidates=2,
        attention_layers=attention_layers,
        n_batch=SHARED,
    )
    if attention_layers:
        cache.probe = seen
        cache.configure(GroundingSpec(layers=attention_layers), None)
    both = [(0, 1)] * SHARED
    start = cache.forward(shared, range(SHARED), both, context=False, all_logits=True).logits[-1:]
    logits = [[start], [start]]
    first = cache.forward(
        [ones[0], others[0]], [SHARED] * 2, [(0,), (1,)], context=False, all_logits=True
    ).logits
    logits[0].append(first[:1])
    logits[1].append(first[1:])
    rest = range(SHARED + 1, SHARED + OWN)
    for branch, own in ((0, ones), (1, others)):
        rows = cache.forward(own[1:], rest, [(branch,)] * len(rest), context=False, all_logits=True)
        logits[branch].append(rows.logits)
    cache.keep(1, SHARED + OWN - 1)  # closes holes; its last token must come out again
    last = SHARED + OWN - 1
    again = cache.forward(others[-1:], [last], [(0,)], context=True, all_logits=False)
    logits[1][-1][-1:] = again.logits
    cache.close()
    return [np.concatenate(rows) for rows in logits]


def _difference(ours: FloatArray, whole: FloatArray) -> float:
    """Return how far logits are apart, relative to their spread over the vocabulary."""
    expected = whole[SHARED - 1 :]
    return float(np.sqrt(np.mean((ours - expected) ** 2)) / expected.std())


def _oddity(seen: list[SeenLayer], layers: int, dtype: torch.dtype) -> str | None:
    """Return what is wrong with the attention that was seen."""
    if len(seen) != 5 * layers - 1:  # five passes, the last one without the top layer
        return f"it showed itself {len(seen)} times only"
    sums = torch.stack([part.probabilities.sum(-1).sub(1).abs().max().cpu() for part in seen])
    if not float(sums.max()) < 1e-3:
        return f"rows differ from a sum of 1 by {float(sums.max()):.2g}"
    first = seen[0].probabilities
    if bool(torch.triu(first, first.shape[-1] - first.shape[-2] + 1).any()):
        return "tokens attend to later ones"
    error = max(part.error for part in seen)
    if not error < (1e-3 if dtype == torch.float32 else 0.1):
        return f"the model's attention gives other values, by {error:.2g}"
    return None
