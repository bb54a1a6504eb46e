"""Attention in transformers: SDPA with this project's masks, and the probabilities on the side.

A model whose attention implementation is `NAME` asks here for its masks and for each layer's
attention. What is computed depends on the pass that is going on in the calling thread; without one
everything is plain SDPA. So engines do not disturb each other, nor whoever else uses the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy.typing as npt
import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask

from specguard_chains.decoding.arrays import IntArray
from specguard_chains.decoding.grounding import GroundingSpec
from specguard_chains.errors import DecodingCancelled, EngineError

NAME = "specguard"
"""Of the attention implementation."""
BLOCK_FLOATS = 1 << 22
"""Most probabilities that are held at once, unless one row alone has more."""


class UnsupportedAttentionError(EngineError):
    """The model's attention is not what this module computes."""


@dataclass(slots=True)
class SeenLayer:
    """What a layer's attention was, for the check at load time."""

    probabilities: torch.Tensor
    """Shape (heads, rows, columns)."""
    error: float
    """Largest difference between what they give and what SDPA gave, relative to the largest."""


@dataclass
class ForwardPass:
    """A pass of q tokens over n cells: who sees whom, and whose attention is wanted."""

    positions: IntArray
    """Of the tokens, shape (q,)."""
    cell_positions: IntArray
    """Of all cells, the tokens' own at the end; shape (n,)."""
    visible: npt.NDArray[Any]
    """Which cells a token sees, as far as its branches go; shape (q, n)."""
    plain: bool
    """The mask is the one that SDPA applies by itself."""
    layers: range = range(0)
    """Layers whose attention is wanted."""
    spec: GroundingSpec = GroundingSpec()  # noqa: RUF009 - frozen
    """How it is cleaned."""
    cancelled: Callable[[], bool] | None = None
    """Asked at every layer."""
    seen: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    """(layer, cleaned and averaged rows of shape (q, n)), as far as the pass has come."""
    probe: list[SeenLayer] | None = None
    """If a list, the wanted layers' attention is noted there."""

    def mask(
        self,
        pattern: Callable[..., torch.Tensor],
        device: torch.device,
        *,
        can_be_left_out: bool,
        window: int | None,
    ) -> torch.Tensor | None:
        """Return the mask of a kind of layers, shape (1, 1, q, n); None if SDPA needs none.

        Args:
            pattern: The model's rule, from indices of batch, head, query and key to truth. It is
                given positions for the latter two, so that a window is one of positions.
            device: Where the mask is needed.
            can_be_left_out: The rule is the usual causal one, but for a window.
            window: Its size; None for none.
        """
        if self.plain and can_be_left_out and (window is None or len(self.cell_positions) < window):
            return None
        zero = torch.zeros((1, 1, 1, 1), dtype=torch.long, device=device)
        rows = torch.as_tensor(self.positions, device=device)[None, None, :, None]
        columns = torch.as_tensor(self.cell_positions, device=device)[None, None, None, :]
        return pattern(zero, zero, rows, columns) & self._visible.to(device)

    @cached_property
    def _visible(self) -> torch.Tensor:
        return torch.from_numpy(self.visible)[None, None]

    def observe(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float | None,
        output: torch.Tensor,
    ) -> None:
        """Take note of a layer's attention if it is wanted."""
        if self.cancelled is not None and self.cancelled():
            raise DecodingCancelled("the request was cancelled")
        if layer not in self.layers:
            return
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        blocks = probabilities(query, key, mask, scale)
        if self.probe is not None:
            blocks = iter([self._noted(torch.cat([*blocks], dim=1), value, output)])
        # Block by block: all probabilities at once would be rows × columns × heads.
        self.seen.append((layer, torch.cat([clean(block, self.spec) for block in blocks])))

    def _noted(
        self, whole: torch.Tensor, value: torch.Tensor, output: torch.Tensor
    ) -> torch.Tensor:
        """Note a layer's probabilities, and how well they explain its output."""
        assert self.probe is not None
        groups = whole.shape[0] // value.shape[1]
        expected = whole @ value[0].float().repeat_interleave(groups, dim=0)
        error = (expected.transpose(0, 1) - output[0].float()).abs().max()
        self.probe.append(SeenLayer(whole, float(error / expected.abs().max())))
        return whole


_current: ContextVar[ForwardPass | None] = ContextVar("specguard_forward_pass", default=None)


@contextmanager
def going_on(forward_pass: ForwardPass) -> Iterator[None]:
    """Let the models that this thread runs within compute this pass."""
    token = _current.set(forward_pass)
    try:
        yield
    finally:
        _current.reset(token)


def probabilities(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> Iterator[torch.Tensor]:
    """Yield attention probabilities in float32, a block of rows after the other.

    Args:
        query: Shape (1, heads, rows, d).
        key: Shape (1, key heads, columns, d); each serves as many query heads as the next.
        mask: True or 0 where a row sees a column, shape (1, 1, rows, columns). None: each row sees
            all columns up to its own, and the last row's is the last column.
        scale: Factor of the products.

    Yields:
        Shape (heads, rows of the block, columns).
    """
    heads, rows, width = query.shape[1:]
    key_heads, columns = key.shape[1:3]
    keys = key[0].float().transpose(1, 2)
    block = max(1, BLOCK_FLOATS // (heads * columns))
    for start in range(0, rows, block):
        queries = query[0, :, start : start + block].float().reshape(key_heads, -1, width)
        scores = ((queries @ keys) * scale).view(heads, -1, columns)
        if mask is None:
            last = torch.arange(scores.shape[1], device=scores.device) + columns - rows + start
            hidden = torch.arange(columns, device=scores.device) > last[:, None]
            scores.masked_fill_(hidden, -torch.inf)
        elif mask.dtype == torch.bool:
            scores.masked_fill_(~mask[0, :, start : start + block], -torch.inf)
        else:
            scores += mask[0, :, start : start + block]
        yield scores.softmax(dim=-1)


def clean(attention: torch.Tensor, spec: GroundingSpec) -> torch.Tensor:
    """Return what `grounding.average_heads` returns, computed where the attention is."""
    if spec.threshold > 0:
        attention = attention.masked_fill(attention < spec.threshold, 0)
    rows = attention.mean(dim=0)
    if spec.renormalise:
        rows /= rows.sum(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return rows


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as SDPA does, and let the pass that is going on take note."""
    current = _current.get()
    if current is not None:
        for feature in ("softcap", "s_aux", "position_bias"):
            if kwargs.get(feature) is not None:
                raise UnsupportedAttentionError(f"its attention uses {feature}, which SDPA lacks")
    output, _ = sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=scaling, **kwargs
    )
    if current is not None:
        layer: int = module.layer_idx
        current.observe(layer, query, key, value, attention_mask, scaling, output)
    return output, None


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *args: Any,
    mask_function: Callable[..., torch.Tensor] = causal_mask_function,
    allow_is_causal_skip: bool = True,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> torch.Tensor | None:
    """Make the mask of the pass that is going on, or SDPA's own."""
    current = _current.get()
    if current is None:
        return sdpa_mask(
            batch_size,
            q_length,
            kv_length,
            *args,
            mask_function=mask_function,
            allow_is_causal_skip=allow_is_causal_skip,
            local_size=local_size,
            use_vmap=use_vmap,
            device=device,
            **kwargs,
        )
    if use_vmap or (batch_size, q_length, kv_length) != (1, *current.visible.shape):
        raise UnsupportedAttentionError(
            f"it asks for a mask of its own, {q_length} × {kv_length} where there are "
            f"{current.visible.shape[0]} × {current.visible.shape[1]} tokens"
        )
    return current.mask(
        mask_function,
        torch.device(device),
        can_be_left_out=allow_is_causal_skip,
        window=local_size,
    )


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
