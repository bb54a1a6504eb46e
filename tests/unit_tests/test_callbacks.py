"""Step events: on every route, for every handler, once each, as events of the model's own run."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any
from uuid import UUID

import pytest
from langchain_core.callbacks import (
    AsyncCallbackHandler,
    BaseCallbackHandler,
    CallbackManager,
    get_usage_metadata_callback,
)
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda
from langchain_core.tracers.run_collector import RunCollectorCallbackHandler
from langgraph.graph import START, MessagesState, StateGraph

from specguard_chains.callbacks import EVENT, LangGraphStepWriter
from specguard_chains.messages import STEPS_KEY
from tests.unit_tests import toy_chat

pytestmark = [
    pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning"),
    pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainDeprecationWarning"),
]


class Log:
    """What a handler was told."""

    def __init__(self) -> None:
        self.model_runs: set[UUID] = set()
        self.events: list[tuple[Any, UUID, Any, Any]] = []
        self.order: list[str] = []
        self.tokens = 0
        self.ends = 0

    def event(self, name: str, data: Any, run_id: UUID, tags: Any, metadata: Any) -> None:
        assert name == EVENT
        self.events.append((data, run_id, tags, metadata))
        self.order.append(f"event {data['number']}")


class Handler(BaseCallbackHandler):
    def __init__(self) -> None:
        self.log = Log()

    def on_chat_model_start(self, serialized: Any, messages: Any, *, run_id: UUID, **_: Any) -> Any:
        self.log.model_runs.add(run_id)

    def on_llm_new_token(self, token: Any, **_: Any) -> None:
        self.log.tokens += 1

    def on_llm_end(self, response: Any, **_: Any) -> None:
        self.log.ends += 1

    def on_custom_event(
        self,
        name: str,
        data: Any,
        *,
        run_id: UUID,
        tags: Any = None,
        metadata: Any = None,
        **_: Any,
    ) -> None:
        self.log.event(name, data, run_id, tags, metadata)


class AsyncHandler(AsyncCallbackHandler):
    def __init__(self) -> None:
        self.log = Log()

    async def on_chat_model_start(
        self, serialized: Any, messages: Any, *, run_id: UUID, **_: Any
    ) -> Any:
        self.log.model_runs.add(run_id)

    async def on_llm_new_token(self, token: Any, **_: Any) -> None:
        self.log.tokens += 1

    async def on_llm_end(self, response: Any, **_: Any) -> None:
        self.log.ends += 1

    async def on_custom_event(
        self,
        name: str,
        data: Any,
        *,
        run_id: UUID,
        tags: Any = None,
        metadata: Any = None,
        **_: Any,
    ) -> None:
        self.log.event(name, data, run_id, tags, metadata)


async def collect(items: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in items]


Route = Callable[[Runnable[Any, Any], RunnableConfig], Any]


async def _astream_v3(r: Runnable[Any, Any], c: RunnableConfig) -> list[Any]:
    stream: Any = await r.astream_events("hi", c, version="v3")  # type: ignore[misc]
    events = await collect(stream)
    await asyncio.sleep(0.01)  # on_llm_end follows the last event
    return events


SYNC: dict[str, Route] = {
    "invoke": lambda r, c: r.invoke("hi", c),
    "stream": lambda r, c: list(r.stream("hi", c)),
    "batch": lambda r, c: r.batch(["hi", "yo"], c),
    "stream_events_v3": lambda r, c: list(r.stream_events("hi", c, version="v3")),  # type: ignore[attr-defined]
}
ASYNC: dict[str, Callable[[Runnable[Any, Any], RunnableConfig], Awaitable[Any]]] = {
    "ainvoke": lambda r, c: r.ainvoke("hi", c),
    "astream": lambda r, c: collect(r.astream("hi", c)),
    "abatch": lambda r, c: r.abatch(["hi", "yo"], c),
    "astream_events_v1": lambda r, c: collect(r.astream_events("hi", c, version="v1")),
    "astream_events_v2": lambda r, c: collect(r.astream_events("hi", c, version="v2")),
    "astream_events_v3": _astream_v3,
}
ROUTES: dict[str, Route] = SYNC | {
    name: lambda r, c, route=route: asyncio.run(route(r, c))  # type: ignore[misc]
    for name, route in ASYNC.items()
}


def passed(value: Any) -> Any:
    return value


SHAPES: dict[str, Callable[[Runnable[Any, Any]], Runnable[Any, Any]]] = {
    "top": lambda m: m,
    "chain": lambda m: RunnableLambda(passed) | m | RunnableLambda(passed),
    "bound": lambda m: m.bind(stop=["x"]).with_config(tags=["z"]),
}


@pytest.mark.parametrize("handler_type", [Handler, AsyncHandler])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("route", ROUTES)
def test_peers_074_every_step_arrives_once_on_every_route(
    route: str, shape: str, handler_type: type[Handler] | type[AsyncHandler]
) -> None:
    if shape == "chain" and route.endswith("events_v3"):
        pytest.skip("a chain has no v3 events in this version")
    handler = handler_type()
    runnable = SHAPES[shape](toy_chat.pair())
    config: RunnableConfig = {"callbacks": [handler], "tags": ["t"], "metadata": {"k": 1}}
    ROUTES[route](runnable, config)
    log = handler.log
    prompts = 2 if "batch" in route else 1
    assert len(log.model_runs) == prompts
    assert log.ends == prompts
    for run_id in log.model_runs:
        assert [e[0]["number"] for e in log.events if e[1] == run_id] == [1, 2, 3]
    assert len(log.events) == 3 * prompts
    for data, _, tags, metadata in log.events:
        assert data["source"] in ("draft", "target")
        assert {"k", "ls_provider", "ls_model_name"} <= metadata.keys()
        assert shape == "chain" or {"t"} <= set(tags)


@pytest.mark.parametrize("handler_type", [Handler, AsyncHandler])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_prompt_of_generate_has_its_own_events(
    handler_type: type[Handler] | type[AsyncHandler], asynchronous: bool
) -> None:
    handler, model = handler_type(), toy_chat.pair()
    prompts = [[HumanMessage("a")], [HumanMessage("b")]]
    if asynchronous:
        asyncio.run(model.agenerate(prompts, callbacks=[handler]))
    else:
        model.generate(prompts, callbacks=[handler])
    runs = [run_id for _, run_id, _, _ in handler.log.events]
    assert sorted(map(runs.count, handler.log.model_runs)) == [3, 3]


@pytest.mark.parametrize("route", ["invoke", "stream", "ainvoke", "astream"])
def test_handlers_of_the_constructor_get_the_events(route: str) -> None:
    handler = Handler()
    ROUTES[route](toy_chat.pair(callbacks=[handler]), {})
    assert len(handler.log.events) == 3


@pytest.mark.parametrize("route", ["invoke", "stream", "ainvoke", "astream"])
@pytest.mark.parametrize("streaming", [True, False])
def test_events_do_not_depend_on_whether_streaming_is_set(route: str, streaming: bool) -> None:
    for model in (toy_chat.pair(streaming=streaming), toy_chat.pair(disable_streaming=True)):
        handler = Handler()
        ROUTES[route](model, {"callbacks": [handler]})
        assert [e[0]["number"] for e in handler.log.events] == [1, 2, 3]


def test_a_ready_callback_manager_works_too() -> None:
    handler = Handler()
    list(toy_chat.pair().stream("hi", {"callbacks": CallbackManager([handler])}))
    assert len(handler.log.events) == 3


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


async def test_events_are_in_astream_events_with_the_run_of_the_model() -> None:
    events = await collect(toy_chat.pair().astream_events("hi", version="v2"))
    custom = [event for event in events if event["event"] == "on_custom_event"]
    starts = {event["run_id"] for event in events if event["event"] == "on_chat_model_start"}
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


def test_a_handler_that_fails_does_not_stop_the_answer(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Handler):
        def on_custom_event(self, *_: Any, **__: Any) -> None:
            raise RuntimeError("broken handler")

    for route in ("invoke", "stream"):
        ROUTES[route](toy_chat.pair(), {"callbacks": [Broken()]})
    assert "broken handler" in caplog.text


def test_peers_063_async_handlers_of_async_routes_run_on_the_callers_loop() -> None:
    loops: set[int] = set()

    class Watching(AsyncHandler):
        async def on_custom_event(self, *_: Any, **__: Any) -> None:
            loops.add(id(asyncio.get_running_loop()))

    async def consume() -> int:
        model, config = toy_chat.pair(), RunnableConfig(callbacks=[Watching()])
        await model.ainvoke("hi", config)
        await collect(model.astream("hi", config))
        await collect(model.astream_events("hi", config, version="v2"))
        return id(asyncio.get_running_loop())

    own = asyncio.run(consume())
    assert loops == {own}


def test_a_handler_may_ask_the_same_model() -> None:
    model = toy_chat.pair()
    answers: list[str] = []

    class Asking(Handler):
        def on_custom_event(self, *_: Any, **__: Any) -> None:
            answers.append(model.invoke("what now?").text)

    for route in ("invoke", "stream"):
        ROUTES[route](model, {"callbacks": [Asking()]})
    assert len(answers) == 6


# LangGraph


def graph(node: Callable[..., Any]) -> Any:
    builder = StateGraph(MessagesState)
    builder.add_node("model", node)
    builder.add_edge(START, "model")
    return builder.compile()


def invoking(model: Any) -> Callable[[MessagesState], Any]:
    return lambda state: {"messages": [model.invoke(state["messages"])]}


def streaming(model: Any) -> Callable[[MessagesState], Any]:
    def node(state: MessagesState) -> Any:
        chunks = list(model.stream(state["messages"]))
        return {"messages": [sum(chunks[1:], start=chunks[0])]}

    return node


def ainvoking(model: Any) -> Callable[[MessagesState], Any]:
    async def node(state: MessagesState) -> Any:
        return {"messages": [await model.ainvoke(state["messages"])]}

    return node


def astreaming(model: Any) -> Callable[[MessagesState], Any]:
    async def node(state: MessagesState) -> Any:
        chunks = await collect(model.astream(state["messages"]))
        return {"messages": [sum(chunks[1:], start=chunks[0])]}

    return node


SYNC_NODES = {"invoke": invoking, "stream": streaming}
ASYNC_NODES = {"ainvoke": ainvoking, "astream": astreaming}
INPUT = {"messages": [HumanMessage("hi")]}


@pytest.mark.parametrize("node", SYNC_NODES)
def test_peers_076_steps_in_the_custom_stream_of_a_graph(node: str) -> None:
    handler = Handler()
    compiled = graph(SYNC_NODES[node](toy_chat.pair()))
    config = {"callbacks": [handler, LangGraphStepWriter()]}
    parts = list(compiled.stream(INPUT, config, stream_mode="custom"))
    assert [part["data"]["number"] for part in parts] == [1, 2, 3]
    assert {part["run_id"] for part in parts} == {str(run) for run in handler.log.model_runs}
    assert all(e[3]["langgraph_node"] == "model" for e in handler.log.events)


@pytest.mark.parametrize("node", ASYNC_NODES)
async def test_peers_077_steps_in_the_custom_stream_of_an_async_graph(node: str) -> None:
    handler = Handler()
    compiled = graph(ASYNC_NODES[node](toy_chat.pair()))
    config = {"callbacks": [handler, LangGraphStepWriter()]}
    parts = await collect(compiled.astream(INPUT, config, stream_mode="custom"))
    assert [part["data"]["number"] for part in parts] == [1, 2, 3]
    assert len(handler.log.events) == 3


def test_the_writer_does_nothing_outside_of_a_graph(caplog: pytest.LogCaptureFixture) -> None:
    toy_chat.pair().invoke("hi", {"callbacks": [LangGraphStepWriter()]})
    assert "Error" not in caplog.text


@pytest.mark.parametrize("node", SYNC_NODES)
def test_peers_008_a_graph_streams_each_message_once(node: str) -> None:
    handler = Handler()
    compiled = graph(SYNC_NODES[node](toy_chat.pair()))
    parts = list(compiled.stream(INPUT, {"callbacks": [handler]}, stream_mode="messages"))
    chunks = [chunk for chunk, _ in parts if isinstance(chunk, AIMessage)]
    assert len({chunk.id for chunk in chunks}) == 1
    assert "".join(chunk.text for chunk in chunks) == "One a.\n\nDos b.\n\nThree c."
    steps = [step for chunk in chunks for step in chunk.additional_kwargs.get(STEPS_KEY, [])]
    assert [step["number"] for step in steps] == [1, 2, 3]
    assert len(handler.log.events) == 3


@pytest.mark.parametrize("mode", ["updates", "values", "messages", ["messages", "custom"]])
def test_a_graphs_stream_mode_does_not_change_the_events(mode: Any) -> None:
    handler = Handler()
    list(graph(invoking(toy_chat.pair())).stream(INPUT, {"callbacks": [handler]}, stream_mode=mode))
    assert [e[0]["number"] for e in handler.log.events] == [1, 2, 3]
