"""Takes the JSON out of a structured answer; everything around it is reasoning."""

from __future__ import annotations

import json
import re
from enum import StrEnum

from specguard_chains.tools.json_scanner import JsonScanner
from specguard_chains.tools.parts import Part, Reasoning, Text, merged


class Structure(StrEnum):
    """What a structured answer consists of."""

    JSON = "json"
    """JSON alone, perhaps in a code block."""
    REASONED = "reasoned"
    """Reasoning in free text, and then a code block with JSON."""


class _At(StrEnum):
    REASONING = "reasoning"
    JSON = "json"
    END = "end"


_ALONE = re.compile(r"\s*(?=[\[{])")
_FENCED = re.compile(r"```(?:json)?[ \t]*\n\s*(?=[\[{])", re.IGNORECASE)
_MAY_BE_FENCE = re.compile(r"(?:`{1,2}|```(?:j|js|jso|json)?[ \t]*(?:\n\s*)?)\Z", re.IGNORECASE)
_LINE = re.compile(r"\n[ \t]*(?=[\[{])")
_FENCES = re.compile(r"\A\s*(?:```(?:json)?\s*)?|\s*(?:```)?\s*\Z", re.IGNORECASE)


class StructureFilter:
    """Takes text in pieces, gives the JSON as text and the rest as reasoning.

    The JSON stands alone or in a code block; from a model that has forgotten the block, it is taken
    where it begins a line and ends the answer.
    """

    def __init__(self, structure: Structure | None) -> None:
        """Look for JSON in an answer of this structure; None leaves all text as it is."""
        self._structure = structure
        self._at = _At.REASONING
        self._text = ""
        self._done = 0
        """How much of the text is settled: given out, or dropped."""
        self._sought = 0
        """Before this no fence begins that is still to be found."""
        self._start: int | None = None
        """Where the JSON begins, or what may turn out to be some."""
        self._scanner = JsonScanner()
        self._begun = False
        """Whether there has been reasoning in the part of the answer in progress."""
        self.reasoned = False
        """Whether reasoning has been given out before."""

    def add(self, text: str, *, last: bool = False) -> list[Part]:
        """Return what is certain after another piece; `last` means that nothing follows."""
        if self._structure is None:
            return merged([Text(text)])
        self._text += text
        if self._at is _At.REASONING and not last and not text.strip():
            return []  # white space settles nothing
        parts: list[Part] = []
        if self._at is _At.REASONING:
            parts += self._before_json(last)
        if self._at is _At.JSON:
            parts += self._json(last)
        if self._at is _At.END and last:  # more than was asked for
            self._begun = False
            parts += self._reasoning(_FENCES.sub("", self._text[self._done :]))
        return merged(parts)

    def _before_json(self, last: bool) -> list[Part]:
        alone = None if self._begun else _ALONE.match(self._text)
        if begin := alone or _FENCED.search(self._text, self._sought):
            return self._begin_json(begin.start(), begin.end())
        bare = self._bare_json(last) if last or self._structure is Structure.REASONED else None
        if last and bare is not None and _is_json(self._text[bare:]):
            return self._begin_json(bare, bare)
        unsure = None if last else _MAY_BE_FENCE.search(self._text, self._sought)
        self._sought = unsure.start() if unsure else len(self._text)
        if self._structure is Structure.JSON:  # a literal, or no JSON at all
            return [Text(_FENCES.sub("", self._text))] if last else []
        certain = self._sought if last or bare is None else min(self._sought, bare)
        reasoning = self._text[self._done : certain].rstrip()
        self._done += len(reasoning)
        return self._reasoning(reasoning)

    def _begin_json(self, end: int, start: int) -> list[Part]:
        """Return the rest of the reasoning, which ends before the JSON starts."""
        reasoning = self._text[self._done : end].rstrip()
        self._at, self._done, self._start = _At.JSON, start, start
        return self._reasoning(reasoning)

    def _bare_json(self, last: bool) -> int | None:
        """Return where JSON begins that may end the answer, None if there is none."""
        at = self._done
        while True:
            if self._start is None:
                line = _LINE.search(self._text, at)
                if line is None:
                    return None
                self._start = line.end()
            region = self._scanner.region(self._text, self._start, last=last)
            if region is None:
                return self._start
            if region.balanced and not self._text[region.end :].strip():
                return self._start
            at, self._start = region.end, None

    def _reasoning(self, text: str) -> list[Part]:
        """Return reasoning without the white space that it begins with, apart from earlier one."""
        text = text if self._begun else text.lstrip()
        apart = "\n\n" if self.reasoned and text and not self._begun else ""
        self._begun |= bool(text)
        self.reasoned |= bool(text)
        return [Reasoning(apart + text)]

    def _json(self, last: bool) -> list[Part]:
        """Give out JSON as it comes, up to its last bracket."""
        assert self._start is not None
        region = self._scanner.region(self._text, self._start, last=last)
        end = region.end if region else len(self._text)
        part = Text(self._text[self._done : end])
        self._done = end
        if region:
            self._at = _At.END
        return [part]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
