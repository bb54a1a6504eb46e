"""Finds calls in the text of an answer while it arrives."""

from __future__ import annotations

import re
from collections.abc import Collection

from specguard_chains.tools.call_forms import FENCE, MARKS, CallForms, Undecided
from specguard_chains.tools.formats import CallStyle, ToolFormat
from specguard_chains.tools.json_scanner import JsonScanner
from specguard_chains.tools.parts import Part, Text, merged, overlap

_CLOSING_FENCE = re.compile(r"```(?!\w)")
_BETWEEN = re.compile(r"[\s;,}\]]+")
"""What is left over between calls: separators, and brackets that were closed twice."""


class CallReader:
    """Takes text in pieces, gives text and calls.

    Text that may turn out to begin a call is held back until that is settled. What names no known
    tool is text, unless it stands between marks that are for calls only. White space around calls
    belongs to nothing.
    """

    def __init__(self, names: Collection[str], form: ToolFormat) -> None:
        """Look for calls of these tools; without any, everything is text."""
        longest_first = tuple(sorted(names, key=len, reverse=True))
        self._forms = CallForms(longest_first, named=form.style is CallStyle.NAMED)
        words = "|".join(map(re.escape, longest_first if self._forms.named else ()))
        marks = "|".join(map(re.escape, (*MARKS, FENCE)))
        self._candidate = re.compile(
            rf"{marks}|[\[{{]" + (rf"|(?<!\w)(?:{words})" if words else "")
        )
        self._held = ""
        self._scanner = JsonScanner()
        """Of the JSON that the held text begins with."""
        self._given = ""
        """The last character that was taken for text."""
        self._spared = ""
        """White space that is given out if text follows."""
        self._had_text = self._after_call = self._in_code = self._spaced = False
        self._closings: list[str] = []
        """Marks that were opened before the last call and not closed yet."""

    def add(self, text: str, *, last: bool = False) -> list[Part]:
        """Return what is certain after another piece; `last` means that nothing follows."""
        if not self._forms.names:
            return merged([Text(text)])
        self._held += text
        parts: list[Part] = []
        while self._held and self._advance(parts, last):
            pass
        if last and not self._after_call:
            parts.append(Text(self._spared))
        return merged(parts)

    def _advance(self, parts: list[Part], last: bool) -> bool:
        """Settle what the held text begins with; False if that needs more text."""
        if not last and self._scanner.waits(self._held):
            return False
        if self._after_call and (skipped := self._skip(last)) is not None:
            return skipped
        context = self._given + self._held
        candidate = self._candidate.search(context, len(self._given))
        if candidate is None:
            unsure = 0 if last else overlap(self._held, self._forms.beginnings)
            parts.append(self._take(len(self._held) - unsure))
            return False
        parts.append(self._take(candidate.start() - len(self._given)))
        found = self._forms.read(self._held, self._scanner, last=last, in_code=self._in_code)
        if found is Undecided.OPEN:
            return False
        if found is Undecided.TEXT:
            fence = self._held.startswith(FENCE)
            self._in_code ^= fence
            parts.append(self._take(len(FENCE) if fence else 1))
            return True
        parts += found.calls
        self._held, self._scanner = self._held[found.end :], JsonScanner()
        self._closings += found.closings
        self._after_call, self._given, self._spaced = True, "", bool(self._spared)
        return True

    def _skip(self, last: bool) -> bool | None:
        """Skip what stands between calls; None if something else follows, False if it is open."""
        if last and self._is_remnant(self._held.strip()):
            self._held = ""
            return False
        if between := _BETWEEN.match(self._held):
            if not self._spaced:
                self._spared += "".join(c for c in between[0] if c.isspace())
            self._held = self._held[between.end() :]
            return True
        for closing in filter(None, [*self._closings, *MARKS.values()]):
            if not last and closing.startswith(self._held):
                return False
            fence = closing == FENCE
            if _CLOSING_FENCE.match(self._held) if fence else self._held.startswith(closing):
                self._held = self._held[len(closing) :]
                if closing in self._closings:
                    self._closings.remove(closing)
                return True
        return None

    def _is_remnant(self, text: str) -> bool:
        """Whether an answer ends so after a call: with a mark that is cut off or closes nothing."""
        marks = (*MARKS, *self._closings, *MARKS.values(), FENCE)
        return any(mark.startswith(text) for mark in marks)

    def _take(self, length: int) -> Part:
        """Give out the next characters as text; white space at their end waits."""
        text, self._held = self._held[:length], self._held[length:]
        if length:
            self._scanner = JsonScanner()
        self._given = text[-1:] or self._given
        self._spared += text
        visible = self._spared.rstrip()
        if not visible:
            return Text("")
        self._spared = self._spared[len(visible) :]
        if self._after_call and not self._had_text:
            visible = visible.lstrip()
        self._had_text, self._after_call = True, False
        self._closings.clear()
        return Text(visible)
