"""Forms of calls and reasoning, found out from chat templates, and histories rendered by them."""

from __future__ import annotations

from pathlib import Path

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage

from specguard_chains.messages import to_template
from specguard_chains.templates import ChatTemplate
from specguard_chains.tools.formats import (
    HERMES,
    LLAMA3,
    MISTRAL,
    MISTRAL_NAMED,
    ReasoningTags,
    ToolFormat,
    detect,
    reasoning_tags,
    renders_tools,
)

FOLDER = Path(__file__).parent / "templates"
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}
ID = "abcdefgh1"


def source(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


def history(*names: str) -> list[BaseMessage]:
    """A question, calls of these tools, and their results."""
    calls = [
        {"name": name, "args": {"a": 1, "ort": "Köln"}, "id": ID[:-1] + str(i)}
        for i, name in enumerate(names, start=1)
    ]
    results = [ToolMessage("3", tool_call_id=call["id"], name=call["name"]) for call in calls]
    return [HumanMessage("1 + 2?"), AIMessage("", tool_calls=calls), *results]


def rendered(name: str, messages: list[BaseMessage]) -> str:
    template = ChatTemplate(source(name), "<s>", "</s>")
    return template.render(to_template(messages), [TOOL])


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("qwen2.5", HERMES),
        ("qwen3", HERMES),
        ("qwq", HERMES),
        ("hermes", HERMES),
        ("llama3", LLAMA3),
        ("mistral", MISTRAL),
        ("mistral-named", MISTRAL_NAMED),
        ("smollm2", HERMES),
        ("deepseek-r1", HERMES),
    ],
)
def test_the_form_of_calls_is_found_in_the_template(name: str, form: ToolFormat) -> None:
    assert detect(source(name)) is form


def test_without_a_template_calls_have_the_usual_form() -> None:
    assert detect(None) is detect("") is HERMES


@pytest.mark.parametrize(
    "mark",
    ["'[TOOL_CALLS]' + tool_call.function.name", "'[TOOL_CALLS]' ~ call['function']['name']"],
)
def test_a_name_after_the_mark_is_seen_in_any_spelling(mark: str) -> None:
    assert detect("{{- " + mark + " }}") is MISTRAL_NAMED
    assert detect("{{- '[TOOL_CALLS][' }}{{- tool_calls }}") is MISTRAL


def test_templates_that_know_no_tools_are_told_from_those_that_do() -> None:
    assert not any(map(renders_tools, [None, "", source("smollm2"), source("deepseek-r1")]))
    assert all(renders_tools(source(name)) for name in ("qwen2.5", "llama3", "mistral", "hermes"))
    assert not renders_tools("{% set tools = [] %}{{ tools }}")
    assert not renders_tools("{{ tools | length }}")
    assert not renders_tools("{% for %}")  # a broken one is reported where it is rendered


@pytest.mark.parametrize(
    ("name", "tags"),
    [
        ("qwen2.5", None),
        ("qwen3", ReasoningTags()),
        ("qwq", ReasoningTags(opened=True)),
        ("deepseek-r1", ReasoningTags(opened=True)),
        ("mistral", None),
    ],
)
def test_reasoning_marks_are_found_in_the_template(name: str, tags: ReasoningTags | None) -> None:
    assert reasoning_tags(source(name)) == tags


def test_other_reasoning_marks() -> None:
    assert reasoning_tags(None) is None
    assert reasoning_tags("{{ '[/THINK]' }}") == ReasoningTags("[THINK]", "[/THINK]")
    assert reasoning_tags("{{ raise_exception('</think>') }}") == ReasoningTags()


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3"])
def test_qwen_renders_calls_and_results(name: str) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "ort": "Köln"}}\n</tool_call>'
    text = rendered(name, history("add", "add"))
    assert text.count(call) == 2
    assert text.count("<tool_response>\n3\n</tool_response>") == 2
    assert text.endswith("<|im_start|>assistant\n")


def test_hermes_renders_calls_and_results() -> None:
    text = rendered("hermes", history("add"))
    assert '<tool_call>\n{ "arguments": {"a": 1, "ort": "Köln"}, "name": "add"}\n' in text
    assert '<tool_response>\n{"name": "add", "content": "3"}\n</tool_response>' in text


def test_llama_renders_a_call_and_its_result() -> None:
    text = rendered("llama3", history("add"))
    assert '{"name": "add", "parameters": {"a": 1, "ort": "Köln"}}<|eot_id|>' in text
    assert 'ipython<|end_header_id|>\n\n{"output": "3"}<|eot_id|>' in text


def test_mistral_renders_calls_with_ids() -> None:
    text = rendered("mistral", history("add", "add"))
    call = '{{"name": "add", "arguments": {{"a": 1, "ort": "Köln"}}, "id": "abcdefgh{}"}}'
    assert f"[TOOL_CALLS] [{call.format(1)}, {call.format(2)}]</s>" in text
    assert '[TOOL_RESULTS] {"content": 3, "call_id": "abcdefgh1"}[/TOOL_RESULTS]' in text


def test_newer_mistral_renders_the_name_before_the_arguments() -> None:
    text = rendered("mistral-named", history("add"))
    assert '[TOOL_CALLS]add[ARGS]{"a": 1, "ort": "Köln"}</s>[TOOL_RESULTS]3[' in text
