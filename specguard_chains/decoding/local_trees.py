"""Token trees on top of local sessions: what speculative decoding needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from specguard_chains.decoding.arrays import FloatArray
from specguard_chains.decoding.constraint import Matcher
from specguard_chains.decoding.local import LocalSession
from specguard_chains.decoding.local_drafts import Branch
from specguard_chains.decoding.local_sequence import computes
from specguard_chains.decoding.token_tree import Node, TokenTree

JOINED_TOKENS = 4
"""So many pending tokens are read in one pass with a tree that follows them."""


class TreeSession(LocalSession):
    """A `LogitSession` over a `Cache`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """See `LocalSession`."""
        super().__init__(*args, **kwargs)
        self._tree: TokenTree | None = None  # whose paths the branches are
        self._grown = 0  # nodes of it that have been computed
        self._level: FloatArray | None = None  # logits of those that were computed last
        self._matchers: dict[int, Matcher] = {}  # after each node, if there is a constraint

    @property
    def tokens(self) -> Sequence[int]:
        """See `LogitSession.tokens`."""
        return self._tokens

    def admits(self, tokens: Sequence[int]) -> int:
        """See `LogitSession.admits`."""
        return len(tokens) if self._matcher is None else self._matcher.admits(tokens)

    @computes
    def logits(self, tree: TokenTree) -> FloatArray:
        """See `LogitSession.logits`. Few pending tokens are read in one pass with the tree."""
        self._require_open()
        self._require_room(tree.depth)
        first = self._grown if tree is self._tree else 0
        return self._allowed_after(tree, first, self._compute_logits(tree))

    def _compute_logits(self, tree: TokenTree) -> FloatArray:
        """Return the model's own logits after the nodes that the tree has gained."""
        if tree is self._tree:
            new = len(tree.nodes) > self._grown
            return self._grow(tree, []) if new else np.empty((0, self._n_tokens), dtype=np.float32)
        self._drop_branches()
        has_nodes = len(tree.nodes) > 1
        known = self._cached
        if self._logits is None:  # if all is cached, the last token's logits are gone: read again
            known = min(known, len(self._tokens) - 1)
        pending = self._tokens[known:]
        joined = (
            has_nodes
            and 0 < len(pending) <= JOINED_TOKENS
            and known >= self._prompt_length
            and not self._grounded
        )
        if joined and known < self._cached:
            self._cut_cache(known)
        root = None if joined else self._next_logits()[None]
        self._cache.fork(tree.leaves, self._cached)
        self._branches = [Branch(i) for i in range(tree.leaves)]
        self._tree, self._grown = tree, 1
        if root is None:
            return self._grow(tree, pending)
        return np.concatenate([root, self._grow(tree, [])]) if has_nodes else root

    def _grow(self, tree: TokenTree, pending: Sequence[int]) -> FloatArray:
        """Compute the end of the sequence and the tree's new nodes; return the logits.

        Shape (new nodes, vocabulary), with one row more in front if there were tokens pending.
        """
        nodes: list[Node] = tree.nodes[self._grown :]
        last = len(self._tokens) - 1
        self._level = None
        rows = self._forward(
            [*pending, *(node.token for node in nodes)],
            [*range(self._cached, len(self._tokens)), *(last + node.depth for node in nodes)],
            [*[tree.nodes[0].branches] * len(pending), *(node.branches for node in nodes)],
            context=False,
        )
        self.counters.read += len(pending)  # whoever wrote the tree counts its nodes
        self._cached, self._grown = len(self._tokens), len(tree.nodes)
        for node in nodes:
            for leaf in node.branches:
                self._branches[leaf].tokens.append(node.token)
                self._branches[leaf].computed += 1
        self._level = rows.logits[len(pending) :]
        return rows.logits[max(len(pending) - 1, 0) :]

    def _allowed_after(self, tree: TokenTree, first: int, rows: FloatArray) -> FloatArray:
        """Return the logits after nodes `first` and on, with forbidden tokens at -inf."""
        if self._matcher is None or not len(rows):
            return rows
        for number in range(first, len(tree.nodes)):
            node = tree.nodes[number]
            above = self._matchers[node.parent] if number else self._matcher
            self._matchers[number] = matcher = above.fork()
            matcher.advance([node.token] if number else [])
        return np.stack([self._matchers[first + i].allowed(row) for i, row in enumerate(rows)])

    def _logits_after(self, branch: Branch, tokens: Sequence[int]) -> FloatArray | None:
        """Return the logits after tokens of a branch, if they are still there."""
        if self._tree is None:
            return super()._logits_after(branch, tokens)
        node = self._tree.find(tokens)
        if node is None or self._level is None or node < self._grown - len(self._level):
            return None
        row: FloatArray = self._level[node - self._grown]
        return row.copy()

    def _forget_branches(self) -> None:
        super()._forget_branches()
        self._tree = self._level = None
        self._matchers = {}
