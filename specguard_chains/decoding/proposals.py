"""What speculative decoding lets the target check: a few tokens that the answer may go on with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from specguard_chains.decoding.acceptance import Branching, Choose, Law
from specguard_chains.decoding.arrays import FloatArray
from specguard_chains.decoding.engine import LogitSession
from specguard_chains.decoding.prompt_lookup import PromptText
from specguard_chains.decoding.sampling import Sampling, distribution, ranked
from specguard_chains.decoding.speculation import BRANCHINGS, Speculation
from specguard_chains.decoding.token_tree import TokenTree


@dataclass(frozen=True, slots=True)
class Block:
    """A tree of tokens, and how the children of its nodes were drawn."""

    tree: TokenTree
    branching: Branching
    laws: dict[int, Law] = field(default_factory=dict)
    """What the children of a node were drawn from, by node, where there was chance in it."""

    @property
    def depth(self) -> int:
        """Tokens of its longest path."""
        return self.tree.nodes[-1].depth


def drafted(
    draft: LogitSession, speculation: Speculation, depth: int, sampling: Sampling, choose: Choose
) -> Block:
    """Let a draft grow a tree, level by level."""
    tree = TokenTree(speculation.widths[:depth])
    block = Block(tree, speculation.branching)
    level = range(1)
    for width in tree.widths:
        rows = draft.logits(tree)
        first, surest = len(tree.nodes), 0.0
        for parent, row in zip(level, rows, strict=True):
            for token, probability in _children(block, parent, row, width, sampling, choose):
                tree.add(token, parent)
                surest = max(surest, probability)
        level = range(first, len(tree.nodes))
        draft.counters.written += len(level)
        if not speculation.goes_on(surest):
            break
    return block


def copied(text: PromptText, speculation: Speculation, depth: int) -> Block:
    """Copy a chain from the text so far."""
    return chain(text.propose(depth, adaptive=speculation.adaptive))


def chain(tokens: Sequence[int]) -> Block:
    """Return tokens that no law was drawn from: without chance, as a draft's likeliest are."""
    tree = TokenTree((1,) * len(tokens))
    for node, token in enumerate(tokens):
        tree.add(token, node)
    return Block(tree, BRANCHINGS["likeliest"])


def _children(
    block: Block, parent: int, row: FloatArray, width: int, sampling: Sampling, choose: Choose
) -> list[tuple[int, float]]:
    """Return the children of a node with their probabilities.

    At temperature 0 they are ranked, which takes no law of the whole vocabulary.
    """
    if sampling.greedy:
        return ranked(row, width)
    law = block.laws[parent] = distribution(row, sampling).astype(np.float64)
    return [(token, float(law[token])) for token in block.branching.draw(law, width, choose)]
