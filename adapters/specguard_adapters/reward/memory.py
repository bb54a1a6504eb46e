"""What was computed of a few texts, so that a text which begins as one of them goes on there.

Answers that are written in turns each go on from their own beginning: every one of them has a
place, as long as there are no more of them than places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from specguard_chains.decoding.cache import common_prefix

T = TypeVar("T")

TEXTS = 8
"""Most texts that are remembered. The keys and values of one with 1000 tokens are about 30 MB with
a model of 1.5 billion parameters in bfloat16, and 60 to 130 MB with one of 7 or 8 billion."""


@dataclass(frozen=True, slots=True, eq=False)
class _Text(Generic[T]):
    tokens: list[int]
    computed: T


class Memory(Generic[T]):
    """The latest texts and what was computed of them; none of them is the beginning of another."""

    def __init__(self, beginning: Callable[[T, int, int], T], most: int = TEXTS) -> None:
        """Start empty.

        Args:
            beginning: Returns what was computed of a text's first tokens, and leaves the text's own
                as it is; is given what was computed, how many tokens that is, and how many of them
                are wanted.
            most: Most texts; the one that was not used for longest is forgotten first.
        """
        self._beginning = beginning
        self._most = most
        self._texts: list[_Text[T]] = []  # the latest one last

    def __len__(self) -> int:
        return len(self._texts)

    def take(self, tokens: Sequence[int]) -> tuple[int, T | None]:
        """Return how many of a text's first tokens need no computing, and what is known of these.

        The last one always needs it. A text that is the beginning of this one is forgotten, since
        what is known of it will change: `put` brings it back, with all that was added.
        """
        read = tokens[:-1]
        lengths = [common_prefix(text.tokens, read) for text in self._texts]
        kept = max(lengths, default=0)
        if not kept:
            return 0, None
        number = lengths.index(kept)
        text = self._texts[number]
        if kept == len(text.tokens):
            del self._texts[number]
            return kept, text.computed
        return kept, self._beginning(text.computed, len(text.tokens), kept)

    def put(self, tokens: Sequence[int], computed: T) -> None:
        """Remember a text that `take` was asked about, as the latest one."""
        new = _Text(list(tokens), computed)
        for number, text in enumerate(self._texts):
            if text.tokens[: len(new.tokens)] == new.tokens:
                new = self._texts.pop(number)  # it holds all of the new one
                break
        self._texts = [*self._texts, new][-self._most :]

    def clear(self) -> None:
        """Forget all texts."""
        self._texts = []
