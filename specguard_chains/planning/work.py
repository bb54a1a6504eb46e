"""Which passes an answer takes, and what they cost together.

seconds = sum over passes of times * kind(size), see `costs`. Numbers of passes are expected values
and need not be whole; a pass of size 12.5 is one of 12 or 13 tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import floor

from specguard_chains.decoding.local import READ_BLOCK
from specguard_chains.decoding.steps import Source
from specguard_chains.planning.costs import Costs, Kind, PairCosts

BLOCK = 8
"""Tokens of a block in which a rejected step's text is salvaged. They end in front of doubtful
tokens, 4 to 32 tokens long (`decoding.trail`); 8 is a middle, and assumed."""
LOOK = 12
"""Tokens that the target reads at a time of a step that is being drafted. It looks after 16 tokens,
after 4 if the draft doubted one of them, and at the step's end (`decoding.local_drafts`); 12 is
assumed. One token in 45 doubted, as on grade school problems, would give 14 in an endless step."""


@dataclass(frozen=True, slots=True)
class Passes:
    """Passes of one kind and size."""

    kind: Kind
    size: float
    times: float = 1.0


@dataclass(frozen=True, slots=True)
class Work:
    """All that both models compute for an answer."""

    draft: tuple[Passes, ...] = ()
    target: tuple[Passes, ...] = ()
    draft_calls: float = 0.0
    """How often something is asked of the draft, which matters if it is on a server."""
    target_calls: float = 0.0
    draft_attention: bool = False
    """Whether the draft's attention is read."""
    target_attention: bool = False

    def times(self, factor: float) -> Work:
        """Return so many times the work."""
        draft, target = (
            tuple(replace(passes, times=factor * passes.times) for passes in side)
            for side in (self.draft, self.target)
        )
        calls = factor * self.draft_calls, factor * self.target_calls
        return replace(
            self, draft=draft, target=target, draft_calls=calls[0], target_calls=calls[1]
        )


@dataclass(frozen=True, slots=True)
class Seconds:
    """What an answer takes, by who works."""

    draft: float
    target: float

    @property
    def total(self) -> float:
        """Both: they take turns."""
        return self.draft + self.target


def seconds_of(work: Work, costs: PairCosts) -> Seconds:
    """Return the seconds that work takes.

    Raises:
        ConfigurationError: It is not known what a part of it costs.
    """
    draft = costs.of(Source.DRAFT, attention=work.draft_attention) if work.draft else costs.draft
    target = (
        costs.of(Source.TARGET, attention=work.target_attention) if work.target else costs.target
    )
    return Seconds(
        _seconds(work.draft, draft) + draft.call_s * work.draft_calls,
        _seconds(work.target, target) + target.call_s * work.target_calls,
    )


def decode(tokens: float, candidates: float = 1) -> Passes:
    """Return the passes in which so many tokens are written, in each of the candidates."""
    return Passes(Kind.DECODE, candidates, tokens)


def proposing(prompt: float, pending: float, drafted: float, passes: float) -> tuple[Passes, ...]:
    """Return the draft's passes in speculative decoding, where it proposes so many tokens a pass.

    It draws the first of them from a pass over the tokens that it does not hold yet.
    """
    first = min(drafted, 1.0)
    return read(prompt), read(pending, first * passes), decode((drafted - first) * passes)


def read(tokens: float, times: float = 1.0) -> Passes:
    """Return passes that each read so many tokens."""
    return Passes(Kind.READ, tokens, times)


def verify(tokens: float, times: float = 1.0, *, block: int = READ_BLOCK) -> Sequence[Passes]:
    """Return the passes in which tokens are read with all of their logits, in blocks."""
    whole = floor(tokens / block)
    rest = tokens - whole * block
    passes = [Passes(Kind.VERIFY, block, times * whole)] if whole else []
    return [*passes, Passes(Kind.VERIFY, rest, times)] if rest else passes


def _seconds(passes: Iterable[Passes], costs: Costs) -> float:
    return sum(each.times * costs.seconds(each.kind, each.size) for each in passes if each.times)
