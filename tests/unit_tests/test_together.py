"""Calls that belong together: when one fails or the caller is interrupted, the others stop."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler

from specguard_chains import ChatSpecGuard
from specguard_chains.errors import DecodingCancelled, DecodingTimeoutError, EngineError
from specguard_chains.llm import SpecGuardLLM
from specguard_chains.together import atogether, places, together
from tests.toy_engine import END, FloatArray, ToyEngine, random_policy

PROMPTS = [f"What all prompts begin with, and then question {number}" for number in range(6)]
FAILING = 2
AT_A_TIME = 3
WHOLE = 3000
"""Tokens of an answer that nobody stops: several seconds' worth."""
SOON = 600
"""Others write some more until the thread that has failed gets its turn; never this many."""
PATIENCE_S = 120.0


class Handler(BaseCallbackHandler):
    """Notes what the prompts' runs have ended with."""

    def __init__(self) -> None:
        self.begun = 0
        self.errors: list[BaseException] = []

    def on_llm_start(self, *_: Any, **__: Any) -> None:
        self.begun += 1

    def on_chat_model_start(self, *_: Any, **__: Any) -> None:
        self.begun += 1

    def on_llm_error(self, error: BaseException, **_: Any) -> None:
        self.errors.append(error)


class Watched:
    """A model that counts the tokens of each answer; does something at the fifth of one of them.

    What it does may return the logits of the next token.
    """

    def __init__(
        self,
        do: Callable[[], FloatArray | None],
        cls: type[ChatSpecGuard] | type[SpecGuardLLM] = SpecGuardLLM,
    ) -> None:
        self.written = dict.fromkeys(range(len(PROMPTS)), 0)
        self._do = do
        self._letters = random_policy(1, end=-40.0)
        self.engine = ToyEngine(self._policy, max_parallel=AT_A_TIME)
        self.llm: Any = cls(
            decoder="target", target=self.engine, seed=1, max_tokens=WHOLE, timeout=PATIENCE_S
        )

    def _policy(self, tokens: tuple[int, ...]) -> FloatArray:
        text = bytes(token for token in tokens if token < END)
        for number, prompt in enumerate(PROMPTS):
            _, asked, answer = text.partition(prompt.encode())
            if asked:
                self.written[number] = max(self.written[number], len(answer))
                if number == FAILING and self.written[number] == 5:
                    logits = self._do()
                    return self._letters(tokens) if logits is None else logits
        return self._letters(tokens)

    def assert_stopped(self, begun: int = AT_A_TIME) -> None:
        """Those that were running have stopped, the others have not begun; the model is free."""
        running, pending = range(begun), range(begun, len(PROMPTS))
        with self.engine.exclusive(), self.engine.exclusive(), self.engine.exclusive():
            written = dict(self.written)
        assert all(written[number] < SOON for number in running), written
        assert not any(written[number] for number in pending), written
        self._do = lambda: None
        answers = self.llm.batch(PROMPTS, max_tokens=20)
        assert len({getattr(answer, "text", answer) for answer in answers}) > 1


def fail() -> None:
    raise EngineError("this one cannot be computed")


def press_ctrl_c() -> None:
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)


def generate(llm: SpecGuardLLM, *handlers: Handler) -> None:
    llm.generate(PROMPTS, callbacks=[*handlers])


def agenerate(llm: SpecGuardLLM, *handlers: Handler) -> None:
    asyncio.run(llm.agenerate(PROMPTS, callbacks=[*handlers]))


@pytest.mark.parametrize("ask", [generate, agenerate])
@pytest.mark.parametrize(("do", "error"), [(fail, EngineError), (press_ctrl_c, KeyboardInterrupt)])
def test_an_error_or_interrupt_stops_all_answers(
    ask: Callable[..., None], do: Callable[[], None], error: type[BaseException]
) -> None:
    watched, handler = Watched(do), Handler()
    with pytest.raises(error):
        ask(watched.llm, handler)
    if ask is generate:  # in an event loop these are cancelled tasks
        assert handler.begun == len(handler.errors) <= AT_A_TIME
        stopped = [each for each in handler.errors if not isinstance(each, EngineError)]
        assert {type(each) for each in stopped} <= {DecodingCancelled}  # and no timeout
    watched.assert_stopped()


async def test_a_cancelled_task_stops_all_answers() -> None:
    loop = asyncio.get_running_loop()
    watched = Watched(lambda: loop.call_soon_threadsafe(task.cancel) and None)
    task = asyncio.create_task(watched.llm.agenerate(PROMPTS))
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(watched.assert_stopped)


def test_an_answer_that_takes_too_long_stops_the_others() -> None:
    watched, handler = Watched(lambda: None), Handler()
    with pytest.raises(DecodingTimeoutError, match=r"timeout=0\.05 s"):
        watched.llm.generate(PROMPTS, timeout=0.05, callbacks=[handler])
    assert handler.begun <= AT_A_TIME
    watched.assert_stopped()


# --- of the calls alone


def test_the_models_with_the_fewest_places_count() -> None:
    few, many = (ToyEngine(random_policy(1), max_parallel=n) for n in (2, 5))
    for given, expected in (
        ({"draft": few, "target": many}, 2),
        ({"draft": few, "target": many, "decoder": "target"}, 5),
        ({"draft": "d.gguf", "target": many}, 1),
        ({"draft": "d.gguf", "target": many, "max_parallel": 3}, 3),
        ({"max_parallel": 7}, 7),
        ({}, 1),
    ):
        assert places(SpecGuardLLM(**given)) == expected, given


def test_no_more_are_done_at_a_time_than_there_are_places() -> None:
    now, most, lock = 0, 0, threading.Lock()
    barrier = threading.Barrier(3)

    def job(number: int) -> int:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        barrier.wait(PATIENCE_S)
        with lock:
            now -= 1
        return -number

    assert together(job, range(6), 3) == [0, -1, -2, -3, -4, -5]
    assert most == 3


def test_what_fails_first_is_raised_and_nothing_begins_afterwards() -> None:
    begun: list[int] = []

    def job(number: int) -> None:
        begun.append(number)
        if number == 1:
            raise EngineError("first")
        time.sleep(0.2)  # the thread of the other one is free meanwhile
        raise EngineError("then")

    with pytest.raises(EngineError, match="first"):
        together(job, range(6), 2)
    assert sorted(begun) == [0, 1]


async def test_after_an_error_the_other_tasks_are_cancelled() -> None:
    ended: list[int] = []

    async def job(number: int) -> None:
        try:
            await asyncio.sleep(0 if number == 1 else PATIENCE_S)
        except asyncio.CancelledError:
            ended.append(number)
            raise
        raise EngineError("broken")

    with pytest.raises(EngineError, match="broken"):
        await atogether(job, range(6), 3)
    assert ended == [0, 2]
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize(("numbers", "at_a_time"), [([7], 4), ([7, 8], 1), ([], 4)])
def test_one_at_a_time_needs_no_thread(numbers: list[int], at_a_time: int) -> None:
    seen = together(lambda number: (number, threading.get_ident()), numbers, at_a_time)
    assert seen == [(number, threading.get_ident()) for number in numbers]
