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
from dataclasses import dataclass
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
    rules = _calls(called, form, strict=strict, compact=choice.mode == "required")
    if choice.mode == "required":
        return _constraint([*rules, _required(form, parallel=choice.parallel)], reasoning)
    rules += [f"after: {_after(parallel=choice.parallel)}"]
    endings = {"<tool_call>": 'WS? call WS? "</tool_call>" after'}
    if answer is None or reason_first:
        rules += [_OTHER, *_named(called, strict=strict)]
        endings[_NAME] = "named after"
    if answer is None:
        return _constraint(rules, reasoning, _Free(endings, optional=True, passing=_NAME))
    rules += [_answer(answer, strict)]
    if reason_first:
        endings["```json\\n"] = '(answer "\\n```" | call after)'
        return _constraint(rules, reasoning, _Free(endings, passing=_NAME))
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
    return _constraint(rules, reasoning, _Free({"```json\\n": 'answer "\\n```"'}, text=text))


def _answer(schema: Schema, strict: bool) -> str:
    schema = {"type": "object"} if schema == "json_object" else schema
    return f"answer: {json_rule(schema, 'the schema of the answer', strict=strict)}"


def _calls(tools: Sequence[Tool], form: ToolFormat, *, strict: bool, compact: bool) -> list[str]:
    """Return the rules of a whole call, alone and between marks."""
    rules = ['tagged: "<tool_call>" WS? call WS? "</tool_call>"', _one_of("call", tools)]
    for i, tool in enumerate(tools):
        parameters, of = closed(parameters_of(tool)), f"the schema of tool {_name(tool)!r}"
        if form.style is CallStyle.NAMED:
            rules.append(f"call{i}: {_quoted(_name(tool))} called{i}")
            rules.append(f"called{i}: {json_rule(parameters, of, strict=strict, compact=compact)}")
        else:
            schema = call_schema(_name(tool), parameters, form.arguments)
            rules.append(f"call{i}: {json_rule(schema, of, strict=strict, compact=compact)}")
    return rules


def _named(tools: Sequence[Tool], *, strict: bool) -> list[str]:
    """Return the rules of calls without marks, from the name on."""
    rules, space = [_one_of("named", tools)], NO_BLANK_LINES
    for i, tool in enumerate(tools):
        of = f"the schema of tool {_name(tool)!r}"
        key = space.join(['"', ",", '"(arguments|parameters)"', ":", ""])
        rules.append(f'named{i}: /{re.escape(_name(tool))}{key}/ arguments{i} WS? "}}"')
        rules.append(f"arguments{i}: {json_rule(parameters_of(tool), of, strict=strict)}")
    return rules


_NAME = r'\{\s*"name"\s*:\s*"'
"""The beginning of a call without marks, or of any other object that has a name first."""

_OTHER = (
    r'OTHER: /([^"\\\n]|\\.)*"\s*([^,\s]|,\s*([^"\s]|"('
    r"[^ap]|a[^r]|ar[^g]|p[^a]|pa[^r]|par[^a]|para[^m])))/"
)
"""Such an object from its name on, as far as it cannot become a call any more: what follows the
name is no key that begins like arguments or parameters."""


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


@dataclass(frozen=True, slots=True)
class _Free:
    """Free text that an answer begins with."""

    endings: Mapping[str, str]
    """Expressions that end it, and what follows them."""
    optional: bool = False
    """Whether an answer may be nothing else."""
    passing: str | None = None
    """The one of the endings after which the text may also go on, by the rule OTHER."""
    text: str = _TEXT

    def rules(self, name: str, *, no: str = "", then: str = "") -> list[str]:
        """Return the rules that define an answer.

        Args:
            name: The rule for the answer.
            no: The name of an expression that the text must not match up to its first ending.
            then: The rule for text that goes on; "" is the same one.
        """
        but = f" & ~{no}" if no else ""
        ways, rules, passed = [], [], ""
        for i, (ending, following) in enumerate(self.endings.items()):
            until = f"{name}_until{i}"
            rules.append(f"{until}[lazy]: {until.upper()}")
            rules.append(f"{until.upper()}: /{self.text}{ending}/{but}")
            ways.append(f"{until} {following}")
            if ending == self.passing and then:
                ways.append(f"{until} OTHER {then}")
            elif ending == self.passing:
                passed = f"({until} OTHER)* "
        if self.optional:
            ways.append(f"{name.upper()}_TEXT")
            rules.append(f"{name.upper()}_TEXT: /{self.text}/{but}")
        return [f"{name}: {passed}({' | '.join(ways)})", *rules]


def _constraint(
    rules: Iterable[str], reasoning: ReasoningTags | None, free: _Free | None = None
) -> Constraint:
    """Return the grammar of an answer.

    Args:
        rules: The rules that the answer is made of; `body` is the answer without its reasoning.
        reasoning: The marks around reasoning.
        free: What the answer begins with, in place of `body`.
    """
    lines = [*_SHARED, *rules, *(free.rules("body") if free else ())]
    if reasoning is None:
        return Constraint.lark("\n".join([*lines, "start: body"]))
    opening, closing = rf"\s*{_escaped(reasoning.opening)}", _escaped(reasoning.closing)
    begun = "" if reasoning.opened else opening
    lines.append(f"thought[lazy]: /{begun}{_TEXT}{closing}/")
    if reasoning.opened:
        lines.append("start: thought WS? body")
    elif free is None:
        lines.append("start: (thought WS?)? body")
    else:
        lines += [f"THOUGHT: /{opening}{_TEXT}/", "start: thought WS? body | unthought"]
        lines += free.rules("unthought", no="THOUGHT", then="body")
    return Constraint.lark("\n".join(lines))


def _one_of(rule: str, tools: Sequence[Tool]) -> str:
    return f"{rule}: {' | '.join(f'{rule}{i}' for i in range(len(tools)))}"


def _name(tool: Tool) -> str:
    return str(tool["function"]["name"])


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    """Return an expression for a text, as it stands between slashes."""
    return re.escape(text).replace("/", "\\/")
