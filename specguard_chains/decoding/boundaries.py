"""Where a step ends, and where the answer ends: delimiters and stop strings in streamed text."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from specguard_chains.errors import ConfigurationError


class Ending(StrEnum):
    """Why a candidate ends."""

    BOUNDARY = "boundary"
    """The step delimiter."""
    END_OF_SEQUENCE = "end_of_sequence"
    """The model's end token."""
    STEP_LIMIT = "step_limit"
    """The step's token limit."""
    STOP_STRING = "stop_string"
    """A stop string of the request."""
    REJECTED_EARLY = "rejected_early"
    """It could not be accepted any more; the step is not complete."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """What counts as a step; the paper cuts at a blank line."""

    delimiter: str = "\n\n"
    max_tokens: int = 256
    """A longer step is cut there and goes on as the next one."""

    def __post_init__(self) -> None:
        """Validate."""
        if not self.delimiter:
            raise ConfigurationError('the step delimiter is empty; use for example "\\n\\n"')
        if self.max_tokens < 1:
            raise ConfigurationError(f"a step needs at least 1 token, not {self.max_tokens}")


@dataclass(frozen=True, slots=True)
class Boundary:
    """Where the step in progress ends."""

    delimiter: str = "\n\n"
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    """Stop strings of the request: the step ends with the token that completes one."""
    preceding: str = ""
    """The end of the answer so far, so that a stop string that began there is seen."""


class StepText:
    """The text of a step while its tokens arrive, and why it ends."""

    def __init__(self, boundary: Boundary, dangling: bytes = b"") -> None:
        """Start empty; `dangling` is an unfinished character that the answer ends with so far."""
        self.text = ""
        self._boundary = boundary
        self._tokens = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(dangling)

    def add(self, token: bytes) -> Ending | None:
        """Append a token's bytes; return why the step ends with it, or None."""
        piece = self._decoder.decode(token)
        self.text += piece
        self._tokens += 1
        if piece and self._completes_stop(len(piece)):
            return Ending.STOP_STRING
        if piece and self._completes_delimiter(len(piece)):
            return Ending.BOUNDARY
        return Ending.STEP_LIMIT if self._tokens >= self._boundary.max_tokens else None

    def _completes_stop(self, grown: int) -> bool:
        text = self._boundary.preceding + self.text
        return any(stop in text[-(grown + len(stop) - 1) :] for stop in self._boundary.stop)

    def _completes_delimiter(self, grown: int) -> bool:
        """Whether there is a delimiter after the first visible character: blank is no step."""
        delimiter = self._boundary.delimiter
        visible = len(self.text) - len(self.text.lstrip())
        unseen = len(self.text) - grown - len(delimiter) + 1
        return self.text.find(delimiter, max(visible + 1, unseen)) >= 0


def unfinished_character(data: bytes) -> bytes:
    """Return the bytes at the end of UTF-8 data that begin a character and do not finish it."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return decoder.getstate()[0]


class StopCutter:
    """Cuts a stream of text exactly before the first stop string in it.

    Text that may turn out to begin a stop string is held back until that is settled.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        """Cut at any of these strings, none of them empty."""
        self._stop = tuple(stop)
        self.held = ""
        """Text that has been added but not released yet."""
        self.stopped = False
        """Whether a stop string has been found."""

    def add(self, text: str, *, last: bool = False) -> str:
        """Return the text that is certain to stand before any stop string.

        Args:
            text: What comes next.
            last: Nothing follows: release what is held back.
        """
        text = self.held + text
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:  # the one that is complete first, as it would have ended a token stream
            self.stopped, self.held = True, ""
            return text[: min(found)[1]]
        keep = 0 if last else max((_overlap(text, stop) for stop in self._stop), default=0)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)
