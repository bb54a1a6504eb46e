"""Steps in OpenTelemetry: where the events go, what they say, and what they keep to themselves."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
from langchain_core.tracers.schemas import Run
from opentelemetry import trace
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from specguard_chains.errors import ConfigurationError
from specguard_chains.telemetry import CAPTURE_VARIABLE, EVENT_NAME, OTelStepHandler
from tests.unit_tests import routes, toy_chat
from tests.unit_tests.routes import MODELS, ROUTES, SHAPES, prompts

pytestmark = [
    pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning"),
    pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainDeprecationWarning"),
]


class Telemetry:
    """An OpenTelemetry that keeps what it is told."""

    def __init__(self) -> None:
        self._spans, self._logs = InMemorySpanExporter(), InMemoryLogRecordExporter()
        self.traces, self.logs = TracerProvider(), LoggerProvider()
        self.traces.add_span_processor(SimpleSpanProcessor(self._spans))
        self.logs.add_log_record_processor(SimpleLogRecordProcessor(self._logs))

    def handler(self, **options: Any) -> OTelStepHandler:
        return OTelStepHandler(tracer_provider=self.traces, logger_provider=self.logs, **options)

    def span(self, name: str = "request") -> AbstractContextManager[trace.Span]:
        return self.traces.get_tracer("test").start_as_current_span(name)

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self._spans.get_finished_spans()

    @property
    def records(self) -> list[Any]:
        return [data.log_record for data in self._logs.get_finished_logs()]


@pytest.fixture
def telemetry(monkeypatch: pytest.MonkeyPatch) -> Telemetry:
    monkeypatch.delenv(CAPTURE_VARIABLE, raising=False)
    return Telemetry()


def numbers(span: ReadableSpan) -> list[Any]:
    assert {event.name for event in span.events} <= {EVENT_NAME}
    return [(event.attributes or {})["specguard.step.number"] for event in span.events]


# Where events go


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("shape", ["top", "LCEL", "graph"])  # where contexts are passed on anew
@pytest.mark.parametrize("model", MODELS)
def test_steps_are_events_of_the_current_span(
    model: str, shape: str, route: str, telemetry: Telemetry
) -> None:
    if route.endswith("events_v3") and routes.without_v3(model, shape):
        return
    config: Any = {"callbacks": [telemetry.handler()]}
    with telemetry.span():
        ROUTES[route](SHAPES[shape](MODELS[model]()), routes.value(shape), config)
    (span,) = telemetry.spans
    assert span.name == "request"
    assert sorted(numbers(span)) == sorted([1, 2, 3] * prompts(route))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("model", MODELS)
def test_without_a_current_span_each_run_has_its_own(
    model: str, route: str, telemetry: Telemetry
) -> None:
    if route.endswith("events_v3") and routes.without_v3(model, "top"):
        return
    ROUTES[route](MODELS[model](), "hi", {"callbacks": [telemetry.handler()]})
    assert len(telemetry.spans) == prompts(route)
    for span in telemetry.spans:
        operation = "chat" if model == "chat" else "text_completion"
        assert span.parent is None
        assert span.name == f"{operation} toy-draft + toy-target"
        assert numbers(span) == [1, 2, 3]
        assert span.start_time and span.end_time
        assert span.start_time <= span.events[0].timestamp <= span.end_time
        attributes = span.attributes or {}
        assert attributes["gen_ai.operation.name"] == operation
        assert attributes["gen_ai.provider.name"] == "specguard"
        assert attributes["gen_ai.request.model"] == "toy-draft + toy-target"
        assert attributes["gen_ai.usage.output_tokens"] == 8
        assert attributes["gen_ai.response.finish_reasons"] == ("stop",)
        assert span.status.status_code is trace.StatusCode.UNSET


def test_own_spans_lie_below_the_current_one(telemetry: Telemetry) -> None:
    with telemetry.span():
        routes.chat().batch(["a", "b"], {"callbacks": [telemetry.handler(own_span=True)]})
    *own, request = telemetry.spans
    assert not request.events
    assert [numbers(span) for span in own] == [[1, 2, 3]] * 2
    assert {span.parent.span_id for span in own if span.parent} == {request.context.span_id}


@pytest.mark.parametrize("own_span", [False, True])
@pytest.mark.parametrize("route", ["invoke", "stream", "ainvoke", "astream"])
def test_logs_belong_to_the_span(route: str, own_span: bool, telemetry: Telemetry) -> None:
    handler = telemetry.handler(events="log", own_span=own_span)
    with telemetry.span():
        ROUTES[route](routes.chat(), "hi", {"callbacks": [handler]})
    span = telemetry.spans[0]
    assert not span.events
    assert {record.event_name for record in telemetry.records} == {EVENT_NAME}
    assert [record.attributes["specguard.step.number"] for record in telemetry.records] == [1, 2, 3]
    assert {record.span_id for record in telemetry.records} == {span.context.span_id}
    assert {record.trace_id for record in telemetry.records} == {span.context.trace_id}
    assert all(record.timestamp for record in telemetry.records)


def test_a_run_that_fails_says_so_on_its_own_span(telemetry: Telemetry) -> None:
    class Strict(routes.Handler):
        raise_error = True

        def on_custom_event(self, name: str, data: Any, **_: Any) -> None:
            raise RuntimeError("secret words")

    handler = telemetry.handler()
    with pytest.raises(RuntimeError):
        routes.chat().invoke("hi", {"callbacks": [handler, Strict()]})
    (span,) = telemetry.spans
    assert span.status.status_code is trace.StatusCode.ERROR
    assert (span.attributes or {})["error.type"] == "RuntimeError"
    assert "secret" not in span.to_json()
    assert not handler._runs


@pytest.mark.parametrize("asynchronous", [False, True])
def test_who_leaves_early_leaves_no_span_open(asynchronous: bool, telemetry: Telemetry) -> None:
    handler = telemetry.handler()

    async def leave() -> None:
        async for _ in routes.chat().astream("hi", {"callbacks": [handler]}):
            break

    if asynchronous:
        asyncio.run(leave())
    else:
        for _ in routes.chat().stream("hi", {"callbacks": [handler]}):
            break
    (span,) = telemetry.spans
    assert numbers(span) == [1]
    assert not handler._runs


def test_what_is_not_sampled_is_not_reported_elsewhere(telemetry: Telemetry) -> None:
    remote = trace.SpanContext(1, 2, is_remote=True, trace_flags=trace.TraceFlags(0))
    with trace.use_span(trace.NonRecordingSpan(remote)):
        routes.chat().invoke("hi", {"callbacks": [telemetry.handler()]})
    assert not telemetry.spans


# What events say


def attributes_of(telemetry: Telemetry, model: Any = None, **options: Any) -> Iterator[Any]:
    (model or routes.chat()).invoke("hi", {"callbacks": [telemetry.handler(**options)]})
    return (event.attributes for event in telemetry.spans[-1].events)


def test_an_event_follows_the_conventions(telemetry: Telemetry) -> None:
    runs: list[Run] = []
    model = routes.chat().with_listeners(on_end=runs.append)
    accepted, rejected, _ = attributes_of(telemetry, model)
    assert accepted["gen_ai.evaluation.name"] == "specguard.verify_step"
    assert accepted["gen_ai.evaluation.score.label"] == "accepted"
    assert 0.5 <= accepted["gen_ai.evaluation.score.value"] <= 1
    assert "at least 0.5; written by the draft" in accepted["gen_ai.evaluation.explanation"]
    assert rejected["gen_ai.evaluation.score.label"] == "rejected"
    assert rejected["gen_ai.evaluation.score.value"] < 0.5
    explanation = rejected["gen_ai.evaluation.explanation"]
    assert "at most" in explanation
    assert "below 0.5; written by the target" in explanation
    assert accepted["specguard.run_id"] == str(runs[0].id)
    assert accepted["specguard.step.source"] == "draft"
    assert rejected["specguard.step.source"] == "target"
    assert accepted["specguard.step.tokens"] == 3
    assert "specguard.step.grounding" not in accepted, "confidence alone decides here"


def test_a_step_that_nobody_verified_has_no_score(telemetry: Telemetry) -> None:
    for attributes in attributes_of(telemetry, toy_chat.scripted()):
        assert attributes["gen_ai.evaluation.score.label"] == "unverified"
        assert "gen_ai.evaluation.score.value" not in attributes
        assert attributes["gen_ai.evaluation.explanation"] == "written by the target, not verified"


def test_a_value_is_told_and_a_step_that_is_only_rated_has_no_verdict(telemetry: Telemetry) -> None:
    def rate(messages: Any, steps: list[str]) -> float:
        return 1 / len(steps)

    judged = routes.chat(decoder="rsd", reward_model=rate, temperature=0)
    values = []
    for attributes in attributes_of(telemetry, judged):
        values.append(attributes["specguard.step.value"])
        relation = "at least" if values[-1] >= 0.5 else "below"
        assert relation in attributes["gen_ai.evaluation.explanation"]
    assert values == [1, 1 / 2, 1 / 3]
    rated = routes.chat(decoder="draft-best-of-n", reward_model=rate, num_samples=2)
    *before, last = attributes_of(telemetry, rated)
    assert last["specguard.step.value"] == last["gen_ai.evaluation.score.value"]
    assert not any("specguard.step.value" in attributes for attributes in before)
    for attributes in [*before, last]:
        assert attributes["gen_ai.evaluation.score.label"] == "unverified"
        assert "specguard.step.threshold" not in attributes
        assert attributes["gen_ai.evaluation.explanation"] == "written by the draft, not verified"


# Content


@pytest.mark.parametrize(
    ("variable", "events", "expected"),
    [
        (None, "span", False),
        (None, "log", False),
        ("", "span", False),
        ("false", "span", False),
        ("NO_CONTENT", "log", False),
        ("true", "span", True),
        ("True", "log", True),
        ("SPAN_ONLY", "span", True),
        ("SPAN_ONLY", "log", False),
        ("EVENT_ONLY", "span", False),
        ("EVENT_ONLY", "log", True),
        ("span_and_event", "span", True),
        ("span_and_event", "log", True),
    ],
)
def test_the_environment_decides_about_content(
    variable: str | None,
    events: Any,
    expected: bool,
    telemetry: Telemetry,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if variable is not None:
        monkeypatch.setenv(CAPTURE_VARIABLE, variable)
    for given, captured in ((None, expected), (True, True), (False, False)):
        telemetry = Telemetry()
        handler = telemetry.handler(events=events, capture_content=given)
        routes.chat().invoke("hi", {"callbacks": [handler]})
        found = (
            [event.attributes for event in telemetry.spans[0].events]
            if events == "span"
            else [record.attributes for record in telemetry.records]
        )
        texts = [attributes.get("specguard.step.text") for attributes in found]
        assert texts == (list(routes.STEPS) if captured else [None] * 3)


def test_an_unknown_value_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CAPTURE_VARIABLE, "perhaps")
    with pytest.raises(ConfigurationError, match=r"'perhaps' is not known; .* span_and_event"):
        OTelStepHandler()
    OTelStepHandler(capture_content=False)
    with pytest.raises(ConfigurationError, match="not 'both'"):
        OTelStepHandler(events="both")  # type: ignore[arg-type]


def test_without_an_sdk_nothing_happens() -> None:
    assert routes.chat().invoke("hi", {"callbacks": [OTelStepHandler()]}).text == "a\n\nb\n\nc"


def test_without_opentelemetry_the_handler_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['opentelemetry'] = None;"
        "from specguard_chains.telemetry import OTelStepHandler; OTelStepHandler()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "ImportError: OTelStepHandler needs OpenTelemetry: pip install" in done.stderr
