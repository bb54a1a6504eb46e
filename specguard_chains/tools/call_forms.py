"""What a call looks like in text: marks or fences around JSON, bare JSON, a name and arguments."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import Enum

from specguard_chains.tools.calls import call_of, may_become_call, read_calls
from specguard_chains.tools.json_scanner import JsonScanner
from specguard_chains.tools.parts import Call, MalformedCall

MARKS = {
    "<tool_call>": "</tool_call>",
    "<tools>": "</tools>",
    "<function_call>": "</function_call>",
    "<|python_tag|>": "",
    "[TOOL_CALLS]": "",
}
"""What models write before a call and after it, also where their template asks for another one."""

FENCE = "```"

_FENCE_LINE = re.compile(r"```[\w+-]*\s*")
_MARK = re.compile("|".join(map(re.escape, MARKS)))
_NAMED_OBJECT = re.compile(r'\[?\s*\{{1,2}\s*"name"\s*:')


class Undecided(Enum):
    """What a text is that begins like a call."""

    TEXT = "text"
    """No call."""
    OPEN = "open"
    """More is needed to tell."""


@dataclass(frozen=True, slots=True)
class Found:
    """Calls that a text begins with."""

    calls: list[Call | MalformedCall]
    end: int
    """Where they end in the text."""
    closings: tuple[str, ...] = ()
    """The marks that are to follow."""


@dataclass(frozen=True, slots=True)
class CallForms:
    """Reads the call that a text begins with."""

    names: Collection[str]
    """The known tools."""
    named: bool = False
    """Whether name{…} is a call too."""

    @property
    def beginnings(self) -> tuple[str, ...]:
        """What begins a call, bare JSON apart."""
        return (*MARKS, FENCE, *(self.names if self.named else ()))

    def read(
        self, text: str, scanner: JsonScanner, *, last: bool, in_code: bool = False
    ) -> Found | Undecided:
        """Return the calls at the beginning of a text.

        Args:
            text: It begins with one of `beginnings` or with a bracket.
            scanner: What was used when less of the same text was here.
            last: Nothing follows.
            in_code: A code block is open, so that a fence closes it.
        """
        at, closings = 0, []
        while at < len(text):
            if mark := _MARK.match(text, at):
                at = _past_space(text, mark.end())
                closings.append(MARKS[mark[0]])
            elif (fence := _FENCE_LINE.match(text, at)) and (at or not in_code):
                if fence.end() == len(text) and not last:  # its language may go on
                    return Undecided.OPEN
                at = fence.end()
                closings.append(FENCE)
            elif not last and _begins_one(text[at:], (*MARKS, FENCE)):
                return Undecided.OPEN
            else:
                break
        marked = any(closing != FENCE for closing in closings)
        found = self._named_call(text, at, scanner, last) if self.named else Undecided.TEXT
        if found is Undecided.TEXT:
            found = self._json_calls(text, at, marked, scanner, last)
        if isinstance(found, Undecided):
            return found
        return replace(found, closings=(*closings, *found.closings))

    def _json_calls(
        self, text: str, at: int, marked: bool, scanner: JsonScanner, last: bool
    ) -> Found | Undecided:
        """Read an object or a list."""
        body = text[at:]
        possible = _is_object(body) if marked else may_become_call(body, self.names)
        if possible is None and last:  # cut off; was a call meant?
            possible = marked = marked or bool(_NAMED_OBJECT.match(body))
        if not possible:
            return Undecided.OPEN if possible is None else Undecided.TEXT
        region = scanner.region(text, at, last=last)
        if region is None:
            return Undecided.OPEN
        calls = read_calls(text[at : region.end].strip(), self.names, marked=marked)
        if calls is None:
            return Undecided.TEXT
        closings = (FENCE,) if text.startswith(FENCE, region.end) else ()
        return Found(calls, region.end, () if region.balanced else closings)

    def _named_call(
        self, text: str, at: int, scanner: JsonScanner, last: bool
    ) -> Found | Undecided:
        """Read name{…}."""
        body = text[at:]
        for name in self.names:
            if body.startswith((f"{name}{{", f"{name}[ARGS]{{")):
                start = text.index("{", at + len(name))
                region = scanner.region(text, start, last=last)
                if region is None:
                    return Undecided.OPEN
                call = call_of(name, text[start : region.end].strip(), self.names)
                return Found([call], region.end)
        unfinished = any(_begins_one(body, (f"{name}[ARGS]{{", f"{name}{{")) for name in self.names)
        return Undecided.OPEN if unfinished and not last else Undecided.TEXT


def _is_object(text: str) -> bool | None:
    """Whether a text is an object or a list of some; None if there is too little of it."""
    head = re.match(r"(\[\s*)?(\{)?", text)
    assert head is not None
    if head[2]:
        return True
    return None if head.end() == len(text) else False


def _begins_one(text: str, marks: Collection[str]) -> bool:
    """Whether a text is the beginning of a mark."""
    return any(mark.startswith(text) for mark in marks)


def _past_space(text: str, at: int) -> int:
    return len(text) - len(text[at:].lstrip())
