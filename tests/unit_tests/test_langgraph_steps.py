"""Steps in LangGraph: the custom stream, the message stream, agents, tools and subgraphs."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, AIMessageChunk, ToolMessage
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from langgraph.config import get_stream_writer
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.stream import CustomTransformer

from specguard_chains.callbacks import EVENT, LangGraphStepWriter
from specguard_chains.messages import STEPS_KEY
from tests.unit_tests import routes
from tests.unit_tests.routes import GRAPHS, MESSAGES, SHAPES, Handler, collect, graph
from tests.unit_tests.test_peers_tools import call_text, talk

pytestmark = [
    pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning"),
    pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainDeprecationWarning"),
]

# Nodes that ask the model in every way


def invoking(model: Any) -> Callable[[MessagesState], Any]:
    return lambda state: {"messages": [model.invoke(state["messages"])]}


def streaming(model: Any) -> Callable[[MessagesState], Any]:
    def node(state: MessagesState) -> Any:
        chunks: list[AIMessageChunk] = list(model.stream(state["messages"]))
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
NODES = SYNC_NODES | ASYNC_NODES

Parts = list[dict[str, Any]]
SYNC_ROUTES: dict[str, Callable[[Any, Any], Parts]] = {
    "invoke": lambda g, c: g.invoke(MESSAGES, c, stream_mode="custom"),
    "stream": lambda g, c: list(g.stream(MESSAGES, c, stream_mode="custom")),
    "stream with others": lambda g, c: [
        part
        for mode, part in g.stream(MESSAGES, c, stream_mode=["messages", "custom", "updates"])
        if mode == "custom"
    ],
    "stream of subgraphs": lambda g, c: [
        part for _, part in g.stream(MESSAGES, c, stream_mode="custom", subgraphs=True)
    ],
    "stream_events_v3": lambda g, c: list(
        g.stream_events(MESSAGES, c, version="v3", transformers=[CustomTransformer]).custom
    ),
}


async def _astream_events_v3(g: Any, c: Any) -> Parts:
    run = await g.astream_events(MESSAGES, c, version="v3", transformers=[CustomTransformer])
    return await collect(run.custom)


ASYNC_ROUTES: dict[str, Callable[[Any, Any], Parts]] = {
    "ainvoke": lambda g, c: asyncio.run(g.ainvoke(MESSAGES, c, stream_mode="custom")),
    "astream": lambda g, c: asyncio.run(collect(g.astream(MESSAGES, c, stream_mode="custom"))),
    "astream_events_v3": lambda g, c: asyncio.run(_astream_events_v3(g, c)),
}
ROUTES = SYNC_ROUTES | ASYNC_ROUTES
POSSIBLE = [
    *((node, route) for node in SYNC_NODES for route in ROUTES),
    *((node, route) for node in ASYNC_NODES for route in ASYNC_ROUTES),  # LangGraph's rule
]


def check(parts: Parts, handler: Handler) -> None:
    assert [part["data"]["number"] for part in parts] == [1, 2, 3]
    assert {part["event"] for part in parts} == {EVENT}
    assert {part["run_id"] for part in parts} == {str(run) for run in handler.log.model_runs}
    assert len(handler.log.events) == 3


# The custom stream


@pytest.mark.parametrize(("node", "route"), POSSIBLE)
def test_peers_076_steps_in_the_custom_stream_of_a_graph(node: str, route: str) -> None:
    handler = Handler()
    compiled = graph(NODES[node](routes.chat()))
    config = {"callbacks": [handler, LangGraphStepWriter()]}
    check(ROUTES[route](compiled, config), handler)
    assert all(e[3]["langgraph_node"] == "model" for e in handler.log.events)


@pytest.mark.parametrize("route", ROUTES)
def test_steps_in_the_custom_stream_of_an_agent(route: str) -> None:
    handler = Handler()
    config = {"callbacks": [handler, LangGraphStepWriter()]}
    check(ROUTES[route](create_agent(routes.chat(), []), config), handler)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_peers_077_an_agents_tools_and_steps_are_in_one_stream(
    asynchronous: bool, route: str
) -> None:
    if asynchronous and route in SYNC_ROUTES:  # LangGraph's rule
        return

    def say(a: int, b: int) -> int:
        get_stream_writer()({"event": "tool", "sum": a + b})
        return a + b

    async def asay(a: int, b: int) -> int:
        await asyncio.sleep(0)
        return say(a, b)

    add = tool("add", description="Add two numbers.")(asay if asynchronous else say)
    handler, model = Handler(), talk(call_text(), "It is 3.\n\nReally.")
    config = {"callbacks": [handler, LangGraphStepWriter()]}
    parts = ROUTES[route](create_agent(model, [add]), config)
    asked, answered = map(str, handler.log.model_runs)
    found = [(part.get("run_id"), part.get("sum") or part["data"]["number"]) for part in parts]
    assert found == [(asked, 1), (None, 3), (answered, 1), (answered, 2)]
    assert parts[0]["data"]["phase"] == "tool_call"


@pytest.mark.parametrize("shape", GRAPHS)
@pytest.mark.parametrize("route", ROUTES)
def test_the_writer_may_belong_to_the_model(route: str, shape: str) -> None:
    handler = Handler()
    model = routes.chat(callbacks=[handler, LangGraphStepWriter()])
    check(ROUTES[route](SHAPES[shape](model), {}), handler)


def test_steps_of_a_subgraph_are_in_the_stream_of_the_whole() -> None:
    handler = Handler()
    builder = StateGraph(MessagesState)
    builder.add_node("inner", create_agent(routes.chat(), []))
    builder.add_edge(START, "inner")
    config = {"callbacks": [handler, LangGraphStepWriter()]}
    check(ROUTES["stream of subgraphs"](builder.compile(), config), handler)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_peers_077_tools_of_the_graph_keep_their_own_parts(asynchronous: bool) -> None:
    @tool
    def look_up(place: str) -> str:
        """Look a place up."""
        get_stream_writer()({"event": "tool", "place": place})
        return "sunny"

    @tool("look_up")
    async def alook_up(place: str) -> str:
        """Look a place up."""
        await asyncio.sleep(0)
        get_stream_writer()({"event": "tool", "place": place})
        return "sunny"

    handler, model = Handler(), routes.chat()
    builder = StateGraph(MessagesState)
    call = {"name": "look_up", "args": {"place": "Rome"}, "id": "1", "type": "tool_call"}
    builder.add_node("plan", lambda state: {"messages": [AIMessage("", tool_calls=[call])]})
    builder.add_node("tools", ToolNode([alook_up if asynchronous else look_up]))
    builder.add_node("model", ainvoking(model) if asynchronous else invoking(model))
    builder.add_edge(START, "plan")
    builder.add_edge("plan", "tools")
    builder.add_edge("tools", "model")
    compiled = builder.compile()
    config: Any = {"callbacks": [handler, LangGraphStepWriter()]}
    parts = (
        asyncio.run(collect(compiled.astream(MESSAGES, config, stream_mode="custom")))
        if asynchronous
        else list(compiled.stream(MESSAGES, config, stream_mode="custom"))
    )
    assert parts[0] == {"event": "tool", "place": "Rome"}
    check(parts[1:], handler)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_tool_that_asks_the_model_writes_steps_too(asynchronous: bool) -> None:
    model = routes.chat()

    @tool
    def think(question: str) -> str:
        """Think about a question."""
        return model.invoke(question).text

    @tool("think")
    async def athink(question: str) -> str:
        """Think about a question."""
        return (await model.ainvoke(question)).text

    handler = Handler()
    call = {"name": "think", "args": {"question": "why?"}, "id": "1", "type": "tool_call"}
    compiled = graph(ToolNode([athink if asynchronous else think]))
    state: Any = {"messages": [AIMessage("", tool_calls=[call])]}
    config = {"callbacks": [handler, LangGraphStepWriter()]}
    modes = ["custom", "values"]
    parts = (
        asyncio.run(collect(compiled.astream(state, config, stream_mode=modes)))
        if asynchronous
        else list(compiled.stream(state, config, stream_mode=modes))
    )
    check([part for mode, part in parts if mode == "custom"], handler)
    answer = parts[-1][1]["messages"][-1]
    assert isinstance(answer, ToolMessage)
    assert answer.text == "a\n\nb\n\nc"


@pytest.mark.parametrize("route", routes.ROUTES)
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape not in GRAPHS])
def test_the_writer_does_nothing_outside_of_a_graph(
    shape: str, route: str, caplog: pytest.LogCaptureFixture
) -> None:
    if route.endswith("events_v3") and routes.without_v3("chat", shape):
        return
    config: Any = {"callbacks": [LangGraphStepWriter()]}
    routes.ROUTES[route](SHAPES[shape](routes.chat()), "hi", config)
    assert "LangGraphStepWriter" not in caplog.text


def test_the_writer_passes_on_nothing_but_steps() -> None:
    from langchain_core.callbacks import dispatch_custom_event

    def node(state: MessagesState) -> Any:
        dispatch_custom_event("something else", {})
        return {"messages": []}

    config: Any = {"callbacks": [LangGraphStepWriter()]}
    assert not list(graph(RunnableLambda(node)).stream(MESSAGES, config, stream_mode="custom"))


# The message stream


@pytest.mark.parametrize("shape", GRAPHS)
def test_peers_008_a_graph_streams_each_message_once(shape: str) -> None:
    handler = Handler()
    compiled = SHAPES[shape](routes.chat())
    parts = list(compiled.stream(MESSAGES, {"callbacks": [handler]}, stream_mode="messages"))
    chunks = [chunk for chunk, _ in parts if isinstance(chunk, AIMessage)]
    assert len({chunk.id for chunk in chunks}) == 1
    assert "".join(chunk.text for chunk in chunks) == "a\n\nb\n\nc"
    steps = [step for chunk in chunks for step in chunk.additional_kwargs.get(STEPS_KEY, [])]
    assert [step["number"] for step in steps] == [1, 2, 3]
    assert len(handler.log.events) == 3


@pytest.mark.parametrize("shape", GRAPHS)
@pytest.mark.parametrize("trace_steps", [False, True])
@pytest.mark.parametrize("mode", ["updates", "values", "messages", ["messages", "custom"]])
def test_a_graphs_stream_mode_does_not_change_the_events(
    mode: Any, trace_steps: bool, shape: str
) -> None:
    handler = Handler()
    compiled = SHAPES[shape](routes.chat(trace_steps=trace_steps))
    config = {"callbacks": [handler, LangGraphStepWriter()]}
    parts = list(compiled.stream(MESSAGES, config, stream_mode=mode))
    assert [e[0]["number"] for e in handler.log.events] == [1, 2, 3]
    if mode == "messages":  # runs of steps are no messages
        assert {type(part[0]) for part in parts} == {AIMessageChunk}
