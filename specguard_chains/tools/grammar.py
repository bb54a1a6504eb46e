r"""Grammars of answers: calls of known tools, JSON by a schema, free text and reasoning around it.

They are written in llguidance's variation of Lark. A rule marked `[lazy]` ends at the first place
where its expression fits: `/(.|\n)*<tool_call>/` is free text up to the mark, after which nothing
is allowed but what follows in the grammar. JSON rules that begin at the same place are followed at
once; other expressions that share a beginning with them would hide them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from specguard_chains.decoding.constraint import NO_BLANK_LINES, Constraint
from specguard_chains.errors import ConfigurationError
from specguard_chains.tools.choice import ToolChoice, tool_names
from specguard_chains.tools.formats import CallStyle, ReasoningTags, ToolFormat
from specguard_chains.tools.schemas import call_schema, closed, json_rule, parameters_of

MAX_CALLS = 16
"""Most calls of one answer: small models repeat themselves."""

Tool = Mapping[str, Any]
"""As OpenAI describes tools: {"type": "function", "function": {name, description, parameters}}."""

Schema = Mapping[str, Any] | Literal["json_object"]

_TEXT = r"(.|\n)*"
_SHARED = (
    r"WS: /[ \n]{1,8}/",
    r"GAP: /[ ,;\n]{1,8}/",
    r'CLOSER: "}" | "]" | "```"',
    r"FENCE: /```json\n/",
)


def call_constraint(
    tools: Sequence[Tool],
    form: ToolFormat,
    *,
    choice: ToolChoice,
    reasoning: ReasoningTags | None = None,
    answer: Schema | None = None,
    reason_first: bool = False,
    strict: bool = True,
) -> Constraint:
    """Return the grammar of an answer that may or must call tools.

    Args:
        tools: The tools.
        form: How the model's template writes calls. Where text may come first, calls in other
            usual forms are held to known names and their schemas too.
        choice: Which of the tools, and whether an answer without calls will do.
        reasoning: The marks around the model's reasoning, which may come first.
        answer: JSON schema of an answer without calls; None for free text.
        reason_first: Free text comes before that JSON.
        strict: Whether keywords of schemas that cannot be enforced are refused.

    Raises:
        ConfigurationError: There is nothing to call, or a schema cannot be enforced.
    """
    names = tool_names(tools)
    if choice.mode == "none" or not names:
        raise ConfigurationError("there are no tools to call; bind some or leave tool_choice out")
    called = [tool for tool in tools if choice.name in (None, tool["function"]["name"])]
    rules = _calls(called, form, strict=strict)
    if choice.mode == "required":
        return _constraint([*rules, _required(form, parallel=choice.parallel)], reasoning)
    rules += [f"after: {_after(parallel=choice.parallel)}"]
    if answer is None or reason_first:
        rules += _arguments(called, strict=strict)
    if answer is None:
        return _constraint(rules, reasoning, free={**_TAGGED, **_BARE}, optional=True)
    rules += [_answer(answer, strict)]
    if reason_first:
        fenced = {"```json\\n": '(answer "\\n```" | call after)'}
        return _constraint(rules, reasoning, free={**_TAGGED, **_BARE, **fenced})
    plain = 'FENCE? "["? call'
    rules += [f'body: (tagged | {plain}) after | answer | FENCE answer "\\n```"']
    return _constraint(rules, reasoning)


def answer_constraint(
    schema: Schema,
    *,
    reason_first: bool = False,
    reasoning: ReasoningTags | None = None,
    max_reasoning: int | None = None,
    strict: bool = True,
) -> Constraint:
    """Return the grammar of an answer in JSON.

    Args:
        schema: The JSON schema; "json_object" for any object.
        reason_first: Free text comes first, and the JSON stands in a code block.
        reasoning: The marks around the model's reasoning, which may come before all that.
        max_reasoning: Most characters of the free text; None for any number.
        strict: Whether keywords that cannot be enforced are refused.

    Raises:
        ConfigurationError: The schema cannot be enforced.
    """
    rules = [_answer(schema, strict)]
    if not reason_first:
        return _constraint([*rules, "body: answer"], reasoning)
    text = _TEXT if max_reasoning is None else rf"(.|\n){{0,{max_reasoning}}}"
    return _constraint(rules, reasoning, free={"```json\\n": 'answer "\\n```"'}, text=text)


_TAGGED = {"<tool_call>": 'WS? call WS? "</tool_call>" after'}
_BARE = {r'\{\s*"name"\s*:\s*"': "rest after"}
"""Beginnings that end free text, as expressions, and what follows them."""


def _answer(schema: Schema, strict: bool) -> str:
    schema = {"type": "object"} if schema == "json_object" else schema
    return f"answer: {json_rule(schema, 'the schema of the answer', strict=strict)}"


def _calls(tools: Sequence[Tool], form: ToolFormat, *, strict: bool) -> list[str]:
    """Return the rules of a whole call, alone and between marks."""
    rules = ['tagged: "<tool_call>" WS? call WS? "</tool_call>"', _one_of("call", tools)]
    for i, tool in enumerate(tools):
        parameters, of = closed(parameters_of(tool)), f"the schema of tool {_name(tool)!r}"
        if form.style is CallStyle.NAMED:
            rules.append(f"call{i}: {_quoted(_name(tool))} named{i}")
            rules.append(f"named{i}: {json_rule(parameters, of, strict=strict)}")
        else:
            schema = call_schema(_name(tool), parameters, form.arguments)
            rules.append(f"call{i}: {json_rule(schema, of, strict=strict)}")
    return rules


def _arguments(tools: Sequence[Tool], *, strict: bool) -> list[str]:
    """Return the rules of what follows after {"name": " in free text."""
    rules, space = [_one_of("rest", tools)], NO_BLANK_LINES
    for i, tool in enumerate(tools):
        name = re.escape(_name(tool))
        head = space.join([f'{name}"', ",", '"(arguments|parameters)"', ":", ""])
        rules.append(f"rest{i}: /{head}/ arguments{i} /{space}\\}}/")
        of = f"the schema of tool {_name(tool)!r}"
        rules.append(f"arguments{i}: {json_rule(parameters_of(tool), of, strict=strict)}")
    return rules


def _required(form: ToolFormat, *, parallel: bool) -> str:
    """Return the rule of an answer that is nothing but calls, as the model's template has them."""
    call = f"{_quoted(form.opening)} call {_quoted(form.closing)}" if form.opening else "call"
    between = "GAP" if form.separator.strip() else "GAP?"
    calls = f"{call} ({between} {call}){{0,{MAX_CALLS - 1}}}" if parallel else call
    return f'body: "[" {calls} "]"' if form.style is CallStyle.LISTED else f"body: {calls} WS?"


def _after(*, parallel: bool) -> str:
    """Return what may follow a call in free text: marks that close, more calls, and no text."""
    if not parallel:
        return "(GAP | CLOSER){0,4}"
    return f"(GAP | CLOSER | tagged | FENCE? call){{0,{3 * MAX_CALLS}}}"


def _constraint(
    rules: Iterable[str],
    reasoning: ReasoningTags | None,
    *,
    free: Mapping[str, str] | None = None,
    optional: bool = False,
    text: str = _TEXT,
) -> Constraint:
    """Return the grammar of an answer.

    Args:
        rules: The rules that the answer is made of; `body` is the answer without its reasoning.
        reasoning: The marks around reasoning.
        free: What ends free text that comes first, and what follows it, in place of `body`.
        optional: Whether free text may be all.
        text: The expression of free text.
    """
    lines = [*_SHARED, *rules]
    if free is not None:
        lines += _free("body", free, optional=optional, text=text)
    closing = _escaped(reasoning.closing) if reasoning else ""
    if reasoning is None:
        lines += ["start: body"]
    elif reasoning.opened:
        lines += [
            "start: thought WS? body",
            f"thought[lazy]: /{_TEXT}{closing}/",
        ]
    else:
        opening = _escaped(reasoning.opening)
        lines += [f"thought[lazy]: /{opening}{_TEXT}{closing}/"]
        if free is None:
            lines += ["start: (thought WS?)? body"]
        else:
            lines += [f"THOUGHT: /{opening}{_TEXT}/", "start: thought WS? body | first"]
            lines += _free("first", free, optional=optional, text=text, no="THOUGHT")
    return Constraint.lark("\n".join(lines))


def _free(
    name: str, free: Mapping[str, str], *, optional: bool, text: str, no: str = ""
) -> list[str]:
    """Return the rules of free text and what ends it.

    Args:
        name: The rule that they define.
        free: See `_constraint`.
        optional: See `_constraint`.
        text: See `_constraint`.
        no: The name of an expression that the text must not be.
    """
    but = f" & ~{no}" if no else ""
    ways, rules = [], []
    for i, (ending, following) in enumerate(free.items()):
        until = f"{name}_until{i}"
        ways.append(f"{until} {following}")
        rules += [f"{until}[lazy]: {until.upper()}", f"{until.upper()}: /{text}{ending}/{but}"]
    if optional:
        ways.append(f"{name.upper()}_TEXT")
        rules.append(f"{name.upper()}_TEXT: /{text}/{but}")
    return [f"{name}: {' | '.join(ways)}", *rules]


def _one_of(rule: str, tools: Sequence[Tool]) -> str:
    return f"{rule}: {' | '.join(f'{rule}{i}' for i in range(len(tools)))}"


def _name(tool: Tool) -> str:
    return str(tool["function"]["name"])


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    """Return an expression for a text, as it stands between slashes."""
    return re.escape(text).replace("/", "\\/")
