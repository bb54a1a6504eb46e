"""Prompt lookup: an answer that repeats its prompt, or itself, goes on as the text did before.

Where the last tokens of the text occur earlier, what followed there is proposed (Saxena's prompt
lookup decoding, 2023). Among the latest occurrences the one counts that agrees longest. A long
agreement says that a passage is being copied, a short one is often chance: as in SuffixDecoding
(2411.04975), it limits how much is proposed. A wrong token ends it, so that little is proposed
after a rejection.
"""

from __future__ import annotations

from collections.abc import Sequence

from specguard_chains.decoding.engine import Candidate, Counters, LogitSession

SHORTEST_MATCH = 3
"""Tokens that must agree; two of them occur together by chance too often."""
LONGEST_MATCH = 64
"""Longer ones are not measured: they allow the most tokens in any case."""
OCCURRENCES = 8
"""So many of the latest are compared."""
TOKENS_OF_MATCH = 2
"""Tokens that must agree for every one that is proposed."""


class NGramIndex:
    """A growing text, and where in it every n tokens have occurred that something followed."""

    def __init__(self, tokens: Sequence[int] = (), n: int = SHORTEST_MATCH) -> None:
        """Start with a text."""
        self.tokens: list[int] = []
        self._n = n
        self._ends: dict[tuple[int, ...], list[int]] = {}
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append to the text."""
        for token in tokens:
            if len(self.tokens) >= self._n:
                self._ends.setdefault(self._last(), []).append(len(self.tokens))
            self.tokens.append(token)

    def cut(self, length: int) -> None:
        """Cut the text to its first `length` tokens."""
        while len(self.tokens) > length:
            self.tokens.pop()
            if len(self.tokens) >= self._n:
                ends = self._ends[self._last()]
                ends.pop()
                if not ends:
                    del self._ends[self._last()]

    def longest(self) -> tuple[int, int]:
        """Return where the occurrence ends that agrees longest with the end, and how long.

        (0, 0) if there is none; of equally long ones the latest.
        """
        best = (0, 0)
        for end in reversed(self._ends.get(self._last(), ())[-OCCURRENCES:]):
            length = self._agreement(end)
            if length > best[1]:
                best = (end, length)
        return best

    def after(self, end: int, n: int) -> list[int]:
        """Return n tokens that follow a place, over and over if the text ends before."""
        period = self.tokens[end : end + n]
        return [period[i % len(period)] for i in range(n)]

    def _last(self) -> tuple[int, ...]:
        return tuple(self.tokens[-self._n :])

    def _agreement(self, end: int) -> int:
        """Return how many tokens before a place are those at the end of the text."""
        length, last = self._n, len(self.tokens)
        most = min(end, LONGEST_MATCH)
        while length < most and self.tokens[end - length - 1] == self.tokens[last - length - 1]:
            length += 1
        return length


class PromptText:
    """Stands in for a draft's session: the target's sequence, which is proposed from.

    What it proposes is a guess, so that it need not be the sequence to the letter.
    """

    def __init__(self, target: LogitSession) -> None:
        """Start where the target is."""
        self.counters = Counters()
        self._target = target
        self._index = NGramIndex(target.tokens)

    @property
    def length(self) -> int:
        """See `Session.length`."""
        return len(self._index.tokens)

    @property
    def room(self) -> int:
        """See `Session.room`. There is no context but the target's."""
        return self._target.room

    def propose(self, most: int, *, adaptive: bool) -> list[int]:
        """Return what may come next, as far as the target's constraint allows it.

        Args:
            most: Tokens that may be proposed.
            adaptive: Propose fewer after a short match.
        """
        end, length = self._index.longest()
        if not length:
            return []
        n = min(most, length // TOKENS_OF_MATCH) if adaptive else most
        tokens = self._index.after(end, n)
        tokens = tokens[: self._target.admits(tokens)]
        self.counters.written += len(tokens)
        return tokens

    def extend(self, tokens: Sequence[int]) -> None:
        """See `LogitSession.extend`."""
        self._index.extend(tokens)

    def fits(self, candidate: Candidate) -> bool:
        """See `Session.fits`."""
        return True

    def accept(self, candidate: Candidate) -> None:
        """See `Session.accept`."""
        self.extend(self._target.tokens_of(candidate))

    def rollback(self, length: int) -> None:
        """See `Session.rollback`."""
        self._index.cut(length)

    def close(self) -> None:
        """See `Session.close`."""
