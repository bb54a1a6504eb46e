"""Takes the JSON out of a structured answer; everything around it is reasoning."""

from __future__ import annotations

import re
from enum import StrEnum

from specguard_chains.tools.calls import json_region
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
_FENCES = re.compile(r"\A\s*(?:```(?:json)?\s*)?|\s*(?:```)?\s*\Z", re.IGNORECASE)


class StructureFilter:
    """Takes text in pieces, gives the JSON as text and the rest as reasoning."""

    def __init__(self, structure: Structure | None) -> None:
        """Look for JSON in an answer of this structure; None leaves all text as it is."""
        self._structure = structure
        self._at = _At.REASONING
        self._held = ""
        self._given = 0
        """Characters that were given out in the part of the answer in progress."""
        self.reasoned = False
        """Whether reasoning has been given out before."""

    def add(self, text: str, *, last: bool = False) -> list[Part]:
        """Return what is certain after another piece; `last` means that nothing follows."""
        if self._structure is None:
            return merged([Text(text)])
        self._held += text
        parts: list[Part] = []
        if self._at is _At.REASONING:
            parts += self._before_json(last)
        if self._at is _At.JSON:
            parts += self._json(last)
        if self._at is _At.END and last:  # more than was asked for
            self._given = 0
            parts += self._reasoning(_FENCES.sub("", self._held))
        return merged(parts)

    def _before_json(self, last: bool) -> list[Part]:
        alone = None if self._given else _ALONE.match(self._held)
        begin = alone or _FENCED.search(self._held)
        if begin:
            reasoning, self._held = self._held[: begin.start()], self._held[begin.end() :]
            parts = self._reasoning(reasoning.rstrip())
            self._at, self._given = _At.JSON, 0
            return parts
        if self._structure is Structure.JSON:  # a literal, or no JSON at all
            return [Text(_FENCES.sub("", self._held))] if last else []
        unsure = None if last else _MAY_BE_FENCE.search(self._held)
        certain = self._held[: unsure.start() if unsure else None].rstrip()
        self._held = self._held[len(certain) :]
        return self._reasoning(certain)

    def _reasoning(self, text: str) -> list[Part]:
        """Return reasoning without the white space that it begins with, apart from earlier one."""
        text = text if self._given else text.lstrip()
        apart = "\n\n" if self.reasoned and text and not self._given else ""
        self._given += len(text)
        self.reasoned |= bool(text)
        return [Reasoning(apart + text)]

    def _json(self, last: bool) -> list[Part]:
        """Give out JSON as it comes, up to its last bracket."""
        region = json_region(self._held, 0, last=last)
        end = region.end if region else len(self._held)
        part = Text(self._held[self._given : end])
        self._given = end
        if region:
            self._held, self._at = self._held[end:], _At.END
        return [part]
