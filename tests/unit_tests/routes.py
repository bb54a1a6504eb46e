"""All ways to call a LangChain model, alone and as a part of something, and handlers that listen.

A route gets a runnable, its input and a config; a shape makes a runnable of a model. Tests take
their product.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from langchain.agents import create_agent
from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler
from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import (
    ConfigurableField,
    Runnable,
    RunnableConfig,
    RunnableLambda,
    RunnableParallel,
)
from langgraph.graph import START, MessagesState, StateGraph

from specguard_chains import ChatSpecGuard
from specguard_chains.callbacks import EVENT
from specguard_chains.llm import SpecGuardLLM
from tests.paper import PAPER
from tests.toy_engine import ToyEngine, scripted_policy

# Models

STEPS = ("a\n\n", "b\n\n", "c")


def chat(**options: Any) -> ChatSpecGuard:
    """Writes three short steps, the second of them by the target."""
    return ChatSpecGuard(**_pair() | options)


def llm(**options: Any) -> SpecGuardLLM:
    """Writes the same."""
    return SpecGuardLLM(**_pair() | options)


def _pair() -> dict[str, Any]:
    draft = ToyEngine(scripted_policy(*STEPS, logprobs=[-0.01, -4.0]), name="toy-draft")
    target = ToyEngine(scripted_policy(*STEPS), name="toy-target")
    settings = PAPER | {"confidence_weight": 1.0, "threshold": 0.5, "num_candidates": 1}
    return {"draft": draft, "target": target, **settings}


MODELS: dict[str, Callable[..., Any]] = {"chat": chat, "llm": llm}

# Handlers


@dataclass
class Log:
    """What a handler was told."""

    starts: list[UUID] = field(default_factory=list)
    model_runs: list[UUID] = field(default_factory=list)
    """Runs of the model by their ends: on async routes, LangChain (core 1.8.3) does not tell the
    start of a plain LLM's run to a handler that has a handler with `run_inline` beside it."""
    events: list[tuple[Any, UUID, Any, Any]] = field(default_factory=list)
    """Step, run, tags, metadata."""
    order: list[str] = field(default_factory=list)
    tokens: int = 0
    errors: int = 0

    def event(self, name: str, data: Any, run_id: UUID, tags: Any, metadata: Any) -> None:
        if name == EVENT:
            self.events.append((data, run_id, tags, metadata))
            self.order.append(f"event {data['number']}")

    def numbers(self, run_id: UUID) -> list[int]:
        """The steps that a run has reported."""
        return [data["number"] for data, owner, _, _ in self.events if owner == run_id]


class Handler(BaseCallbackHandler):
    def __init__(self) -> None:
        self.log = Log()

    def on_chat_model_start(self, serialized: Any, messages: Any, *, run_id: UUID, **_: Any) -> Any:
        self.log.starts.append(run_id)

    def on_llm_start(self, serialized: Any, prompts: Any, *, run_id: UUID, **_: Any) -> Any:
        self.log.starts.append(run_id)

    def on_llm_new_token(self, token: Any, **_: Any) -> None:
        self.log.tokens += 1

    def on_llm_end(self, response: Any, *, run_id: UUID, **_: Any) -> None:
        self.log.model_runs.append(run_id)

    def on_llm_error(self, error: BaseException, **_: Any) -> None:
        self.log.errors += 1

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
        self.log.starts.append(run_id)

    async def on_llm_start(self, serialized: Any, prompts: Any, *, run_id: UUID, **_: Any) -> Any:
        self.log.starts.append(run_id)

    async def on_llm_new_token(self, token: Any, **_: Any) -> None:
        self.log.tokens += 1

    async def on_llm_end(self, response: Any, *, run_id: UUID, **_: Any) -> None:
        self.log.model_runs.append(run_id)

    async def on_llm_error(self, error: BaseException, **_: Any) -> None:
        self.log.errors += 1

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


# Routes


async def collect(items: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in items]


async def once(item: Any) -> AsyncIterator[Any]:
    yield item


async def _astream_events_v3(r: Any, value: Any, config: RunnableConfig) -> list[Any]:
    events = await collect(await r.astream_events(value, config, version="v3"))
    # LangChain reports the run's end after the last event, in a task of its own.
    await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))
    return events


Route = Callable[[Any, Any, RunnableConfig], Any]
SYNC: dict[str, Route] = {
    "invoke": lambda r, v, c: r.invoke(v, c),
    "stream": lambda r, v, c: list(r.stream(v, c)),
    "transform": lambda r, v, c: list(r.transform(iter([v]), c)),
    "batch": lambda r, v, c: r.batch([v, v], c),
    "batch_as_completed": lambda r, v, c: list(r.batch_as_completed([v, v], c)),
    "stream_events_v3": lambda r, v, c: list(r.stream_events(v, c, version="v3")),
}
ASYNC: dict[str, Callable[[Any, Any, RunnableConfig], Awaitable[Any]]] = {
    "ainvoke": lambda r, v, c: r.ainvoke(v, c),
    "astream": lambda r, v, c: collect(r.astream(v, c)),
    "atransform": lambda r, v, c: collect(r.atransform(once(v), c)),
    "abatch": lambda r, v, c: r.abatch([v, v], c),
    "abatch_as_completed": lambda r, v, c: collect(r.abatch_as_completed([v, v], c)),
    "astream_log": lambda r, v, c: collect(r.astream_log(v, c)),
    "astream_events_v1": lambda r, v, c: collect(r.astream_events(v, c, version="v1")),
    "astream_events_v2": lambda r, v, c: collect(r.astream_events(v, c, version="v2")),
    "astream_events_v3": _astream_events_v3,
}
ROUTES: dict[str, Route] = SYNC | {
    name: lambda r, v, c, route=route: asyncio.run(route(r, v, c))  # type: ignore[misc]
    for name, route in ASYNC.items()
}


def prompts(route: str) -> int:
    """How many times a route asks the model."""
    return 2 if "batch" in route else 1


# Shapes


def passed(value: Any) -> Any:
    return value


def failing(value: Any) -> Any:
    raise RuntimeError("the first choice is out of order")


def in_a_function(model: Any) -> Runnable[Any, Any]:
    async def ask(value: Any) -> Any:
        return await model.ainvoke(value)

    return RunnableLambda(model.invoke, afunc=ask)


def in_a_graph(model: Any) -> Any:
    def ask(state: MessagesState) -> Any:
        return {"messages": [model.invoke(state["messages"])]}

    async def aask(state: MessagesState) -> Any:
        return {"messages": [await model.ainvoke(state["messages"])]}

    return graph(RunnableLambda(ask, afunc=aask))


def graph(node: Any) -> Any:
    builder = StateGraph(MessagesState)
    builder.add_node("model", node)
    builder.add_edge(START, "model")
    return builder.compile()


def configurable(model: Any) -> Runnable[Any, Any]:
    fields = model.configurable_fields(max_tokens=ConfigurableField(id="length"))
    return fields.with_config(configurable={"length": 400})


PROMPT = ChatPromptTemplate.from_messages([("system", "Be brief."), ("human", "{question}")])

SHAPES: dict[str, Callable[[Any], Any]] = {
    "top": lambda m: m,
    "bind": lambda m: m.bind(stop=["x"]),
    "with_config": lambda m: m.with_config(tags=["z"], metadata={"z": 1}),
    "with_retry": lambda m: m.with_retry(),
    "with_fallbacks": lambda m: m.with_fallbacks([RunnableLambda(failing)]),
    "configurable_fields": configurable,
    "all of these": lambda m: m.bind(stop=["x"]).with_config(tags=["z"]).with_retry(),
    "a fallback": lambda m: RunnableLambda(failing).with_fallbacks([m]),
    "LCEL": lambda m: RunnableLambda(passed) | m | RunnableLambda(passed),
    "prompt": lambda m: {"question": passed} | PROMPT | m | StrOutputParser(),
    "parallel": lambda m: RunnableParallel(answer=m, question=passed),
    "function": in_a_function,
    "graph": in_a_graph,
    "agent": lambda m: create_agent(m, []),
}
GRAPHS = ("graph", "agent")
MODELS_IN_SHAPES = [
    (model, shape) for model in MODELS for shape in SHAPES if (model, shape) != ("llm", "agent")
]
MESSAGES: dict[str, list[BaseMessage]] = {"messages": [HumanMessage("hi")]}


def without_v3(model: str, shape: str) -> bool:
    """Whether LangChain has no v3 events for this model in this shape."""
    bindings = ("top", "bind", "with_config", "with_retry", "all of these")
    return shape not in (GRAPHS if model == "llm" else (*bindings, *GRAPHS))


def value(shape: str) -> Any:
    """What a runnable of this shape takes."""
    return MESSAGES if shape in GRAPHS else "hi"
