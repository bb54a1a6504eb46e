r"""Finding the final answer in a text that reasons, and what two answers that are equal share.

The last `\boxed{...}` counts, as the prompts ask for one; a text without one ends in a number.
What can be compared without computer algebra is compared here, for votes; right answers are
checked by math-verify (`evaluation.equality`), which is given the same cleaned forms.
"""

from __future__ import annotations

import re
from collections import deque
from fractions import Fraction

_BRACE = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)  # an escaped brace is no brace
_DIGITS = r"(?:\d{1,3}(?:(?:,|\{,\}|\\,|\\!)\d{3})+(?!\d)|\d+)"
# A digit after a letter, a "^" or a "_" is a part of a name, an exponent or an index.
_NUMBER = re.compile(
    r"(?<![\w^.])(?<!\^\{)(?P<sign>(?<![\w)\]}])[-−])?(?<![A-Za-z_^.])"
    rf"(?:\\[dt]?frac\{{(?P<over>\d+)\}}\{{(?P<under>\d+)\}}|"
    rf"(?P<number>(?:{_DIGITS}(?:\.\d+)?|\.\d+)(?:/\d+(?!\.?\d))?))"
)
_SEPARATORS = re.compile(r"[,{}!\\]")

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
_WITH_UNIT = re.compile(
    r"(?:[A-Za-z ]*\b(?:is|are)\b)?\s*"
    r"(?P<number>[-+]?\s*\\?[$€£¥]?\s*[-+]?"
    rf"(?:{_DECIMAL}(?:\s*/\s*{_DECIMAL})?|\d*\s*\\[dt]?frac\s*(?:\d\d|\{{\d+\}}\{{\d+\}})))"
    r"\s*(?P<unit>(?:\\?%|\\?°|\^\{?\\circ\}?|[A-Za-z][A-Za-z. /-]*(?:\^\{?\d\}?|[²³])?)?\.?)"
)
# Words after a number that make another number of it, or more than one.
_NO_UNITS = frozenset(
    [
        *("pi", "e", "i", "sqrt", "sin", "cos", "tan", "log", "ln", "exp", "mod"),
        *("dozen", "half", "and", "or", "to", "times", "over", "plus", "minus"),
    ]
)
_ONE_LETTER_UNITS = frozenset("mgshlLNJWVAKCF")
_PERCENT = re.compile(r"\\?%|per ?cent", re.IGNORECASE)
_PERCENT_BEHIND = re.compile(r"(?:[\s*$~]|\\[,; ]|\\text\{)*(?:\\?%|per ?cent\b)", re.IGNORECASE)
_WITH_FRACTION = re.compile(r"(-?)(\d*)\\[dt]?frac(?:(\d)(\d)|\{(\d+)\}\{(\d+)\})")
_SHORT_WORDS = frozenset({"yes", "no"})

_NAMED = re.compile(r"\\?[A-Za-z][\w ]*(?:_\{\w+\})? ?=(?P<value>[^=]+)")
# Without knowing the choices, "(x)(x+1)" must not be taken for one.
_CHOICE = re.compile(
    r"(?:(?i:option|choice|answer)\s*:?\s*)?"
    r"(?:\(?([A-Za-z])[).:]*|\(([A-Z])\)\s(?!.*\([A-Z]\)).*|([A-Z])[).:]+\s.*)",
    re.DOTALL,
)


def final_answer(text: str) -> str | None:
    r"""Return what the last complete, non-empty `\boxed{...}` holds, else the last number.

    A number is a decimal or a fraction, without its thousands separators, and with a percent sign
    if it is a percentage; None if there is none.
    """
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    found = _last_number(text)
    if found is None:
        return None
    return _plain(found) + ("%" if _PERCENT_BEHIND.match(text, found.end()) else "")


def last_boxed(text: str) -> str | None:
    r"""Return what the last complete, non-empty `\boxed{...}` of the text holds, if any."""
    found, found_at = None, -1
    open_braces: list[tuple[bool, int]] = []
    for brace in _BRACE.finditer(text):
        if brace.group().endswith("{") and brace.group() != r"\{":
            open_braces.append((brace.group() != "{", brace.end()))
        elif brace.group() == "}" and open_braces:
            is_box, start = open_braces.pop()
            content = text[start : brace.start()].strip()
            if is_box and content and start > found_at:
                found, found_at = content, start
    return found


def last_number(text: str) -> str | None:
    """Return the last number of the text, like "-1200.5" or "3/4", if there is one.

    Without what stands behind it: "25%" gives 25, and whoever compares knows what is asked for.
    """
    found = _last_number(text)
    return None if found is None else _plain(found)


def _last_number(text: str) -> re.Match[str] | None:
    numbers = deque(_NUMBER.finditer(text), maxlen=1)
    return numbers[0] if numbers else None


def _plain(found: re.Match[str]) -> str:
    """Return a number that was found, without separators."""
    sign = "-" if found["sign"] else ""
    if found["over"]:
        return f"{sign}{found['over']}/{found['under']}"
    return sign + _SEPARATORS.sub("", found["number"])


def canonical_answer(answer: str) -> Fraction | str:
    r"""Return what is equal for answers that say the same: a number, a choice's letter, or a text.

    A number counts without its unit, so that "18" is "18 dollars", but 18 \% is 0.18; "x = 3" is
    "3" and "(B) 42" is "b". Spaces, styles and the case of words do not count. Units are not told
    apart, nor does math-verify: "5 hours" and "5 minutes" are one.
    """
    plain = unstyled(answer)
    stated = _NAMED.fullmatch(plain)
    if (number := _number(stated["value"] if stated else answer)) is not None:
        return number
    if (choice := _CHOICE.fullmatch(plain)) is not None:
        return (choice[1] or choice[2] or choice[3]).upper()
    text = plain_words(answer) or re.sub(r"\\(?:left|right)(?![A-Za-z])", "", plain)
    return "".join(re.sub(r"\\[dt]frac(?![A-Za-z])", r"\\frac", text).split())


def cleaned(answer: str) -> str:
    r"""Return an answer without what is around it: $ signs, styles, a full stop.

    What math-verify misreads is put another way: spaces between thousands, "2 million", "3 1/2",
    and set-builder notation, of which the condition remains.
    """
    answer = re.sub(r"(?<!\\)\$", "", answer).replace("−", "-").strip()
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
    found = _with_unit(answer)
    return found[0] if found else None


def plain_words(answer: str) -> str | None:
    """Return an answer of words in lower case, without article; None if it is not of words.

    A few letters are no word, but may be variables, unless the answer has them as text.
    """
    words = unstyled(answer).split()
    if not words or not all(re.fullmatch(r"[^\W\d_]+(?:['’-][^\W\d_]+)*", w) for w in words):
        return None
    short = max(map(len, words)) < 4 and " ".join(words).casefold() not in _SHORT_WORDS
    if short and not re.search(r"\\(?:text|mbox)", answer):
        return None
    if len(words) > 1 and words[0].casefold() in ("a", "an", "the"):
        words = words[1:]
    return " ".join(words).casefold()


def unstyled(answer: str) -> str:
    """Return a cleaned answer with its texts as plain words."""
    return " ".join(_SPACING.sub(" ", _STYLE.sub(r" \1 ", cleaned(answer))).split())


def _number(answer: str) -> Fraction | None:
    """Return the value of an answer that is a number, without its unit but for percent."""
    found = _with_unit(answer)
    if found is None:
        return None
    number, unit = found
    try:
        value = _value(number)
    except (ValueError, ZeroDivisionError):  # more digits than Python reads, or no number at all
        return None
    return value / 100 if _PERCENT.match(unit) else value


def _value(number: str) -> Fraction:
    if (parts := _WITH_FRACTION.fullmatch(number)) is not None:
        sign, whole, *_ = parts.groups()
        part = Fraction(int(parts[3] or parts[5]), int(parts[4] or parts[6]))
        return (int(whole or 0) + part) * (-1 if sign else 1)
    over, _, under = number.partition("/")
    return Fraction(over) / Fraction(under or 1)


def _with_unit(answer: str) -> tuple[str, str] | None:
    """Return the number that an answer is, and the unit behind it."""
    match = _WITH_UNIT.fullmatch(unstyled(answer))
    if match is None or not _is_unit(match["unit"]):
        return None
    number = re.sub(r"\\?[$€£¥]|\s", "", match["number"])
    return number.replace(",", "").lstrip("+"), match["unit"]


def _is_unit(words: str) -> bool:
    found = re.findall(r"[A-Za-z]+", words)
    if len(found) == 1 and len(found[0]) == 1:
        return found[0] in _ONE_LETTER_UNITS
    return not _NO_UNITS & {word.lower() for word in found}
