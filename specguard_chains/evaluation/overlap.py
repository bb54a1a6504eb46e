"""Problems that are nearly the same: what is fitted on one must not be reported on the other.

Questions are compared by their words in threes, numbers set aside: a question with other numbers
in it is the same exercise. The similarity is the share of common threes (Jaccard). An index from
each three to its questions leaves only pairs to compare that have something in common.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specguard_chains.evaluation.problems import Problem

SIZE = 3
_WORD = re.compile(r"\d+(?:[.,]\d+)*|[^\W\d_]+|[-+*/^=<>]")


def near_duplicates(
    training: Sequence[Problem], test: Sequence[Problem], threshold: float = 0.5
) -> list[tuple[str, str, float]]:
    """Return the ids of nearly equal problems, of training and of test, with their similarity.

    Args:
        training: What something is fitted, calibrated or trained on.
        test: What it is reported on.
        threshold: The similarity from which on a pair counts, above 0, at most 1.

    The most similar come first.
    """
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold is {threshold}; it must be above 0 and at most 1")
    sets = [_threes(problem.question) for problem in training]
    places: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for place, threes in enumerate(sets):
        for three in threes:
            places[three].append(place)
    pairs = []
    for problem in test:
        threes = _threes(problem.question)
        common = Counter(place for three in threes for place in places.get(three, ()))
        for place, count in common.items():
            similarity = count / (len(threes) + len(sets[place]) - count)
            if similarity >= threshold:
                pairs.append((training[place].id, problem.id, similarity))
    return sorted(pairs, key=lambda pair: (-pair[2], pair[0], pair[1]))


def _threes(question: str) -> set[tuple[str, ...]]:
    """Return the runs of three words of a question; a shorter question is one run."""
    words = [
        "#" if word[0].isdecimal() else word
        for word in _WORD.findall(unicodedata.normalize("NFKC", question).casefold())
    ]
    return {tuple(words[i : i + SIZE]) for i in range(max(len(words) - SIZE + 1, 1))}
