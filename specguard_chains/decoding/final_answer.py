r"""Finding the final answer in a text that reasons.

The last `\boxed{...}` counts, as the prompts ask for one; a text without one ends in a number.
"""

from __future__ import annotations

import re
from collections import deque

_BRACE = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)  # an escaped brace is no brace
_DIGITS = r"(?:\d{1,3}(?:(?:,|\{,\}|\\,|\\!)\d{3})+(?!\d)|\d+)"
# A digit after a letter, a "^" or a "_" is a part of a name, an exponent or an index.
_NUMBER = re.compile(
    r"(?<![\w^.])(?<!\^\{)(?P<sign>(?<![\w)\]}])[-−])?(?<![A-Za-z_^.])"
    rf"(?:\\[dt]?frac\{{(?P<over>\d+)\}}\{{(?P<under>\d+)\}}|"
    rf"(?P<number>(?:{_DIGITS}(?:\.\d+)?|\.\d+)(?:/\d+(?!\.?\d))?))"
)
_SEPARATORS = re.compile(r"[,{}!\\]")


def final_answer(text: str) -> str | None:
    r"""Return what the last complete, non-empty `\boxed{...}` holds, else the last number.

    A number is a decimal or a fraction, without its thousands separators; None if there is none.
    """
    boxed = last_boxed(text)
    return boxed if boxed is not None else last_number(text)


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
    """Return the last number of the text, like "-1200.5" or "3/4", if there is one."""
    numbers = deque(_NUMBER.finditer(text), maxlen=1)
    if not numbers:
        return None
    found = numbers[0]
    sign = "-" if found["sign"] else ""
    if found["over"]:
        return f"{sign}{found['over']}/{found['under']}"
    return sign + _SEPARATORS.sub("", found["number"])
