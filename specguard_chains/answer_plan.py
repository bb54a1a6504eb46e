"""What tools and a response format mean for one answer: its prompt, its grammar, its reading."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from specguard_chains.asked import Asked
from specguard_chains.decoding.boundaries import Phase, Section
from specguard_chains.decoding.constraint import Constraint
from specguard_chains.decoding.engine import Engine, Prompt
from specguard_chains.errors import ConfigurationError
from specguard_chains.messages import (
    with_closing_instruction,
    with_instruction,
)
from specguard_chains.options import SpecGuardOptions
from specguard_chains.response_format import JSON_OBJECT
from specguard_chains.tools.formats import (
    CallStyle,
    ReasoningTags,
    ToolFormat,
    detect,
    reasoning_tags,
    renders_tools,
)
from specguard_chains.tools.grammar import answer_constraint, call_constraint
from specguard_chains.tools.history import written_out
from specguard_chains.tools.reader import AnswerReader
from specguard_chains.tools.structured import Structure

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """How one answer is asked for, and how it is read."""

    asked: Asked
    form: ToolFormat
    reasoning: ReasoningTags | None
    renders_tools: bool
    """Whether the model's template says what the tools are."""
    constraint: Constraint | None
    sections: tuple[Section, ...]
    opened: Section | None
    instruction: str
    """What the system message has to say."""
    schema_instruction: str
    """What it says of an answer in JSON; with tools, the last result does."""

    @classmethod
    def of(cls, asked: Asked, options: SpecGuardOptions, engines: Sequence[Engine]) -> AnswerPlan:
        """Plan an answer.

        Args:
            asked: What is asked.
            options: The instructions for the model.
            engines: The models that write it; the last one's template tells how it is written. If
                one of them cannot be held to a grammar, calls and JSON are read as they come, and
                what else must have a form is refused by the request.

        Raises:
            ConfigurationError: A schema cannot be enforced, by llguidance or by an engine.
        """
        template = engines[-1].chat_template()
        form, reasoning = detect(template), reasoning_tags(template)
        constrains = all(engine.capabilities.constraints for engine in engines)
        if not constrains:
            _tell_unconstrained(asked, engines)
            if template is None:  # a server's, which may think; text without the marks is none
                reasoning = ReasoningTags()
        readable = asked.response.format in (None, "json")
        sections = _sections(asked, form, reasoning)
        opened = next((s for s in sections if reasoning and reasoning.opened and _thinks(s)), None)
        return cls(
            asked,
            form,
            reasoning,
            renders_tools=template is None or renders_tools(template),
            constraint=(
                _constraint(asked, form, reasoning) if constrains or not readable else None
            ),
            sections=sections,
            opened=opened,
            instruction=_instruction(asked, options),
            schema_instruction=_schema_instruction(asked, options),
        )

    def prompt(self, messages: Sequence[Mapping[str, Any]], passages: Sequence[str] = ()) -> Prompt:
        """Return the prompt that messages become; `passages` are texts in them."""
        tools = self.asked.callable
        if not tools:
            text = "\n\n".join(filter(None, [self.instruction, self.schema_instruction]))
        else:  # whoever reads of JSON at the start writes it at once, and calls no tool
            text = self.instruction
            messages = with_closing_instruction(messages, self.schema_instruction)
        if self.renders_tools:
            return Prompt(with_instruction(messages, text), tools, passages=passages)
        told = written_out(messages, tools, self.form)
        return Prompt(with_instruction(told, text), passages=passages)

    def reader(self) -> AnswerReader:
        """Return what reads the answer."""
        response = self.asked.response
        structure = None
        if response.is_json:
            alone = self.constraint is not None and not response.reason_first
            structure = Structure.JSON if alone else Structure.REASONED
        return AnswerReader(self.asked.names, self.form, self.reasoning, structure)


def _tell_unconstrained(asked: Asked, engines: Sequence[Engine]) -> None:
    """Log that nothing holds the models to a schema, or refuse that if it must be kept."""
    required = asked.response.is_json or asked.choice.mode == "required"
    strict = asked.strict is True and bool(asked.names)
    one_call = bool(asked.names) and not asked.choice.parallel
    if not (required or strict or one_call):
        return
    name = next(e.name for e in engines if not e.capabilities.constraints)
    if asked.strict:
        raise ConfigurationError(
            f"{name} cannot be held to a schema, as strict=True asks; leave it out to have the "
            "answer read as it comes, or take models that run in this process"
        )
    logger.warning("%s cannot be held to a schema: calls and JSON are read as they come", name)


def _constraint(
    asked: Asked, form: ToolFormat, reasoning: ReasoningTags | None
) -> Constraint | None:
    """Return the grammar of the answer, None if it may be anything."""
    if asked.names:
        return call_constraint(
            asked.tools,
            form,
            choice=asked.choice,
            reasoning=reasoning,
            answer=asked.response.schema if asked.response.is_json else None,
            reason_first=asked.response.reason_first,
            strict=asked.strict is True,
        )
    response = asked.response
    if response.is_json:
        return answer_constraint(
            response.schema,
            reason_first=response.reason_first,
            reasoning=reasoning,
            strict=asked.strict is True,
        )
    return response.constraint


def _sections(
    asked: Asked, form: ToolFormat, reasoning: ReasoningTags | None
) -> tuple[Section, ...]:
    sections = []
    if reasoning is not None:
        sections.append(Section(reasoning.opening, reasoning.closing, Phase.REASONING))
    if asked.names:
        sections += _call_sections(asked.names, form)
    if asked.response.is_json and asked.response.reason_first:
        sections.append(Section("```json\n", "", Phase.ANSWER, whole=True))
    return tuple(sections)


def _call_sections(names: Sequence[str], form: ToolFormat) -> list[Section]:
    """Return the sections of calls: between the format's marks, or bare JSON to the end."""
    marked = Section("<tool_call>", "</tool_call>", Phase.TOOL_CALL, whole=True)
    if form.style is CallStyle.NAMED:
        openings = [f"{name}{{" for name in names]
    else:
        fences = ("", "```json\n", "```\n")
        brackets = ("{", "{ ", "{\n", "{\n  ", "{\n    ", "[{", "{{", "{{\n  ", "{{\n    ")
        openings = [f'{fence}{opening}"name"' for fence, opening in product(fences, brackets)]
    return [marked, *(Section(o, "", Phase.TOOL_CALL, whole=True) for o in openings)]


def _thinks(section: Section) -> bool:
    return section.phase is Phase.REASONING


def _instruction(asked: Asked, options: SpecGuardOptions) -> str:
    """Return what the model is told about tools."""
    if not asked.names or not options.tool_instruction:
        return ""
    if asked.choice.mode != "required":
        return options.tool_instruction
    which = f"the tool {asked.choice.name}" if asked.choice.name else "one of the tools"
    return f"Answer with a call of {which}, and with nothing else."


def _schema_instruction(asked: Asked, options: SpecGuardOptions) -> str:
    """Return what the model is told about an answer in JSON, "" where it is to call a tool."""
    response = asked.response
    calls = asked.choice.mode == "required"
    if calls or not response.is_json or not options.schema_instruction:
        return ""
    schema = json.dumps(response.schema, ensure_ascii=False)
    text = options.schema_instruction.replace("{schema}", schema)
    if response.schema == JSON_OBJECT:
        text = "Give the answer as a JSON object."
    return f"{text}\n\n{REASON_FIRST}" if response.reason_first else text


REASON_FIRST = "Reason step by step first. End with the JSON in a block that begins with ```json."
