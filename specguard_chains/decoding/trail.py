"""A guess at what a model is about to write, computed in blocks ahead of those who follow it.

A drafted step that was rejected is mostly right up to some token. The target draws its own tokens
as ever; but as long as they are those of the guess, their logits come from one pass over many
tokens, which costs a fraction of as many passes. Nothing of the text changes: a guess decides only
how many tokens are computed at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

from specguard_chains.decoding.arrays import FloatArray
from specguard_chains.decoding.cache import Rows

SHORT, LONG = 4, 32
"""Fewest and most tokens of a block. Fewer are computed one by one, as a pass over two costs nearly
two passes; and the logits of a whole block are held together."""
DOUBTFUL = log(0.6)
"""A block ends before a token that its own writer found less likely: there the default target
chooses another one every second time."""


@dataclass(frozen=True, slots=True)
class Row:
    """What a forward pass gives for one token."""

    logits: FloatArray
    grounding: float | None = None
    passages: FloatArray | None = None
    state: FloatArray | None = None


def row_of(rows: Rows, i: int) -> Row:
    """Return what a pass gave for its i-th token; valid as long as the pass's rows are."""
    return Row(
        rows.logits[i],
        None if rows.grounding is None else float(rows.grounding[i]),
        None if rows.passages is None else rows.passages[i],
        None if rows.states is None else rows.states[i],
    )


class Trail:
    """The tokens of a guess, and the rows of its latest block."""

    def __init__(self, tokens: Sequence[int] = (), logprobs: Sequence[float] | FloatArray = ()):
        """Start before the first token; `logprobs` are the writer's own, if there are any."""
        self.tokens = list(tokens)
        self._doubtful = [i for i, value in enumerate(logprobs) if value < DOUBTFUL]
        self.walked = 0
        """How many of the tokens somebody has drawn."""
        self._rows: list[Row] = []
        self._first = 0  # number of tokens up to the first row's

    @property
    def reach(self) -> int:
        """How many of the tokens have been computed."""
        return self._first + max(len(self._rows) - 1, 0)

    def follows(self, tokens: Sequence[int]) -> bool:
        """Whether the latest of some tokens, of which all before follow the guess, does so too."""
        n = len(tokens)
        return n <= len(self.tokens) and tokens[-1] == self.tokens[n - 1]

    def block(self, start: int) -> list[int]:
        """Return the tokens from number `start` to compute at once; the first of them is drawn."""
        end = next((i for i in self._doubtful if i >= start + SHORT), len(self.tokens))
        block = self.tokens[start : min(end, start + LONG)]
        return block if len(block) >= SHORT else block[:1]

    def keep(self, first: int, rows: Sequence[Row]) -> None:
        """Take the rows of a block whose first token is number `first`."""
        self._first, self._rows = first + 1, list(rows)

    def row(self, n: int) -> Row | None:
        """Return the row after the first n tokens, None if it has not been computed."""
        inside = self._first <= n < self._first + len(self._rows)
        return self._rows[n - self._first] if inside else None
