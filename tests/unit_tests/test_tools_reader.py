"""Answers read piece by piece: text, reasoning, calls in all usual forms, structured answers."""

from __future__ import annotations

import json
import random
import time
from itertools import pairwise
from typing import Any

import pytest

from specguard_chains.tools.formats import HERMES, MISTRAL, MISTRAL_NAMED, ReasoningTags
from specguard_chains.tools.parts import Call, MalformedCall, Part, Reasoning, Text, merged
from specguard_chains.tools.reader import AnswerReader
from specguard_chains.tools.structured import Structure

NAMES = ("add", "weather", "größe", "add_all")
ARGUMENTS = '{"a": 1, "b": "x}] </tool_call> ``` \\" <think>"}'
OBJECT = f'{{"name": "add", "arguments": {ARGUMENTS}}}'
OTHER = '{"name": "weather", "arguments": {"city": "Köln 😀"}}'
ADD = Call("add", ARGUMENTS)
WEATHER = Call("weather", '{"city": "Köln 😀"}')
TAGS = ReasoningTags()


def read(text: str, *, cuts: Any = (), names: Any = NAMES, **options: Any) -> list[Part]:
    """Return the parts of an answer that comes in pieces cut at these places."""
    reader = AnswerReader(names, **{"reasoning": TAGS, **options})
    places = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in pairwise(places)]
    parts = [part for piece in pieces for part in reader.add(piece)]
    return merged([*parts, *reader.add("", last=True)])


def check(text: str, *expected: Part, **options: Any) -> None:
    """Check what is read, whole and one character at a time."""
    assert read(text, **options) == list(expected)
    assert read(text, cuts=range(len(text)), **options) == list(expected)


def malformed(name: str | None, arguments: str, error: str) -> MalformedCall:
    return MalformedCall(name, arguments, error)


INVALID = "the call is not valid JSON"


# Text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  Hello there.\n\nHow are you? \n",
        'An object {"a": 1}, a list [1, [2]], [{"b": {}}], nothing {} [].',
        r"$\frac{{1}}{2}$ and [a link](http://x), {name}, {'name': 'add'}",
        'A person: {"name": "Bob", "age": 3} or {"name": "adda"}.',
        '{"name": 3}, {"name" "add"}, {"named": 1}, {"type": "object"}, {"id": 1}',
        "```json\n{\n  \"a\": 1\n}\n```\nand\n```python\nprint({'x': [1]})\n```\n",
        "Ends in ``", "Ends in <tool_c", "Ends in {", "Ends in [", 'Ends in {"na', "Ends in ```",
        'Ends in {"name"',
        "The mark <tool_call> is text, and so is </tool_call>.",
        '{"name": "foo", "arguments": {"a": 1}}',
        '{"type": "function", "function": {"name": "add", "description": "Adds."}}',
        '{"name": "add", "age": 3}',
        '{"name": "add", "description": "Adds two numbers.", "parameters": {"type": "object"}}',
        "Not at the start: <think>x</think>", "<thinking>", "<thi",
    ],
)  # fmt: skip
def test_what_is_no_call_is_text_to_the_last_space(text: str) -> None:
    check(text, *([Text(text)] if text else []))


def test_without_tools_everything_is_text() -> None:
    text = f"<tool_call>\n{OBJECT}\n</tool_call> "
    check(text, Text(text), names=())


# Calls


@pytest.mark.parametrize(
    "text",
    [
        f"<tool_call>\n{OBJECT}\n</tool_call>",
        f"\n<tool_call>{OBJECT}</tool_call>\n\n",
        f"<tool_call>\n{OBJECT}",
        f"<tool_call>\n{OBJECT}\n</tool_c",
        f"<tool_call>\n{OBJECT}\n</tool_call>\n<",
        f"```json\n{OBJECT}\n``",
        f"{OBJECT}\n</tool_call>",
        f"```json\n{OBJECT}\n```",
        f"```\n{OBJECT}\n```\n",
        f"```xml\n<tool_call>\n{OBJECT}\n</tool_call>\n```",
        f"<tools>\n{OBJECT}\n</tools>",
        f"<function_call>{OBJECT}</function_call>",
        f"<|python_tag|>{OBJECT}",
        f"[TOOL_CALLS] [{OBJECT}]",
        OBJECT,
        f"[{OBJECT}]",
        f"{{{OBJECT}}}",
        f"<tool_call>\n{{{OBJECT}}}\n</tool_call>",
        f"<tool_call>\n{{{OBJECT}\n</tool_call>",
        f"{{{OBJECT}",
        f"{OBJECT}}}\n```",
        OBJECT.replace("arguments", "parameters"),
        f'{{"arguments": {ARGUMENTS}, "name": "add"}}',
        f'{{"id": "x", "name": "add", "arguments": {ARGUMENTS}}}',
        f'{{"type": "function", "function": {{"name": "add", "parameters": {ARGUMENTS}}}}}',
        f'{{"function": "add", "arguments": {ARGUMENTS}}}',
        f'{{"tool_calls": [{OBJECT}]}}',
        f'{{"name": "add", "arguments": {json.dumps(ARGUMENTS)}}}',
        json.dumps(json.loads(OBJECT), indent=4),
        OBJECT.replace(": ", ":").replace(", ", ",").replace('":{"a":1,"b":"x', '":{"a":1,"b":"x'),
    ],
)
def test_a_call_is_read_in_every_usual_form(text: str) -> None:
    check(text, ADD)


@pytest.mark.parametrize(
    "text",
    [
        f"<tool_call>\n{OBJECT}\n</tool_call>\n<tool_call>\n{OTHER}\n</tool_call>",
        f"<tool_call>\n{OBJECT}\n{OTHER}\n</tool_call>",
        f"```json\n{OBJECT}\n```\n```json\n{OTHER}\n```",
        f"```json\n{OBJECT}\n```json\n{OTHER}\n```",
        f"```json\n{OBJECT}\n{OTHER}\n```",
        f"```json\n[\n{OBJECT},\n{OTHER}\n]\n```",
        f"{OBJECT}\n\n{OTHER}\n",
        f"{OBJECT}; {OTHER}",
        f"{OBJECT}, {OTHER}",
        f"[{OBJECT}, {OTHER}]",
        f'{{"tool_calls": [{OBJECT}, {OTHER}]}}',
    ],
)
def test_several_calls_are_read(text: str) -> None:
    check(text, ADD, WEATHER)


def test_doubled_braces_as_some_templates_teach_them() -> None:
    expected = Call("add", '{"a": 1}')
    for text in (
        '{{"name": "add", "arguments": {"a": 1}}}',
        '{{"name": "add", "arguments": {{"a": 1}}}}',
        '[{{"name": "add", "arguments": {{"a": 1}}}}]',
        '```json\n{{"name": "add", "arguments": {"a": 1}}\n```',
    ):
        check(text, expected)


def test_names_and_arguments_in_any_script() -> None:
    check('{"name": "größe", "arguments": {"n": "中文"}}', Call("größe", '{"n": "中文"}'))
    escaped = json.dumps({"name": "größe", "arguments": {"n": "中文 😀"}})
    check(escaped, Call("größe", '{"n": "中文 😀"}'))
    half = '{"name": "add", "arguments": {"a": "\\ud83d"}}'
    check(half, Call("add", '{"a": "\ufffd"}'))


def test_arguments_may_be_missing_or_hold_line_breaks() -> None:
    check('{"name": "add"}', Call("add", "{}"))
    check('{"name": "add", "arguments": null}', Call("add", "{}"))
    check('{"name": "add", "arguments": ""}', Call("add", "{}"))
    check('{"name": "add", "arguments": {"a": "x\ny"}}', Call("add", '{"a": "x\\ny"}'))


def test_text_around_calls_keeps_its_words_and_no_white_space_of_theirs() -> None:
    call = f"<tool_call>\n{OBJECT}\n</tool_call>"
    check(f"Let me see.\n\n{call}\n", Text("Let me see."), ADD)
    check(f"{call}\n\nDone.\n", ADD, Text("Done.\n"))
    check(f"First.\n\n{call}\nThen {OTHER} and more.", Text("First."), ADD, Text("\n\nThen"),
          WEATHER, Text(" and more."))  # fmt: skip
    block = "```python\nf()\n```"
    check(f"{block}\n{OBJECT}\nOk.", Text(block), ADD, Text("\nOk."))


def test_calls_of_newer_mistral_models() -> None:
    named = {"form": MISTRAL_NAMED}
    one = Call("add", '{"a": 1}')
    check('add{"a": 1}', one, **named)
    check('add[ARGS]{"a": 1}', one, **named)
    check('[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add_all{}', one, Call("add_all", "{}"), **named)
    check('Let me add. add{"a": 1}', Text("Let me add."), one, **named)
    check('readd{"a": 1} add x add', Text('readd{"a": 1} add x add'), **named)
    cut = malformed("add", '{"a": 1', "the arguments are not a JSON object")
    check('add{"a": 1', cut, **named)
    check('add{"a": 1}', Text('add{"a": 1}'), form=HERMES)
    listed = '[{"name": "add", "arguments": {"a": 1}, "id": "123456789"}]'
    check(listed, one, form=MISTRAL)


# Calls that cannot be carried out


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ('{"name": "add", "arguments": {"a": 1', malformed("add", '{"a": 1', INVALID)),
        ('```json\n{"name": "add", "arguments": {"a": "x', malformed("add", '{"a": "x', INVALID)),
        ('{"name": "add", "arguments": {a: 1}}', malformed("add", "{a: 1}}", INVALID)),
        ('{"name": "add", "argu', malformed("add", '{"name": "add", "argu', INVALID)),
        ('{"name": "ad', malformed(None, '{"name": "ad', INVALID)),
        ('<tool_call>\n{"a": 1', malformed(None, '{"a": 1', INVALID)),
        ('<tool_call>\n{"a": 1\n</tool_call>', malformed(None, '{"a": 1', INVALID)),
        ("<tool_call>\n", malformed(None, "", INVALID)),
        ('<tool_call>{"a": 1}</tool_call>', malformed(None, '{"a": 1}', "the call names no tool")),
        (
            '{"name": "add", "arguments": [1]}',
            malformed("add", "[1]", "the arguments are not a JSON object"),
        ),
        (
            '{"name": "add", "arguments": "1 + 2"}',
            malformed("add", "1 + 2", "the arguments are not a JSON object"),
        ),
        (
            '<tool_call>\n{"name": "foo", "arguments": {"a": 1}}\n</tool_call>',
            malformed(
                "foo", '{"a": 1}', "there is no tool 'foo'; known are: add, add_all, größe, weather"
            ),
        ),
    ],
)
def test_what_was_meant_as_a_call_is_no_text(text: str, call: MalformedCall) -> None:
    check(text, call)


@pytest.mark.parametrize("depth", [*range(940, 1000, 6), 985, 987, 990, 991, 5000])
@pytest.mark.parametrize("form", ["<tool_call>{}</tool_call>", "{}", "named"])
def test_a_call_that_is_nested_too_deep_is_malformed(form: str, depth: int) -> None:
    arguments = '{"a": ' + "[" * depth + "]" * depth + "}"
    text = form.replace("{}", f'{{"name": "add", "arguments": {arguments}}}')
    (call,) = read(f"add{arguments}" if form == "named" else text, form=MISTRAL_NAMED)
    assert isinstance(call, Call | MalformedCall)
    assert (call.name, call.arguments.rstrip("}")) == ("add", arguments[:-1])
    if depth == 5000:
        assert isinstance(call, MalformedCall)


def test_text_goes_on_after_a_call_that_lacks_a_bracket() -> None:
    check('{"name": "add", "arguments": {"a": 1}\n```\nSo.',
          malformed("add", '{"a": 1}', INVALID), Text("So."))  # fmt: skip


# Reasoning


def test_reasoning_comes_first_and_holds_no_calls() -> None:
    check(f"<think>\nHm, {OBJECT} < </th\n</think>\n\nHello \n",
          Reasoning(f"Hm, {OBJECT} < </th"), Text("Hello \n"))  # fmt: skip
    check(f"\n<think>a</think>\n{OBJECT}", Reasoning("a"), ADD)
    check("<think>\n\n</think>\n\nHello", Text("Hello"))
    check("<think>cut off ", Reasoning("cut off"))
    check("<think>a</think> \n<think>b</think>c", Reasoning("a\n\nb"), Text("c"))
    check("<think>a</think>\n", Reasoning("a"))


def test_reasoning_that_the_prompt_has_begun() -> None:
    opened = {"reasoning": ReasoningTags(opened=True)}
    check("Hm.\n\nSo.\n</think>\n\n4", Reasoning("Hm.\n\nSo."), Text("4"), **opened)
    check("Hm. </thin", Reasoning("Hm. </thin"), **opened)


def test_other_marks_or_none() -> None:
    check("[THINK]a[/THINK]b", Reasoning("a"), Text("b"),
          reasoning=ReasoningTags("[THINK]", "[/THINK]"))  # fmt: skip
    check(" <think>a</think>b", Text(" <think>a</think>b"), reasoning=None)


# Structured answers


@pytest.mark.parametrize(
    ("text", "json_text"),
    [
        ('{"a": {"b": "}"}}', '{"a": {"b": "}"}}'),
        (' \n```json\n{"a": "```"}\n```\n', '{"a": "```"}'),
        ("```\n[1, 2]\n```", "[1, 2]"),
        ('"red"', '"red"'),
        ("```json\n3\n```", "3"),
        ('{"a": 1', '{"a": 1'),
        ('{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}'),
    ],
)
def test_a_structured_answer_is_its_json_alone(text: str, json_text: str) -> None:
    check(text, Text(json_text), structure=Structure.JSON)
    check(f"<think>\nx {{\n</think>\n{text}", Reasoning("x {"), Text(json_text),
          structure=Structure.JSON)  # fmt: skip


def test_what_comes_before_and_after_the_json_is_reasoning() -> None:
    reasoned = {"structure": Structure.REASONED}
    why = "First {x}, `a`.\n\n```python\nf()\n```\nSo:"
    check(f'{why}\n\n```json\n{{"a": 4}}\n```', Reasoning(why), Text('{"a": 4}'), **reasoned)
    check('{"a": 1}\n\nBecause.', Text('{"a": 1}'), Reasoning("Because."), **reasoned)
    check('<think>x</think>\nWhy.\n```json\n{"a": 4}\n```\nEnd.', Reasoning("x\n\nWhy."),
          Text('{"a": 4}'), Reasoning("\n\nEnd."), **reasoned)  # fmt: skip
    check("No JSON ``", Reasoning("No JSON ``"), **reasoned)


@pytest.mark.parametrize("structure", Structure)
def test_json_without_a_block_is_taken_where_it_ends_the_answer(structure: Structure) -> None:
    options = {"structure": structure}
    taken = {
        'Sure!\n\n{"a": [1, "}"]}\n': ("Sure!", '{"a": [1, "}"]}'),
        "Sure!\n  [1]": ("Sure!", "[1]"),
        'So {x}:\n{x}\n{y}\n{"a": {}}': ("So {x}:\n{x}\n{y}", '{"a": {}}'),
        'a</b>\n{"a": \n</b>\n{"a": 1}': ('a</b>\n{"a": \n</b>', '{"a": 1}'),
        'a\n{\n"a":\n{}\n}\n\n': ("a", '{\n"a":\n{}\n}'),
    }
    for text, (reasoning, json_text) in taken.items():
        check(text, Reasoning(reasoning), Text(json_text), **options)
    kind = Text if structure is Structure.JSON else Reasoning
    for text in (
        'So {"a": 1}',
        "So\n{x}",
        'So\n{"a": 1}\nas I said',
        "So\n{'a': 1}",
        'So\n{"a": 1',
    ):
        check(text, kind(text), **options)
    check('So\n{"a": 1}\n```json\n{"a": 2}\n```', Reasoning('So\n{"a": 1}'), Text('{"a": 2}'),
          **options)  # fmt: skip


def test_json_is_given_out_while_it_is_written() -> None:
    reader = AnswerReader(structure=Structure.JSON)
    assert reader.add('```json\n{"a": "x') == [Text('{"a": "x')]
    assert reader.add('y", ') == [Text('y", ')]
    assert reader.add('"b": 2}\n```', last=True) == [Text('"b": 2}')]


def test_a_call_may_stand_in_place_of_a_structured_answer() -> None:
    for structure in Structure:
        check(OBJECT, ADD, structure=structure)
        check(f"```json\n{OBJECT}\n```", ADD, structure=structure)
    person = '{"name": "Bob", "age": 3}'
    check(person, Text(person), structure=Structure.JSON)


# Pieces

FRAGMENTS = (
    *'{}[]".;\\<`\n', " ", "\n\n", "name", '"name"', ": ", '"add"', ", ", '"arguments"', "{}",
    '{"a": 1}', '{"name": "add"', OBJECT, OTHER, "```", "```json\n", "<tool_call>", "</tool_call>",
    "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "add", "add{", "add_all{", "text", "{{", "}}",
    "</", '"type": "function"', '"function": ', "null",
)  # fmt: skip


def test_an_escape_does_not_make_a_name_of_what_is_none() -> None:
    text = '{"function": "x\\u0041", "name": "y\\n"}'
    check(text, Text(text))


@pytest.mark.parametrize("seed", range(40))
def test_parts_do_not_depend_on_where_the_answer_is_cut(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(5):
        text = "".join(draw.choices(FRAGMENTS, k=draw.randint(1, 16)))
        options: dict[str, Any] = draw.choice(
            [{}, {"form": MISTRAL_NAMED}, *({"structure": structure} for structure in Structure)]
        )
        whole = read(text, **options)
        cuts = sorted(draw.sample(range(len(text) + 1), 2))
        for places in (range(len(text)), cuts):
            assert read(text, cuts=places, **options) == whole, text
        if not options and all(isinstance(part, Text) for part in whole):
            assert "".join(part.text for part in whole if isinstance(part, Text)) == text


LONG = "x \\n [{" * 1500


@pytest.mark.parametrize(
    "text",
    [
        f'{{"a": "{LONG}"}}',
        f'Sure!\n\n{{"a": "{LONG}"}}',
        f'<tool_call>{{"name": "add", "arguments": {{"a": "{LONG}"}}}}',
        f'add{{"a": "{LONG}"}}',
        "word\n\n" * 2000,
        "a\n" + "{}\n" * 4000,
        "[\n" * 6000 + "```",
        "\n" * 12000,
    ],
    ids=["json", "json behind text", "call", "named", "words", "objects", "brackets", "lines"],
)
@pytest.mark.parametrize("structure", [None, *Structure])
def test_the_time_to_read_grows_with_the_length_and_not_with_its_square(
    structure: Structure | None, text: str
) -> None:
    begun = time.process_time()
    read(text, cuts=range(2, len(text), 2), form=MISTRAL_NAMED, structure=structure)
    assert time.process_time() - begun < 2, "a square takes 20 s"


def test_text_is_given_out_as_soon_as_it_is_certain() -> None:
    reader = AnswerReader(NAMES)
    assert reader.add("One {x} two.\n\n") == [Text("One {x} two.")]
    assert reader.add("Three <tool") == [Text("\n\nThree")]
    assert reader.add("_call>\n" + OBJECT[:20]) == []
    assert reader.add(OBJECT[20:]) == [ADD]
    assert reader.add("\n</tool_call>", last=True) == []
