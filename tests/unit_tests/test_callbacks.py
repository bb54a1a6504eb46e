"""Step events: on every route, for every handler, once each, as events of the model's own run."""

import asyncio
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import CallbackManager, get_usage_metadata_callback
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda
from langchain_core.tracers.run_collector import RunCollectorCallbackHandler

from specguard_chains import callbacks
from specguard_chains.callbacks import LangGraphStepWriter
from specguard_chains.telemetry import OTelStepHandler
from tests.unit_tests import routes, toy_chat
from tests.unit_tests.routes import (
    ASYNC,
    MODELS,
    MODELS_IN_SHAPES,
    ROUTES,
    SHAPES,
    AsyncHandler,
    Handler,
    Log,
    collect,
    passed,
    prompts,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning"),
    pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainDeprecationWarning"),
]

HandlerType = type[Handler] | type[AsyncHandler]


def check(log: Log, expected_runs: int) -> None:
    """Every run of the model has reported each of its three steps once, in order."""
    assert len(set(log.model_runs)) == len(log.model_runs) == expected_runs
    assert sorted(log.starts) in ([], sorted(log.model_runs))
    assert not log.errors
    for run_id in log.model_runs:
        assert log.numbers(run_id) == [1, 2, 3]
    assert len(log.events) == 3 * expected_runs
    for data, _, _, metadata in log.events:
        assert data["source"] == ("target" if data["number"] == 2 else "draft")
        assert {"ls_provider", "ls_model_name"} <= metadata.keys()


# The matrix: routes, shapes, handlers, models


@pytest.mark.parametrize("given", ["sync", "async", "constructor"])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("model", "shape"), MODELS_IN_SHAPES)
def test_peers_074_every_step_arrives_once_on_every_route(
    model: str, shape: str, route: str, given: str
) -> None:
    handler: Any = AsyncHandler() if given == "async" else Handler()
    own = given == "constructor"
    runnable = SHAPES[shape](MODELS[model](callbacks=[handler] if own else None))
    config = {} if own else RunnableConfig(callbacks=[handler], tags=["t"], metadata={"k": 1})
    if route.endswith("events_v3") and routes.without_v3(model, shape):
        with pytest.raises(NotImplementedError, match="v3"):
            ROUTES[route](runnable, routes.value(shape), config)
        return
    ROUTES[route](runnable, routes.value(shape), config)
    check(handler.log, prompts(route))
    for _, _, tags, metadata in handler.log.events:
        assert own or metadata["k"] == 1
        assert own or "t" in tags


@pytest.mark.parametrize("handler_type", [Handler, AsyncHandler])
@pytest.mark.parametrize("route", ["generate", "agenerate", "generate_prompt", "agenerate_prompt"])
@pytest.mark.parametrize("model", MODELS)
def test_every_prompt_of_generate_has_its_own_events(
    model: str, route: str, handler_type: HandlerType
) -> None:
    handler, asked = handler_type(), MODELS[model]()
    inputs: list[Any] = [asked._convert_input(text) for text in ("a", "b")]
    if not route.endswith("prompt"):
        inputs = [i.to_messages() if model == "chat" else i.to_string() for i in inputs]
    result = getattr(asked, route)(inputs, callbacks=[handler])
    if route.startswith("a"):
        asyncio.run(result)
    check(handler.log, 2)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("streaming", [True, False, None])
@pytest.mark.parametrize("model", MODELS)
def test_events_do_not_depend_on_whether_streaming_is_set(
    model: str, streaming: bool | None, route: str
) -> None:
    if route.endswith("events_v3") and routes.without_v3(model, "top"):
        return
    for options in ({"streaming": streaming}, {"disable_streaming": True}):
        if not options.keys() <= type(MODELS[model]()).model_fields.keys():
            continue
        handler = Handler()
        ROUTES[route](MODELS[model](**options), "hi", {"callbacks": [handler]})
        check(handler.log, prompts(route))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("model", MODELS)
def test_handlers_of_all_places_get_the_events_together(model: str, route: str) -> None:
    if route.endswith("events_v3") and routes.without_v3(model, "with_config"):
        return
    handlers: list[Any] = [Handler(), AsyncHandler(), Handler()]
    asked = MODELS[model](callbacks=[handlers[0]])
    bound = asked.with_config(callbacks=[handlers[1]])
    ROUTES[route](bound, "hi", {"callbacks": [handlers[2]]})
    for handler in handlers:
        check(handler.log, prompts(route))


@pytest.mark.parametrize("route", ["invoke", "stream", "astream"])
def test_a_ready_callback_manager_works_too_and_stays_as_it_is(route: str) -> None:
    handler = Handler()
    manager = CallbackManager([handler])
    for _ in range(2):
        ROUTES[route](routes.chat(), "hi", {"callbacks": manager})
    check(handler.log, 2)
    assert manager.handlers == [handler]


@pytest.mark.parametrize("route", ROUTES)
def test_an_answer_from_the_cache_was_reported_when_it_was_written(route: str) -> None:
    model, handler = routes.chat(cache=InMemoryCache(), seed=1), Handler()
    model.invoke("hi")
    ROUTES[route](model, "hi", {"callbacks": [handler]})
    from_cache = route.endswith(("invoke", "batch", "batch_as_completed"))  # LangChain's rule
    assert len(handler.log.events) == (0 if from_cache else 3)
    assert len(handler.log.model_runs) == prompts(route)


# Tokens, order, owners


def test_peers_003_and_005_every_chunk_is_one_new_token() -> None:
    handler = Handler()
    chunks = list(toy_chat.pair().stream("hi", {"callbacks": [handler]}))
    assert handler.log.tokens == len(chunks) == 4


@pytest.mark.parametrize("route", ["stream", "stream_events_v3"])
def test_peers_004_handlers_know_a_step_before_the_consumer(route: str) -> None:
    handler = Handler()
    model, config = toy_chat.pair(), RunnableConfig(callbacks=[handler])
    chunks: Iterator[Any] = (
        model.stream("hi", config)
        if route == "stream"
        else iter(model.stream_events("hi", config, version="v3"))
    )
    for chunk in chunks:
        text = chunk.text if route == "stream" else chunk.get("delta", {}).get("text", "")
        if text:
            handler.log.order.append(f"text {len([o for o in handler.log.order if 't ' in o])}")
    events = [entry for entry in handler.log.order if entry.startswith("event")]
    assert events == ["event 1", "event 2", "event 3"]
    assert handler.log.order[0] == "event 1"
    assert handler.log.order[-1].startswith("text")


def test_peers_075_events_belong_to_the_model_and_not_to_a_neighbour() -> None:
    collector, handler = RunCollectorCallbackHandler(), Handler()
    chain = RunnableLambda(passed) | toy_chat.pair() | RunnableLambda(passed)
    list(chain.stream("hi", {"callbacks": [collector, handler]}))
    (root,) = collector.traced_runs
    (model_run,) = [run for run in root.child_runs if run.run_type in ("llm", "chat_model")]
    assert {run_id for _, run_id, _, _ in handler.log.events} == {model_run.id}
    assert len(root.child_runs) == 3


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "a fallback"])
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_events_are_in_astream_events_with_the_run_of_the_model(shape: str, version: Any) -> None:
    runnable, value = SHAPES[shape](routes.chat()), routes.value(shape)
    events = asyncio.run(collect(runnable.astream_events(value, version=version)))
    custom = [event for event in events if event["event"] == "on_custom_event"]
    starts = {event["run_id"] for event in events if event["event"] == "on_chat_model_start"}
    if version == "v2":  # v1 knows no custom events
        assert [event["data"]["number"] for event in custom] == [1, 2, 3]
        assert {event["run_id"] for event in custom} == starts


def test_usage_is_counted_once() -> None:
    model = toy_chat.pair()
    with get_usage_metadata_callback() as usage:
        message = model.invoke("hi")
        list(model.stream("hi"))
    (total,) = usage.usage_metadata.values()
    assert message.usage_metadata
    assert total["output_tokens"] == 2 * message.usage_metadata["output_tokens"]


# Handlers that fail, ask and count


@pytest.mark.parametrize("route", ROUTES)
def test_a_handler_that_fails_does_not_stop_the_answer(
    route: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Handler):
        def on_custom_event(self, *_: Any, **__: Any) -> None:
            raise RuntimeError("broken handler")

    other = Handler()
    ROUTES[route](routes.chat(), "hi", {"callbacks": [Broken(), other]})
    assert "broken handler" in caplog.text
    check(other.log, prompts(route))


@pytest.mark.parametrize("route", ["invoke", "stream", "ainvoke", "astream"])
def test_a_handler_that_must_not_fail_ends_the_answer_and_the_model_goes_on(route: str) -> None:
    class Strict(Handler):
        raise_error = True

        def on_custom_event(self, *_: Any, **__: Any) -> None:
            raise RuntimeError("strict handler")

    model, other = routes.chat(), Handler()
    with pytest.raises(RuntimeError, match="strict handler"):
        ROUTES[route](model, "hi", {"callbacks": [Strict(), other]})
    assert model.invoke("hi").text == "a\n\nb\n\nc"
    assert other.log.errors == 1


def test_peers_063_async_handlers_of_async_routes_run_on_the_callers_loop() -> None:
    loops: set[int] = set()

    class Watching(AsyncHandler):
        async def on_custom_event(self, *_: Any, **__: Any) -> None:
            loops.add(id(asyncio.get_running_loop()))

    async def consume() -> int:
        config = RunnableConfig(callbacks=[Watching()])
        for route in ASYNC.values():
            await route(routes.chat(), "hi", config)
        return id(asyncio.get_running_loop())

    own = asyncio.run(consume())
    assert loops == {own}


async def test_langchain_hides_starts_of_plain_llms_from_handlers_beside_inline_ones() -> None:
    """Holds for core 1.8.3; the handlers of this package are therefore not inline."""

    class Inline(Handler):
        run_inline = True

    handler, inline = Handler(), Inline()
    await routes.llm().ainvoke("hi", {"callbacks": [handler, inline]})
    assert inline.log.starts
    assert not handler.log.starts
    check(handler.log, 1)
    assert not LangGraphStepWriter().run_inline
    assert not OTelStepHandler().run_inline


def test_a_handler_may_ask_the_same_model() -> None:
    model = toy_chat.pair()
    answers: list[str] = []

    class Asking(Handler):
        def on_custom_event(self, *_: Any, **__: Any) -> None:
            answers.append(model.invoke("what now?").text)

    for route in ("invoke", "stream"):
        ROUTES[route](model, "hi", {"callbacks": [Asking()]})
    assert len(answers) == 6


@pytest.mark.parametrize("route", ["stream", "astream"])
def test_what_is_known_of_a_run_is_forgotten_at_its_end(route: str) -> None:
    taps: list[Any] = []

    class Looking(Handler):
        def on_custom_event(self, *_: Any, **__: Any) -> None:
            kinds = (callbacks._Tap, callbacks._AsyncTap)
            taps.extend(found for found in gc.get_objects() if isinstance(found, kinds))

    ROUTES[route](routes.chat(), "hi", {"callbacks": [Looking()]})
    assert taps
    assert not any(tap._runs for tap in taps)


Consumer = Callable[[Runnable[Any, Any], RunnableConfig], Any]


def leave(model: Runnable[Any, Any], config: RunnableConfig) -> None:
    stream = model.stream("hi", config)
    next(stream)
    del stream


def aleave(model: Runnable[Any, Any], config: RunnableConfig) -> None:
    async def run() -> None:
        async for _ in model.astream("hi", config):
            break

    asyncio.run(run())


@pytest.mark.parametrize("consumer", [leave, aleave])
def test_who_leaves_early_has_seen_no_more_events_than_steps(consumer: Consumer) -> None:
    handler = Handler()
    consumer(routes.chat(), {"callbacks": [handler]})
    assert [data["number"] for data, _, _, _ in handler.log.events] == [1]
    assert len(handler.log.model_runs) + handler.log.errors == 1
