"""What LangChain expects of any model class, of the chat model and of the plain LLM alike."""

import asyncio
import copy
import json
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import UsageMetadataCallbackHandler
from langchain_core.globals import set_llm_cache
from langchain_core.load import dumpd, dumps
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    trim_messages,
)
from langchain_core.outputs import Generation
from langchain_core.prompts import PromptTemplate
from langchain_core.rate_limiters import InMemoryRateLimiter
from langchain_core.runnables import ConfigurableField, Runnable
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import create_model

from specguard_chains import ChatSpecGuard, ConfigurationError, QueueFullError, SpecGuardOptions
from specguard_chains.decoding.engine import Prompt
from specguard_chains.engines import DEFAULT_N_CTX
from specguard_chains.errors import EngineError
from specguard_chains.llm import SpecGuardLLM
from specguard_chains.model_base import profile
from specguard_chains.templates import ChatTemplate
from tests.toy_engine import ToyEngine, random_policy, scripted_policy
from tests.unit_tests import test_llm, toy_chat
from tests.unit_tests.routes import collect
from tests.unit_tests.test_llm import Counting, plain

Model = ChatSpecGuard | SpecGuardLLM

CLASSES: list[type[Model]] = [ChatSpecGuard, SpecGuardLLM]
KINDS: dict[str, Callable[[ChatSpecGuard], Model]] = {"chat": lambda chat: chat, "plain": plain}

classes = pytest.mark.parametrize("cls", CLASSES)
kinds = pytest.mark.parametrize("kind", KINDS)


def text(answer: BaseMessage | str) -> str:
    return answer if isinstance(answer, str) else answer.text


def engine_of(model: Model) -> ToyEngine:
    assert isinstance(model.target, ToyEngine)
    return model.target


@pytest.fixture
def global_cache() -> Iterator[InMemoryCache]:
    cache = InMemoryCache()
    set_llm_cache(cache)
    yield cache
    set_llm_cache(None)


# Construction


@classes
def test_peers_079_a_models_name_is_all_that_a_model_needs(cls: type[Model]) -> None:
    assert cls(model="some-pair").model == cls(pair="some-pair").model == "some-pair"
    assert cls(draft="small.gguf", target="large.gguf").model == "small.gguf + large.gguf"
    with pytest.raises(ConfigurationError, match="did you mean temperature"):
        cls(temprature=1)


def test_importing_the_plain_llm_loads_no_engine() -> None:
    code = (
        "import sys, specguard_chains.llm; "
        "engines = {'torch', 'transformers', 'llama_cpp', 'specguard_adapters'}; "
        "print(sorted(engines & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@classes
def test_traces_show_the_packages_version(cls: type[Model]) -> None:
    metadata = cls(metadata={"k": 1}).metadata
    assert metadata
    assert metadata["k"] == 1
    assert {"langchain-core", "specguard_chains"} <= metadata["lc_versions"].keys()


# Copies


@classes
def test_pickles_hold_settings_only(cls: type[Model]) -> None:
    model = cls(draft="small.gguf", target="large.gguf", seed=1, stop=["x"], timeout=3)
    model._assembled._latest = ({}, threading.Lock())  # type: ignore[assignment]
    clone = pickle.loads(pickle.dumps(model))
    assert clone == model
    assert (clone.stop, clone.timeout) == (["x"], 3)
    assert clone._assembled._latest is None


@classes
def test_a_loaded_engine_in_a_pickle_is_an_error_with_a_remedy(cls: type[Model]) -> None:
    model = cls(decoder="target", target=engine_of(toy_chat.scripted()))
    with pytest.raises(ConfigurationError, match=r"toy-target, which cannot be pickled.*target='"):
        pickle.dumps(model)


@kinds
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda model: model.model_copy()])
def test_copies_share_engines_and_go_their_own_way(kind: str, copied: Any) -> None:
    model = KINDS[kind](toy_chat.scripted())
    model.invoke("hi")
    clone = copied(model)
    assert clone.target is model.target
    clone.max_tokens = 3
    assert text(clone.invoke("hi")) == "One"
    assert text(model.invoke("hi")) == toy_chat.TEXT


@classes
def test_deep_copies_share_what_has_locks(cls: type[Model]) -> None:
    shared: dict[str, Any] = {
        "target": engine_of(toy_chat.scripted()),
        "cache": InMemoryCache(),
        "rate_limiter": InMemoryRateLimiter(requests_per_second=100),
    }
    handler = UsageMetadataCallbackHandler()
    model = cls(decoder="target", callbacks=[handler], stop=["x"], **shared)
    clone = copy.deepcopy(model)
    for name, value in shared.items():
        assert getattr(clone, name) is value
    assert clone.callbacks == [handler]
    assert clone.stop == model.stop
    assert clone.stop is not model.stop


# Configuration at run time


@kinds
def test_fields_can_be_configured_at_run_time(kind: str) -> None:
    model = KINDS[kind](toy_chat.scripted())
    configurable: Runnable[Any, Any] = model.configurable_fields(
        max_tokens=ConfigurableField("limit"), stop=ConfigurableField("stop")
    )
    assert text(configurable.invoke("hi")) == toy_chat.TEXT
    assert text(configurable.invoke("hi", {"configurable": {"limit": 3}})) == "One"
    assert text(configurable.with_config(configurable={"stop": ["a."]}).invoke("hi")) == "One "
    with pytest.raises(ConfigurationError, match="max_tokens=0"):
        configurable.invoke("hi", {"configurable": {"limit": 0}})


@kinds
def test_a_model_can_have_alternatives(kind: str) -> None:
    model, other = (KINDS[kind](toy_chat.scripted(*steps)) for steps in ((), ("Other.",)))
    either = model.configurable_alternatives(ConfigurableField("which"), other=other)
    assert text(either.invoke("hi")) == toy_chat.TEXT
    assert text(either.invoke("hi", {"configurable": {"which": "other"}})) == "Other."


@kinds
def test_retries_and_fallbacks_see_typed_errors(kind: str) -> None:
    chain: Any = KINDS[kind](toy_chat.scripted())
    long = "x" * 5000
    fallback = KINDS[kind](toy_chat.solo(random_policy(0), max_tokens=4))
    engine_of(fallback).context_length = 9000
    assert text(chain.with_fallbacks([fallback]).invoke(long))
    retrying = chain.with_retry(retry_if_exception_type=(EngineError,), stop_after_attempt=2)
    assert text(retrying.invoke("hi")) == toy_chat.TEXT


# Rate limits


@kinds
@pytest.mark.parametrize("route", ["invoke", "stream", "batch", "ainvoke", "astream", "abatch"])
def test_a_rate_limiter_is_asked_once_for_each_request(kind: str, route: str) -> None:
    limiter = Counting()
    model = KINDS[kind](toy_chat.scripted()).model_copy(update={"rate_limiter": limiter})
    test_llm.ROUTES[route](model, {})
    requests = 2 if "batch" in route else 1
    expected = (0, requests) if route.startswith("a") else (requests, 0)
    assert (limiter.sync, limiter.asynchronous) == expected


@kinds
def test_a_rate_limiter_is_asked_for_steps_too(kind: str) -> None:
    limiter = Counting()
    model = KINDS[kind](toy_chat.scripted()).model_copy(update={"rate_limiter": limiter})
    assert len(list(model.steps("hi"))) == 3
    assert len(asyncio.run(collect(model.asteps("hi")))) == 3
    assert (limiter.sync, limiter.asynchronous) == (1, 1)


@classes
def test_langchains_own_rate_limiter(cls: type[Model]) -> None:
    limiter = InMemoryRateLimiter(requests_per_second=1000, check_every_n_seconds=0.001)
    engine = engine_of(toy_chat.scripted())
    model = cls(decoder="target", target=engine, rate_limiter=limiter)
    assert [text(answer) for answer in model.batch(["a", "b", "c"])] == [toy_chat.TEXT] * 3
    assert limiter.available_tokens < 1


# Caching


@kinds
def test_equal_settings_share_a_cache_and_others_do_not(
    kind: str, global_cache: InMemoryCache
) -> None:
    model = KINDS[kind](toy_chat.random(3, temperature=1.5, seed=1))
    engine = engine_of(model)
    answer = text(model.invoke("hi"))

    def computes(other: Any, **options: Any) -> bool:
        before = engine.forward_passes
        other.invoke("hi", **options)
        return engine.forward_passes > before

    same = model.model_copy()
    assert text(same.invoke("hi")) == answer
    assert not computes(same)
    assert not computes(model.model_copy(update={"timeout": 60.0, "max_retries": 0}))
    assert not computes(model.with_config(tags=["t"]))
    assert computes(model.model_copy(update={"cache": False}))
    assert computes(model.model_copy(update={"seed": 2}))
    assert computes(model.model_copy(update={"stop": ["zz"]}))
    assert computes(model, top_p=0.5)
    model.temperature = 0.2
    assert computes(model)
    model.temperature = 1.5
    assert not computes(model)


@kinds
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("bound", [False, True])
def test_no_cache_answers_for_hooks(
    kind: str, asynchronous: bool, bound: bool, global_cache: InMemoryCache
) -> None:
    # A hook may say something else next time, and one that is gone leaves its address to another.
    model = KINDS[kind](toy_chat.scripted())

    def ask(number: int) -> str:
        hooks: Any = {"stop_when": lambda step: step.number == number}
        asked: Any = model.bind(**hooks) if bound else model.model_copy(update=hooks)
        return text(asyncio.run(asked.ainvoke("hi")) if asynchronous else asked.invoke("hi"))

    model.invoke("hi")
    assert len(global_cache._cache) == 1
    assert [len(ask(number)) for number in (1, 2, 3)] == [8, 16, 24]
    assert len(global_cache._cache) == 1


def test_a_cache_tells_schemas_and_tools_of_one_name_apart(global_cache: InMemoryCache) -> None:
    model = toy_chat.scripted('{"x": 1}')

    def schema(field: str) -> Any:
        return create_model("Schema", **{field: (int, ...)})  # type: ignore[call-overload]

    def ask(field: str) -> str:
        return model.invoke("hi", response_format=schema(field)).text

    assert [ask("x"), ask("y"), ask("x")] == ['{"x": 1}', '{"y": 1}', '{"x": 1}']
    assert len(global_cache._cache) == 2
    for field in ("x", "y"):
        model.invoke("hi", tools=[schema(field)])
        model.invoke("hi", tools=[convert_to_openai_tool(schema(field))])
    assert len(global_cache._cache) == 4


def test_a_cache_tells_forms_of_messages_apart(global_cache: InMemoryCache) -> None:
    model = toy_chat.scripted("One a.", seed=1)
    assert model.invoke("hi").content == "One a."
    for _ in range(2):
        (block,) = model.model_copy(update={"output_version": "v1"}).invoke("hi").content
        assert isinstance(block, dict)
        assert block["text"] == "One a."
    assert len(global_cache._cache) == 2


@classes
def test_a_cache_that_is_not_there_is_an_error(cls: type[Model]) -> None:
    model = cls(decoder="target", target=engine_of(toy_chat.scripted()), cache=True)
    with pytest.raises(ValueError, match="cache"):
        model.invoke("hi")


def test_every_option_of_the_plain_llm_is_identifying() -> None:
    def key(model: SpecGuardLLM) -> str:
        return str(sorted(model.asdict().items()))

    given: dict[str, Any] = {
        "draft": "d.gguf",
        "target": "t.gguf",
        "decoder": "target",
        "threshold": 0.1,
        "stop": ["x"],
        "seed": 9,
        "n_ctx": 512,
        "chat_template": True,
        "stop_when": bool,
        "review": str,
    }
    keys = {key(SpecGuardLLM(**{name: value})) for name, value in given.items()}
    assert len(keys | {key(SpecGuardLLM())}) == len(given) + 1
    for name in ({"api_key": "k"}, {"max_retries": 9}, {"timeout": 9}):
        assert key(SpecGuardLLM(**name)) == key(SpecGuardLLM())  # type: ignore[arg-type]


def test_answers_of_the_plain_llm_survive_a_cache_that_writes_them_down() -> None:
    class Written(InMemoryCache):
        def update(self, prompt: str, llm_string: str, return_val: Any) -> None:
            assert all(isinstance(generation, Generation) for generation in return_val)
            super().update(prompt, llm_string, [json.loads(dumps(g)) for g in return_val])

        def lookup(self, prompt: str, llm_string: str) -> Any:
            found = super().lookup(prompt, llm_string)
            return found and [Generation(**found[0]["kwargs"])]

    model = plain(toy_chat.scripted(), cache=Written())
    first, again = (model.generate(["hi"]).generations[0][0] for _ in range(2))
    assert again.text == first.text
    assert again.generation_info == first.generation_info


# Serialisation


@classes
def test_a_model_is_shown_without_its_key_and_not_loaded_from_text(cls: type[Model]) -> None:
    model = cls(api_key="top-secret", draft="small.gguf", seed=7)
    assert not cls.is_lc_serializable()
    shown = dumpd(model)
    assert shown["type"] == "not_implemented"
    assert shown["id"][-1] == cls.__name__
    assert "small.gguf" in shown["repr"]
    assert "seed=7" in shown["repr"]
    assert model.lc_secrets == {"api_key": "OPENAI_API_KEY"}
    for form in (
        json.dumps(shown),
        repr(model),
        dumps(PromptTemplate.from_template("{x}") | model),
    ):
        assert "top-secret" not in form


# Tokens


class Strict(ToyEngine):
    """Refuses what a template that insists on alternating roles refuses."""

    def encode(self, prompt: Prompt) -> list[int]:
        if prompt.text is None:
            source = Path(__file__).with_name("templates") / "mistral.jinja"
            text = ChatTemplate(source.read_text()).render(prompt.messages, prompt.tools)
            return list(text.encode())
        return super().encode(prompt)


@pytest.mark.parametrize("engine", [ToyEngine, Strict])
def test_conversations_are_shortened_by_the_targets_tokens(engine: type[ToyEngine]) -> None:
    model = ChatSpecGuard(decoder="target", target=engine(random_policy(0)))
    call: Any = {"name": "add", "args": {"a": 1}, "id": "call_1"}
    messages = [
        SystemMessage("Short."),
        HumanMessage("A long question. " * 20),
        AIMessage("", tool_calls=[call]),
        ToolMessage("", tool_call_id="call_1"),
        AIMessage("A long answer. " * 20),
        HumanMessage("And now?"),
    ]
    for strategy in ("first", "last"):
        shortened = trim_messages(
            messages, max_tokens=150, token_counter=model, strategy=strategy, allow_partial=False
        )
        assert 0 < len(shortened) < len(messages)
    assert shortened == messages[-1:]
    assert model.get_num_tokens_from_messages([AIMessage("")]) > 0
    with pytest.raises(ConfigurationError, match="nothing to answer"):
        model.invoke([AIMessage("")])


@kinds
@pytest.mark.parametrize("wrong", [{"timeout": "soon"}, {"timeout": [3]}])
def test_fields_that_a_call_gives_anew_are_validated(kind: str, wrong: dict[str, Any]) -> None:
    model = KINDS[kind](toy_chat.scripted())
    with pytest.raises(ConfigurationError, match=r"timeout=.*valid number"):
        model.invoke("hi", **wrong)
    assert text(model.invoke("hi", timeout="60")) == toy_chat.TEXT
    with pytest.raises(ConfigurationError, match=r"reasoning_steps='perhaps'.*boolean"):
        toy_chat.scripted().invoke("hi", reasoning_steps="perhaps")
    assert toy_chat.scripted().invoke("hi", reasoning_steps="no").text == toy_chat.TEXT


@kinds
def test_tokens_are_counted_by_the_target(kind: str) -> None:
    model = KINDS[kind](toy_chat.pair())
    assert model.get_token_ids("hi") == [*b"hi", 257]
    assert model.get_num_tokens("hi") == 3
    own = model.model_copy(update={"custom_get_token_ids": lambda text: [0] * len(text)})
    assert own.get_num_tokens("hello") == 5


# Threads and event loops

REQUESTS = [(f"prompt {seed}", seed) for seed in range(32)]


class Owners(test_llm.Handler):
    """Which run every event belongs to, and what each run's answer was."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: dict[UUID, list[str]] = {}

    def on_custom_event(self, name: str, data: Any, *, run_id: UUID, **_: Any) -> None:
        self.texts.setdefault(run_id, []).append(data["text"])


@kinds
def test_eight_threads_of_four_requests_get_their_own_answers(kind: str) -> None:
    model: Any = KINDS[kind](toy_chat.random(3, temperature=1.5))
    alone = {seed: text(model.invoke(prompt, seed=seed)) for prompt, seed in REQUESTS}
    handlers: dict[int, Owners] = {}

    def ask(request: tuple[str, int]) -> str:
        prompt, seed = request
        handlers[seed] = Owners()
        config = {"callbacks": [handlers[seed]]}
        if seed % 2:
            return "".join(map(text, model.stream(prompt, config, seed=seed)))
        return text(model.invoke(prompt, config, seed=seed))

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, REQUESTS))
    assert answers == [alone[seed] for _, seed in REQUESTS]
    for seed, handler in handlers.items():
        assert ["".join(texts) for texts in handler.texts.values()] == [alone[seed]]


@kinds
def test_several_event_loops_share_a_model(kind: str) -> None:
    model: Any = KINDS[kind](toy_chat.random(3, temperature=1.5))
    alone = {seed: text(model.invoke(prompt, seed=seed)) for prompt, seed in REQUESTS}

    async def ask(prompt: str, seed: int) -> str:
        if seed % 2:
            pieces = [text(piece) async for piece in model.astream(prompt, seed=seed)]
            return "".join(pieces)
        return text(await model.ainvoke(prompt, seed=seed))

    async def some(requests: list[tuple[str, int]]) -> list[str]:
        return await asyncio.gather(*(ask(*request) for request in requests))

    with ThreadPoolExecutor(4) as pool:
        parts = [REQUESTS[i::4] for i in range(4)]
        answers = list(pool.map(lambda part: asyncio.run(some(part)), parts))
    assert answers == [[alone[seed] for _, seed in part] for part in parts]


class Counted(ToyEngine):
    """Remembers on which threads prompts are encoded: that may ask a server."""

    def __init__(self) -> None:
        super().__init__(scripted_policy(*toy_chat.STEPS))
        self.threads: set[int] = set()

    def encode(self, prompt: Prompt) -> list[int]:
        self.threads.add(threading.get_ident())
        return super().encode(prompt)


@kinds
@pytest.mark.parametrize("route", ["ainvoke", "astream", "asteps"])
def test_no_event_loop_waits_while_a_prompt_is_counted(kind: str, route: str) -> None:
    engine = Counted()
    model: Any = KINDS[kind](ChatSpecGuard(decoder="target", target=engine))

    async def ask() -> None:
        answer = getattr(model, route)("hi")
        await (answer if route == "ainvoke" else collect(answer))
        assert threading.get_ident() not in engine.threads

    asyncio.run(ask())
    assert engine.threads


QUEUE_ROUTES: dict[str, Callable[[Any], Any]] = {
    "invoke": lambda m: m.invoke("hi"),
    "stream": lambda m: list(m.stream("hi")),
    "steps": lambda m: list(m.steps("hi")),
    "ainvoke": lambda m: asyncio.run(m.ainvoke("hi")),
    "astream": lambda m: asyncio.run(collect(m.astream("hi"))),
}


@kinds
@pytest.mark.parametrize("route", QUEUE_ROUTES)
def test_a_full_queue_is_an_error_and_those_in_it_are_answered(kind: str, route: str) -> None:
    model: Any = KINDS[kind](toy_chat.scripted(max_queue=1))
    with ThreadPoolExecutor(1) as pool:
        with engine_of(model).exclusive():
            waiting = pool.submit(model.invoke, "hi")
            while not engine_of(model)._queue.waiting:
                time.sleep(0.001)
            with pytest.raises(QueueFullError, match="max_queue=1 allows no more"):
                QUEUE_ROUTES[route](model)
        assert text(waiting.result(30)) == toy_chat.TEXT
    QUEUE_ROUTES[route](model)


# Profile


def test_a_profile_of_models_in_this_process() -> None:
    known = profile(SpecGuardOptions())
    assert known["max_input_tokens"] == known["max_output_tokens"] == DEFAULT_N_CTX
    assert known["tool_calling"]
    assert known["tool_choice"]
    assert known["structured_output"]
    assert not known["image_inputs"]
    limited = profile(SpecGuardOptions(n_ctx=8192, max_tokens=1000))
    assert (limited["max_input_tokens"], limited["max_output_tokens"]) == (7192, 1000)


def test_a_profile_takes_the_smaller_window_of_the_models_that_are_needed() -> None:
    small, large = (
        ToyEngine(random_policy(0), name=str(size), context_length=size) for size in (300, 700)
    )
    both = SpecGuardOptions(draft=small, target=large)
    assert profile(both)["max_input_tokens"] == 300
    assert profile(both)["name"] == "300 + 700"
    alone = SpecGuardOptions(draft=small, target=large, decoder="target")
    assert profile(alone)["max_input_tokens"] == 700
    crowded = profile(SpecGuardOptions(draft=small, target=large, max_tokens=900))
    assert "max_input_tokens" not in crowded
    assert crowded["max_output_tokens"] == 300


def test_a_server_keeps_its_window_to_itself_and_takes_no_grammar() -> None:
    url = "openai://localhost:1/model"
    known = profile(SpecGuardOptions(target=url))
    assert known.keys().isdisjoint({"max_input_tokens", "max_output_tokens"})
    assert not known["tool_choice"]
    assert not known["structured_output"]
    assert profile(SpecGuardOptions(target=url, n_ctx=2048))["max_input_tokens"] == 2048


def test_a_profile_has_no_keys_that_langchain_does_not_know(
    recwarn: pytest.WarningsRecorder,
) -> None:
    model = ChatSpecGuard(profile=profile(SpecGuardOptions()))
    assert model.profile == profile(SpecGuardOptions())
    assert not recwarn.list


def test_the_chat_model_has_its_profile_and_keeps_a_given_one() -> None:
    model = ChatSpecGuard(n_ctx=2048)
    assert model.profile == profile(model)
    assert ChatSpecGuard(profile={"max_input_tokens": 7}).profile == {"max_input_tokens": 7}
