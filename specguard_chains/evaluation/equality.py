"""Whether two answers are equal, by math-verify. Runs in the worker of `checking`."""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module
from typing import Any

from specguard_chains.decoding.final_answer import bare_number, cleaned, plain_words, unstyled
from specguard_chains.evaluation.extraction import gives_several

_IN_BASE = re.compile(r"(?=[A-Z]*\d)([0-9A-Z]+)_\{?([2-9]|[12]\d|3[0-6])\}?")
_CLOCK = re.compile(r"(\d{1,2})(?::(\d\d))?([ap])\.?m\.?", re.IGNORECASE)


def equal(gold: str, given: str) -> bool:
    r"""Return whether an answer equals the right one.

    Answers of words must have the same words. All others are read as LaTeX, whole: when a part
    cannot be read, a number found elsewhere in it is no answer (`first_match`, no plain numbers).
    If the right answer is a number, the given one counts without its unit, and 5.3 for 5.3 \%. A
    base and "am" or "pm" count where both answers have them.

    Args:
        gold: The right answer. math-verify's comparison takes it first: its form decides whether
            "x = 3" or "3" is asked for.
        given: The answer to compare.
    """
    if (words := plain_words(gold)) is not None:
        return words == plain_words(given)
    marked = _marked(gold), _marked(given)
    if None not in marked:
        return marked[0] == marked[1]
    golds, answers = [cleaned(gold)], [cleaned(given)]
    if "".join(golds[0].split()) == "".join(answers[0].split()):
        return True
    if (number := bare_number(gold)) is not None:
        if gives_several(given):
            return False
        golds.append(number)
        if (number := bare_number(given)) is not None:
            answers.append(number)
    return any(_verified(one, other) for one in golds for other in answers)


def _marked(answer: str) -> object | None:
    """Return the parts of a number with its base, or of a time of day; None if it is neither.

    math-verify passes over both marks: 52_8 would be 52_9, and 5 am 5 pm. Who is asked for a base
    is not given the same number in another one.
    """
    plain = "".join(unstyled(answer).split())
    if (found := _IN_BASE.fullmatch(plain)) is not None:
        return found.groups()
    if (found := _CLOCK.fullmatch(plain)) is not None:
        return int(found[1]), int(found[2] or 0), found[3].lower()
    return None


def _verified(gold: str, given: str) -> bool:
    # An inequality for an interval says the same. The time is limited by the worker's owner:
    # math-verify's own limits are signals, and those work on a main thread only.
    verify = _math_verify().verify
    return bool(
        verify(_parsed(gold), _parsed(given), allow_set_relation_comp=True, timeout_seconds=None)
    )


def _parsed(answer: str) -> list[Any]:
    """Return the expression that an answer is, and the answer as it stands."""
    parsed = _read(answer)
    sides = re.split(r"(?<![<>\\!])=", answer)
    if len(parsed) < 2 and len(sides) == 2:  # unreadable as it stands, such as m_{\max} = 3
        return _read(sides[1].strip())
    return parsed


def _read(latex: str) -> list[Any]:
    config = _math_verify().LatexExtractionConfig(boxed_match_priority=-1)
    parsed: list[Any] = _math_verify().parse(
        f"${latex}$", [config], extraction_mode="first_match", parsing_timeout=None
    )
    return parsed


@cache
def _math_verify() -> Any:
    return import_module("math_verify")
