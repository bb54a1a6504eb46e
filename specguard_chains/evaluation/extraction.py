r"""What a text gives as its answer, and in which form it is compared.

The answer is the content of the text's last complete `\boxed{...}`. A text without one is given
another chance where that needs no guessing what is meant: its last number, if the right answer is a
number; a letter after "answer is" or "correct option", or alone in the last line, if the right
answer is a letter. What is said of other options is no answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from specguard_chains.decoding.final_answer import (
    bare_number,
    cleaned,
    last_boxed,
    last_number,
    unstyled,
)
from specguard_chains.evaluation.choices import LETTERS
from specguard_chains.evaluation.problems import Problem

_SEVERAL = re.compile(r"\d.*\b(?:and|or|to)\b.*\d", re.DOTALL)
_LETTER = re.compile(
    r"(?:(?:option|choice|answer)\s*:?\s*)?"
    r"(?:\(([A-Z])\)(?!.*\([A-Z]\)).*|([A-Z])(?:[).:]+(?:\s.*)?)?)",
    re.IGNORECASE | re.DOTALL,
)
_SAID_LETTER = re.compile(
    r"\b(?i:(?:answer|(?:correct|right|best)\s+(?:choice|option))(?:\s+is)?\s*:?\s*\**\s*"
    r"(?:(?:choice|option)\s+)?)\(?([A-Z])\b(?!['’])"
)
_LETTERS_WITHOUT_CHOICES = LETTERS[:8]


def extracted_answer(text: str, problem: Problem) -> str | None:
    """Return the answer that a text gives, None if it gives none.

    Where a letter is asked for, it is the letter, unless the text gives none.

    Args:
        text: What the model wrote, without the prompt.
        problem: It tells the kind of answer; neither its question nor its answer is searched.
    """
    boxed = last_boxed(text)
    letters = letters_of(problem)
    if letters:
        letter = _said_letter(text) if boxed is None else _letter(boxed, problem.choices)
        return letter if letter and letter in letters else boxed
    if boxed is None and bare_number(problem.answer):
        return last_number(text)
    return boxed


def letters_of(problem: Problem) -> str:
    """Return the letters that can be the answer; none if it is not a letter."""
    if problem.choices:
        return LETTERS[: len(problem.choices)]
    letter = re.fullmatch(r"\(?[A-H]\)?", cleaned(problem.answer))
    return _LETTERS_WITHOUT_CHOICES if letter else ""


def letter_in(answer: str) -> str | None:
    r"""Return the letter that an answer is or begins with: "B", "(b)", "B. 42"."""
    match = _LETTER.fullmatch(unstyled(answer))
    return (match[1] or match[2]).upper() if match else None


def gives_several(answer: str) -> bool:
    """Return whether an answer gives several values: "5 hours and 30 minutes", "3 or 4"."""
    return bool(_SEVERAL.search(unstyled(answer)))


def _letter(boxed: str, choices: Sequence[str]) -> str | None:
    """Return the letter of a boxed option: as given, or of the one option that is given whole."""
    same = [letter for letter, text in zip(LETTERS, choices, strict=False) if _same(text, boxed)]
    return same[0] if len(same) == 1 else letter_in(boxed)


def _same(option: str, boxed: str) -> bool:
    return "".join(cleaned(option).split()) == "".join(cleaned(boxed).split())


def _said_letter(text: str) -> str | None:
    said = _SAID_LETTER.findall(text)
    if said:
        return str(said[-1]).upper()
    lines = text.strip().splitlines()
    alone = re.fullmatch(r"\W*(?i:(?:choice|option)\W+)?([A-Z])\W*", lines[-1]) if lines else None
    return alone[1] if alone else None
