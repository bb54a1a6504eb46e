"""Answers of a given form: what is cut off is no answer, and what cannot be kept is refused."""

import asyncio
import operator
from collections.abc import Callable
from functools import reduce
from typing import Any, TypedDict

import pytest
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import BaseModel

from specguard_chains import ConfigurationError
from specguard_chains.answer_plan import AnswerPlan
from specguard_chains.asked import Asked
from tests.unit_tests import toy_chat

JSON = '{"name": "Ann", "age": 3}'


class Person(BaseModel):
    name: str
    age: int = 0


class PersonDict(TypedDict):
    """A person."""

    name: str
    age: int


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


schemas = pytest.mark.parametrize("schema", [Person, PersonDict])


@schemas
@pytest.mark.parametrize("method", ["json_schema", "json_mode"])
@pytest.mark.parametrize("max_tokens", [1, 12, 14, 20, len(JSON) - 1])
def test_an_answer_that_is_cut_off_is_an_error(schema: Any, method: Any, max_tokens: int) -> None:
    model = toy_chat.scripted(JSON, max_tokens=max_tokens)
    structured = model.with_structured_output(schema, method=method)
    with pytest.raises(ValueError, match=r"\(length\) before its JSON was complete.*max_tokens"):
        structured.invoke("Who?")
    with pytest.raises(ValueError, match=r"\(length\) before its JSON was complete.*max_tokens"):
        list(structured.stream("Who?"))


@schemas
def test_an_answer_that_just_fits_is_none(schema: Any) -> None:
    model = toy_chat.scripted(JSON, max_tokens=len(JSON))
    assert dict(model.with_structured_output(schema).invoke("Who?")) == {"name": "Ann", "age": 3}


@schemas
def test_a_stop_string_in_the_json_is_an_error_too(schema: Any) -> None:
    model = toy_chat.scripted(JSON, stop=[","])
    with pytest.raises(ValueError, match=r"\(stop\) before its JSON was complete.*stop strings"):
        model.with_structured_output(schema).invoke("Who?")


@schemas
def test_the_raw_message_of_an_answer_that_is_cut_off_can_be_had(schema: Any) -> None:
    model = toy_chat.scripted(JSON, max_tokens=12)
    given = model.with_structured_output(schema, include_raw=True).invoke("Who?")
    assert given["raw"].text == JSON[:12]
    assert given["parsed"] is None
    assert "before its JSON was complete" in str(given["parsing_error"])


@schemas
@pytest.mark.parametrize("method", ["json_schema", "json_mode", "function_calling"])
def test_json_that_is_nested_too_deep_is_an_error_of_the_parser(schema: Any, method: Any) -> None:
    structured: Any = toy_chat.scripted().with_structured_output(schema, method=method)
    parser = structured.steps[1]
    text = '{"name": ' + "[" * 5000 + "]" * 5000 + "}"
    with pytest.raises(OutputParserException, match=r"nested too deep|called no tool"):
        parser.invoke(AIMessage(text))
    with pytest.raises(OutputParserException, match=r"nested too deep|called no tool"):
        list(parser.transform(iter([AIMessageChunk(text[:3]), AIMessageChunk(text[3:])])))


def test_streaming_gives_the_object_as_it_grows() -> None:
    model = toy_chat.scripted(JSON, max_step_tokens=16)
    objects = list(model.with_structured_output(PersonDict).stream("Who?"))
    assert len(objects) > 1
    assert objects[-1] == {"name": "Ann", "age": 3}


@pytest.mark.parametrize("tool_choice", [None, "any", "add"])
@pytest.mark.parametrize("form", [("regex", "[0-9]+"), ("grammar", 'start: "a"')])
def test_a_grammar_beside_tools_is_refused_and_not_forgotten(
    tool_choice: Any, form: tuple[str, str]
) -> None:
    response_format = {"type": form[0], form[0]: form[1]}
    with pytest.raises(ConfigurationError, match=f"{form[0]} where tools may be called.*leave"):
        toy_chat.scripted().bind_tools(
            [add], tool_choice=tool_choice, response_format=response_format
        )
    none = toy_chat.scripted("12").bind_tools(
        [add], tool_choice="none", response_format={"type": "regex", "regex": "[0-9]+"}
    )
    assert none.invoke("1 + 2?").text == "12"


@pytest.mark.parametrize("form", [("regex", "[0-9]+"), ("grammar", 'start: "a"')])
def test_reasoning_before_a_grammar_is_refused(form: tuple[str, str]) -> None:
    response_format = {"type": form[0], form[0]: form[1]}
    with pytest.raises(ConfigurationError, match=f"reason_first=True.*{form[0]} itself"):
        toy_chat.scripted().invoke("hi", response_format=response_format, reason_first=True)


@pytest.mark.parametrize("described", [None, "x", {}, {"name": "x"}, {"schema": None}])
def test_a_description_without_a_schema_is_named(described: Any) -> None:
    with pytest.raises(ConfigurationError, match="known forms; give a pydantic class"):
        toy_chat.scripted().invoke(
            "hi", response_format={"type": "json_schema", "json_schema": described}
        )


def test_a_descriptions_own_strict_counts_unless_the_call_says_otherwise() -> None:
    schema = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    described: dict[str, Any] = {"name": "x", "schema": schema}
    form = {"type": "json_schema", "json_schema": described}
    model = toy_chat.scripted('{"a": []}')
    assert model.invoke("hi", response_format=form).text == '{"a": []}'
    described["strict"] = True
    with pytest.raises(ConfigurationError, match="strict=False"):
        model.invoke("hi", response_format=form)
    assert model.invoke("hi", response_format=form, strict=False).text == '{"a": []}'


@pytest.mark.parametrize("method", ["json_schema", "json_mode", "function_calling"])
def test_a_description_of_a_tool_is_a_schema(method: Any) -> None:
    tool = convert_to_openai_tool(Person)
    call = f'<tool_call>\n{{"name": "Person", "arguments": {JSON}}}\n</tool_call>'
    model = toy_chat.scripted(call if method == "function_calling" else JSON)
    for schema in (tool, tool["function"]):
        structured = model.with_structured_output(schema, method=method)
        assert structured.invoke("Who?") == {"name": "Ann", "age": 3}
    answer = toy_chat.scripted("no", max_tokens=9).invoke("Who?", response_format=tool)
    assert answer.text.startswith("{")


def test_a_named_schema_is_its_schema() -> None:
    named: dict[str, Any] = {"name": "person", "schema": Person.model_json_schema()}
    model = toy_chat.scripted("5", max_tokens=9)
    structured = model.with_structured_output(named, include_raw=True)
    assert structured.invoke("Who?")["raw"].text.startswith("{")  # 5 would be any JSON
    described = {"type": "json_schema", "json_schema": {**named, "strict": True}}
    for form in (described, described["json_schema"]):
        named["schema"]["properties"]["name"]["not"] = {"type": "null"}
        with pytest.raises(ConfigurationError, match="strict=False"):
            toy_chat.scripted().with_structured_output(form).invoke("Who?")
        lenient: Any = toy_chat.scripted(JSON).with_structured_output(form, strict=False)
        assert lenient.invoke("Who?") == {"name": "Ann", "age": 3}


@pytest.mark.parametrize("schema", [{"type": "object"}, {"type": "web_search"}, 5])
def test_what_no_tool_can_be_made_of_is_an_error_of_configuration(schema: Any) -> None:
    with pytest.raises(ConfigurationError, match="tool"):
        toy_chat.scripted().with_structured_output(schema, method="function_calling")


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([{"type": "web_search_preview"}], "a tool cannot be called None"),
        (["add"], "'add' cannot be described as a tool.*give a function"),
    ],
)
def test_wrong_tools_are_refused_when_they_are_bound_and_in_calls(
    tools: list[Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"(?s){message}"):
        toy_chat.scripted().bind_tools(tools)
    with pytest.raises(ConfigurationError, match=f"(?s){message}"):
        toy_chat.scripted().invoke("hi", tools=tools)


def test_tools_of_one_name_are_refused_in_calls() -> None:
    # LangChain's standard tests bind such ones.
    bound = toy_chat.scripted().bind_tools([add, add], tool_choice="add")
    with pytest.raises(ConfigurationError, match="several tools are called 'add'"):
        bound.invoke("hi")


@pytest.mark.parametrize("tool_choice", ["any", "add", "auto", "none"])
@pytest.mark.parametrize("after_result", [False, True])
def test_json_is_not_asked_for_where_a_tool_must_be_called(
    tool_choice: str, after_result: bool
) -> None:
    model = toy_chat.scripted()
    asked = Asked.taken_from(
        {"tools": [add], "tool_choice": tool_choice, "response_format": Person}
    )
    messages = [{"role": "user", "content": "1 + 2?"}]
    if after_result:
        messages += [{"role": "assistant", "content": "3"}, {"role": "tool", "content": "3"}]
    plan = AnswerPlan.of(asked, model, [toy_chat.engine_of(model)])
    told = str(plan.prompt(messages).messages)
    assert ("schema" in told) is (tool_choice == "none" or (tool_choice == "auto" and after_result))
    assert ("Answer with a call of" in told) is (tool_choice in ("any", "add"))


async def _streamed(model: Any) -> Any:
    chunks = [chunk async for chunk in model.astream("hi")]
    return sum(chunks[1:], start=chunks[0])


ROUTES: dict[str, Callable[[Any], Any]] = {
    "invoke": lambda model: model.invoke("hi"),
    "ainvoke": lambda model: asyncio.run(model.ainvoke("hi")),
    "stream=True": lambda model: model.invoke("hi", stream=True),
    "stream": lambda model: reduce(operator.add, model.stream("hi")),
    "astream": lambda model: asyncio.run(_streamed(model)),
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("thought", ["", "<think>Hm.</think>\n\n"])
def test_reasoning_text_and_calls_are_blocks_of_their_own(route: str, thought: str) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    model = toy_chat.scripted(f"{thought}Let me see.\n\n{call}\n{call}", output_version="v1")
    toy_chat.engine_of(model).template = "<think></think>"
    blocks: list[Any] = ROUTES[route](model.bind_tools([add])).content_blocks
    reasoning = ["reasoning"] if thought else []
    assert [block["type"] for block in blocks] == [*reasoning, "text", "tool_call", "tool_call"]
    assert blocks[-3]["text"] == "Let me see."
    assert [block["args"] for block in blocks[-2:]] == [{"a": 1, "b": 2}] * 2
