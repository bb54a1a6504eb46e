"""StepParser: what follows is called for each step, while the model writes the steps after it."""

import asyncio
import copy
import itertools
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import (
    ConfigurableField,
    Runnable,
    RunnableBinding,
    RunnableLambda,
    RunnableParallel,
    RunnableSequence,
)
from langchain_core.tracers.run_collector import RunCollectorCallbackHandler
from langgraph.graph import START, StateGraph

from specguard_chains import Step
from specguard_chains.errors import ConfigurationError
from specguard_chains.step_parser import StepChain, StepParser
from tests.toy_engine import ANSWER, Policy, scripted_policy
from tests.unit_tests import routes, toy_chat
from tests.unit_tests.routes import PROMPT, STEPS, collect, failing, passed

pytestmark = [
    pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainDeprecationWarning"),
]


def text(step: Step) -> str:
    assert isinstance(step, Step)
    return step.text


async def atext(step: Step) -> str:
    return text(step)


def number(value: Any) -> Any:
    return value.number if isinstance(value, Step) else len(value)


SOURCES: dict[str, Callable[[Any], Any]] = {
    "model": lambda m: m,
    "bind": lambda m: m.bind(stop=["x"]),
    "with_config": lambda m: m.with_config(tags=["t"]),
    "with_retry": lambda m: m.with_retry(),
    "with_listeners": lambda m: m.with_listeners(on_end=passed),
    "with_types": lambda m: m.with_types(input_type=str),
    "with_fallbacks": lambda m: m.with_fallbacks([m]),
    "all of these": lambda m: m.bind(stop=["x"]).with_config(tags=["t"]).with_retry(),
    "sequence": lambda m: RunnableLambda(passed) | m,
    "sequence of a binding": lambda m: RunnableLambda(passed) | m.with_retry(),
    "binding of a sequence": lambda m: (RunnableLambda(passed) | m).with_config(tags=["t"]),
}
"""Where `|` works."""

OTHERS: dict[str, Callable[[Any], Any]] = {
    "function": lambda m: RunnableLambda(m.invoke, afunc=m.ainvoke),
    "configurable": lambda m: m.configurable_fields(max_tokens=ConfigurableField(id="n")),
    "retried sequence": lambda m: (RunnableLambda(passed) | m).with_retry(),
    "second choice": lambda m: RunnableLambda(failing).with_fallbacks([m]),
}
"""Where it does not."""


# What follows is called for each step


@pytest.mark.parametrize("source", SOURCES)
def test_what_follows_is_called_for_each_step(source: str) -> None:
    chain = SOURCES[source](routes.chat()) | StepParser() | text
    assert list(chain.stream("hi")) == list(STEPS)
    assert chain.invoke("hi") == list(STEPS)
    assert chain.batch(["hi", "yo"]) == [list(STEPS)] * 2


@pytest.mark.parametrize("source", SOURCES)
async def test_what_follows_is_called_for_each_step_async(source: str) -> None:
    for called in (text, atext):
        chain = SOURCES[source](routes.chat()) | StepParser() | called
        assert await collect(chain.astream("hi")) == list(STEPS)
        assert await chain.ainvoke("hi") == list(STEPS)
        assert await chain.abatch(["hi", "yo"]) == [list(STEPS)] * 2


@pytest.mark.parametrize("source", SOURCES | OTHERS)
def test_after_works_everywhere(source: str) -> None:
    model = (SOURCES | OTHERS)[source](routes.chat())
    for chain in (
        StepParser(text, len).after(model),
        StepParser(text).after(model) | len,
        StepParser().after(model) | text | len,
        StepParser().after(model).pipe(text, len),
    ):
        assert list(chain.stream("hi")) == [3, 3, 1]
        assert chain.invoke("hi") == [3, 3, 1]
        assert asyncio.run(collect(chain.astream("hi"))) == [3, 3, 1]


@pytest.mark.parametrize("source", OTHERS)
def test_where_nobody_asks_the_parser_it_refuses(source: str) -> None:
    model = OTHERS[source](routes.chat())
    for wrong in (
        lambda: model | StepParser(),
        lambda: model | StepParser(text),
        lambda: model.pipe(StepParser(), text),
        lambda: RunnableSequence(model, StepParser(), text),
        lambda: RunnableSequence(StepParser(), text),
    ):
        with pytest.raises(ConfigurationError, match=r"StepParser\(\)\.after\("):
            wrong()


FOLLOWING: dict[str, Any] = {
    "function": text,
    "lambda": lambda step: step.text,
    "RunnableLambda": RunnableLambda(text),
    "runnable with both": RunnableLambda(text, afunc=atext),
    "chain": RunnableLambda(passed) | RunnableLambda(text),
    "binding": RunnableLambda(text).with_retry(),
    "with config": RunnableLambda(lambda step, config: (config["tags"], step.text)[1]),
}


@pytest.mark.parametrize("following", FOLLOWING)
def test_anything_may_follow(following: str) -> None:
    for chain in (
        routes.chat() | StepParser() | FOLLOWING[following],
        routes.chat() | StepParser(FOLLOWING[following]),
        routes.chat() | (StepParser() | FOLLOWING[following]),
        (routes.chat() | StepParser()).pipe(FOLLOWING[following]),
    ):
        assert list(chain.stream("hi", {"tags": ["t"]})) == list(STEPS)
        assert chain.invoke("hi", {"tags": ["t"]}) == list(STEPS)
        assert asyncio.run(collect(chain.astream("hi", {"tags": ["t"]}))) == list(STEPS)


def test_a_mapping_and_a_generator_get_each_step_too() -> None:
    def twice(steps: Iterator[Step]) -> Iterator[str]:
        for step in steps:
            yield step.text
            yield step.text

    chain = routes.chat() | StepParser() | {"text": text, "number": number}
    assert next(chain.stream("hi")) == {"text": "a\n\n", "number": 1}
    assert (routes.chat() | StepParser() | twice).invoke("hi") == [step * 2 for step in STEPS]


def test_without_anything_that_follows_there_are_steps() -> None:
    model = routes.chat(seed=1, temperature=0)
    chain = model | StepParser()
    steps = chain.invoke("hi")
    assert [type(step) for step in steps] == [Step] * 3
    same = [list(chain.stream("hi")), list(model.steps("hi")), asyncio.run(chain.ainvoke("hi"))]
    for others in same:
        assert [(s.text, s.verdict, s.source, s.score, s.span) for s in others] == [
            (s.text, s.verdict, s.source, s.score, s.span) for s in steps
        ]


def test_a_prompt_and_many_functions() -> None:
    chain = PROMPT | routes.chat() | StepParser() | text | str.strip | str.upper
    assert isinstance(chain, StepChain)
    assert chain.invoke({"question": "hi"}) == ["A", "B", "C"]
    assert list(chain.stream({"question": "hi"})) == ["A", "B", "C"]


def test_functions_see_the_config_and_parts_of_a_chain_can_be_configured() -> None:
    seen: list[Any] = []
    model = routes.chat().configurable_fields(max_tokens=ConfigurableField(id="length"))
    chain = StepParser().after(model) | RunnableLambda(lambda s, config: seen.append(config))
    chain.with_config(tags=["t"], metadata={"m": 1}).invoke("hi")
    assert len(seen) == 3
    assert seen[0]["tags"] == ["t"]
    assert seen[0]["metadata"]["m"] == 1
    assert [spec.id for spec in chain.config_specs] == ["length"]
    short = StepParser(text).after(model).with_config(configurable={"length": 3})
    assert short.invoke("hi") == ["a\n\n"]


def test_a_chain_can_be_bound_configured_and_retried_and_goes_on() -> None:
    chain: Any = routes.chat() | StepParser()
    for changed in (
        chain.with_config(tags=["t"]),
        chain.with_retry(),
        chain.with_listeners(on_end=passed),
        chain.with_fallbacks([routes.chat() | StepParser()]),
        chain.bind(stop=["x"]),
        chain.with_types(input_type=str),
    ):
        assert list((changed | text).stream("hi")) == list(STEPS)
        assert (changed | text | len).invoke("hi") == [3, 3, 1]
    assert (chain.bind(stop=["b"]) | text).invoke("hi") == ["a\n\n", ""]


async def test_async_listeners_of_a_chain() -> None:
    async def listen(run: Any) -> None: ...

    chain: Any = routes.chat() | StepParser()
    listened = chain.with_alisteners(on_end=listen) | text
    assert await collect(listened.astream("hi")) == list(STEPS)


# While the model goes on


def waiting(gate: threading.Event) -> Policy:
    """Writes the second step only when the gate is open."""
    write = scripted_policy(*STEPS)

    def next_token(tokens: tuple[int, ...]) -> Any:
        answer = tokens[tokens.index(ANSWER) + 1 :] if ANSWER in tokens else ()
        if len(answer) > len(STEPS[0]):  # a token is a byte; a step ends where the next one begins
            assert gate.wait(5), "nothing was called for the first step"
        return write(tokens)

    return next_token


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("route", ["stream", "astream"])
def test_functions_are_called_while_the_model_writes(route: str, source: str) -> None:
    gate = threading.Event()

    def open_gate(step: Step) -> int:
        gate.set()
        return step.number

    model = SOURCES[source](toy_chat.solo(waiting(gate)))
    for chain in (
        model | StepParser() | open_gate,
        model | StepParser() | (RunnableLambda(passed) | RunnableLambda(open_gate)),
        model | StepParser(passed, open_gate),
    ):
        gate.clear()
        results = (
            list(chain.stream("hi"))
            if route == "stream"
            else asyncio.run(collect(chain.astream("hi")))
        )
        assert results == [1, 2, 3]


@pytest.mark.parametrize("route", ["stream", "astream"])
def test_consumers_get_results_while_the_model_writes(route: str) -> None:
    gate = threading.Event()
    chain = toy_chat.solo(waiting(gate)) | StepParser() | number

    async def aconsume() -> list[int]:
        results = []
        async for result in chain.astream("hi"):
            gate.set()
            results.append(result)
        return results

    if route == "stream":
        results = []
        for result in chain.stream("hi"):
            gate.set()
            results.append(result)
    else:
        results = asyncio.run(aconsume())
    assert results == [1, 2, 3]


# Errors and early ends stop the model


def stops(model: Any) -> None:
    """Check that the model is free, and that its answer ended long before its limit would end it.

    The limit is 4,096 tokens, 20 s at these delays: no machine is so slow.
    """
    assert model.invoke("hi", max_tokens=2).text == "On"
    assert toy_chat.engine_of(model).computed_tokens < 4000


@pytest.mark.parametrize("route", ["stream", "astream"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_errors_of_a_function_stop_the_model(route: str, asynchronous: bool) -> None:
    def broken(step: Step) -> int:
        if step.number == 2:
            raise LookupError("not in the table")
        return step.number

    async def abroken(step: Step) -> int:
        return broken(step)

    model = toy_chat.endless(delay_s=0.005)
    chain = model | StepParser() | RunnableLambda(broken, afunc=abroken if asynchronous else None)
    results: list[int] = []

    async def aconsume() -> None:
        async for result in chain.astream("hi"):
            results.append(result)

    with pytest.raises(LookupError, match="not in the table"):
        if route == "stream":
            for result in chain.stream("hi"):
                results.append(result)
        else:
            asyncio.run(aconsume())
    assert results == [1]
    stops(model)


@pytest.mark.parametrize("route", ["stream", "astream"])
def test_who_leaves_early_stops_the_model(route: str) -> None:
    model = toy_chat.endless(delay_s=0.005)
    chain = RunnableLambda(passed) | model.with_retry() | StepParser() | number

    async def aleave() -> None:
        async for _ in chain.astream("hi"):
            break

    if route == "stream":
        for _ in chain.stream("hi"):
            break
    else:
        asyncio.run(aleave())
    stops(model)


def test_errors_of_the_model_arrive() -> None:
    chain = routes.chat() | StepParser() | text
    with pytest.raises(ConfigurationError, match="empty"):
        chain.invoke([])
    with pytest.raises(ConfigurationError, match="empty"):
        list(chain.stream([]))


def test_errors_in_batches_stay_apart() -> None:
    def picky(step: Step) -> str:
        if step.number == 3:
            raise LookupError("three")
        return step.text

    results = (routes.chat() | StepParser() | picky).batch(["a", "b"], return_exceptions=True)
    assert [type(result) for result in results] == [LookupError] * 2


# Inside of something larger: a runnable with a list


def test_inside_of_a_sequence_a_chain_gives_a_list() -> None:
    inner = routes.chat() | StepParser() | text
    for larger in (RunnableLambda(passed) | inner, RunnableBinding(bound=inner) | passed):
        assert larger.invoke("hi") == list(STEPS)
        assert list(itertools.chain.from_iterable(larger.stream("hi"))) == list(STEPS)
    assert list((RunnableLambda(passed) | inner).stream("hi")) == [[step] for step in STEPS]
    report = RunnableLambda(passed) | inner | "|".join
    assert report.invoke("hi") == "a\n\n|b\n\n|c"
    assert list(report.stream("hi")) == ["a\n\n|b\n\n|c"]
    assert asyncio.run(collect(report.astream("hi"))) == ["a\n\n|b\n\n|c"]


def test_beside_other_parsers() -> None:
    chain = routes.chat() | {"steps": StepParser(number), "text": StrOutputParser()}
    assert chain.invoke("hi") == {"steps": [1, 2, 3], "text": "a\n\nb\n\nc"}
    whole: Any = None
    for part in chain.stream("hi"):
        whole = part if whole is None else whole + part
    assert whole == {"steps": [1, 2, 3], "text": "a\n\nb\n\nc"}
    parallel = RunnableParallel(steps=routes.chat() | StepParser() | number, question=passed)
    assert parallel.invoke("hi") == {"steps": [1, 2, 3], "question": "hi"}


def test_alone_the_parser_reads_messages() -> None:
    message = routes.chat().invoke("hi")
    chunks = list(routes.chat().stream("hi"))
    for parser in (
        StepParser(text),
        StepParser() | text,
        StepParser().with_config(tags=["t"]) | text,
    ):
        assert isinstance(parser, StepParser)
        assert parser.invoke(message) == list(STEPS)
        assert list(parser.stream(message)) == list(STEPS)
        assert list(parser.transform(iter(chunks))) == [[step] for step in STEPS]
        assert (routes.chat() | parser).invoke("hi") == list(STEPS)


def test_as_a_node_of_a_graph() -> None:
    def result(state: dict[str, Any]) -> dict[str, Any]:
        return {"results": state}

    builder: Any = StateGraph(dict)
    node = RunnableLambda(lambda state: state["question"]) | (routes.chat() | StepParser() | text)
    builder.add_node("steps", node | result)
    builder.add_node("direct", routes.chat().with_config(tags=["t"]) | StepParser() | text | print)
    builder.add_edge(START, "steps")
    assert builder.compile().invoke({"question": "hi"}) == {"results": list(STEPS)}


# What cannot be parsed


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("text", "not str"),
        ([AIMessage("a")], "not list"),
        (AIMessage("a"), "no verified steps"),
        (AIMessage("a", additional_kwargs={"specguard_steps": [{"number": 1}]}), "not a step"),
    ],
)
def test_what_has_no_steps_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        StepParser().invoke(given)
    with pytest.raises(ConfigurationError, match=message):
        list(StepParser().stream(given))
    with pytest.raises(ConfigurationError, match=message):
        asyncio.run(StepParser().ainvoke(given))


def test_plain_llms_have_no_steps_in_their_text() -> None:
    with pytest.raises(ConfigurationError, match="after"):
        routes.llm() | StepParser()
    with pytest.raises(ConfigurationError, match="not str"):
        StepParser().after(routes.llm()).invoke("hi")


def test_one_parser_is_enough() -> None:
    chain = routes.chat() | StepParser()
    for wrong in (
        lambda: chain | StepParser(),
        lambda: StepParser().after(chain),
        lambda: StepParser() | StepParser(text),
    ):
        with pytest.raises(ConfigurationError, match="one StepParser"):
            wrong()


# As LangChain's other runnables


def test_functions_are_runs_below_the_chain() -> None:
    collector = RunCollectorCallbackHandler()
    chain: Runnable[Any, Any] = PROMPT | routes.chat() | StepParser() | text | str.strip
    for route in (chain.invoke, lambda v, c: list(chain.stream(v, c))):
        collector.traced_runs.clear()
        route({"question": "hi"}, {"callbacks": [collector]})
        (root,) = collector.traced_runs
        assert not root.error
        names = [run.name for run in root.child_runs]
        assert names[:2] == ["ChatPromptTemplate", "ChatSpecGuard"]
        assert sorted(names[2:]) == ["strip"] * 3 + ["text"] * 3


async def test_events_of_a_chain() -> None:
    chain = routes.chat() | StepParser() | text
    events = await collect(chain.astream_events("hi", version="v2"))
    results = [
        event["data"]["output"]
        for event in events
        if event["event"] == "on_chain_end" and event["name"] == "text"
    ]
    assert results == list(STEPS)
    assert sum(event["event"] == "on_custom_event" for event in events) == 3


def test_a_chain_can_be_copied_pickled_shown_and_drawn() -> None:
    chain = PROMPT | routes.chat() | StepParser() | str
    assert copy.deepcopy(chain).invoke({"question": "hi"})[0].startswith("Step(")
    parser = pickle.loads(pickle.dumps(StepParser(text)))
    assert (routes.chat() | parser).invoke("hi") == list(STEPS)
    assert repr(StepParser(text)) == "StepParser()\n| EachStep(RunnableLambda(text))"
    assert "| StepParser()\n| EachStep(RunnableLambda(str))" in repr(chain)
    assert list(chain.get_input_jsonschema()["properties"]) == ["question"]
    assert "ChatSpecGuard" in [node.name for node in chain.get_graph().nodes.values()]
    assert chain.get_prompts() == [PROMPT]


def test_models_are_as_before_where_no_parser_follows() -> None:
    model = routes.chat()
    assert type(model | passed) is RunnableSequence
    assert (model | StrOutputParser()).invoke("hi") == "a\n\nb\n\nc"
    for bound in (model.bind(stop=["b"]), model.with_retry(), model.with_fallbacks([model])):
        assert isinstance(bound, RunnableBinding)
        assert type(bound | passed) is RunnableSequence
    assert model.bind(stop=["b"]).kwargs == {"stop": ["b"]}
    assert model.bind(stop=["b"]).bound is model
    assert model.with_fallbacks([model]).fallbacks == [model]
    assert model.bind(stop=["b"]).invoke("hi").text == "a\n\n"
    assert model.with_retry(stop_after_attempt=2).max_attempt_number == 2
