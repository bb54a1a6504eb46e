"""Where a session's tokens lie in the cells of a context, and the grounding that is read there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from specguard_chains.decoding.arrays import FloatArray, IntArray
from specguard_chains.decoding.cache import State
from specguard_chains.decoding.grounding import Rollout


class GroundedCells:
    """A rollout that counts in the context's cells, and the cells of one session's tokens.

    llama.cpp tells the cells of tokens while it computes them, and never again.
    """

    def __init__(self, rollout: Rollout, max_candidates: int, context_length: int) -> None:
        """Start empty, with a rollout of the session's own."""
        self.rollout = rollout
        # [branch, position]: the context's on branch 0, and the step in progress; the cells of
        # candidates interleave.
        self._cells = np.zeros((max_candidates, context_length), dtype=np.intp)

    def take_over(self, other: GroundedCells, length: int) -> None:
        """Begin with the first `length` tokens of another session, which share its cells."""
        self.rollout.take_over(other.rollout)
        self._cells[0, :length] = other._cells[0, :length]

    def note_context(self, positions: Sequence[int], cells: IntArray) -> None:
        """Take note of where tokens of the context were put."""
        self._cells[0, np.asarray(positions)] = cells

    def note_step(
        self, positions: Sequence[int], branches: Sequence[Sequence[int]], cells: IntArray
    ) -> tuple[FloatArray, FloatArray | None]:
        """Take note of where tokens of a step were put; see `Rows.grounding` and `passages`."""
        for cell, position, equal in zip(cells, positions, branches, strict=True):
            self._cells[equal, position] = cell
        return self.rollout.grounding(cells), self.rollout.passages(cells)

    def commit(self, branch: int, start: int, end: int) -> None:
        """Make a branch's tokens at the positions [start, end) context."""
        fresh = self._cells[branch, start:end]
        self.rollout.commit(fresh)
        self._cells[0, start:end] = fresh

    def export(self, parts: Sequence[range]) -> dict[str, npt.NDArray[Any]]:
        """Return what is known of the context at positions that are saved in these parts.

        llama.cpp saves the tokens of a part in the order of their cells.
        """
        cells = self._cells[0]
        ordered = [part.start + np.argsort(cells[part.start : part.stop]) for part in parts]
        positions = np.concatenate(ordered)
        return {"positions": positions, "grounding": self.rollout.export(cells[positions])}

    def restore(self, state: State, length: int) -> None:
        """Begin with `length` tokens that were exported and lie in the first cells now."""
        cells = np.arange(length)
        self.rollout.restore(cells, state["grounding"])
        self._cells[0, state["positions"]] = cells
