"""What an answer consists of, in the order in which it was written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    """What the user is to read; in a structured answer nothing but the JSON."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What the model thought before."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A complete call of a known tool."""

    name: str
    arguments: str
    """A JSON object."""


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """What was meant as a call and cannot be carried out."""

    name: str | None
    arguments: str
    """As they were written, complete or not."""
    error: str


Part = Text | Reasoning | Call | MalformedCall


def merged(parts: Iterable[Part]) -> list[Part]:
    """Return the parts with neighbouring texts joined and empty ones dropped."""
    joined: list[Part] = []
    for part in parts:
        if isinstance(part, Call | MalformedCall):
            joined.append(part)
        elif joined and type(last := joined[-1]) is type(part):
            assert isinstance(last, Text | Reasoning)
            joined[-1] = type(part)(last.text + part.text)
        elif part.text:
            joined.append(part)
    return joined


def overlap(text: str, marks: Iterable[str]) -> int:
    """Return the length of the longest end of `text` that begins one of the marks."""
    return max((_overlap(text, mark) for mark in marks), default=0)


def _overlap(text: str, mark: str) -> int:
    longest = min(len(text), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if mark.startswith(text[-n:])), 0)
