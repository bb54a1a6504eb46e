"""Models of transformers with the heads that reward models have, under the heads' own names."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from specguard_adapters.reward.kinds import Head
from specguard_chains.errors import ConfigurationError

HEAD_NAMES = {Head.SCORE: ("score", "classifier"), Head.MLP: ("score",), Head.VALUE: ("v_head",)}
"""How models call their heads."""


def class_with_head(config: Any, head: Head, size: int) -> type[Any]:
    """Return a class of models: the plain model of this config below an MLP or a value head.

    Args:
        config: Of the model.
        head: `Head.MLP` or `Head.VALUE`.
        size: How many numbers the head gives.

    Raises:
        ConfigurationError: transformers has no plain model of this config.
    """
    plain = transformers.MODEL_MAPPING.get(type(config), None)
    if plain is None:
        raise ConfigurationError(
            f"transformers has no model without a head for {type(config).__name__}; give another "
            "reward kind"
        )
    base = next(c for c in plain.__mro__[1:] if issubclass(c, PreTrainedModel))

    class Headed(base):  # type: ignore[misc, valid-type]
        _keys_to_ignore_on_load_unexpected = (r"^lm_head\.",)

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            width = config.get_text_config().hidden_size
            setattr(self, self.base_model_prefix, plain(config))
            (name,) = HEAD_NAMES[head]
            setattr(self, name, _mlp(width, size) if head is Head.MLP else _Value(width, size))
            self.post_init()

    return Headed


def head_of(model: PreTrainedModel, head: Head) -> nn.Module:
    """Return a model's head, in float32: the numbers are few and decide.

    Raises:
        ConfigurationError: It has none.
    """
    for name in HEAD_NAMES[head]:
        if isinstance(found := getattr(model, name, None), nn.Module):
            return found.float()
    raise ConfigurationError(
        f"{type(model).__name__} has no head called {' or '.join(HEAD_NAMES[head])}; give another "
        "reward kind"
    )


class _Value(nn.Module):  # type: ignore[misc]
    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.summary = nn.Linear(width, size)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.summary(states)


def _mlp(width: int, size: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, size))
