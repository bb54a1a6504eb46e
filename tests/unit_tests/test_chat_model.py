"""ChatSpecGuard: its parameters, what it says about itself, and what an answer carries."""

import asyncio
import copy
import json
import pickle
import subprocess
import sys
import threading
import tomllib
from pathlib import Path
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.load import dumpd
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage
from langchain_core.runnables import ConfigurableField
from langchain_core.tools import tool

import specguard_chains
from specguard_chains import ChatSpecGuard, ConfigurationError, SpecGuardError, Step
from specguard_chains.decoding.engine import Prompt
from specguard_chains.errors import DecodingTimeoutError
from specguard_chains.messages import STEPS_KEY
from specguard_chains.model_base import NOT_IDENTIFYING
from specguard_chains.options import SpecGuardOptions
from tests.unit_tests import toy_chat


def merged(chunks: list[AIMessageChunk]) -> AIMessageChunk:
    return sum(chunks[1:], start=chunks[0])


# Importing and constructing


def test_importing_the_package_loads_neither_engines_nor_langchain() -> None:
    program = (
        "import sys, specguard_chains; specguard_chains.Step; specguard_chains.SpecGuardError;"
        "heavy = {'torch', 'transformers', 'llama_cpp', 'langchain_core', 'numpy'};"
        "print(sorted(heavy & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_importing_the_chat_model_loads_no_engine() -> None:
    program = (
        "import sys; from specguard_chains import ChatSpecGuard; ChatSpecGuard();"
        "print(sorted({'torch', 'transformers', 'llama_cpp'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_every_public_name_exists() -> None:
    for name in specguard_chains.__all__:
        assert getattr(specguard_chains, name) is not None
    assert set(specguard_chains.__all__) == {*specguard_chains._MODULES, "__version__"}
    with pytest.raises(AttributeError, match="SpecGuardLlama"):
        specguard_chains.SpecGuardLlama  # noqa: B018


def test_the_version_is_the_projects() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert specguard_chains.__version__ == project["project"]["version"]


def test_construction_loads_nothing() -> None:
    ChatSpecGuard(draft="no such file.gguf", target="no such file either.gguf")


@pytest.mark.parametrize("name", ["pair", "model"])
def test_the_pair_is_also_called_model(name: str) -> None:
    model = ChatSpecGuard(**{name: "some-pair"})
    assert model.pair == model.model == "some-pair"
    assert model._get_ls_params()["ls_model_name"] == "some-pair"


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"temprature": 1}, "'temprature'; did you mean temperature"),
        ({"n_contex": 1}, "n_ctx"),
        ({"base_url": "here"}, "'base_url'"),
        ({"temperature": -1}, r"temperature=-1: .* greater than or equal to 0"),
        ({"threshold": 1.5}, r"threshold=1\.5: .* less than or equal to 1"),
        ({"decoder": "magic"}, r"decoder='magic': .*'specguard-greedy'"),
        ({"stop": "STOP"}, "stop='STOP'"),
        ({"timeout": 0}, "timeout=0"),
        ({"pair": "a", "model": "b"}, "pair='a' and model='b'"),
    ],
)
def test_wrong_parameters_are_named(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ChatSpecGuard(**parameters)


def test_a_wrong_type_of_model_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"draft must be .* not int"):
        ChatSpecGuard(draft=1, target=2).invoke("hi")


def test_the_key_of_a_server_is_never_shown() -> None:
    model = ChatSpecGuard(api_key="sesame", max_retries=5)
    assert model.api_key is not None
    assert model.api_key.get_secret_value() == "sesame"
    params = model._identifying_params
    assert not {"api_key", "max_retries"} & params.keys(), "they change no answer"
    for shown in (repr(model), str(params), model.model_dump_json(), str(dumpd(model))):
        assert "sesame" not in shown
    with pytest.raises(ConfigurationError) as refusal:
        ChatSpecGuard(api_key=["sesame"])
    assert "sesame" not in str(refusal.value)
    assert "sesame" not in str(refusal.value.__cause__)


@pytest.mark.parametrize("route", ["invoke", "stream", "ainvoke", "astream", "steps"])
async def test_a_key_in_a_call_is_refused_before_anybody_sees_it(route: str) -> None:
    seen: list[str] = []

    class Tracer(BaseCallbackHandler):
        def on_chat_model_start(self, *args: Any, **kwargs: Any) -> None:
            seen.append(str((args, kwargs)))

    model = toy_chat.scripted().bind(api_key="sesame")
    config: Any = {"callbacks": [Tracer()]}
    with pytest.raises(ConfigurationError, match="OPENAI_API_KEY") as refusal:
        if route == "invoke":
            model.invoke("hi", config)
        elif route == "stream":
            list(model.stream("hi", config))
        elif route == "ainvoke":
            await model.ainvoke("hi", config)
        elif route == "astream":
            async for _ in model.astream("hi", config):
                pass
        else:
            list(toy_chat.scripted().steps("hi", api_key="sesame"))
    assert "sesame" not in str(refusal.value) + str(seen)


# Options of one call


@pytest.mark.parametrize("route", ["invoke", "stream"])
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"temprature": 1}, "did you mean temperature"),
        ({"temperature": -1}, "temperature=-1"),
        ({"logprobs": True}, "'logprobs'"),
        ({"stop": "STOP"}, "stop='STOP'"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"timeout": -1}, "timeout must be more than 0 seconds, not -1"),
    ],
)
def test_wrong_options_of_a_call_are_named(
    route: str, overrides: dict[str, Any], message: str
) -> None:
    model = toy_chat.scripted()
    with pytest.raises(ConfigurationError, match=message):
        list(getattr(model, route)("hi", **overrides))
    assert model.invoke("hi").text == toy_chat.TEXT


def test_a_field_assigned_later_counts_and_is_validated() -> None:
    model = toy_chat.scripted()
    model.max_tokens = 2
    assert model.invoke("hi").text == "On"
    model.temperature = -1
    with pytest.raises(ConfigurationError, match="temperature=-1"):
        model.invoke("hi")


@pytest.mark.parametrize(
    "overrides",
    [
        {"max_tokens": 3},
        {"temperature": 0.0},
        {"temperature": 2.0, "top_k": 3},
        {"top_p": 0.2},
        {"min_p": 0.5},
        {"seed": 7},
        {"max_step_tokens": 2},
        {"step_delimiter": "."},
    ],
)
def test_an_option_of_a_call_is_the_option_of_the_model(overrides: dict[str, Any]) -> None:
    base: dict[str, Any] = {"seed": 1, "temperature": 1.5, "top_p": 1.0}
    bound = toy_chat.random(3, **base).bind(**overrides).invoke("hi")
    assert texts(bound) == texts(toy_chat.random(3, **{**base, **overrides}).invoke("hi"))
    assert texts(bound) != texts(toy_chat.random(3, **base).invoke("hi"))


def texts(message: Any) -> list[str]:
    return [step["text"] for step in message.additional_kwargs[STEPS_KEY]]


def test_decoder_options_can_be_bound_too() -> None:
    model = toy_chat.pair(temperature=0)
    assert texts(model.invoke("hi"))[1].startswith("Dos")
    assert texts(model.bind(threshold=0.0).invoke("hi"))[1].startswith("Two")
    assert texts(model.bind(decoder="target").invoke("hi"))[0].startswith("Uno")
    assert texts(model.invoke("hi"))[1].startswith("Dos")


def test_a_pair_that_a_call_names_replaces_the_models_of_the_constructor() -> None:
    with pytest.raises(SpecGuardError, match="no-such-pair"):
        toy_chat.pair().invoke("hi", model="no-such-pair")


def test_fields_can_be_configured_at_run_time() -> None:
    model = toy_chat.random(3, seed=1, temperature=1.5).configurable_fields(
        seed=ConfigurableField(id="seed"), max_tokens=ConfigurableField(id="length")
    )
    config: Any = {"configurable": {"seed": 2, "length": 20}}
    message = model.invoke("hi", config)
    assert message.response_metadata["seed"] == 2
    assert (
        message.text == toy_chat.random(3, seed=2, temperature=1.5, max_tokens=20).invoke("hi").text
    )
    assert len(list(model.with_config(config).stream("hi"))) > 2


def test_langchains_own_keywords_pass() -> None:
    model = toy_chat.scripted()
    for overrides in ({"stream": True}, {"stream": False}, {"ls_note": "x"}):
        assert model.invoke("hi", **overrides).text == toy_chat.TEXT
        assert merged(list(model.stream("hi", **overrides))).text == toy_chat.TEXT


# What an answer carries


def test_the_answer_of_a_pair() -> None:
    message = toy_chat.pair(seed=5).invoke("hi")
    assert isinstance(message, AIMessage)
    assert message.text == "One a.\n\nDos b.\n\nThree c."
    metadata = message.response_metadata
    assert metadata["model_name"] == "toy-draft + toy-target"
    assert metadata["finish_reason"] == "stop"
    assert metadata["seed"] == 5
    metrics = metadata["specguard"]
    assert metrics["steps_by_source"] == {"draft": 2, "target": 1}
    assert metrics["acceptance_rate"] == pytest.approx(2 / 3)
    assert metrics["calibrated"] is False
    assert [step["verdict"] for step in message.additional_kwargs[STEPS_KEY]] == [
        "accepted",
        "rejected",
        "accepted",
    ]


def test_an_answer_is_plain_json() -> None:
    message = toy_chat.pair().invoke("hi")
    for part in (message.additional_kwargs, message.response_metadata):
        assert json.loads(json.dumps(part)) == part
    assert type(message.response_metadata["finish_reason"]) is str


@pytest.mark.parametrize("asynchronous", [False, True])
def test_streaming_gives_a_chunk_per_step_and_the_metadata_last(asynchronous: bool) -> None:
    model = toy_chat.pair(seed=5)
    if asynchronous:
        chunks = asyncio.run(collected(model.astream("hi")))
    else:
        chunks = list(model.stream("hi"))
    assert [chunk.text for chunk in chunks] == ["One a.\n\n", "Dos b.\n\n", "Three c.", ""]
    assert [chunk.chunk_position for chunk in chunks] == [None, None, None, "last"]
    assert [bool(chunk.response_metadata) for chunk in chunks] == [False, False, False, True]
    assert [bool(chunk.usage_metadata) for chunk in chunks] == [False, False, False, True]
    assert len({chunk.id for chunk in chunks}) == 1
    whole = merged(chunks)
    answer = toy_chat.pair(seed=5).invoke("hi")
    assert whole.text == answer.text
    assert texts(whole) == texts(answer)
    assert whole.usage_metadata == answer.usage_metadata
    assert whole.response_metadata.keys() == answer.response_metadata.keys()


async def collected(items: Any) -> list[Any]:
    return [item async for item in items]


def test_prompt_tokens_are_the_targets_and_cached_ones_are_told() -> None:
    model = toy_chat.pair()
    first, second = model.invoke("hi").usage_metadata, model.invoke("hi").usage_metadata
    assert first and second
    tokens = len(toy_chat.engine_of(model).encode(Prompt([{"role": "user", "content": "hi"}])))
    assert first["input_tokens"] == second["input_tokens"] == tokens
    assert first["input_token_details"]["cache_read"] == 0
    assert second["input_token_details"]["cache_read"] == tokens


@pytest.mark.parametrize("version", ["v0", "v1"])
def test_both_output_versions(version: str) -> None:
    model = toy_chat.pair(output_version=version)
    for message in (model.invoke("hi"), merged(list(model.stream("hi")))):
        assert message.text == "One a.\n\nDos b.\n\nThree c."
        assert [block["type"] for block in message.content_blocks] == ["text"]
        assert len(message.additional_kwargs[STEPS_KEY]) == 3


# Steps without LangChain's callbacks


def test_steps_are_yielded_as_they_are() -> None:
    steps = list(toy_chat.pair().steps([SystemMessage("Be brief."), HumanMessage("hi")]))
    assert all(isinstance(step, Step) for step in steps)
    assert [step.text for step in steps] == ["One a.\n\n", "Dos b.\n\n", "Three c."]
    assert [step.finish_reason for step in steps] == [None, None, "stop"]


async def test_asteps_gives_the_same() -> None:
    steps = await collected(toy_chat.pair().asteps("hi", max_tokens=8))
    assert [step.text for step in steps] == ["One a.\n\n"]
    assert steps[-1].finish_reason == "length"


def test_steps_check_their_options() -> None:
    with pytest.raises(ConfigurationError, match="temprature"):
        list(toy_chat.pair().steps("hi", temprature=1))


# What the model says about itself


def test_counting_tokens_is_the_targets_business() -> None:
    model = toy_chat.pair()
    assert model.get_token_ids("né")[:3] == [*"né".encode()]
    assert model.get_num_tokens("né") == len(model.get_token_ids("né"))
    messages = [HumanMessage("hi")]
    usage = model.invoke(messages).usage_metadata
    assert usage
    assert model.get_num_tokens_from_messages(messages) == usage["input_tokens"]
    assert toy_chat.scripted(custom_get_token_ids=lambda text: [1]).get_token_ids("né") == [1]


def test_counting_tokens_hands_tools_to_the_template() -> None:
    model = toy_chat.scripted()
    seen: list[Prompt] = []
    engine = toy_chat.engine_of(model)
    encode = engine.encode
    engine.encode = lambda prompt: seen.append(prompt) or encode(prompt)  # type: ignore[method-assign,func-returns-value]

    @tool
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    model.get_num_tokens_from_messages([HumanMessage("hi")], tools=[add])
    assert seen[0].tools[0]["function"]["name"] == "add"


def test_parameters_for_tracing() -> None:
    model = toy_chat.scripted(stop=["a"], max_tokens=9, temperature=0.25)
    assert model._get_ls_params() == {
        "ls_provider": "specguard",
        "ls_model_name": "toy-target",
        "ls_model_type": "chat",
        "ls_temperature": 0.25,
        "ls_max_tokens": 9,
        "ls_stop": ["a"],
    }
    assert model._get_ls_params(stop=["b"], temperature=1.0)["ls_stop"] == ["b"]
    assert model._get_ls_params(model="other")["ls_model_name"] == "other"
    assert (model.metadata or {})["lc_versions"]["specguard_chains"] == specguard_chains.__version__


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"pair": "p"}, "p"),
        ({"pair": "p", "decoder": "draft"}, "p:draft"),
        ({"pair": "p", "target": "folder/large.gguf"}, "p:draft + large.gguf"),
        ({"draft": Path("small.gguf"), "target": "large.gguf"}, "small.gguf + large.gguf"),
        ({"target": "large.gguf", "decoder": "target"}, "large.gguf"),
    ],
)
def test_names(options: dict[str, Any], name: str) -> None:
    assert ChatSpecGuard(**options).model == name


def test_every_option_is_identifying() -> None:
    changed = {
        "pair": "other",
        "draft": "d.gguf",
        "target": Path("t.gguf"),
        "decoder": "target",
        "num_candidates": 3,
        "num_target_candidates": 3,
        "threshold": 0.1,
        "confidence_weight": 0.1,
        "verify_with": "draft",
        "grounding": "dense",
        "grounding_layers": 2,
        "calibration": "c.json",
        "step_delimiter": ".",
        "max_step_tokens": 9,
        "max_slowdown": 0.1,
        "early_rejection": False,
        "salvage": False,
        "patience": 3,
        "pause_steps": 2,
        "hand_back": 8,
        "doubt_margin": 0.05,
        "target_confidence": -0.5,
        "critical_steps": "target",
        "tool_instruction": "Use tools.",
        "schema_instruction": "Follow {schema}.",
        "speculate_with": "prompt",
        "num_speculative_tokens": 2,
        "speculative_tree": [2, 1],
        "speculative_children": "likeliest",
        "adaptive_speculation": False,
        "speculate_rewrites": True,
        "value_weight": 0.1,
        "reward_model": "head.json",
        "num_samples": 2,
        "acceptance_rate": 0.1,
        "max_accepted_tokens": 9,
        "temperature": 0.1,
        "top_p": 0.1,
        "top_k": 9,
        "min_p": 0.1,
        "max_tokens": 9,
        "stop": ["x"],
        "seed": 9,
        "n_ctx": 512,
        "n_threads": 1,
        "n_gpu_layers": 1,
        "max_parallel": 2,
    }
    assert SpecGuardOptions.model_fields.keys() - NOT_IDENTIFYING == changed.keys() | {"encoder"}
    keys = {ChatSpecGuard()._get_llm_string()}
    for name, value in changed.items():
        keys.add(ChatSpecGuard(**{name: value})._get_llm_string())
    assert len(keys) == len(changed) + 1


def test_engines_are_told_apart() -> None:
    one, other = toy_chat.scripted(), toy_chat.scripted()
    assert one._get_llm_string() == one.model_copy()._get_llm_string()
    assert one._get_llm_string() != other._get_llm_string()


def test_stop_strings_of_a_call_count_as_the_models_own() -> None:
    assert toy_chat.scripted()._get_llm_string(stop=["x"]) != toy_chat.scripted()._get_llm_string()
    model = toy_chat.scripted()
    own = model.model_copy(update={"stop": ["x"]})
    assert own._get_llm_string(stop=[]) == model._get_llm_string(stop=[])


# Copies


def test_pickles_hold_settings_only() -> None:
    model = ChatSpecGuard(draft="small.gguf", target="large.gguf", seed=1, stop=["x"])
    clone = pickle.loads(pickle.dumps(model))
    assert clone == model
    assert clone.stop == ["x"]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda model: model.model_copy()])
def test_copies_share_engines_and_go_their_own_way(copied: Any) -> None:
    model = toy_chat.scripted()
    model.invoke("hi")
    clone = copied(model)
    assert clone.target is model.target
    clone.max_step_tokens = 2
    assert len(texts(clone.invoke("hi"))) > len(texts(model.invoke("hi"))) == 3


def test_a_deep_copy_holds_no_decoder() -> None:
    model = toy_chat.scripted()
    model.invoke("hi")
    assert copy.deepcopy(model)._assembled._latest is None


# Time


@pytest.mark.parametrize("route", ["invoke", "stream"])
def test_a_timeout_is_an_error_that_names_it(route: str) -> None:
    model = toy_chat.endless(delay_s=0.005, timeout=0.1)
    with pytest.raises(DecodingTimeoutError, match=r"timeout=0\.1 s"):
        list(getattr(model, route)("hi"))
    with pytest.raises(TimeoutError):
        model.invoke("hi", timeout=0.05)
    assert model.invoke("hi", timeout=None, max_tokens=2).text == "On"


def test_waiting_for_ones_turn_counts() -> None:
    model = toy_chat.scripted()
    with toy_chat.engine_of(model).exclusive(), pytest.raises(DecodingTimeoutError):
        model.invoke("hi", timeout=0.05)
    assert model.invoke("hi", timeout=5).text == toy_chat.TEXT


async def test_a_timeout_of_an_async_call() -> None:
    model = toy_chat.endless(delay_s=0.005)
    with pytest.raises(DecodingTimeoutError):
        await model.ainvoke("hi", timeout=0.05)


# Caching


def test_peers_070_caches_are_honoured() -> None:
    cache = InMemoryCache()
    model = toy_chat.scripted(cache=cache)
    first = model.invoke("hi")
    passes = toy_chat.engine_of(model).forward_passes
    again = model.invoke("hi")
    assert toy_chat.engine_of(model).forward_passes == passes
    assert again.text == first.text
    assert texts(again) == texts(first)
    uncached = model.model_copy(update={"cache": False})
    uncached.invoke("hi")
    assert toy_chat.engine_of(model).forward_passes > passes


def test_peers_073_the_cache_tells_options_of_calls_apart() -> None:
    model = toy_chat.random(3, temperature=1.5, cache=InMemoryCache())
    answers = [model.invoke("hi", seed=seed).text for seed in (1, 2, 1)]
    assert answers[0] == answers[2] != answers[1]
    stopped = [model.invoke("hi", seed=1, stop=stop).text for stop in (["b"], ["c"], None)]
    assert len({*stopped}) > 1


# Errors


@pytest.mark.parametrize("route", ["invoke", "stream", "ainvoke", "astream"])
def test_the_model_is_usable_after_an_error(route: str) -> None:
    model = toy_chat.scripted()

    def use(prompt: Any, **overrides: Any) -> None:
        method = getattr(model, route)
        if route == "ainvoke":
            asyncio.run(method(prompt, **overrides))
        elif route == "astream":
            asyncio.run(collected(method(prompt, **overrides)))
        else:
            list(method(prompt, **overrides))

    for prompt, overrides in (("", {}), ("x" * 5000, {}), ("hi", {"max_tokens": 100_000})):
        with pytest.raises(SpecGuardError):
            use(prompt, **overrides)
    use("hi")


def test_threads_share_a_model() -> None:
    model = toy_chat.pair()
    answers: list[str] = []
    threads = [
        threading.Thread(target=lambda: answers.append(model.invoke("hi").text)) for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert answers == ["One a.\n\nDos b.\n\nThree c."] * 16
