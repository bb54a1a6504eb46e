"""Trees of tokens, and the branches that their nodes stand on."""

from __future__ import annotations

import pytest

from specguard_chains.decoding.token_tree import TokenTree
from specguard_chains.errors import ConfigurationError


def filled(widths: tuple[int, ...]) -> TokenTree:
    """A tree whose i-th node has the token i."""
    tree, level = TokenTree(widths), [0]
    for width in widths:
        level = [tree.add(len(tree.nodes), parent) for parent in level for _ in range(width)]
    return tree


def test_a_chain_is_one_branch() -> None:
    tree = filled((1, 1, 1))
    assert (tree.depth, tree.leaves) == (3, 1)
    assert [list(node.branches) for node in tree.nodes] == [[0]] * 4
    assert tree.path(3) == [1, 2, 3]


def test_a_node_stands_on_the_branches_of_all_leaves_below_it() -> None:
    tree = filled((2, 1, 2))
    assert [list(node.branches) for node in tree.nodes] == [
        [0, 1, 2, 3],
        *([0, 1], [2, 3]),
        *([0, 1], [2, 3]),
        *([0], [1], [2], [3]),
    ]
    assert [node.depth for node in tree.nodes] == [0, 1, 1, 2, 2, 3, 3, 3, 3]
    assert tree.path(0) == []
    assert tree.path(8) == [2, 4, 8]
    assert tree.nodes[0].children == [1, 2]


def test_a_tree_may_stay_unfilled() -> None:
    tree = TokenTree((3, 2))
    second = [tree.add(5), tree.add(6)][1]
    leaf = tree.add(7, second)
    assert list(tree.nodes[leaf].branches) == [2]
    assert tree.path(leaf) == [6, 7]


def test_no_tree_is_only_the_end_of_the_sequence() -> None:
    tree = TokenTree(())
    assert (tree.depth, tree.leaves, len(tree.nodes)) == (0, 1, 1)


@pytest.mark.parametrize("widths", [(0,), (2, 0), (-1,)])
def test_a_node_without_children_above_others_is_refused(widths: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError, match="a child or more"):
        TokenTree(widths)


def test_more_children_than_there_is_room_for_are_refused() -> None:
    tree = filled((2,))
    for parent in (0, 1):
        with pytest.raises(ValueError, match="no room"):
            tree.add(9, parent)


def test_a_node_is_found_by_its_path() -> None:
    tree = filled((2, 2))
    for node in range(len(tree.nodes)):
        assert tree.find(tree.path(node)) == node
    assert tree.find([1, 1]) is None
    assert tree.find([1, 3, 5]) is None
