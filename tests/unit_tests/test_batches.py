"""LangChain's batches of a model: an error, an interrupt, and leaving them stop what they run."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.runnables import Runnable, RunnablePassthrough

from specguard_chains import ChatSpecGuard
from specguard_chains.batches import Batches
from specguard_chains.decoding.arrays import FloatArray
from specguard_chains.errors import DecodingCancelled, EngineError
from specguard_chains.llm import SpecGuardLLM
from tests.toy_engine import END, one_hot
from tests.unit_tests.routes import collect
from tests.unit_tests.test_together import (
    AT_A_TIME,
    FAILING,
    PATIENCE_S,
    PROMPTS,
    Handler,
    Watched,
    fail,
    press_ctrl_c,
)

BEGINNING = PROMPTS[:AT_A_TIME]
"""All that begin at once: asyncio's `as_completed` begins in any order."""

SYNC: dict[str, Callable[..., Any]] = {
    "batch": lambda m, c, **o: m.batch(PROMPTS, c, **o),
    "batch_as_completed": lambda m, c, **o: list(m.batch_as_completed(PROMPTS, c, **o)),
}
ASYNC: dict[str, Callable[..., Any]] = {
    "abatch": lambda m, c, **o: m.abatch(PROMPTS, c, **o),
    "abatch_as_completed": lambda m, c, **o: collect(m.abatch_as_completed(BEGINNING, c, **o)),
}

classes = pytest.mark.parametrize("cls", [ChatSpecGuard, SpecGuardLLM])


def asked(*handlers: Handler) -> dict[str, Any]:
    return {"max_concurrency": AT_A_TIME, "callbacks": [*handlers]}


def end() -> FloatArray:
    """Ends an answer."""
    return one_hot(END)


@classes
@pytest.mark.parametrize("route", SYNC)
@pytest.mark.parametrize(("do", "error"), [(fail, EngineError), (press_ctrl_c, KeyboardInterrupt)])
def test_an_error_or_interrupt_stops_all_answers(
    cls: Any, route: str, do: Callable[[], None], error: type[BaseException]
) -> None:
    watched, handler = Watched(do, cls), Handler()
    with pytest.raises(error):
        SYNC[route](watched.llm, asked(handler))
    assert handler.begun == len(handler.errors) <= AT_A_TIME
    stopped = [each for each in handler.errors if not isinstance(each, EngineError)]
    assert {type(each) for each in stopped} <= {DecodingCancelled}
    watched.assert_stopped()


@pytest.mark.parametrize(
    "chained",
    [
        lambda model: RunnablePassthrough() | model,
        lambda model: model.bind(seed=2),
        lambda model: model.with_retry(stop_after_attempt=2, wait_exponential_jitter=False),
    ],
)
def test_an_interrupt_stops_the_answers_in_chains(chained: Callable[[Any], Any]) -> None:
    watched = Watched(press_ctrl_c, ChatSpecGuard)
    with pytest.raises(KeyboardInterrupt):
        chained(watched.llm).batch(PROMPTS, asked())
    watched.assert_stopped()


@classes
@pytest.mark.parametrize("route", ASYNC)
async def test_an_error_stops_all_answers_async(cls: Any, route: str) -> None:
    watched = Watched(fail, cls)
    with pytest.raises(EngineError):
        await ASYNC[route](watched.llm, asked())
    await asyncio.to_thread(watched.assert_stopped)


@classes
@pytest.mark.parametrize("route", [*SYNC, *ASYNC])
def test_an_error_that_is_returned_stops_nothing(cls: Any, route: str) -> None:
    watched = Watched(fail, cls)
    options = {"return_exceptions": True, "max_tokens": 20}
    answers = {**SYNC, **ASYNC}[route](watched.llm, asked(), **options)
    answers = asyncio.run(answers) if route in ASYNC else answers
    numbered = answers if "completed" in route else enumerate(answers)
    failed = {number: type(each) for number, each in numbered if isinstance(each, Exception)}
    assert failed == {FAILING: EngineError}


@classes
def test_whoever_leaves_after_an_answer_stops_the_others(cls: Any) -> None:
    watched = Watched(end, cls)
    for number, _ in watched.llm.batch_as_completed(PROMPTS, asked()):
        assert number == FAILING
        break
    watched.assert_stopped(AT_A_TIME + 1)  # as there was room for one more


@classes
async def test_whoever_leaves_after_an_answer_stops_the_others_async(cls: Any) -> None:
    watched = Watched(end, cls)
    answers = watched.llm.abatch_as_completed(BEGINNING, asked())
    assert (await anext(answers))[0] == FAILING
    await answers.aclose()
    await asyncio.to_thread(watched.assert_stopped)
    assert len(asyncio.all_tasks()) == 1


# --- of the batches alone


class Asked(Batches, Runnable[int, int]):
    """Does something with each input."""

    def __init__(self, do: Callable[[int], Any]) -> None:
        self._do = do

    def invoke(self, input: int, config: Any = None, **kwargs: Any) -> Any:
        return self._do(input, **kwargs)


def test_answers_come_in_the_order_of_their_inputs_and_options_go_to_each() -> None:
    model = Asked(lambda number, factor: -number * factor)
    assert model.batch([1, 2, 3], factor=2) == [-2, -4, -6]
    assert sorted(model.batch_as_completed([1, 2, 3], factor=2)) == [(0, -2), (1, -4), (2, -6)]
    assert asyncio.run(model.abatch([1, 2, 3], factor=2)) == [-2, -4, -6]
    numbered = asyncio.run(collect(model.abatch_as_completed([1, 2, 3], factor=2)))
    assert sorted(numbered) == [(0, -2), (1, -4), (2, -6)]


def test_none_and_one_need_no_thread() -> None:
    model = Asked(lambda _: threading.get_ident())
    assert model.batch([]) == list(model.batch_as_completed([])) == []
    assert model.batch([1]) == [threading.get_ident()]
    assert list(model.batch_as_completed([1])) == [(0, threading.get_ident())]
    assert asyncio.run(model.abatch([])) == []


@pytest.mark.parametrize("return_exceptions", [False, True])
def test_what_fails_first_is_raised_and_nothing_begins_afterwards(return_exceptions: bool) -> None:
    begun: list[int] = []
    failed = threading.Event()
    error = KeyboardInterrupt if return_exceptions else EngineError

    def do(number: int) -> None:
        begun.append(number)
        if number == 1:
            failed.set()
            raise error("first")
        failed.wait(PATIENCE_S)
        time.sleep(0.2)  # LangChain looks at this one first
        raise DecodingCancelled("as it was stopped")

    for ask in (Asked(do).batch, lambda *a, **o: list(Asked(do).batch_as_completed(*a, **o))):
        with pytest.raises(error, match="first"):
            ask(range(6), {"max_concurrency": 2}, return_exceptions=return_exceptions)
        assert sorted(begun) == [0, 1]
        begun.clear()
        failed.clear()


def test_a_wrong_configuration_is_refused_as_by_langchain() -> None:
    with pytest.raises(ValueError, match="config must be a list of the same length"):
        Asked(abs).batch([1, 2], [{}])


def test_no_thread_stays() -> None:
    before = threading.active_count()
    answers = Asked(abs).batch_as_completed([1, 2, 3])
    next(answers)
    answers.close()
    Asked(abs).batch([1, 2, 3])
    assert threading.active_count() == before
