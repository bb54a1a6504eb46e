"""Public reports about wrappers of local models: streaming, characters, length, templates."""

import asyncio
import time
from itertools import pairwise
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage

from specguard_chains import ChatSpecGuard, ConfigurationError, ContextOverflowError
from specguard_chains.decoding.engine import Prompt
from specguard_chains.messages import STEPS_KEY
from tests.toy_engine import ToyEngine, scripted_policy
from tests.unit_tests import toy_chat

EMOJI = ("One 😀a.\n\n", "👩‍👩‍👧 Zwei é.\n\n", "三 🏳️‍🌈")
QUESTION = "What now?"


async def collected(items: Any) -> list[Any]:
    return [item async for item in items]


def text_of(model: ChatSpecGuard, route: str, **overrides: Any) -> str:
    match route:
        case "invoke":
            return model.invoke(QUESTION, **overrides).text
        case "stream":
            return "".join(chunk.text for chunk in model.stream(QUESTION, **overrides))
        case "ainvoke":
            return asyncio.run(model.ainvoke(QUESTION, **overrides)).text
        case "astream":
            chunks = asyncio.run(collected(model.astream(QUESTION, **overrides)))
            return "".join(chunk.text for chunk in chunks)
        case "batch":
            return model.batch([QUESTION], **overrides)[0].text
    raise AssertionError(route)


ROUTES = ["invoke", "stream", "ainvoke", "astream", "batch"]


def test_peers_001_chunks_come_while_the_answer_is_written() -> None:
    model = toy_chat.scripted(*["A step.\n\n"] * 8, delay_s=0.002)
    start = time.perf_counter()
    times = [time.perf_counter() for _ in model.stream(QUESTION)]
    assert times[-1] - times[0] > 0.5 * (times[-1] - start)


def test_peers_002_there_are_many_chunks() -> None:
    model = toy_chat.scripted("a\n\n", "b\n\n", "c\n\n", "d")
    assert [c.text for c in model.stream(QUESTION) if c.text] == ["a\n\n", "b\n\n", "c\n\n", "d"]


def test_peers_003_handlers_get_the_tokens() -> None:
    tokens: list[Any] = []

    class Handler(BaseCallbackHandler):
        def on_llm_new_token(self, token: Any, **_: Any) -> None:
            tokens.append(token)

    list(toy_chat.scripted().stream(QUESTION, {"callbacks": [Handler()]}))
    assert "".join(tokens) == toy_chat.TEXT


class TokenCounter(BaseCallbackHandler):
    def __init__(self) -> None:
        self.tokens: list[str] = []

    def on_llm_new_token(self, token: Any, **_: Any) -> None:
        self.tokens.append(token)


@pytest.mark.parametrize("route", ["stream", "astream", "astream_events"])
@pytest.mark.parametrize("streaming", [None, True])
@pytest.mark.parametrize("own", [False, True])
def test_peers_005_handlers_get_each_chunk_once(
    route: str, streaming: bool | None, own: bool
) -> None:
    counter = TokenCounter()
    model = toy_chat.pair(streaming=streaming, callbacks=[counter] if own else None)
    config: Any = {"callbacks": [] if own else [counter]}
    match route:
        case "stream":
            list(model.stream(QUESTION, config))
        case "astream":
            asyncio.run(collected(model.astream(QUESTION, config)))
        case _:
            asyncio.run(collected(model.astream_events(QUESTION, config, version="v2")))
    assert counter.tokens == ["One a.\n\n", "Dos b.\n\n", "Three c.", ""]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_peers_005_invoke_streams_each_chunk_once_if_it_streams(asynchronous: bool) -> None:
    counter = TokenCounter()
    model = toy_chat.pair(streaming=True)
    config: Any = {"callbacks": [counter]}
    if asynchronous:
        asyncio.run(model.ainvoke(QUESTION, config))
    else:
        model.invoke(QUESTION, config)
    assert counter.tokens == ["One a.\n\n", "Dos b.\n\n", "Three c.", ""]


@pytest.mark.parametrize("route", ROUTES)
def test_peers_006_all_routes_honour_the_same_parameters(route: str) -> None:
    model = toy_chat.random(4, temperature=0, max_tokens=50)
    assert text_of(model, route) == model.invoke(QUESTION).text != ""
    assert len(text_of(model, route, max_tokens=9).encode()) <= 9


def test_peers_006_an_exception_of_the_engine_reaches_the_consumer_of_a_stream() -> None:
    def broken(tokens: tuple[int, ...]) -> Any:
        raise RuntimeError("the model broke")

    model = toy_chat.solo(broken)
    with pytest.raises(RuntimeError, match="the model broke"):
        list(model.stream(QUESTION))


async def test_peers_009_usage_is_in_a_stream_event() -> None:
    events = await collected(toy_chat.scripted().astream_events(QUESTION, version="v2"))
    chunks = [e["data"]["chunk"] for e in events if e["event"] == "on_chat_model_stream"]
    assert [bool(chunk.usage_metadata) for chunk in chunks] == [False, False, False, True]


@pytest.mark.parametrize("stream", [True, False])
async def test_peers_010_usage_does_not_depend_on_streaming(stream: bool) -> None:
    model = toy_chat.scripted()
    expected = (await model.ainvoke(QUESTION)).usage_metadata
    message = await model.ainvoke(QUESTION, stream=stream)
    assert expected and message.usage_metadata
    for name in ("input_tokens", "output_tokens", "total_tokens"):
        assert message.usage_metadata[name] == expected[name]  # type: ignore[literal-required]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("max_step_tokens", [1, 2, 3, 256])
def test_peers_011_characters_of_several_tokens_stay_whole(
    route: str, max_step_tokens: int
) -> None:
    model = toy_chat.scripted(*EMOJI, max_step_tokens=max_step_tokens)
    assert text_of(model, route) == "".join(EMOJI)


@pytest.mark.parametrize("route", ROUTES)
def test_peers_012_characters_stay_whole_with_streaming_set(route: str) -> None:
    assert text_of(toy_chat.scripted(*EMOJI, streaming=True), route) == "".join(EMOJI)


def test_peers_025_the_template_gets_the_messages() -> None:
    model = toy_chat.scripted()
    engine, seen = toy_chat.engine_of(model), list[Prompt]()
    encode = engine.encode
    engine.encode = lambda prompt: seen.append(prompt) or encode(prompt)  # type: ignore[method-assign,func-returns-value]
    model.invoke([SystemMessage("Be brief."), HumanMessage([{"type": "text", "text": "hi"}])])
    assert all(
        list(prompt.messages)
        == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
        for prompt in seen
    )
    assert all(prompt.text is None for prompt in seen)


@pytest.mark.parametrize("route", ROUTES)
def test_peers_026_the_answer_does_not_repeat_the_prompt(route: str) -> None:
    assert QUESTION not in text_of(toy_chat.scripted(), route)


def test_peers_030_a_tool_message_may_be_last() -> None:
    call: Any = {"id": "1", "name": "add", "args": {"a": 1}}
    conversation = [
        HumanMessage("1 + 1?"),
        AIMessage("", tool_calls=[call]),
        ToolMessage("2", tool_call_id="1"),
    ]
    assert toy_chat.scripted().invoke(conversation).text == toy_chat.TEXT


def test_peers_034_an_answer_without_end_ends_with_the_context() -> None:
    engine = ToyEngine(scripted_policy("On and on.\n\n", end=False), context_length=64)
    message = ChatSpecGuard(decoder="target", target=engine).invoke(QUESTION)
    usage = message.usage_metadata
    assert usage and usage["total_tokens"] == 64
    assert message.response_metadata["finish_reason"] == "length"


def test_peers_051_a_system_message_alone_is_answered_and_empty_ones_are_refused() -> None:
    assert toy_chat.scripted().invoke([SystemMessage("x")]).text == toy_chat.TEXT
    for messages in ([], [SystemMessage("")], [HumanMessage(" ")]):
        with pytest.raises(ConfigurationError, match="nothing to answer"):
            toy_chat.scripted().invoke(messages)


def test_peers_053_too_long_a_prompt_or_answer_is_an_error_beforehand() -> None:
    small = ToyEngine(scripted_policy("x"), context_length=64)
    large = ToyEngine(scripted_policy("x"), context_length=4096)
    model = ChatSpecGuard(draft=small, target=large, confidence_weight=1)
    for prompt, overrides in (("x" * 64, {}), (QUESTION, {"max_tokens": 60})):
        with pytest.raises(ContextOverflowError, match="n_ctx"):
            model.invoke(prompt, **overrides)
        assert small.computed_tokens == 0
    assert model.bind(decoder="target").invoke("x" * 64).text == "x"


def test_peers_054_what_fits_into_max_tokens_is_visible() -> None:
    message = toy_chat.scripted(max_tokens=4).invoke(QUESTION)
    assert message.text == "One "
    assert message.response_metadata["finish_reason"] == "length"
    (step,) = message.additional_kwargs[STEPS_KEY]
    assert step["finish_reason"] == "length"


def test_spans_of_the_steps_tile_the_answer() -> None:
    message = toy_chat.random(5, max_tokens=80, max_step_tokens=7).invoke(QUESTION)
    spans = [step["span"] for step in message.additional_kwargs[STEPS_KEY]]
    assert spans[0][0] == 0
    assert spans[-1][1] == len(message.text)
    assert all(before[1] == after[0] for before, after in pairwise(spans))
