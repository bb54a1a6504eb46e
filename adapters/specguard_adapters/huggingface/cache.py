"""KV memory of one sequence and its candidates in transformers, with its tokens' grounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from specguard_adapters.huggingface.attention import ForwardPass, SeenLayer
from specguard_adapters.huggingface.cells import Cells
from specguard_adapters.huggingface.model import Model
from specguard_chains.decoding.arrays import FloatArray
from specguard_chains.decoding.cache import Rows, State, check_branches, rollout_for
from specguard_chains.decoding.grounding import GroundingSpec, Rollout
from specguard_chains.errors import (
    ContextOverflowError,
    DecodingCancelled,
    EngineError,
)

ABORTABLE_TOKENS = 16
"""Longer runs can be cancelled while they are computed; shorter ones only before and after."""
LOGIT_ROWS = 64
"""Most rows of logits that one pass gives."""


class HuggingFaceCache:
    """A `Cache` whose sequence and branches share the cells of one batch row.

    Cell i of the context is position i. Behind it lie the tokens of the step in progress, in the
    order in which they were computed.
    """

    def __init__(
        self,
        model: Model,
        *,
        cells: int,
        max_candidates: int,
        attention_layers: int,
        n_batch: int,
    ) -> None:
        """Start empty.

        Args:
            model: What computes.
            cells: The most tokens that are held, over all branches.
            max_candidates: The most branches.
            attention_layers: Most last layers whose attention can be read.
            n_batch: Most tokens computed at once.
        """
        self._model = model
        self._max_candidates = max_candidates
        self._attention_layers = attention_layers
        self._n_batch = n_batch
        self._cells = Cells(model.n_layer, cells)
        self._positions = np.zeros(cells, dtype=np.intp)
        self._members = np.zeros((cells, max_candidates), dtype=np.float32)  # 1: on the branch
        self._committed = 0  # tokens of branch 0 that are context
        self._rollout: Rollout | None = None
        self._state_layer: int | None = None
        self._cancelled: Callable[[], bool] | None = None
        self.probe: list[SeenLayer] | None = None

    def configure(
        self,
        grounding: GroundingSpec | None,
        cancelled: Callable[[], bool] | None,
        state_layer: int | None = None,
    ) -> None:
        """See `Cache.configure`."""
        self._state_layer = state_layer
        self._cancelled = cancelled
        self._rollout = rollout_for(
            grounding,
            self._rollout,
            attention_layers=self._attention_layers,
            slots=self._cells.limit,
        )

    @property
    def shareable(self) -> bool:
        """See `Cache.shareable`."""
        return True

    def share(self, other: HuggingFaceCache, length: int) -> bool:
        """See `Cache.share`. Keys and values are copied."""
        with torch.inference_mode():
            self._cells.copy(other._cells, length)
        self._commit(length)
        if self._rollout is not None:
            assert other._rollout is not None
            self._rollout.take_over(other._rollout)
        return True

    def fork(self, n: int, length: int) -> None:
        """See `Cache.fork`."""
        check_branches(n, self._max_candidates)
        used = self._cells.used
        shared = self._members[:used, 0] * (self._positions[:used] < length)
        self._members[:used, 1:] = 0
        self._members[:used, 1:n] = shared[:, None]

    def forward(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        branches: Sequence[Sequence[int]],
        *,
        context: bool,
        all_logits: bool,
    ) -> Rows:
        """See `Cache.forward`. Context has no grounding; tokens of a step have one each."""
        if context and self._cells.used > self._committed:
            self.keep(0, positions[0])
        if self._cells.used + len(tokens) > self._cells.limit:
            raise ContextOverflowError(
                f"{len(tokens)} more tokens do not fit into the memory for {self._cells.limit}; "
                "load the model with a larger n_ctx, or with larger candidate_tokens if there are "
                "several candidates"
            )
        first = self._cells.used
        limit = min(self._n_batch, LOGIT_ROWS) if all_logits else self._n_batch
        logits, states = [], []
        for start in range(0, len(tokens), limit):
            part = slice(start, start + limit)
            if len(tokens) > ABORTABLE_TOKENS and self._cancelled is not None and self._cancelled():
                raise DecodingCancelled("the request was cancelled")
            rows, hidden = self._compute(
                tokens[part],
                positions[part],
                branches[part],
                context=context,
                all_logits=all_logits,
            )
            logits.append(rows)
            states += [] if hidden is None else [hidden]
        if context:
            self._commit(self._cells.used)
        grounding = passages = None
        if self._rollout is not None and not context:
            own = np.arange(first, self._cells.used)
            grounding, passages = self._rollout.grounding(own), self._rollout.passages(own)
        whole = np.concatenate(logits) if all_logits and logits[1:] else logits[-1]
        return Rows(whole, grounding, passages, np.concatenate(states) if states else None)

    def cut(self, branch: int, length: int) -> None:
        """See `Cache.cut`. Cells at the end that are on no branch any more are free again."""
        first, used = self._committed, self._cells.used
        beyond = self._positions[first:used] >= length
        self._members[first:used, branch][beyond] = 0
        taken = np.flatnonzero(self._members[first:used].any(axis=1))
        self._cells.used = first + (int(taken[-1]) + 1 if taken.size else 0)

    def keep(self, branch: int, length: int) -> None:
        """See `Cache.keep`. The kept path's cells close up behind the context."""
        if length > self._committed:
            ours = self._members[self._committed : self._cells.used, branch] > 0
            path = np.flatnonzero(ours) + self._committed
            path = path[np.argsort(self._positions[path])][: length - self._committed]
            places = np.arange(self._committed, length)
            if not np.array_equal(self._positions[path], places):
                raise EngineError(f"branch {branch} does not hold {length} tokens")
            moved = path != places
            if moved.any():
                sources, targets = torch.from_numpy(path[moved]), torch.from_numpy(places[moved])
                with torch.inference_mode():
                    self._cells.move(sources, targets)
            if self._rollout is not None:
                self._rollout.move(path, places)
                self._rollout.commit(places)
        self._commit(length)

    def export(self, length: int) -> State:
        """See `Cache.export`. Keys and values are bytes, as NumPy has no bfloat16."""
        state: dict[str, Any] = {}
        with torch.inference_mode():
            for number, layer in enumerate(self._cells.layers):
                for name, tensor in zip(("keys", "values"), layer.export(length), strict=True):
                    if tensor.dtype != self._model.dtype:
                        raise EngineError(f"{name} have the type {tensor.dtype}")
                    # Always a copy, as it is written to a file while the cells change.
                    whole = tensor.to("cpu", copy=True).contiguous()
                    state[f"{name}{number}"] = whole.view(torch.uint8).numpy()
        if self._rollout is not None:
            state["grounding"] = self._rollout.export(np.arange(length))
        return state

    @property
    def restorable(self) -> bool:
        """See `Cache.restorable`."""
        return True

    def restore(self, state: State, length: int) -> bool:
        """See `Cache.restore`."""
        with torch.inference_mode():
            for number, layer in enumerate(self._cells.layers):
                keys, values = (
                    torch.from_numpy(state[f"{name}{number}"])
                    .view(self._model.dtype)
                    .to(self._model.device)
                    for name in ("keys", "values")
                )
                layer.restore(keys, values)
        if self._rollout is not None:
            self._rollout.restore(np.arange(length), state["grounding"])
        self._commit(length)
        return True

    def close(self) -> None:
        """See `Cache.close`."""
        self._commit(0)
        self._cells = Cells(self._model.n_layer, self._cells.limit)

    def _compute(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        branches: Sequence[Sequence[int]],
        *,
        context: bool,
        all_logits: bool,
    ) -> tuple[FloatArray, FloatArray | None]:
        """Compute tokens at once and put them into the next cells.

        Returns their logits and, of a step if that was asked for, their hidden states.
        """
        start, end = self._cells.used, self._cells.used + len(tokens)
        own = np.arange(start, end)
        self._positions[own] = positions
        self._members[own] = 0
        for cell, equal in zip(own, branches, strict=True):
            self._members[cell, list(equal)] = 1
        coming = self._forward_pass(start, end, context=context)
        if self._rollout is not None:
            self._rollout.begin(own, context=context, positions=positions)
        state_layer = None if context else self._state_layer
        logits, states = self._model.forward(
            tokens, self._cells, coming, all_logits=all_logits, state_layer=state_layer
        )
        if self._rollout is not None:
            for layer, rows in coming.seen:
                lowest = self._model.n_layer - self._rollout.spec.layers
                self._rollout.absorb_averaged(layer - lowest, rows.cpu().numpy(), own)
        self._cells.used = end
        return logits, states

    def _forward_pass(self, start: int, end: int, *, context: bool) -> ForwardPass:
        """Say who sees whom among the cells from `start`, which are about to be computed."""
        members, positions = self._members[:end], self._positions[:end]
        visible = (members[start:] @ members.T) > 0
        visible &= positions <= positions[start:, None]
        # SDPA's own causal mask begins with the first column: it serves the first pass alone.
        plain = (start == 0 or end - start == 1) and np.array_equal(
            visible, np.tri(end - start, end, start, dtype=np.bool_)
        )
        coming = ForwardPass(positions[start:], positions, visible, plain, probe=self.probe)
        if end - start > ABORTABLE_TOKENS:
            coming.cancelled = self._cancelled
        if self._rollout is not None:
            coming.spec = self._rollout.spec
            n_layer = self._model.n_layer
            # Nothing looks at the context's values in the top layer.
            coming.layers = range(n_layer - coming.spec.layers, n_layer - context)
        return coming

    def _commit(self, length: int) -> None:
        """Take note that the first `length` cells are the context, and drop all others."""
        self._committed = self._cells.used = length
        self._positions[:length] = np.arange(length)
        self._members[:length] = 0
        self._members[:length, 0] = 1
