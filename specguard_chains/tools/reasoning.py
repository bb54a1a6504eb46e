"""Tells a model's reasoning from its answer by the marks around it."""

from __future__ import annotations

from specguard_chains.tools.formats import ReasoningTags
from specguard_chains.tools.parts import Part, Reasoning, Text, merged, overlap


class ReasoningSplitter:
    """Takes the answer in pieces, gives reasoning and the rest.

    Blocks are read where an answer begins; a mark in the middle of a sentence is text. White space
    around a block belongs to nothing.
    """

    def __init__(self, tags: ReasoningTags | None) -> None:
        """Split by these marks; None takes everything for the rest."""
        self._tags = tags or ReasoningTags()
        self._answering = tags is None
        self._inside = self._had_block = self._tags.opened
        self._begun = False
        """Whether the block in progress has shown a visible character."""
        self._held = ""
        self.given = False
        """Whether any reasoning has been given out."""

    def add(self, text: str, *, last: bool = False) -> list[Part]:
        """Return what is certain after another piece; `last` means that nothing follows."""
        self._held += text
        parts: list[Part] = []
        while not self._answering:
            decided = self._inside_block(parts, last) if self._inside else self._before_text(last)
            if not decided:
                return merged(parts)
        parts.append(Text(self._held))
        self._held = ""
        return merged(parts)

    def _before_text(self, last: bool) -> bool:
        """Decide whether a block or the answer begins; False if that is open."""
        visible, opening = self._held.lstrip(), self._tags.opening
        if visible.startswith(opening):
            self._held = visible[len(opening) :]
            self._inside, self._had_block, self._begun = True, True, False
            return True
        if not last and opening.startswith(visible):  # also if there is nothing visible yet
            return False
        self._answering = True
        if self._had_block:
            self._held = visible
        return True

    def _inside_block(self, parts: list[Part], last: bool) -> bool:
        """Give out reasoning; False if the block goes on."""
        body, closed, rest = self._held.partition(self._tags.closing)
        ends = bool(closed) or last
        if not ends:
            body = body[: len(body) - overlap(body, [self._tags.closing])]
        certain = body.rstrip()
        self._held = rest if ends else self._held[len(certain) :]
        self._inside = not ends
        if not self._begun:
            certain = certain.lstrip()
            self._begun = bool(certain)
            if certain and self.given:
                parts.append(Reasoning("\n\n"))
        self.given |= bool(certain)
        parts.append(Reasoning(certain))
        return ends
