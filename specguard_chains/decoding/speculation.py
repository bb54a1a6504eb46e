"""What a draft proposes at a time: how many tokens, in which shape, and how they are drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from specguard_chains.decoding.acceptance import (
    Branching,
    Independent,
    Likeliest,
    WithoutReplacement,
)
from specguard_chains.errors import ConfigurationError

Children = Literal["independent", "without-replacement", "likeliest"]
BRANCHINGS: dict[Children, Branching] = {
    "independent": Independent(),
    "without-replacement": WithoutReplacement(),
    "likeliest": Likeliest(),
}


@dataclass(frozen=True, slots=True)
class Speculation:
    """The shape of a draft's proposals."""

    widths: tuple[int, ...] = (1, 1, 1, 1)
    """Children of every node, by depth; a chain of n tokens has n times 1."""
    children: Children = "independent"
    """How they are drawn. At temperature 0 they are always the likeliest ones."""
    adaptive: bool = True
    """Propose fewer tokens after a rejection and more after none, up to the full depth; and none
    below tokens that the draft itself finds unlikely."""
    min_confidence: float = 0.4
    """What counts as unlikely, if adaptive: probabilities below it."""

    def __post_init__(self) -> None:
        """Validate."""
        if not self.widths or not all(width >= 1 for width in self.widths):
            raise ConfigurationError(
                f"a draft proposes one token or more at every depth, not {self.widths}"
            )
        if self.children not in get_args(Children):
            raise ConfigurationError(
                f"unknown children {self.children!r}; use one of {', '.join(get_args(Children))}"
            )
        if not 0 <= self.min_confidence <= 1:
            raise ConfigurationError(
                f"min_confidence must lie in [0, 1], not {self.min_confidence}"
            )

    @property
    def depth(self) -> int:
        """Most tokens that are proposed one after the other."""
        return len(self.widths)

    @property
    def branching(self) -> Branching:
        """How children are drawn, where there is chance in it."""
        return BRANCHINGS[self.children]

    def next_depth(self, depth: int, drafted: int, accepted: int) -> int:
        """Return how deep to draft after `accepted` of `drafted` tokens; `depth` were allowed."""
        if not self.adaptive:
            return self.depth
        return min(self.depth, depth + 2) if accepted >= drafted else max(1, depth - 1)

    def goes_on(self, likeliest: float) -> bool:
        """Whether to draft below tokens of which the likeliest has this probability."""
        return not self.adaptive or likeliest >= self.min_confidence
