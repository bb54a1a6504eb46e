"""Several continuations of one sequence that share their beginnings: what a draft proposes.

The nodes are tokens; node 0 is the last token of the sequence itself. The shape is fixed
beforehand, so that every node knows which of the tree's leaves it leads to: those are the branches
of a KV memory that its token stands on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from specguard_chains.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Node:
    """A token of the tree."""

    token: int
    parent: int
    depth: int
    branches: range
    """The leaves below it."""
    children: list[int] = field(default_factory=list)


class TokenTree:
    """A tree that grows by tokens; widths (1, 1, 1) is a chain of three."""

    def __init__(self, widths: Sequence[int]) -> None:
        """Reserve room for `widths[d]` children of every node at depth d."""
        if not all(width >= 1 for width in widths):
            raise ConfigurationError(f"every node of a tree needs a child or more, not {widths}")
        self.widths = tuple(widths)
        self.leaves = prod(self.widths)
        self.nodes = [Node(-1, -1, 0, range(self.leaves))]

    @property
    def depth(self) -> int:
        """Tokens of its longest path, if it is filled."""
        return len(self.widths)

    def add(self, token: int, parent: int = 0) -> int:
        """Append a token after a node, and return the number of its own node."""
        above = self.nodes[parent]
        if above.depth == self.depth or len(above.children) == self.widths[above.depth]:
            raise ValueError(f"node {parent} has no room for another child in {self.widths}")
        share = len(above.branches) // self.widths[above.depth]
        first = above.branches.start + share * len(above.children)
        self.nodes.append(Node(token, parent, above.depth + 1, range(first, first + share)))
        above.children.append(len(self.nodes) - 1)
        return above.children[-1]

    def path(self, node: int) -> list[int]:
        """Return the tokens from the sequence's end to a node."""
        tokens: list[int] = []
        while node:
            tokens.append(self.nodes[node].token)
            node = self.nodes[node].parent
        return tokens[::-1]

    def find(self, path: Sequence[int]) -> int | None:
        """Return the node that a path from the sequence's end leads to, None if there is none."""
        node = 0
        for token in path:
            below = (c for c in self.nodes[node].children if self.nodes[c].token == token)
            if (child := next(below, None)) is None:
                return None
            node = child
        return node
