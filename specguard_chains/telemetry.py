"""Verified steps in OpenTelemetry: each is an event `gen_ai.evaluation.result`.

The event is the one of the semantic conventions for generative AI (in development there): the
evaluation is the verification of a step, its score the step's score and its label the verdict.
What a step says is left out unless it is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from time import time_ns
from typing import Any, Literal, get_args
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.outputs import LLMResult

from specguard_chains.callbacks import EVENT
from specguard_chains.errors import ConfigurationError
from specguard_chains.step_runs import NAME, PlainStep

EVENT_NAME = "gen_ai.evaluation.result"
"""The event's name in OpenTelemetry."""

CAPTURE_VARIABLE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
"""The environment variable that decides about content where the handler is not told."""

Channel = Literal["span", "log"]
"""Where events go: onto spans, or into logs that belong to spans."""

_CAPTURED: Mapping[str, frozenset[Channel]] = {
    "": frozenset(),
    "false": frozenset(),
    "no_content": frozenset(),
    "true": frozenset({"span", "log"}),
    "span_only": frozenset({"span"}),
    "event_only": frozenset({"log"}),
    "span_and_event": frozenset({"span", "log"}),
}


@dataclass(slots=True)
class _Run:
    """A run of a model while it lasts."""

    start_ns: int = field(default_factory=time_ns)
    span: Any = None
    """Its own span, if it has needed one."""


class OTelStepHandler(BaseCallbackHandler):
    """Reports each verified step to OpenTelemetry.

    Use it as `llm.invoke(question, {"callbacks": [OTelStepHandler()]})`; it needs
    `pip install "specguard_chains[otel]"`. Events belong to the current span; a run of a model
    that has none around it gets a span of its own.
    """

    def __init__(
        self,
        *,
        events: Channel = "span",
        own_span: bool = False,
        capture_content: bool | None = None,
        tracer_provider: Any = None,
        logger_provider: Any = None,
    ) -> None:
        """Report to the global providers of OpenTelemetry, or to those that are given.

        Args:
            events: "span" adds events to spans, which every backend shows; "log" emits them as
                logs within the span, which is what OpenTelemetry recommends to new code.
            own_span: Give every run of a model a span of its own, below the current one.
            capture_content: Whether events tell the step's text; None leaves it to the environment
                variable OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT, and to no if unset.
            tracer_provider: Where own spans come from.
            logger_provider: Where logs go.

        Raises:
            ConfigurationError: `events` or the environment variable has an unknown value.
            ImportError: OpenTelemetry is not installed.
        """
        trace = _api()
        if events not in get_args(Channel):
            raise ConfigurationError(f"events must be 'span' or 'log', not {events!r}")
        self._trace = trace
        self._tracer = trace.get_tracer(__name__, tracer_provider=tracer_provider)
        self._logger = _logger(logger_provider) if events == "log" else None
        self._own_span = own_span
        self._capture = _captures(events) if capture_content is None else capture_content
        self._runs: dict[UUID, _Run] = {}

    def on_chat_model_start(
        self, serialized: dict[str, Any], messages: Any, *, run_id: UUID, **kwargs: Any
    ) -> None:
        """Remember when a chat model began."""
        self._runs[run_id] = _Run()

    def on_llm_start(
        self, serialized: dict[str, Any], prompts: list[str], *, run_id: UUID, **kwargs: Any
    ) -> None:
        """Remember when a plain LLM began."""
        self._runs[run_id] = _Run()

    def on_custom_event(
        self,
        name: str,
        data: Any,
        *,
        run_id: UUID,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Report a step."""
        if name != EVENT:
            return
        attributes = dict(_attributes(data, run_id, self._capture))
        span = self._span(run_id, metadata or {})
        if self._logger is None:
            span.add_event(EVENT_NAME, attributes)
        else:
            context = self._trace.set_span_in_context(span)
            self._logger.emit(
                event_name=EVENT_NAME, attributes=attributes, context=context, timestamp=time_ns()
            )

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        """End the run's own span."""
        run = self._runs.pop(run_id, None)
        if run is not None and run.span is not None:
            run.span.set_attributes(dict(_usage(response)))
            run.span.end()

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """End the run's own span; the error's words stay out of it, as they may be content."""
        run = self._runs.pop(run_id, None)
        if run is not None and run.span is not None:
            run.span.set_attribute("error.type", type(error).__qualname__)
            run.span.set_status(self._trace.StatusCode.ERROR)
            run.span.end()

    def _span(self, run_id: UUID, metadata: Mapping[str, Any]) -> Any:
        """Return the span that the run's events belong to."""
        current = self._trace.get_current_span()
        if current.get_span_context().is_valid and not self._own_span:
            return current
        run = self._runs.setdefault(run_id, _Run())
        if run.span is None:
            model = str(metadata.get("ls_model_name", "specguard"))
            chat = metadata.get("ls_model_type", "chat") == "chat"
            operation = "chat" if chat else "text_completion"
            run.span = self._tracer.start_span(
                f"{operation} {model}",
                start_time=run.start_ns,
                attributes={
                    "gen_ai.operation.name": operation,
                    "gen_ai.provider.name": "specguard",
                    "gen_ai.request.model": model,
                },
            )
        return run.span


def _api() -> Any:
    try:
        from opentelemetry import trace
    except ImportError as error:
        raise ImportError(
            "OTelStepHandler needs OpenTelemetry: pip install 'specguard_chains[otel]'"
        ) from error
    return trace


def _logger(provider: Any) -> Any:
    from opentelemetry._logs import get_logger

    return get_logger(__name__, logger_provider=provider)


def _captures(events: Channel) -> bool:
    """Return whether the environment lets content go where the events go."""
    value = os.environ.get(CAPTURE_VARIABLE, "")
    try:
        return events in _CAPTURED[value.strip().lower()]
    except KeyError as error:
        known = ", ".join(filter(None, _CAPTURED))
        raise ConfigurationError(
            f"{CAPTURE_VARIABLE}={value!r} is not known; set it to one of {known}, or give "
            "capture_content"
        ) from error


def _attributes(step: PlainStep, run_id: UUID, capture: bool) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a step's event; what is not known is left out."""
    yield "gen_ai.evaluation.name", NAME
    yield "gen_ai.evaluation.score.label", step["verdict"]
    yield "gen_ai.evaluation.explanation", _explanation(step)
    yield "specguard.run_id", str(run_id)  # part of the id that LangChain gives the message
    if step["score"] is not None:
        yield "gen_ai.evaluation.score.value", step["score"]
    for key in ("number", "source", "phase", "threshold", "confidence", "grounding", "value"):
        if step[key] is not None:
            yield f"specguard.step.{key}", step[key]
    yield "specguard.step.candidates", step["num_candidates"]
    yield "specguard.step.tokens", step["answer_tokens"]
    yield "specguard.step.seconds", sum(step["seconds"].values())
    if capture:
        yield "specguard.step.text", step["text"]


def _explanation(step: PlainStep) -> str:
    """Return why the step has its verdict, without saying what is in it."""
    if step["verdict"] == "unverified" or step["score"] is None or step["threshold"] is None:
        return f"written by the {step['source']}, not verified"
    relation = "at least" if step["verdict"] == "accepted" else "below"
    bound = "at most " if step["rejected_early"] else ""
    score = f"the draft's score of {bound}{step['score']:.3g}"
    return f"{score} is {relation} {step['threshold']:.3g}; written by the {step['source']}"


def _usage(response: LLMResult) -> Iterator[tuple[str, Any]]:
    """Yield what is known about the complete answer."""
    generation = response.generations[0][0]
    message = getattr(generation, "message", None)
    info = generation.generation_info or {} if message is None else message.response_metadata
    usage = info.get("usage_metadata") if message is None else message.usage_metadata
    for side in ("input_tokens", "output_tokens"):
        if usage:
            yield f"gen_ai.usage.{side}", usage[side]
    if reason := info.get("finish_reason"):
        yield "gen_ai.response.finish_reasons", [reason]
