"""Verified steps -> the chunks of a LangChain message: text, reasoning, calls, and their cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from langchain_core.messages import AIMessageChunk
from langchain_core.messages.tool import ToolCallChunk, tool_call_chunk

from specguard_chains.decoding.steps import FinishReason, Step
from specguard_chains.messages import STEPS_KEY
from specguard_chains.model_base import usage
from specguard_chains.tools.parts import Call, MalformedCall, Part, Reasoning, Text
from specguard_chains.tools.reader import AnswerReader

REASONING_KEY = "reasoning_content"
"""Where LangChain looks for reasoning in a message's `additional_kwargs`."""

CALLS_FROM = 1_000_000
"""The index of the first call in the v1 form. LangChain (core 1.8.3) counts the blocks of text and
reasoning from 0 there, and merges a call with a block of the same index."""


class ChunkWriter:
    """Writes the chunks of one message; each part of the answer goes where LangChain has it."""

    def __init__(
        self,
        reader: AnswerReader,
        *,
        reasoning_steps: bool = False,
        output_version: str | None = None,
    ) -> None:
        """Start a message.

        Args:
            reader: Tells the parts of the answer apart.
            reasoning_steps: Count every step before the last one as reasoning.
            output_version: In which form LangChain is going to give the chunks.
        """
        self.steps: list[Step] = []
        self._reader = reader
        self._reasoning_steps = reasoning_steps
        self._first_index = CALLS_FROM if output_version == "v1" else 0
        self._num_calls = self._num_valid = 0
        self._answered = False
        self._latest = ""
        """The reasoning that was written last, for an answer that ends without a text."""

    def chunks(self, step: Step) -> list[AIMessageChunk]:
        """Return what a step is streamed as: one chunk, or two if it has both text and calls.

        LangChain's events of version 3 (core 1.8.3) take a call beside text for the one that stood
        so in an earlier chunk, which is lost, and leave out one that is malformed.
        """
        chunk = self.chunk(step)
        if not (chunk.content and chunk.tool_call_chunks):
            return [chunk]
        text = AIMessageChunk(content=chunk.content, additional_kwargs=chunk.additional_kwargs)
        return [text, AIMessageChunk(content="", tool_call_chunks=chunk.tool_call_chunks)]

    def chunk(self, step: Step) -> AIMessageChunk:
        """Return everything that a step adds to the message."""
        self.steps.append(step)
        last = step.finish_reason is not None
        parts = self._reader.add(step.text, last=last)
        if self._reasoning_steps:
            parts = self._as_reasoning(parts, last=last)
        text = "".join(part.text for part in parts if isinstance(part, Text))
        reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
        return AIMessageChunk(
            content=text,
            additional_kwargs={
                STEPS_KEY: [step.to_dict()],
                **({REASONING_KEY: reasoning} if reasoning else {}),
            },
            tool_call_chunks=[
                self._call(part) for part in parts if isinstance(part, Call | MalformedCall)
            ],
        )

    def last(self, input_tokens: int, metadata: Mapping[str, Any]) -> AIMessageChunk:
        """Return the empty chunk that ends the message: what it has cost, and how it ended.

        Merging adds numbers up and concatenates strings, so both stand on this one chunk only.
        """
        finish = {"finish_reason": "tool_calls"} if self._called else {}
        return AIMessageChunk(
            content="",
            chunk_position="last",
            usage_metadata=usage(self.steps, input_tokens),
            response_metadata={**metadata, **finish},
        )

    @property
    def _called(self) -> bool:
        """Whether the answer ends with calls that can be carried out, rather than being cut off."""
        return bool(self._num_valid) and self.steps[-1].finish_reason is FinishReason.STOP

    def _call(self, call: Call | MalformedCall) -> ToolCallChunk:
        """Return a call as LangChain streams it.

        LangChain completes arguments that are cut off and takes what it gets for a call. What was
        malformed must not be carried out, so it is made to stay malformed.
        """
        index = self._first_index + self._num_calls
        self._num_calls += 1
        self._num_valid += isinstance(call, Call)
        failed = f"({call.error}) " if isinstance(call, MalformedCall) else ""
        return tool_call_chunk(
            name=call.name,
            args=failed + call.arguments,
            id=f"call_{uuid4().hex}",
            index=index,
        )

    def _as_reasoning(self, parts: list[Part], *, last: bool) -> list[Part]:
        """Turn the text of a step that is not the last one into reasoning."""
        if not last:
            texts = [part.text for part in parts if isinstance(part, Text)]
            self._latest = "".join(texts) if "".join(texts).strip() else self._latest
            return [Reasoning(part.text) if isinstance(part, Text) else part for part in parts]
        if not any(isinstance(part, Text) and part.text.strip() for part in parts):
            calls = [part for part in parts if isinstance(part, Call | MalformedCall)]
            if not (calls or self._num_calls):  # it ended with the end of the step before
                return [*parts, Text(self._latest)]
        return parts
