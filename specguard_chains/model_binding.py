"""What is bound to a model: any options of its calls, and to a chat model tools and forms."""

from __future__ import annotations

import builtins
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, cast

from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage
from langchain_core.runnables import Runnable, RunnableBinding
from langchain_core.tools import BaseTool

from specguard_chains.asked import Asked, described
from specguard_chains.decoding.steps import Step
from specguard_chains.step_parser import StepSource
from specguard_chains.structured_output import Method, structured


class BindsTools:
    """A base of runnables whose `bind` takes tools and response formats."""

    def bind_tools(
        self,
        tools: Sequence[builtins.dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: builtins.dict[str, Any] | str | bool | None = None,
        strict: bool | None = None,
        parallel_tool_calls: bool | None = None,
        response_format: Any = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Return the model with tools that it may call.

        Calls are held to the tools' names and JSON schemas while they are written, in both models.

        Args:
            tools: Functions, tools, pydantic classes, or their descriptions as OpenAI has them.
            tool_choice: "auto" (the model decides, the default), "any" or "required" or True (at
                least one call), a tool's name, or "none"; OpenAI's mappings are taken too.
            strict: True refuses a schema that cannot be enforced in full; else it is enforced as
                far as it can.
            parallel_tool_calls: False allows one call at a time.
            response_format: What an answer without calls must look like; see `ResponseFormat`.
            kwargs: Further options of the calls.

        Raises:
            ConfigurationError: A tool or choice is wrong.
        """
        bound: builtins.dict[str, Any] = {
            "tools": described(tools, strict=strict),
            "tool_choice": tool_choice,
            "strict": strict,
            "parallel_tool_calls": parallel_tool_calls,
            "response_format": response_format,
        }
        bound = {name: value for name, value in bound.items() if value is not None}
        # Wrong values are refused here rather than in every call; tools of one name only there, as
        # LangChain's standard tests bind such ones.
        named = {tool["function"]["name"]: tool for tool in bound["tools"]}
        Asked.taken_from({**bound, "tools": named.values()})
        if "tools" in getattr(self, "kwargs", {}):  # other tools, among which was chosen
            bound.setdefault("tool_choice", None)
        bind = cast("Any", self).bind
        return cast("Runnable[LanguageModelInput, AIMessage]", bind(**bound, **kwargs))

    def with_structured_output(
        self,
        schema: builtins.dict[str, Any] | type | None = None,
        *,
        include_raw: bool = False,
        method: Method = "json_schema",
        strict: bool | None = None,
        reason_first: bool = False,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Return the model with answers of a given form, to which they are held while written.

        Args:
            schema: A pydantic class (gives its instances), a TypedDict, a JSON schema or OpenAI's
                description of a function (give dicts).
            include_raw: Return {"raw": message, "parsed": …, "parsing_error": …}.
            method: "json_schema" (the answer is JSON), "function_calling" (the answer is a call of
                one tool), or "json_mode" (any JSON object; the prompt must say which).
            strict: True refuses a schema that cannot be enforced in full; else it is enforced as
                far as it can.
            reason_first: Let the model reason in free, verified steps before the JSON; they are
                the message's reasoning. Not with "function_calling".
            kwargs: Further options of the calls.

        Raises:
            ConfigurationError: The schema or the method is wrong.
        """
        return structured(
            self,
            schema,
            method=method,
            include_raw=include_raw,
            strict=strict,
            reason_first=reason_first,
            options=kwargs,
        )


class StepsBinding(RunnableBinding[Any, Any]):
    """A model with options bound to it, which also count in the steps of its answers.

    LangChain's own binding hands methods that it does not have to the bare model, without them.
    """

    def steps(self, input: LanguageModelInput, **overrides: Any) -> Iterator[Step]:
        """Yield the verified steps of an answer; no callbacks are called."""
        model = cast("Any", self.bound)
        return cast("Iterator[Step]", model.steps(input, **{**self.kwargs, **overrides}))

    def asteps(self, input: LanguageModelInput, **overrides: Any) -> AsyncIterator[Step]:
        """Yield the verified steps of an answer; no callbacks are called."""
        model = cast("Any", self.bound)
        return cast("AsyncIterator[Step]", model.asteps(input, **{**self.kwargs, **overrides}))

    @classmethod
    def lc_id(cls) -> list[str]:
        """Return the id of LangChain's own class: what is stored is the same."""
        return RunnableBinding.lc_id()


class ModelBinding(StepSource, BindsTools, StepsBinding):
    """A chat model with options bound to it, which also count in what is made of the binding."""
