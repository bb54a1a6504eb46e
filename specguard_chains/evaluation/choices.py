"""The options of a multiple-choice problem, and the letter of the right one.

The options of a data set come in an order that may give the answer away, such as the right one
first. So they are shuffled, by the seed and the problem's id alone: each problem keeps its order
in every run, and each letter is right about equally often.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_PREFIX = re.compile(r"\s*\(?([A-Za-z])\s*[).:]\s*")
# Options that speak of the others keep their places: "both A and C", "all of the above".
_REFERENCE = re.compile(
    r"\bthe (?:above|below)\b|\b[A-J]\)? (?:and|or|&) \(?[A-J]\b|\b(?:[Oo]nly|[Oo]ption) \(?[A-J]\b"
)


class Place(int):
    """The right option's place from 0: it means no option by its text, as a number may."""


def arranged(
    options: Sequence[str], gold: str | int, *, seed: int, problem_id: str
) -> tuple[tuple[str, ...], str]:
    """Return the options in the order in which they are shown, and the right one's letter.

    Args:
        options: In the data set's order; letters of their own ("A) 5") are taken off.
        gold: The right option's letter, its place from 0, or its text.
        seed: Of the shuffle.
        problem_id: Problems are shuffled independently.

    Raises:
        ValueError: There are too few or too many options, or not exactly one is the right one.
    """
    if not 2 <= len(options) <= len(LETTERS):
        raise ValueError(f"{len(options)} options; a choice needs 2 to {len(LETTERS)}")
    texts = _without_letters(options)
    if not all(texts):
        raise ValueError("an option is empty")
    right = _right_option(texts, gold)
    order = list(range(len(texts)))
    if not any(_REFERENCE.search(text) for text in texts):
        random.Random(f"{seed}:{problem_id}").shuffle(order)
    return tuple(texts[i] for i in order), LETTERS[order.index(right)]


def lettered(options: Sequence[str]) -> str:
    """Return the options as they are shown, one a line."""
    return "\n".join(f"({letter}) {text}" for letter, text in zip(LETTERS, options, strict=False))


def _without_letters(options: Sequence[str]) -> list[str]:
    """Return the options without the letters that they all begin with, if they all do, in order."""
    prefixes = [_PREFIX.match(option) for option in options]
    found = [prefix[1].upper() for prefix in prefixes if prefix]
    if found == list(LETTERS[: len(options)]):
        options = [option[len(p[0]) :] for option, p in zip(options, prefixes, strict=True) if p]
    return [option.strip() for option in options]


def _right_option(texts: Sequence[str], gold: str | int) -> int:
    """Return the place of the one option that the answer means, whatever it may mean."""
    if isinstance(gold, Place) and 0 <= gold < len(texts):
        return gold
    meant = {place for place, text in enumerate(texts) if text == str(gold).strip()}
    if isinstance(gold, int):
        meant |= {gold} & set(range(len(texts)))
    else:
        letter = re.fullmatch(r"\(?([A-Za-z])[).]?", gold.strip())
        if letter and letter[1].upper() in LETTERS[: len(texts)]:
            meant.add(LETTERS.index(letter[1].upper()))
        elif not meant and gold.strip().isdecimal():
            meant |= {int(gold)} & set(range(len(texts)))
    if not meant:
        raise ValueError(
            f'the answer {gold!r} is none of the {len(texts)} options; give its letter, like "A", '
            "its place from 0, or its text"
        )
    if len(meant) > 1:
        raise ValueError(
            f"the answer {gold!r} can mean several options; give the letter of the right one"
        )
    return meant.pop()
