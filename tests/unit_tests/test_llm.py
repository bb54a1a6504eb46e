"""The plain LLM: prompts and their runs, texts, caches; `test_callbacks` has routes and shapes."""

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from uuid import UUID, uuid4

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler, CallbackManager
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.outputs import GenerationChunk, LLMResult
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.rate_limiters import BaseRateLimiter
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda
from langchain_core.tracers.run_collector import RunCollectorCallbackHandler

from specguard_chains import ChatSpecGuard, SpecGuardOptions, Step
from specguard_chains.callbacks import EVENT
from specguard_chains.errors import ConfigurationError, DecodingTimeoutError, SpecGuardError
from specguard_chains.llm import SpecGuardLLM
from specguard_chains.messages import STEPS_KEY
from specguard_chains.metrics import Metrics
from tests.toy_engine import ToyEngine
from tests.unit_tests import routes, toy_chat
from tests.unit_tests.routes import AsyncHandler, collect, passed

pytestmark = [
    pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning"),
    pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainDeprecationWarning"),
]

PAIR_TEXTS = ["One a.\n\n", "Dos b.\n\n", "Three c."]
PAIR_TEXT = "".join(PAIR_TEXTS)


def plain(chat: ChatSpecGuard, **more: Any) -> SpecGuardLLM:
    """The plain LLM with the options of a toy chat model."""
    options = {name: getattr(chat, name) for name in SpecGuardOptions.model_fields}
    return SpecGuardLLM(**options | more)


def pair(**more: Any) -> SpecGuardLLM:
    return plain(toy_chat.pair(), **more)


def engine_of(model: SpecGuardLLM) -> ToyEngine:
    assert isinstance(model.target, ToyEngine)
    return model.target


class Handler(routes.Handler):
    """Notes the rest of what LangChain tells of a plain LLM."""

    def __init__(self) -> None:
        super().__init__()
        self.chunks: list[GenerationChunk] = []
        self.results: list[LLMResult] = []
        self.metadata: list[dict[str, Any]] = []
        self.errors: list[tuple[UUID, BaseException]] = []

    def on_llm_start(
        self, serialized: Any, prompts: Any, *, run_id: UUID, metadata: Any = None, **_: Any
    ) -> Any:
        super().on_llm_start(serialized, prompts, run_id=run_id)
        self.metadata.append(metadata)

    def on_llm_new_token(self, token: Any, *, chunk: Any = None, **_: Any) -> None:
        self.log.tokens += 1
        self.log.order.append(f"token {self.log.tokens}")
        self.chunks.append(chunk)

    def on_llm_end(self, response: Any, *, run_id: UUID, **_: Any) -> None:
        super().on_llm_end(response, run_id=run_id)
        self.results.append(response)

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **_: Any) -> None:
        self.errors.append((run_id, error))


Route = Callable[[Runnable[Any, Any], RunnableConfig], Any]

SYNC: dict[str, Route] = {
    "invoke": lambda r, c: r.invoke("hi", c),
    "stream": lambda r, c: list(r.stream("hi", c)),
    "batch": lambda r, c: r.batch(["hi", "yo"], c),
    "batch_as_completed": lambda r, c: list(r.batch_as_completed(["hi", "yo"], c)),
    "batch_one_at_a_time": lambda r, c: r.batch(["hi", "yo"], {**c, "max_concurrency": 1}),
}
ASYNC: dict[str, Callable[[Runnable[Any, Any], RunnableConfig], Awaitable[Any]]] = {
    "ainvoke": lambda r, c: r.ainvoke("hi", c),
    "astream": lambda r, c: collect(r.astream("hi", c)),
    "abatch": lambda r, c: r.abatch(["hi", "yo"], c),
    "astream_events_v1": lambda r, c: collect(r.astream_events("hi", c, version="v1")),
    "astream_events_v2": lambda r, c: collect(r.astream_events("hi", c, version="v2")),
}
ROUTES: dict[str, Route] = SYNC | {
    name: lambda r, c, route=route: asyncio.run(route(r, c))  # type: ignore[misc]
    for name, route in ASYNC.items()
}
SINGLE = ["invoke", "stream", "ainvoke", "astream"]


# Events


@pytest.mark.parametrize("route", SINGLE)
def test_chunks_are_told_with_their_steps_after_the_event(route: str) -> None:
    handler = Handler()
    ROUTES[route](pair(), {"callbacks": [handler]})
    assert [chunk.text for chunk in handler.chunks] == [*PAIR_TEXTS, ""]
    steps = [(chunk.generation_info or {}).get(STEPS_KEY, []) for chunk in handler.chunks]
    assert [[step["number"] for step in some] for some in steps] == [[1], [2], [3], []]
    assert handler.log.order == [
        *itertools.chain(*((f"event {n}", f"token {n}") for n in (1, 2, 3))),
        "token 4",
    ]


@pytest.mark.parametrize("route", SINGLE)
def test_without_streaming_there_is_one_chunk_and_the_events_stay(route: str) -> None:
    handler = Handler()
    answer = ROUTES[route](pair(streaming=False), {"callbacks": [handler]})
    assert answer == ([PAIR_TEXT] if "stream" in route else PAIR_TEXT)
    assert handler.log.tokens == 0
    assert [e[0]["number"] for e in handler.log.events] == [1, 2, 3]


@pytest.mark.parametrize("version", ["v1", "v2"])
async def test_a_chain_streams_the_model_within_it(version: Any) -> None:
    chain = PromptTemplate.from_template("{topic}") | pair() | RunnableLambda(passed)
    events = await collect(chain.astream_events({"topic": "hi"}, version=version))
    texts = [e["data"]["chunk"] for e in events if e["event"] == "on_llm_stream"]
    assert "".join(getattr(text, "text", text) for text in texts) == PAIR_TEXT
    custom = [e for e in events if e["event"] == "on_custom_event"]
    if version == "v1":  # knows no custom events
        return
    assert [e["data"]["number"] for e in custom] == [1, 2, 3]
    assert {e["name"] for e in custom} == {EVENT}
    starts = {e["run_id"] for e in events if e["event"] == "on_llm_start"}
    assert {e["run_id"] for e in custom} == starts


def test_peers_075_events_belong_to_the_model_and_not_to_a_neighbour() -> None:
    collector, handler = RunCollectorCallbackHandler(), Handler()
    chain = RunnableLambda(passed) | pair() | RunnableLambda(passed)
    list(chain.stream("hi", {"callbacks": [collector, handler]}))
    (root,) = collector.traced_runs
    (model_run,) = [run for run in root.child_runs if run.run_type == "llm"]
    assert {run_id for _, run_id, _, _ in handler.log.events} == {model_run.id}


def test_peers_063_async_handlers_of_async_routes_run_on_the_callers_loop() -> None:
    loops: set[int] = set()

    class Watching(AsyncHandler):
        async def on_custom_event(self, *_: Any, **__: Any) -> None:
            loops.add(id(asyncio.get_running_loop()))

    async def consume() -> int:
        model, config = pair(), RunnableConfig(callbacks=[Watching()])
        await model.ainvoke("hi", config)
        await collect(model.astream("hi", config))
        await model.agenerate(["hi", "yo"], callbacks=[Watching()])
        return id(asyncio.get_running_loop())

    own = asyncio.run(consume())
    assert loops == {own}


# Runs of several prompts


class Named(BaseCallbackHandler):
    """Notes what LangChain says of each run."""

    def __init__(self) -> None:
        self.runs: list[tuple[UUID, Any, Any, Any]] = []

    def on_llm_start(
        self,
        serialized: Any,
        prompts: Any,
        *,
        run_id: UUID,
        tags: Any = None,
        metadata: Any = None,
        name: Any = None,
        **_: Any,
    ) -> Any:
        self.runs.append((run_id, prompts, tags, name))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_each_prompt_can_have_its_own_callbacks_tags_names_and_ids(asynchronous: bool) -> None:
    handlers, ids = [Named(), Named()], [uuid4(), uuid4()]
    arguments: dict[str, Any] = {
        "callbacks": [[handlers[0]], CallbackManager([handlers[1]])],
        "tags": [["one"], ["two"]],
        "metadata": [{"k": 1}, {"k": 2}],
        "run_name": ["first", "second"],
        "run_id": ids,
    }
    if asynchronous:
        # An async call wants a manager of its own kind; lists are good for both.
        arguments["callbacks"] = [[handler] for handler in handlers]
        asyncio.run(pair().agenerate(["a", "b"], **arguments))
    else:
        pair().generate(["a", "b"], **arguments)
    assert [handler.runs for handler in handlers] == [
        [(ids[0], ["a"], ["one"], "first")],
        [(ids[1], ["b"], ["two"], "second")],
    ]


def test_a_single_run_id_is_the_first_prompts() -> None:
    handler, run_id = Named(), uuid4()
    pair().generate(["a", "b"], callbacks=[handler], tags=["t"], run_name="n", run_id=run_id)
    assert handler.runs[0] == (run_id, ["a"], ["t"], "n")
    assert handler.runs[1][1:] == (["b"], ["t"], "n")
    assert handler.runs[1][0] != run_id


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"callbacks": [None]}, "callbacks must be a list of 2"),
        ({"callbacks": [[], []], "tags": ["a"]}, "tags must be a list of 2"),
        ({"run_id": [uuid4()]}, "run_id must be a list of 2"),
    ],
)
def test_lists_of_the_wrong_length_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        pair().generate(["a", "b"], **arguments)


def test_prompts_must_be_a_list_and_may_be_none_at_all() -> None:
    with pytest.raises(ConfigurationError, match="prompts must be a list"):
        pair().generate("a")  # type: ignore[arg-type]
    assert pair().generate([]).generations == []
    assert pair().batch([]) == []


def test_errors_of_one_prompt_stay_its_own() -> None:
    handler = Handler()
    long = "x" * 5000
    answers = pair().batch(["a", long, "b"], {"callbacks": [handler]}, return_exceptions=True)
    assert answers[0] == answers[2] == PAIR_TEXT
    assert isinstance(answers[1], SpecGuardError)
    assert len(handler.errors) == 1
    assert len(handler.log.starts) == 3
    answers = asyncio.run(pair().abatch(["a", long], return_exceptions=True))
    assert answers[0] == PAIR_TEXT
    assert isinstance(answers[1], SpecGuardError)


# Answers


@pytest.mark.parametrize("route", [route for route in ROUTES if "events" not in route])
def test_all_routes_give_the_same_text(route: str) -> None:
    answer = ROUTES[route](pair(), {})
    if route == "batch_as_completed":
        answer = [text for _, text in answer]
    if "batch" in route:
        assert answer == [PAIR_TEXT] * 2
    else:
        assert answer == ([*PAIR_TEXTS, ""] if "stream" in route else PAIR_TEXT)


@pytest.mark.parametrize("route", SINGLE)
@pytest.mark.parametrize(
    ("stop", "text"),
    [(["b."], "One a.\n\nDos "), (["c"], "One a.\n\nDos b.\n\nThree "), (["a.\n\nD"], "One ")],
)
def test_stop_strings_cut_on_every_route(route: str, stop: list[str], text: str) -> None:
    for model in (pair(stop=stop), pair().bind(stop=stop)):
        assert "".join(ROUTES[route](model, {})) == text
    assert "".join(ROUTES[route](pair(stop=stop).bind(stop=[]), {})) == PAIR_TEXT


@pytest.mark.parametrize("route", SINGLE)
def test_peers_064_equal_seeds_give_equal_answers_and_none_gives_others(route: str) -> None:
    model = plain(toy_chat.random(3, temperature=1.5))
    answers = ["".join(ROUTES[route](model.bind(seed=seed), {})) for seed in (1, 2, 1)]
    assert answers[0] == answers[2] != answers[1]
    assert len({"".join(ROUTES[route](model, {})) for _ in range(4)}) > 1


def test_the_seed_that_was_drawn_gives_the_answer_again() -> None:
    model = plain(toy_chat.random(3, temperature=1.5))
    generation = model.generate(["hi"]).generations[0][0]
    assert generation.generation_info
    assert model.invoke("hi", seed=generation.generation_info["seed"]) == generation.text


def test_the_text_goes_to_the_model_as_it_stands_or_as_a_users_message() -> None:
    model = pair()
    raw, chat = (
        model.generate(["hi"], chat_template=flag).llm_output["token_usage"]["prompt_tokens"]  # type: ignore[index]
        for flag in (False, True)
    )
    assert raw == len(engine_of(model).encode(model._prompt("hi"))) == len("hi") + 1
    assert chat == len("<user>hi") + 1
    assert pair(chat_template=True)._prompt("hi").messages == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("chat_template", [False, True])
def test_nothing_to_answer_is_an_error(chat_template: bool) -> None:
    with pytest.raises(ConfigurationError, match="empty"):
        pair(chat_template=chat_template).invoke("")


def test_messages_become_text_as_langchain_writes_it() -> None:
    prompt = ChatPromptTemplate([("human", "{question}"), ("ai", "Hm.")])
    assert (prompt | pair()).invoke({"question": "hi"}) == PAIR_TEXT
    messages = [HumanMessage("hi"), AIMessage("Hm.")]
    assert pair().get_num_tokens_from_messages(messages) == len("Human: hi\nAI: Hm.") + 1


def test_the_result_says_what_it_has_cost_and_how_it_ended() -> None:
    handler = Handler()
    result = pair(seed=7).generate(["hi"], callbacks=[handler])
    (generation,) = result.generations[0]
    info, output = generation.generation_info, result.llm_output
    assert info
    assert output
    assert generation.text == PAIR_TEXT
    steps = [Step.from_dict(step) for step in info[STEPS_KEY]]
    assert "".join(step.text for step in steps) == PAIR_TEXT
    assert info["finish_reason"] == "stop"
    assert info["seed"] == 7
    assert info["model_name"] == output["model_name"] == "toy-draft + toy-target"
    assert info["specguard"]["acceptance_rate"] == pytest.approx(2 / 3)
    written = len(PAIR_TEXT.encode()) + 1  # and the end token
    assert output["token_usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": written,
        "total_tokens": 3 + written,
    }
    assert info["usage_metadata"]["total_tokens"] == 3 + written
    assert handler.results[0].llm_output == output


def test_the_costs_of_several_prompts_are_summed_and_those_of_a_cache_are_none() -> None:
    model = pair(cache=InMemoryCache())
    both = model.generate(["a", "bb"])
    assert both.llm_output
    infos = [generations[0].generation_info or {} for generations in both.generations]
    used = [info["usage_metadata"] for info in infos]
    assert both.llm_output["token_usage"]["total_tokens"] == sum(u["total_tokens"] for u in used)
    steps = [Step.from_dict(step) for info in infos for step in info[STEPS_KEY]]
    assert Metrics.of(steps).to_dict().items() <= both.llm_output["specguard"].items()
    again = model.generate(["a", "ccc"])
    assert again.llm_output
    assert again.llm_output["token_usage"]["prompt_tokens"] == len("ccc") + 1
    assert [g[0].text for g in again.generations] == [PAIR_TEXT] * 2
    assert model.generate(["a", "bb"]).llm_output == {}


def test_streamed_chunks_merge_into_the_result() -> None:
    collector = Handler()
    list(pair(seed=1).stream("hi", {"callbacks": [collector]}))
    (streamed,) = collector.results[0].generations[0]
    (computed,) = pair(seed=1).generate(["hi"]).generations[0]
    assert streamed.text == computed.text
    assert streamed.generation_info
    assert computed.generation_info
    assert streamed.generation_info.keys() == computed.generation_info.keys()
    assert len(streamed.generation_info[STEPS_KEY]) == 3


def test_steps_are_yielded_as_they_are() -> None:
    steps = list(pair().steps("hi", stop=["c."]))
    assert [step.text for step in steps] == ["One a.\n\n", "Dos b.\n\n", "Three "]
    assert steps[-1].finish_reason == "stop"


async def test_asteps_gives_the_same() -> None:
    assert [step.text async for step in pair().asteps("hi")] == PAIR_TEXTS


@pytest.mark.parametrize("route", SINGLE)
def test_steps_can_end_an_answer_or_be_written_anew(route: str) -> None:
    second = pair(stop_when=lambda step: step.number == 2)
    assert "".join(ROUTES[route](second, {})) == "One a.\n\nDos b.\n\n"
    runnable = RunnableLambda(lambda step: step.number == 1)
    assert "".join(ROUTES[route](pair().bind(stop_when=runnable), {})) == "One a.\n\n"
    by_the_target = pair(review=lambda step: "keep" if step.source == "target" else "regenerate")
    assert "".join(ROUTES[route](by_the_target, {})) == "Uno a.\n\nDos b.\n\nTres c."


# Options


@pytest.mark.parametrize("route", [*SINGLE, "batch", "abatch"])
def test_options_of_a_call_are_checked_on_every_route(route: str) -> None:
    model = pair()
    for wrong in ({"temprature": 1}, {"temperature": -1.0}, {"timeout": -1.0}):
        with pytest.raises(ConfigurationError, match=next(iter(wrong))):
            ROUTES[route](model.bind(**wrong), {})
    with pytest.raises(ConfigurationError, match="api_key cannot be given in a call"):
        ROUTES[route](model.bind(api_key="secret"), {})
    ROUTES[route](model, {})


def test_a_field_assigned_later_counts_and_is_validated() -> None:
    model = pair()
    model.max_tokens = 3
    assert model.invoke("hi") == "One"
    model.temperature = -1
    with pytest.raises(ConfigurationError, match="temperature=-1"):
        model.invoke("hi")


@pytest.mark.parametrize("route", SINGLE)
def test_traces_show_the_options_in_force(route: str) -> None:
    handler = Handler()
    model = pair(stop=["x"], temperature=0.5)
    ROUTES[route](model, {"callbacks": [handler]})
    ROUTES[route](model.bind(stop=["y"], temperature=0.25, max_tokens=9), {"callbacks": [handler]})
    first, second = handler.metadata
    assert (first["ls_stop"], first["ls_temperature"]) == (["x"], 0.5)
    assert (second["ls_stop"], second["ls_temperature"]) == (["y"], 0.25)
    assert second["ls_max_tokens"] == 9
    assert first["ls_provider"] == "specguard"


@pytest.mark.parametrize("route", SINGLE)
def test_a_timeout_is_an_error_that_names_it(route: str) -> None:
    model = plain(toy_chat.endless(delay_s=0.005), timeout=0.1)
    with pytest.raises(DecodingTimeoutError, match=r"timeout=0\.1 s"):
        ROUTES[route](model, {})
    with pytest.raises(DecodingTimeoutError, match=r"timeout=0\.05 s"):
        ROUTES[route](model.bind(timeout=0.05), {})


# Caching


def test_peers_070_caches_are_honoured() -> None:
    model = plain(toy_chat.scripted(), cache=InMemoryCache())
    first = model.invoke("hi")
    passes = engine_of(model).forward_passes
    assert model.invoke("hi") == asyncio.run(model.ainvoke("hi")) == first
    assert engine_of(model).forward_passes == passes
    model.model_copy(update={"cache": False}).invoke("hi")
    assert engine_of(model).forward_passes > passes


@pytest.mark.parametrize("asynchronous", [False, True])
def test_peers_073_the_cache_tells_options_of_calls_apart(asynchronous: bool) -> None:
    model = plain(toy_chat.random(3, temperature=1.5), cache=InMemoryCache())

    def ask(**options: Any) -> str:
        if asynchronous:
            return asyncio.run(model.ainvoke("hi", **options))
        return model.invoke("hi", **options)

    answers = [ask(seed=seed) for seed in (1, 2, 1)]
    assert answers[0] == answers[2] != answers[1]
    whole = ask(seed=1)
    assert ask(seed=1, stop=[whole[3]]) == whole[: whole.index(whole[3])]
    assert ask(seed=1, max_tokens=2) == whole[:2]
    assert ask(seed=1) == whole


def test_stop_strings_of_the_constructor_are_part_of_the_identity() -> None:
    cache = InMemoryCache()
    model = pair(cache=cache, seed=1)
    stopping = model.model_copy(update={"stop": ["b."]})
    assert model.invoke("hi") == PAIR_TEXT
    assert stopping.invoke("hi") == "One a.\n\nDos "
    assert stopping.invoke("hi", stop=[]) == PAIR_TEXT


def test_a_chat_prompt_and_a_raw_one_are_told_apart() -> None:
    model = pair(cache=InMemoryCache())
    model.invoke("hi")
    passes = engine_of(model).forward_passes
    model.invoke("hi", chat_template=True)
    assert engine_of(model).forward_passes > passes


# Passages


@pytest.mark.parametrize("chat_template", [False, True])
@pytest.mark.parametrize("route", SINGLE)
def test_steps_tell_which_passages_they_lean_on(route: str, chat_template: bool) -> None:
    handler = Handler()
    model = pair(chat_template=chat_template)
    ROUTES[route](model.bind(passages=["h", "i"]), {"callbacks": [handler]})
    assert [len(event["passages"]) for event, *_ in handler.log.events] == [2, 2, 2]
    assert [len(step.passages) for step in model.steps("hi", passages=["h"])] == [1, 1, 1]


def test_wrong_passages_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="passages='hi'"):
        pair().invoke("hi", passages="hi")
    with pytest.raises(ConfigurationError, match=r"'yo'.* does not stand in the prompt"):
        pair().invoke("hi", passages=["yo"])


def test_the_cache_tells_passages_apart() -> None:
    model = pair(cache=InMemoryCache(), seed=1)
    told = [
        [len(step["passages"]) for step in (generation.generation_info or {})[STEPS_KEY]]
        for passages in ([], ["h"], ["h", "i"], ["h"])
        for (generation,) in model.generate(["hi"], passages=passages).generations
    ]
    assert told == [[n] * 3 for n in (0, 1, 2, 1)]


# Rate limits


class Counting(BaseRateLimiter):
    def __init__(self) -> None:
        self.sync = self.asynchronous = 0
        self.lock = threading.Lock()

    def acquire(self, *, blocking: bool = True) -> bool:
        with self.lock:
            self.sync += blocking
        return True

    async def aacquire(self, *, blocking: bool = True) -> bool:
        self.asynchronous += blocking
        return True


@pytest.mark.parametrize("route", ROUTES)
def test_a_rate_limiter_is_asked_once_for_each_prompt(route: str) -> None:
    limiter = Counting()
    ROUTES[route](pair(rate_limiter=limiter), {})
    prompts = 2 if "batch" in route else 1
    expected = (0, prompts) if route in ASYNC else (prompts, 0)
    assert (limiter.sync, limiter.asynchronous) == expected


def test_what_a_cache_has_needs_no_leave() -> None:
    limiter = Counting()
    model = pair(rate_limiter=limiter, cache=InMemoryCache())
    model.invoke("hi")
    model.invoke("hi")
    assert limiter.sync == 1


# Cancellation


WAYS: dict[str, Callable[[SpecGuardLLM], Any]] = {
    "ainvoke": lambda m: m.ainvoke("hi"),
    "agenerate": lambda m: m.agenerate(["hi", "yo"]),
    "astream": lambda m: collect(m.astream("hi")),
    "asteps": lambda m: collect(m.asteps("hi")),
    "abatch": lambda m: m.abatch(["hi", "yo"]),
    "astream_events": lambda m: collect(m.astream_events("hi", version="v2")),
}


async def assert_stopped(model: SpecGuardLLM) -> None:
    """The engine computes nothing more after at most a token, and answers the next request."""
    engine = engine_of(model)
    await asyncio.sleep(0.1)
    before = engine.forward_passes
    assert before > 0
    await asyncio.sleep(0.1)
    assert engine.forward_passes == before
    assert await model.ainvoke("hi", max_tokens=2) == "On"


def slow() -> SpecGuardLLM:
    return plain(toy_chat.endless(delay_s=0.002))


@pytest.mark.parametrize("way", WAYS)
async def test_peers_059_a_cancelled_call_stops_decoding(way: str) -> None:
    model = slow()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(WAYS[way](model), 0.15)
    await assert_stopped(model)


@pytest.mark.parametrize("leave", ["break", "aclose", "drop"])
async def test_peers_059_leaving_a_stream_stops_decoding(leave: str) -> None:
    model = slow()
    stream: Any = model.astream("hi")
    if leave == "break":
        async for _ in stream:
            break
    else:
        await anext(stream)
    if leave == "aclose":
        await stream.aclose()
    del stream
    await assert_stopped(model)


@pytest.mark.parametrize("route", ["stream", "steps"])
def test_leaving_a_sync_stream_stops_decoding(route: str) -> None:
    model = slow()
    for _ in getattr(model, route)("hi"):
        break
    asyncio.run(assert_stopped(model))


def test_ctrl_c_in_a_handler_of_invoke_stops_decoding() -> None:
    class Impatient(Handler):
        raise_error = True

        def on_llm_new_token(self, *_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

    model = slow()
    with pytest.raises(KeyboardInterrupt):
        model.invoke("hi", {"callbacks": [Impatient()]})
    asyncio.run(assert_stopped(model))


async def test_the_event_loop_stays_responsive() -> None:
    gaps: list[float] = []

    async def tick() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.005)
            gaps.append(time.perf_counter() - before)

    ticker = asyncio.create_task(tick())
    await plain(toy_chat.endless(delay_s=0.002, max_tokens=60)).ainvoke("hi")
    ticker.cancel()
    assert sorted(gaps)[len(gaps) // 2] < 0.05


# Errors


@pytest.mark.parametrize("route", SINGLE)
def test_the_model_is_usable_after_an_error(route: str) -> None:
    model, handler = pair(), Handler()

    async def consumed(texts: AsyncIterator[str]) -> str:
        return "".join([text async for text in texts])

    def use(prompt: str, **overrides: Any) -> str:
        answer = getattr(model, route)(prompt, {"callbacks": [handler]}, **overrides)
        if route == "ainvoke":
            return str(asyncio.run(answer))
        return asyncio.run(consumed(answer)) if route == "astream" else "".join(answer)

    for prompt, overrides in (("", {}), ("x" * 5000, {}), ("hi", {"max_tokens": 100_000})):
        with pytest.raises(SpecGuardError):
            use(prompt, **overrides)
    assert len(handler.errors) == 3
    assert all(isinstance(error, SpecGuardError) for _, error in handler.errors)
    assert use("hi") == PAIR_TEXT
