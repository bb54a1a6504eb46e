r"""What a text gives as its answer, and in which form it is compared.

The answer is the content of the text's last complete `\boxed{...}`. A text without one is given
another chance where that needs no guessing what is meant: its last number, if the right answer is a
number; a letter after "answer is", or alone in the last line, if the right answer is a letter.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from specguard_chains.decoding.final_answer import last_boxed, last_number
from specguard_chains.evaluation.choices import LETTERS
from specguard_chains.evaluation.problems import Problem

_STYLE = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|operatorname)\s*\{([^{}]*)\}"
)
_SPACING = re.compile(r"\\[,!;:]|\\ |~|\{,\}")
_THOUSANDS = re.compile(r"(?<=\d)(?:\\[,!;:]|\\ |\{,\}|~| |,(?:\\!)+)(?=\d{3}(?!\d))")
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALED = re.compile(rf"(?<=\d)\s*(?:\\text\{{)?\s*({'|'.join(_SCALES)})\b[A-Za-z ]*\}}?$")
_MIXED = re.compile(r"(?<![\d.])(\d+) (\d+)/(\d+)(?![\d.])")
_SET = re.compile(
    r"(?:\\left)?\\\{\s*[a-z]\w*\s*(?:\\in\s*(?:\\mathbb\{R\}|\\R)\s*)?(?:\||\\mid|\\vert|:)"
    r"(?P<condition>.*?)(?:\\right)?\\\}",
    re.DOTALL,
)

_DECIMAL = r"(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)"
_NUMBER = re.compile(
    r"(?:[A-Za-z ]*\b(?:is|are)\b)?\s*"
    r"(?P<number>[-+]?\s*\\?[$€£¥]?\s*[-+]?"
    rf"(?:{_DECIMAL}(?:\s*/\s*{_DECIMAL})?|\d*\s*\\[dt]?frac\s*(?:\d\d|\{{\d+\}}\{{\d+\}})))"
    r"\s*(?P<unit>(?:\\?%|\\?°|\^\{?\\circ\}?|[A-Za-z][A-Za-z. /-]*(?:\^\{?\d\}?|[²³])?)?\.?)"
)
_SEVERAL = re.compile(r"\d.*\b(?:and|or|to)\b.*\d", re.DOTALL)
# Words after a number that make another number of it, or more than one.
_NO_UNITS = frozenset(
    [
        *("pi", "e", "i", "sqrt", "sin", "cos", "tan", "log", "ln", "exp", "mod"),
        *("dozen", "half", "and", "or", "to", "times", "over", "plus", "minus"),
    ]
)
_ONE_LETTER_UNITS = frozenset("mgshlLNJWVAKCF")

_LETTER = re.compile(
    r"(?:(?:option|choice|answer)\s*:?\s*)?"
    r"(?:\(([A-Z])\)(?!.*\([A-Z]\)).*|([A-Z])(?:[).:]+(?:\s.*)?)?)",
    re.IGNORECASE | re.DOTALL,
)
_SAID_LETTER = re.compile(
    r"\b(?i:answer|choice|option)(?:\s+is)?\s*:?\s*\**\s*\(?([A-Z])\b(?!['’])"
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
    match = _LETTER.fullmatch(_unstyled(answer))
    return (match[1] or match[2]).upper() if match else None


def cleaned(answer: str) -> str:
    r"""Return an answer without what is around it: $ signs, styles, a full stop.

    What math-verify misreads is put another way: spaces between thousands, "2 million", "3 1/2",
    and set-builder notation, of which the condition remains.
    """
    answer = re.sub(r"(?<!\\)\$", "", answer).strip()
    whole = _STYLE.fullmatch(answer)
    answer = (whole[1] if whole else answer).strip().rstrip(".").strip()
    answer = _MIXED.sub(r"\1\\frac{\2}{\3}", _THOUSANDS.sub("", answer))
    answer = _SCALED.sub(lambda scale: rf" \times 10^{{{_SCALES[scale[1]]}}}", answer)
    builder = _SET.fullmatch(answer)
    return builder["condition"].strip() if builder else answer


def bare_number(answer: str) -> str | None:
    """Return the number that an answer is, without currency or unit; None if it is no number.

    "18", "$1,800.50" and "3/4 of a cup" are; "18x", "18 or 19" and "18 pi" are not.
    """
    match = _NUMBER.fullmatch(_unstyled(answer))
    if match is None or not _is_unit(match["unit"]):
        return None
    number = re.sub(r"\\?[$€£¥]|\s", "", match["number"])
    return number.replace(",", "").lstrip("+")


def gives_several(answer: str) -> bool:
    """Return whether an answer gives several values: "5 hours and 30 minutes", "3 or 4"."""
    return bool(_SEVERAL.search(_unstyled(answer)))


def plain_words(answer: str) -> str | None:
    """Return an answer of words in lower case, without article; None if it is not of words.

    A few letters are no word, but may be variables, unless the answer has them as text.
    """
    words = _unstyled(answer).split()
    if not words or not all(re.fullmatch(r"[^\W\d_]+(?:['’-][^\W\d_]+)*", w) for w in words):
        return None
    if max(map(len, words)) < 4 and not re.search(r"\\(?:text|mbox)", answer):
        return None
    if len(words) > 1 and words[0].casefold() in ("a", "an", "the"):
        words = words[1:]
    return " ".join(words).casefold()


def _unstyled(answer: str) -> str:
    """Return a cleaned answer with its texts as plain words."""
    return " ".join(_SPACING.sub(" ", _STYLE.sub(r" \1 ", cleaned(answer))).split())


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
    alone = re.fullmatch(r"\W*([A-Z])\W*", lines[-1]) if lines else None
    return alone[1] if alone else None


def _is_unit(words: str) -> bool:
    found = re.findall(r"[A-Za-z]+", words)
    if len(found) == 1 and len(found[0]) == 1:
        return found[0] in _ONE_LETTER_UNITS
    return not _NO_UNITS & {word.lower() for word in found}
