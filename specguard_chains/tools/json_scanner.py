"""Finds where JSON ends, also in a text that is still growing."""

from __future__ import annotations

import re
from dataclasses import dataclass

_TOKEN = re.compile(r'[{}\[\]"]|[^{}\[\]"<`]+|<(?!/|\Z)|`(?!``|`?\Z)')
"""A piece of JSON, or of what was meant to be some; a closing mark (</tag>, ```) is none."""
_IN_STRING = re.compile(r'(?:[^"\\]++|\\.)*+', re.DOTALL)
_DEPTH = {"{": 1, "[": 1, "}": -1, "]": -1}


@dataclass(frozen=True, slots=True)
class Region:
    """Where JSON ends in a text."""

    end: int
    balanced: bool
    """False if it is cut off before its last bracket."""


class JsonScanner:
    """Looks for the end of one object or list, and reads no character twice."""

    def __init__(self) -> None:
        """Start without one."""
        self._start: int | None = None
        self._restart(None)

    def _restart(self, start: int | None) -> None:
        self._start, self._at = start, start or 0
        self._depth = 0
        self._in_string = self._balanced = False

    def region(self, text: str, start: int, *, last: bool) -> Region | None:
        """Return where the JSON that begins at `start` ends, None if that is not here yet.

        Args:
            text: What it was in the call before, and perhaps more.
            start: The place of a bracket; another one than before starts anew.
            last: Nothing follows.
        """
        if start != self._start:
            self._restart(start)
        while not self._balanced and self._next(text):
            self._balanced = self._depth == 0 and not self._in_string
        if self._balanced:
            return Region(self._at, balanced=True)
        if not self._in_string and text.startswith(("</", "```"), self._at):
            return Region(self._at, balanced=False)
        return Region(len(text), balanced=False) if last else None

    def waits(self, text: str) -> bool:
        """Whether there is JSON in progress that does not end in a text."""
        return self._start is not None and self.region(text, self._start, last=False) is None

    def _next(self, text: str) -> bool:
        """Read on; False if that needs more text, or there is no more JSON."""
        if self._in_string:
            match = _IN_STRING.match(text, self._at)
            assert match is not None
            self._at = match.end()
            self._in_string = not text.startswith('"', self._at)
            self._at += not self._in_string
            return not self._in_string
        token = _TOKEN.match(text, self._at)
        if token is None:
            return False
        self._at = token.end()
        self._in_string = token[0] == '"'
        self._depth += _DEPTH.get(token[0], 0)
        return True


def json_region(text: str, start: int, *, last: bool) -> Region | None:
    """Return where the object or list that begins at `start` ends, None if that is not here yet."""
    return JsonScanner().region(text, start, last=last)
