"""Reads an answer while it is being written: text, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from specguard_chains.tools.call_reader import CallReader
from specguard_chains.tools.formats import HERMES, ReasoningTags, ToolFormat
from specguard_chains.tools.parts import Part, Text, merged
from specguard_chains.tools.reasoning import ReasoningSplitter
from specguard_chains.tools.structured import Structure, StructureFilter


class AnswerReader:
    """Takes an answer in pieces of any size and gives its parts as soon as they are certain.

    The parts do not depend on where the answer is cut. An answer without calls, reasoning and
    structure is given out as it stands, to the last space.
    """

    def __init__(
        self,
        names: Collection[str] = (),
        form: ToolFormat = HERMES,
        reasoning: ReasoningTags | None = None,
        structure: Structure | None = None,
    ) -> None:
        """Start reading an answer.

        Args:
            names: The tools that can be called.
            form: How the model's template writes calls; other usual forms are read as well.
            reasoning: The marks around the model's reasoning, None if it has none.
            structure: What a structured answer consists of, None for other answers.
        """
        self._reasoning = ReasoningSplitter(reasoning)
        self._calls = CallReader(names, form)
        self._structure = StructureFilter(structure)

    def add(self, text: str, *, last: bool = False) -> list[Part]:
        """Return what is certain after another piece; `last` means that nothing follows."""
        parts = [
            given
            for part in self._reasoning.add(text, last=last)
            for given in (self._read(part.text) if isinstance(part, Text) else [part])
        ]
        if last:
            parts += self._filtered(self._calls.add("", last=True))
            parts += self._structure.add("", last=True)
        return merged(parts)

    def _read(self, text: str) -> Iterable[Part]:
        return self._filtered(self._calls.add(text))

    def _filtered(self, parts: Iterable[Part]) -> Iterable[Part]:
        for part in parts:
            if isinstance(part, Text):
                self._structure.reasoned |= self._reasoning.given
                yield from self._structure.add(part.text)
            else:
                yield part
