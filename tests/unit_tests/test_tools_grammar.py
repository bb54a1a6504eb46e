"""What grammars of calls and of structured answers allow, byte by byte."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from specguard_chains.decoding.constraint import Constraint
from specguard_chains.errors import ConfigurationError
from specguard_chains.tools.choice import ToolChoice, tool_names
from specguard_chains.tools.formats import (
    HERMES,
    LLAMA3,
    MISTRAL,
    MISTRAL_NAMED,
    ReasoningTags,
    ToolFormat,
)
from specguard_chains.tools.grammar import answer_constraint, call_constraint

llguidance = pytest.importorskip("llguidance")

END = 256


class Bytes:
    """A tokenizer with a token for every byte."""

    eos_token_id = END
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"")
    special_token_ids = (END,)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@cache
def tokenizer() -> Any:
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()), eos_token=END)


def allowed(constraint: Constraint, text: str) -> str:
    """Return as much of a text as an answer may begin with; complete ones end with "END"."""
    matcher = llguidance.LLMatcher(tokenizer(), constraint.grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    data = text.encode()
    for at, byte in enumerate(data):
        if matcher.validate_tokens([byte]) != 1:
            return data[:at].decode(errors="replace")
        assert matcher.consume_token(byte), matcher.get_error()
    return text + ("END" if matcher.is_accepting() else "")


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": name, "description": "A tool.", "parameters": parameters}
    return {"type": "function", "function": function}


INTEGER = {"type": "integer"}
ADD = tool("add", a=INTEGER, b=INTEGER)
WEATHER = tool("weather", city={"type": "string"})
TOOLS = [ADD, WEATHER]

CALL = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
OTHER = '{"name": "weather", "arguments": {"city": "Köln 😀"}}'
PRETTY = '{\n  "name": "add",\n  "arguments": {\n    "a": 1,\n    "b": 2\n  }\n}'


def tagged(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


def calls(
    mode: str = "auto", *, tools: Any = TOOLS, form: ToolFormat = HERMES, **more: Any
) -> Constraint:
    choice = ToolChoice.of(mode, tool_names(tools), parallel=more.pop("parallel", None))
    return call_constraint(tools, form, choice=choice, **more)


# Required calls


@pytest.mark.parametrize("text", [tagged(CALL), tagged(OTHER), tagged(CALL, OTHER)])
def test_required_calls_stand_between_the_marks_of_the_template(text: str) -> None:
    assert allowed(calls("any"), text) == text + "END"


@pytest.mark.parametrize(
    ("text", "prefix"),
    [
        ("Hello", ""),
        (CALL, ""),
        (tagged('{"name": "addition"'), '<tool_call>\n{"name": "add'),
        (
            tagged('{"name": "add", "arguments": {"x": 1}}'),
            '<tool_call>\n{"name": "add", "arguments": {"',
        ),
        (tagged('{"name": "add", "arguments": {}}'), '<tool_call>\n{"name": "add", "arguments": {'),
        (tagged(PRETTY), "<tool_call>\n{"),
        ("<tool_call>\n\n", "<tool_call>\n"),
        (tagged(CALL) + "\n\nThe", tagged(CALL) + "\n\n"),
    ],
)
def test_nothing_but_calls_of_known_tools_is_allowed(text: str, prefix: str) -> None:
    assert allowed(calls("any"), text) == prefix


def test_the_answer_must_not_end_before_a_call_does() -> None:
    for end in range(len(tagged(CALL))):
        assert allowed(calls("any"), tagged(CALL)[:end]) == tagged(CALL)[:end]


def test_a_named_tool_is_the_only_one() -> None:
    named = calls("weather")
    assert allowed(named, tagged(OTHER)) == tagged(OTHER) + "END"
    assert allowed(named, tagged(CALL)) == '<tool_call>\n{"name": "'


def test_parallel_calls_can_be_ruled_out_and_are_not_endless() -> None:
    assert allowed(calls("any", parallel=False), tagged(CALL, CALL)) == tagged(CALL) + "\n"
    many = allowed(calls("any"), tagged(*[CALL] * 20))
    assert many.count("<tool_call>") == 16


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (LLAMA3, CALL.replace("arguments", "parameters")),
        (LLAMA3, "; ".join([CALL.replace("arguments", "parameters")] * 2)),
        (MISTRAL, f"[{CALL}, {OTHER}]"),
        (MISTRAL, f"[{CALL}]"),
        (MISTRAL_NAMED, 'add{"a": 1, "b": 2}'),
        (MISTRAL_NAMED, 'add{"a": 1, "b": 2}weather{"city": "Rome"}'),
    ],
)
def test_required_calls_in_other_formats(form: ToolFormat, text: str) -> None:
    constraint = calls("any", form=form)
    assert allowed(constraint, text) == text + "END"
    assert allowed(constraint, "I think") == ""


def test_reasoning_may_come_before_required_calls() -> None:
    thinking = calls("any", reasoning=ReasoningTags())
    thought = '<think>\nAdd? {"name": "foo"} <tool_call>\n</think>\n\n'
    for text in (tagged(CALL), thought + tagged(CALL)):
        assert allowed(thinking, text) == text + "END"
    assert allowed(thinking, thought + "Hello") == thought
    opened = calls("any", reasoning=ReasoningTags(opened=True))
    assert allowed(opened, f"Add?\n</think>\n\n{tagged(CALL)}").endswith("END")
    assert not allowed(opened, tagged(CALL)).endswith("END")


# Free choice between text and calls

FENCED = "```json\n{}\n```"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Hello, how are you?\n\nFine.",
        'Persons {"name": "Bob", "age": 3}, {"name": "a\\"b"}, {"name": "adder", "x": {}}',
        'My tools: {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}',
        'One of them is {"name": "add"}, or {"name":"add", "age": 3}',
        'An object {"a": 1}, a list [{"b": 2}], code\n```json\n{"a": 1}\n```\nand more.',
        tagged(CALL),
        tagged(CALL, OTHER) + "\n",
        "Let me see.\n\n" + tagged(PRETTY),
        CALL,
        CALL.replace("arguments", "parameters"),
        PRETTY,
        "{" + CALL + "}",
        f"[{CALL}, {OTHER}]",
        f"{CALL}\n{OTHER}",
        "Sure:\n" + FENCED.format(CALL),
        FENCED.format(PRETTY) + "\n" + FENCED.format(OTHER) + "\n",
        FENCED.format(f"{CALL}\n{OTHER}"),
        "```xml\n" + tagged(CALL) + "\n```",
    ],
)
def test_text_and_calls_in_all_usual_forms_are_allowed(text: str) -> None:
    assert allowed(calls(), text) == text + "END"


@pytest.mark.parametrize("form", [HERMES, LLAMA3, MISTRAL, MISTRAL_NAMED])
def test_text_and_calls_are_allowed_whatever_the_format(form: ToolFormat) -> None:
    for text in ("Hello.", CALL, CALL.replace("arguments", "parameters"), FENCED.format(CALL)):
        for more in ({}, {"reasoning": ReasoningTags()}):
            assert allowed(calls(form=form, **more), text) == text + "END"


@pytest.mark.parametrize(
    ("text", "stop"),
    [
        ('{"name": "greet", "arguments": {}}', "guments"),
        ('```json\n{"name": "greet", "parameters"', "meters"),
        ('{\n "name" : "greet" , "args"', "gs"),
        ('Hi.\n\n{{"name": "greet", "arguments": {', "guments"),
        (tagged('{"name": "greet"}'), "greet"),
        ("<tool_call>\nadd(1, 2)", "add"),
        ('{"name": "add", "arguments": {"x": 1}}', "x"),
        ('{"name": "add", "args": {}}', "s"),
        ('{"name": "add", "params": {}}', "s"),
        (f"{CALL}\n\nThe result is 3.", "The"),
        (f"{tagged(CALL)}\n<tool_response>", "response"),
        (f"{FENCED.format(CALL)}\n\nUser: ok", "User"),
    ],
)
def test_a_call_that_has_begun_must_be_one_of_a_known_tool(text: str, stop: str) -> None:
    assert allowed(calls(), text) == text[: text.index(stop)]


def test_parallel_calls_can_be_ruled_out_in_text() -> None:
    single = calls(parallel=False)
    assert allowed(single, FENCED.format(CALL) + "\n") == FENCED.format(CALL) + "\nEND"
    assert allowed(single, f"{CALL}\n{CALL}") == CALL + "\n"


def test_calls_in_reasoning_are_no_calls() -> None:
    thinking = calls(reasoning=ReasoningTags())
    thought = '<think>\nUse {"name": "foo"}? <tool_call> no.\n</think>\n\n'
    answers = ("Hello.", tagged(CALL), CALL)
    for text in [before + answer for before in ("", thought, "\n" + thought) for answer in answers]:
        assert allowed(thinking, text) == text + "END"
    for before in (thought, ""):
        foreign = before + '{"name": "foo", "ar'
        assert allowed(thinking, foreign + "g") == foreign
    assert allowed(thinking, "<think>\nand so") == "<think>\nand so"  # no end yet


def test_names_are_taken_literally() -> None:
    tools = [tool("größe.m-2", n={"type": "string"}), tool("größe", n={"type": "string"})]
    for name in ("größe.m-2", "größe"):
        call = f'{{"name": "{name}", "arguments": {{"n": "中文"}}}}'
        assert allowed(calls(tools=tools), call) == call + "END"
        assert allowed(calls("any", tools=tools), tagged(call)) == tagged(call) + "END"
    foreign = '{"name": "größeXm-2", "ar'
    assert allowed(calls(tools=tools), foreign + "g") == foreign


def test_many_tools_and_many_names_in_text_are_no_burden() -> None:
    constraint = calls(
        tools=[tool(f"tool_{i}", a=INTEGER, b={"type": "string"}) for i in range(60)]
    )
    persons = "".join(f'{{"name": "Person {i}", "age": {i}}}\n' for i in range(60))
    call = '{"name": "tool_7", "arguments": {"a": 1, "b": "x"}}'
    assert allowed(constraint, persons + call) == persons + call + "END"


def test_white_space_in_a_call_is_bounded() -> None:
    blank = '{"name": "add", "arguments": {'
    assert allowed(calls(), blank + "\n\n\n") == blank + "\n"
    assert allowed(calls(), blank + " " * 80) == blank + " " * 32


# Calls or a structured answer

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": INTEGER},
    "required": ["name", "age"],
}
BOB = '{"name": "Bob", "age": 3}'


@pytest.mark.parametrize(
    "text", [BOB, FENCED.format(BOB), CALL, tagged(CALL, CALL), FENCED.format(CALL), f"[{CALL}]"]
)
def test_an_answer_is_calls_or_follows_its_schema(text: str) -> None:
    constraint = calls(answer=PERSON)
    assert allowed(constraint, text) == text + "END"
    assert allowed(constraint, "Hello") == ""
    assert allowed(constraint, '{"name": "Bob", "arguments"') == '{"name": "Bob", "a'


@pytest.mark.parametrize(
    "text",
    [
        f"Well.\n\n{FENCED.format(BOB)}",
        f"Well.\n\n{tagged(CALL)}",
        f"Well.\n\n{FENCED.format(CALL)}",
        f"Well. {CALL}",
    ],
)
def test_reasoning_may_come_before_calls_or_a_structured_answer(text: str) -> None:
    constraint = calls(answer=PERSON, reason_first=True)
    assert allowed(constraint, text) == text + "END"
    assert allowed(constraint, "Well.") == "Well."


# Structured answers


def test_a_structured_answer_is_json_by_its_schema() -> None:
    constraint = answer_constraint(PERSON)
    for text in (BOB, '{\n  "name": "Bob",\n  "age": 3\n}'):
        assert allowed(constraint, text) == text + "END"
    assert allowed(constraint, '{"name": "Bob", "age": 3, ') == '{"name": "Bob", "age": 3'
    assert allowed(constraint, "Sure: {") == ""
    assert allowed(constraint, r'{"name": "\u00e9') == '{"name": "' + "\\"


def test_any_object_can_be_asked_for() -> None:
    constraint = answer_constraint("json_object")
    text = '{"a": [1, {"b": null}], "c": "d"}'
    assert allowed(constraint, text) == text + "END"
    assert allowed(constraint, "[1]") == ""


def test_reasoning_comes_before_a_structured_answer() -> None:
    constraint = answer_constraint(PERSON, reason_first=True)
    text = f'First {{"x": 1}} and\n```python\nf()\n```\nthen:\n{FENCED.format(BOB)}'
    assert allowed(constraint, text) == text + "END"
    assert allowed(constraint, text + "\nDone") == text + ""
    assert allowed(constraint, "First, I think.") == "First, I think."  # no end without the JSON


def test_reasoning_before_a_structured_answer_can_be_bounded() -> None:
    constraint = answer_constraint(PERSON, reason_first=True, max_reasoning=10)
    assert allowed(constraint, "0123456789" + FENCED.format(BOB)).endswith("END")
    assert allowed(constraint, "0123456789x") == "0123456789"


def test_marked_reasoning_comes_before_a_structured_answer() -> None:
    thought = "<think>\n```json\n{}\n```\n</think>\n\n"
    plain = answer_constraint(PERSON, reasoning=ReasoningTags())
    assert allowed(plain, thought + BOB) == thought + BOB + "END"
    assert allowed(plain, BOB) == BOB + "END"
    reasoned = answer_constraint(PERSON, reason_first=True, reasoning=ReasoningTags())
    for text in (
        thought + FENCED.format(BOB),
        f"{thought}So:\n{FENCED.format(BOB)}",
        FENCED.format(BOB),
    ):
        assert allowed(reasoned, text) == text + "END"
    opened = answer_constraint(PERSON, reasoning=ReasoningTags(opened=True))
    assert allowed(opened, f"hm\n</think>\n{BOB}").endswith("END")


# Schemas


def test_schemas_may_refer_to_definitions_and_to_themselves() -> None:
    node = {"type": "object", "properties": {"v": INTEGER, "next": {"$ref": "#/$defs/Node"}}}
    refers = tool("refers", n={"$ref": "#/$defs/Node"})
    refers["function"]["parameters"]["$defs"] = {"Node": node}
    recursive = tool("recursive", v=INTEGER)
    recursive["function"]["parameters"]["properties"]["next"] = {"$ref": "#"}
    tools = [refers, recursive]
    for arguments in (
        '{"name": "refers", "arguments": {"n": {"v": 1, "next": {"v": 2}}}}',
        '{"name": "recursive", "arguments": {"v": 1, "next": {"v": 2}}}',
    ):
        assert allowed(calls("any", tools=tools), tagged(arguments)) == tagged(arguments) + "END"
        assert allowed(calls(tools=tools), arguments) == arguments + "END"


def test_a_tool_without_arguments() -> None:
    now = {"type": "function", "function": {"name": "now", "description": "The time."}}
    call = '{"name": "now", "arguments": {}}'
    for tools in ([now], [tool("now")]):
        assert allowed(calls("any", tools=tools), tagged(call)) == tagged(call) + "END"
        assert allowed(calls(tools=tools), '{"name": "now", "arguments": {"a') == call[:-2]


def test_open_objects_stay_open() -> None:
    table = {"type": "object", "additionalProperties": INTEGER}
    call = '{"name": "put", "arguments": {"table": {"a": 1, "b": 2}}}'
    assert allowed(calls(tools=[tool("put", table=table)]), call) == call + "END"


@pytest.mark.parametrize("mode", ["any", "auto"])
@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (
            {"not": INTEGER},
            "schema of tool 'f' cannot be enforced: the keyword \"not\" is not supp",
        ),
        ({"type": "array", "uniqueItems": True}, '"uniqueItems"'),
        ({"type": "strin"}, "Invalid type: strin; change the schema"),
        ({"$ref": "#/$defs/Missing"}, "schema of tool 'f' cannot be enforced: .*Missing"),
        ({"type": "string", "pattern": "(?=a)"}, "schema of tool 'f' cannot be enforced: .*look"),
    ],
)
def test_what_cannot_be_enforced_is_refused(mode: str, schema: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        calls(mode, tools=[ADD, tool("f", x=schema)])
    with pytest.raises(ConfigurationError, match="schema of the answer cannot be enforced"):
        answer_constraint({"type": "object", "properties": {"x": schema}})


def test_what_cannot_be_enforced_can_be_left_out() -> None:
    unique = {"type": "array", "items": INTEGER, "uniqueItems": True}
    call = '{"name": "f", "arguments": {"x": [1, 2]}}'
    constraint = calls("any", tools=[tool("f", x=unique)], strict=False)
    assert allowed(constraint, tagged(call)) == tagged(call) + "END"


@pytest.mark.parametrize("mode", ["any", "auto"])
def test_patterns_that_no_grammar_can_have_can_be_left_out_and_others_stay(mode: str) -> None:
    look = {"type": "string", "pattern": r"^(?!\.)[a-z.]+@[a-z.]+$"}
    pattern = {"type": "string", "pattern": "^[a-z]+$"}  # a property may be called so, too
    sends = tool("send", to={"anyOf": [look, {"type": "null"}]}, pattern=pattern)
    text = tagged('{"name": "send", "arguments": {"to": "a@b.c", "pattern": "x"}}')
    constraint = calls(mode, tools=[sends], strict=False)
    assert allowed(constraint, text) == text + "END"
    assert not allowed(constraint, text.replace('"x"', '"X"')).endswith("END")
    with pytest.raises(ConfigurationError, match="schema of tool 'send' cannot be enforced"):
        calls(mode, tools=[sends])


def test_formats_are_enforced_where_they_are_known_and_remarks_elsewhere() -> None:
    date, path = {"type": "string", "format": "date"}, {"type": "string", "format": "path"}
    constraint = calls("any", tools=[tool("f", d=date, p=path)])
    text = tagged('{"name": "f", "arguments": {"d": "2024-02-28", "p": "/tmp"}}')
    assert allowed(constraint, text) == text + "END"
    assert not allowed(constraint, text.replace("2024-02", "today")).endswith("END")


def test_calls_need_tools() -> None:
    with pytest.raises(ConfigurationError, match="no tools to call"):
        call_constraint([], HERMES, choice=ToolChoice())
    with pytest.raises(ConfigurationError, match="no tools to call"):
        call_constraint(TOOLS, HERMES, choice=ToolChoice("none"))
