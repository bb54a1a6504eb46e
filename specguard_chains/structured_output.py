"""A model whose answers come as Python objects: `ChatSpecGuard.with_structured_output`."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from typing import Any, Literal, get_args
from uuid import uuid4

from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage
from langchain_core.messages.tool import tool_call
from langchain_core.output_parsers import (
    BaseOutputParser,
    JsonOutputKeyToolsParser,
    JsonOutputParser,
    PydanticOutputParser,
    PydanticToolsParser,
)
from langchain_core.outputs import Generation
from langchain_core.runnables import (
    Runnable,
    RunnableLambda,
    RunnableMap,
    RunnablePassthrough,
)
from langchain_core.utils.pydantic import is_basemodel_subclass

from specguard_chains.asked import described
from specguard_chains.errors import ConfigurationError
from specguard_chains.response_format import ResponseFormat
from specguard_chains.tools.json_scanner import json_region
from specguard_chains.tools.parts import Text
from specguard_chains.tools.reader import AnswerReader
from specguard_chains.tools.structured import Structure

Method = Literal["json_schema", "function_calling", "json_mode"]
JSON_OBJECT = {"type": "json_object"}


def structured(
    model: Any,
    schema: Mapping[str, Any] | type | None,
    *,
    method: Method,
    include_raw: bool,
    strict: bool | None,
    reason_first: bool,
    options: Mapping[str, Any],
) -> Runnable[LanguageModelInput, Any]:
    """See `ChatSpecGuard.with_structured_output`."""
    if method not in get_args(Method):
        raise ConfigurationError(f"method={method!r} is none of {', '.join(get_args(Method))}")
    if schema is None and method != "json_mode":
        raise ConfigurationError(f"method={method!r} needs a schema; give one, or use 'json_mode'")
    if reason_first and method == "function_calling":
        raise ConfigurationError("reason_first=True needs method='json_schema' or 'json_mode'")
    traced = {"kwargs": {"method": method, "strict": strict}, "schema": schema}
    shown = {"ls_structured_output_format": traced}
    if method == "function_calling":
        llm, parser = _by_call(model, schema, strict, {**options, **shown})
    else:
        response_format = JSON_OBJECT if method == "json_mode" else _described(schema, strict)
        given = {"response_format": response_format, "strict": strict, "reason_first": reason_first}
        given = {name: value for name, value in given.items() if value is not None}
        ResponseFormat.of(response_format, reason_first=reason_first)
        llm, parser = model.bind(**given, **options, **shown), _json_parser(schema)
    return _with_raw(llm, parser) if include_raw else llm | parser


def _by_call(
    model: Any, schema: Any, strict: bool | None, options: Mapping[str, Any]
) -> tuple[Runnable[LanguageModelInput, Any], Runnable[Any, Any]]:
    """Return the model that is made to call one tool, and what reads the call."""
    (tool,) = described([schema])
    name = tool["function"]["name"]
    llm = model.bind_tools(
        [schema], tool_choice=name, parallel_tool_calls=False, strict=strict, **options
    )
    parser: BaseOutputParser[Any] = (
        PydanticToolsParser(tools=[schema], first_tool_only=True)
        if _is_pydantic(schema)
        else JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)
    )
    return llm, RunnableLambda(partial(_with_call, name=name)) | parser


def _with_call(message: AIMessage, name: str) -> AIMessage:
    """Return a message with a call: of the tool that was meant, if the model wrote only JSON.

    Raises:
        OutputParserException: It has none; LangChain's parsers would say nothing.
    """
    if message.tool_calls:
        return message
    reader = AnswerReader(structure=Structure.REASONED)
    parts = reader.add(message.text, last=True)
    text = "".join(part.text for part in parts if isinstance(part, Text))
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        said = message.invalid_tool_calls or message.text
        raise OutputParserException(
            f"the model has called no tool; it wrote {said!r} and ended by "
            f"{message.response_metadata.get('finish_reason')!r}",
            llm_output=message.text,
        )
    return message.model_copy(
        update={"tool_calls": [tool_call(name=name, args=arguments, id=f"call_{uuid4().hex}")]}
    )


def _described(schema: Any, strict: bool | None) -> dict[str, Any]:
    """Return OpenAI's description of an answer in JSON: plain values, for traces and caches."""
    form = ResponseFormat.of(schema)
    name = getattr(schema, "__name__", None) or form.schema.get("title") or "answer"
    description: dict[str, Any] = {"name": str(name), "schema": dict(form.schema)}
    strict = form.strict if strict is None else strict
    if strict is not None:
        description["strict"] = strict
    return {"type": "json_schema", "json_schema": description}


def _json_parser(schema: Any) -> BaseOutputParser[Any]:
    if _is_pydantic(schema):
        return _WholeModelParser(pydantic_object=schema)
    return _WholeJsonParser()


class _WholeJsonParser(JsonOutputParser):
    """Reads JSON that is complete: LangChain's own parser completes what is cut off."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        _refuse_cut_off(result[0], partial=partial)
        with _typed_errors(result[0]):
            return super().parse_result(result, partial=partial)


class _WholeModelParser(PydanticOutputParser[Any]):
    """The same for a class."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        _refuse_cut_off(result[0], partial=partial)
        with _typed_errors(result[0]):
            return super().parse_result(result, partial=partial)


def _refuse_cut_off(generation: Generation, *, partial: bool) -> None:
    """Refuse an answer that has ended before its JSON.

    Args:
        generation: The answer so far.
        partial: More may come, unless the message says how it has ended.

    Raises:
        OutputParserException: The JSON is not complete and never will be.
    """
    message = getattr(generation, "message", None)
    finish = message.response_metadata.get("finish_reason") if message else None
    text = generation.text.strip()
    if (partial and finish is None) or not text.startswith(("{", "[")):
        return
    if json_region(text, 0, last=False) is None:
        raise OutputParserException(
            f"the answer ended ({finish}) before its JSON was complete: {text!r}; raise max_tokens "
            "or leave out stop strings",
            llm_output=text,
        )


@contextmanager
def _typed_errors(generation: Generation) -> Iterator[None]:
    """Turn Python's error about JSON that is nested too deep into the parsers' own."""
    try:
        yield
    except RecursionError as error:
        text = generation.text
        raise OutputParserException(
            f"the answer's JSON is nested too deep to be read: {text[:80]!r}…", llm_output=text
        ) from error


def _is_pydantic(schema: Any) -> bool:
    return inspect.isclass(schema) and is_basemodel_subclass(schema)


def _with_raw(
    llm: Runnable[LanguageModelInput, Any], parser: Runnable[Any, Any]
) -> Runnable[LanguageModelInput, Any]:
    """Return the message too, and an error of the parser in place of raising it."""
    parsed = RunnablePassthrough.assign(
        parsed=itemgetter("raw") | parser, parsing_error=lambda _: None
    )
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=llm) | parsed.with_fallbacks([failed], exception_key="parsing_error")
