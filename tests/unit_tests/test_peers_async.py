"""Public reports about wrappers of local models: async, cancellation, threads."""

import asyncio
import gc
import time
from collections.abc import Callable
from typing import Any

import pytest

from specguard_chains import ChatSpecGuard
from tests.unit_tests import toy_chat
from tests.unit_tests.test_peers_streaming import collected

QUESTION = "What now?"


def slow() -> ChatSpecGuard:
    return toy_chat.endless(delay_s=0.002)


async def assert_stopped(model: ChatSpecGuard) -> None:
    """The engine computes nothing more after at most a token, and answers the next request."""
    engine = toy_chat.engine_of(model)
    await asyncio.sleep(0.1)
    before = engine.forward_passes
    assert before > 0
    await asyncio.sleep(0.1)
    assert engine.forward_passes == before
    assert (await model.ainvoke(QUESTION, max_tokens=2)).text == "On"


async def consume(items: Any) -> None:
    async for _ in items:
        pass


WAYS: dict[str, Callable[[ChatSpecGuard], Any]] = {
    "ainvoke": lambda m: m.ainvoke(QUESTION),
    "astream": lambda m: consume(m.astream(QUESTION)),
    "asteps": lambda m: consume(m.asteps(QUESTION)),
    "abatch": lambda m: m.abatch([QUESTION, QUESTION]),
    "astream_events": lambda m: consume(m.astream_events(QUESTION, version="v2")),
}


@pytest.mark.parametrize("way", WAYS)
async def test_peers_058_the_event_loop_stays_responsive(way: str) -> None:
    gaps: list[float] = []

    async def tick() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.005)
            gaps.append(time.perf_counter() - before)

    ticker = asyncio.create_task(tick())
    await WAYS[way](toy_chat.endless(delay_s=0.002, max_tokens=60))
    ticker.cancel()
    assert len(gaps) > 10
    # The typical gap, as other processes may hold up single ones.
    assert sorted(gaps)[len(gaps) // 2] < 0.05


@pytest.mark.parametrize("way", WAYS)
async def test_peers_059_a_cancelled_call_stops_decoding(way: str) -> None:
    model = slow()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(WAYS[way](model), 0.15)
    await assert_stopped(model)


@pytest.mark.parametrize("leave", ["break", "aclose", "drop"])
async def test_peers_059_leaving_a_stream_stops_decoding(leave: str) -> None:
    model = slow()
    stream: Any = model.astream(QUESTION)
    if leave == "break":
        async for _ in stream:
            break
    else:
        await anext(stream)
    if leave == "aclose":
        await stream.aclose()
    del stream
    gc.collect()
    await assert_stopped(model)


@pytest.mark.parametrize("leave", ["break", "close", "error"])
def test_leaving_a_sync_stream_stops_decoding(leave: str) -> None:
    model = slow()
    stream: Any = model.stream(QUESTION)
    if leave == "close":
        next(stream)
        stream.close()
    elif leave == "break":
        for _ in stream:
            break
    else:
        with pytest.raises(KeyboardInterrupt):
            for _ in stream:
                raise KeyboardInterrupt
    del stream
    asyncio.run(assert_stopped(model))


async def test_a_call_cancelled_while_it_queues_does_not_hold_up_the_others() -> None:
    model = toy_chat.scripted()
    engine = toy_chat.engine_of(model)
    with engine.exclusive():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(model.ainvoke(QUESTION), 0.1)
        waiting = asyncio.create_task(model.ainvoke(QUESTION))
        await asyncio.sleep(0.1)
    assert (await waiting).text == toy_chat.TEXT


def test_peers_060_one_model_serves_many_threads() -> None:
    answers = toy_chat.pair().batch([QUESTION] * 8)
    assert {answer.text for answer in answers} == {"One a.\n\nDos b.\n\nThree c."}


async def test_peers_060_one_model_serves_many_tasks() -> None:
    answers = await toy_chat.pair().abatch([QUESTION] * 16)
    assert {answer.text for answer in answers} == {"One a.\n\nDos b.\n\nThree c."}


def test_two_models_that_share_engines_crosswise_do_not_deadlock() -> None:
    one = toy_chat.pair()
    other = ChatSpecGuard(draft=one.target, target=one.draft, confidence_weight=1)
    for model in (one, other) * 3:
        assert len(model.batch([QUESTION] * 2)) == 2
    both = asyncio.run(_both(one, other))
    assert len(both) == 12


async def _both(one: ChatSpecGuard, other: ChatSpecGuard) -> list[Any]:
    return await asyncio.gather(*[m.ainvoke(QUESTION) for m in (one, other) * 6])


def test_a_call_within_the_loop_over_a_stream_does_not_deadlock() -> None:
    model = toy_chat.pair()
    answers = [model.invoke("And this?").text for _ in model.stream(QUESTION)]
    assert answers == ["One a.\n\nDos b.\n\nThree c."] * 4


async def test_a_call_within_the_loop_over_an_async_stream_does_not_deadlock() -> None:
    model = toy_chat.pair()
    answers = []
    async for _ in model.astream(QUESTION):
        answers.append((await model.ainvoke("And this?")).text)
        answers += [chunk.text for chunk in model.stream("And this?") if chunk.text == "Three c."]
    assert len(answers) == 8


async def test_async_and_sync_give_the_same() -> None:
    model = toy_chat.random(2, seed=3, temperature=1.5)
    sync = [chunk.text for chunk in model.stream(QUESTION)]
    assert [chunk.text for chunk in await collected(model.astream(QUESTION))] == sync
