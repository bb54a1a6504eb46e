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


class Phase(StrEnum):
    """Which part of the answer a step belongs to."""

    REASONING = "reasoning"
    ANSWER = "answer"
    TOOL_CALL = "tool_call"


@dataclass(frozen=True, slots=True)
class Section:
    """A part of an answer between two marks, such as reasoning tags or a tool call."""

    opening: str
    """A step that has text before it ends with it."""
    closing: str
    """A step ends with it, unless the section is whole; "" if that lasts to the answer's end."""
    phase: Phase
    whole: bool = False
    """No delimiter and no end of it cuts a step: what follows up to the next cut belongs to it."""


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
    """The end of the answer so far, so that a stop string or mark that began there is seen."""
    sections: tuple[Section, ...] = ()
    """Parts of the answer whose marks end steps."""
    inside: Section | None = None
    """The one in which the step begins."""
    marks_from: int = 0
    """Where in `preceding` marks may begin: what is before it belongs to the last mark."""


class StepText:
    """The text of a step while its tokens arrive, and why it ends."""

    def __init__(self, boundary: Boundary, dangling: bytes = b"") -> None:
        """Start empty; `dangling` is an unfinished character that the answer ends with so far."""
        self.text = ""
        self._boundary = boundary
        self._inside = boundary.inside
        self._marks_from = boundary.marks_from
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
        if piece and (self._completes_section(len(piece)) or self._completes_delimiter(len(piece))):
            return Ending.BOUNDARY
        return Ending.STEP_LIMIT if self._tokens >= self._boundary.max_tokens else None

    def _completes_stop(self, grown: int) -> bool:
        text = self._boundary.preceding + self.text
        return any(stop in text[-(grown + len(stop) - 1) :] for stop in self._boundary.stop)

    def _completes_section(self, grown: int) -> bool:
        """Whether the step ends with a mark: a section's end, or its beginning after other text."""
        begins = len(self._boundary.preceding)
        text = self._boundary.preceding + self.text
        grown_from = len(text) - grown
        sections = self._boundary.sections
        while mark := next_mark(text, grown_from, sections, self._inside, self._marks_from):
            if self._inside is None and text[begins : mark.start].strip():
                return True
            if self._inside is not None and not self._inside.whole:
                return True
            self._inside, self._marks_from = mark.section, mark.end
        return False

    def _completes_delimiter(self, grown: int) -> bool:
        """Whether there is a delimiter after the first visible character: blank is no step."""
        if self._inside is not None and self._inside.whole:
            return False
        delimiter = self._boundary.delimiter
        visible = len(self.text) - len(self.text.lstrip())
        unseen = len(self.text) - grown - len(delimiter) + 1
        return self.text.find(delimiter, max(visible + 1, unseen)) >= 0


@dataclass(frozen=True, slots=True)
class Mark:
    """Where a section begins or ends."""

    start: int
    end: int
    section: Section | None
    """The one that begins here; None if one ends."""


def next_mark(
    text: str,
    grown_from: int,
    sections: Sequence[Section],
    inside: Section | None,
    marks_from: int = 0,
) -> Mark | None:
    """Return the first mark that is complete after `text[:grown_from]`, None if there is none.

    Args:
        text: The end of an answer.
        grown_from: How much of it was there before; marks within that are over.
        sections: Whose marks are looked for, outside of a section.
        inside: The section that the text is in; then its end is looked for.
        marks_from: Where a mark may begin: marks do not overlap.
    """
    wanted = (
        [(inside.closing, None)] if inside else [(section.opening, section) for section in sections]
    )
    found = [
        Mark(start, start + len(mark), section)
        for mark, section in wanted
        if mark and (start := text.find(mark, max(grown_from - len(mark) + 1, marks_from))) >= 0
    ]
    return min(found, key=lambda mark: (mark.end, mark.start), default=None)


class SectionTracker:
    """Follows an answer through its sections, step by step."""

    def __init__(
        self, sections: Sequence[Section], inside: Section | None = None, *, memory: int = 0
    ) -> None:
        """Start in a section, or in none; remember `memory` characters in any case."""
        self.inside = inside
        self.seen: set[Phase] = set() if inside is None else {inside.phase}
        """Phases of the sections so far."""
        self.tail = ""
        """The end of the text, in which a mark or stop string may have begun."""
        self.marks_from = 0
        """Where in the tail marks may begin."""
        self._sections = tuple(sections)
        marks = [mark for section in sections for mark in (section.opening, section.closing)]
        self._memory = max([memory, *(len(mark) - 1 for mark in marks)])

    def add(self, text: str) -> None:
        """Take in what the answer has gained."""
        grown_from, text, marks_from = len(self.tail), self.tail + text, self.marks_from
        while mark := next_mark(text, grown_from, self._sections, self.inside, marks_from):
            self.inside, marks_from = mark.section, mark.end
            self.seen |= set() if mark.section is None else {mark.section.phase}
        forgotten = max(len(text) - self._memory, 0)
        self.tail, self.marks_from = text[forgotten:], max(marks_from - forgotten, 0)


def phase_within(boundary: Boundary, text: str) -> Phase | None:
    """Return the phase of the section that a step's text is in, None if it is in none."""
    if boundary.inside is not None:
        return boundary.inside.phase
    whole = boundary.preceding + text
    begins = len(boundary.preceding)
    mark = next_mark(whole, begins, boundary.sections, None, boundary.marks_from)
    if mark is None or mark.section is None:
        return None
    return None if whole[begins : mark.start].strip() else mark.section.phase


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
