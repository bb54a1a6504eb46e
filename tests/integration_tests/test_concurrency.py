"""Many threads and tasks on one real model: each gets its own answer and events, in its turn."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage

from specguard_chains import ChatSpecGuard
from specguard_chains.assembly import assemble, unload
from specguard_chains.decoding.local import LocalSession
from specguard_chains.errors import DecodingTimeoutError
from specguard_chains.messages import STEPS_KEY
from tests.paper import PAPER

pytestmark = pytest.mark.integration

THREADS, REQUESTS = 16, 8
QUESTIONS = [f"Tell me about the number {number}." for number in range(THREADS)]


def chat(**options: Any) -> ChatSpecGuard:
    """Short steps, some of them rejected."""
    defaults: dict[str, Any] = {
        "pair": "smollm2-135m",
        "n_ctx": 512,
        "n_threads": 1,
        **PAPER,
        "num_candidates": 2,
        "num_target_candidates": 2,
        "max_step_tokens": 2,
        "max_tokens": 6,
        "threshold": 0.5,
        "seed": 7,
    }
    return ChatSpecGuard(**(defaults | options))


@pytest.fixture(scope="module", autouse=True)
def free_memory_afterwards() -> Iterator[None]:
    yield
    unload()


@pytest.fixture(scope="module")
def alone() -> dict[str, str]:
    """What the model answers to each question when nobody else asks."""
    model = chat()
    answers = {question: model.invoke(question).text for question in QUESTIONS}
    assert len(set(answers.values())) > THREADS // 2, "the answers must tell the requests apart"
    return answers


class Records(BaseCallbackHandler):
    """Everything that a handler is told, by the run that it is told of."""

    def __init__(self) -> None:
        self.questions: dict[UUID, str] = {}
        self.events: dict[UUID, list[dict[str, Any]]] = defaultdict(list)
        self.answers: dict[UUID, str] = {}

    def on_chat_model_start(self, serialized: Any, messages: Any, *, run_id: UUID, **_: Any) -> Any:
        self.questions[run_id] = messages[0][0].content

    def on_custom_event(self, name: str, data: Any, *, run_id: UUID, **_: Any) -> None:
        self.events[run_id].append(data)

    def on_llm_end(self, response: Any, *, run_id: UUID, **_: Any) -> None:
        self.answers[run_id] = response.generations[0][0].text

    def check(self, alone: dict[str, str], runs: int) -> None:
        """Each run has its own question's answer, and the events of that answer alone."""
        assert len(self.questions) == len(self.answers) == len(self.events) == runs
        for run_id, question in self.questions.items():
            assert self.answers[run_id] == alone[question]
            steps = self.events[run_id]
            assert [step["number"] for step in steps] == list(range(1, len(steps) + 1))
            assert "".join(step["text"] for step in steps) == alone[question]
            assert steps[-1]["finish_reason"]


def streamed(model: ChatSpecGuard, question: str, config: Any) -> Any:
    chunks: list[Any] = list(model.stream(question, config))
    return sum(chunks[1:], start=chunks[0])


def test_16_threads_with_8_requests_each_do_not_mix(alone: dict[str, str]) -> None:
    model, records = chat(), Records()
    config: Any = {"callbacks": [records]}

    def ask(thread: int) -> list[tuple[str, str]]:
        answers = []
        for request in range(REQUESTS):
            question = QUESTIONS[(thread + request) % len(QUESTIONS)]
            route = streamed if request % 2 else ChatSpecGuard.invoke
            message: Any = route(model, question, config)
            assert "".join(s["text"] for s in message.additional_kwargs[STEPS_KEY]) == message.text
            answers.append((question, message.text))
        return answers

    with ThreadPoolExecutor(THREADS) as pool:
        for answers in pool.map(ask, range(THREADS)):
            assert answers == [(question, alone[question]) for question, _ in answers]
    records.check(alone, THREADS * REQUESTS)


async def test_8_tasks_do_not_mix(alone: dict[str, str]) -> None:
    model, records = chat(), Records()
    config: Any = {"callbacks": [records]}

    async def stream(question: str) -> Any:
        chunks: list[Any] = [chunk async for chunk in model.astream(question, config)]
        return sum(chunks[1:], start=chunks[0])

    questions = QUESTIONS[:8]
    answers = await asyncio.gather(
        *[
            stream(question) if turn % 2 else model.ainvoke(question, config)
            for turn, question in enumerate(questions)
        ]
    )
    assert [answer.text for answer in answers] == [alone[question] for question in questions]
    records.check(alone, 8)


async def test_threads_and_several_event_loops_at_once_do_not_mix(alone: dict[str, str]) -> None:
    model, records = chat(), Records()
    config: Any = {"callbacks": [records]}

    async def gather(questions: list[str]) -> list[Any]:
        return await asyncio.gather(*[model.ainvoke(question, config) for question in questions])

    answers = await asyncio.gather(
        gather(QUESTIONS[:4]),
        asyncio.to_thread(lambda: asyncio.run(gather(QUESTIONS[4:8]))),
        asyncio.to_thread(model.batch, list(QUESTIONS[8:12]), config),
    )
    texts = [answer.text for group in answers for answer in group]
    assert texts == [alone[question] for question in QUESTIONS[:12]]
    records.check(alone, 12)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_requests_are_answered_in_the_order_in_which_they_came(
    asynchronous: bool, alone: dict[str, str]
) -> None:
    model, order = chat(), list[str]()
    engine: Any = assemble(model).engines[0]

    def ask(question: str) -> None:
        answer = asyncio.run(model.ainvoke(question)) if asynchronous else model.invoke(question)
        assert answer.text == alone[question]
        order.append(question)

    threads = [threading.Thread(target=ask, args=(question,)) for question in QUESTIONS[:8]]
    with engine.exclusive():
        for waiting, thread in enumerate(threads, start=1):
            thread.start()
            wait_until(lambda n=waiting: engine._queue.waiting == n)  # type: ignore[misc]
    for thread in threads:
        thread.join(60)
    assert order == QUESTIONS[:8]


def test_the_answers_of_a_batch_are_in_the_order_of_its_questions(alone: dict[str, str]) -> None:
    answers = chat().batch(list(QUESTIONS), {"max_concurrency": 8})
    assert [answer.text for answer in answers] == [alone[question] for question in QUESTIONS]
    assert all(isinstance(answer, AIMessage) for answer in answers)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.002)


class Gate:
    """Holds a request in its n-th forward pass, and counts the passes of that request alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, hold_at: int) -> None:
        self.passes = 0
        self.held, self.opened = threading.Event(), threading.Event()
        self.sessions: list[LocalSession] = []
        forward = LocalSession._forward

        def counted(session: LocalSession, *args: Any, **kwargs: Any) -> Any:
            if not self.held.is_set() and session not in self.sessions:
                self.sessions.append(session)
            self.passes += session in self.sessions
            if self.passes == hold_at and not self.held.is_set():
                self.held.set()
                assert self.opened.wait(60)
            return forward(session, *args, **kwargs)

        monkeypatch.setattr(LocalSession, "_forward", counted)


async def _cancel_ainvoke(model: ChatSpecGuard, gate: Gate) -> None:
    task = asyncio.create_task(model.ainvoke(QUESTIONS[0]))
    assert await asyncio.to_thread(gate.held.wait, 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def _leave_astream(model: ChatSpecGuard, gate: Gate) -> None:
    stream: Any = model.astream(QUESTIONS[0])
    await anext(stream)
    assert await asyncio.to_thread(gate.held.wait, 60)
    await stream.aclose()


async def _leave_stream(model: ChatSpecGuard, gate: Gate) -> None:
    stream: Any = model.stream(QUESTIONS[0])
    next(stream)
    assert gate.held.wait(60)
    stream.close()


async def _time_out(model: ChatSpecGuard, gate: Gate) -> None:
    threading.Timer(6.0, gate.opened.set).start()
    with pytest.raises(DecodingTimeoutError):
        await model.ainvoke(QUESTIONS[0], timeout=5.0)


WAYS = {
    "ainvoke": _cancel_ainvoke,
    "astream": _leave_astream,
    "stream": _leave_stream,
    "timeout": _time_out,
}


@pytest.mark.parametrize("way", WAYS)
async def test_a_cancelled_request_stops_at_its_next_token_and_the_next_one_answers(
    way: str, alone: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    long, short = chat(max_tokens=400), chat()
    gate = Gate(monkeypatch, hold_at=12)
    cancelling = asyncio.create_task(WAYS[way](long, gate))
    assert await asyncio.to_thread(gate.held.wait, 60)
    behind = asyncio.create_task(short.ainvoke(QUESTIONS[2]))  # queues while the engine is held
    await cancelling
    gate.opened.set()
    assert (await behind).text == alone[QUESTIONS[2]]
    assert gate.passes == 12, "the pass that was going on is the last one"
    assert short.invoke(QUESTIONS[3]).text == alone[QUESTIONS[3]]
