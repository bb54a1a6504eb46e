"""One request on a thread of its own: nobody waits for ever, nothing computes for nobody."""

import asyncio
import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from subprocess import run as run_process

import pytest

from specguard_chains.background import arun, run, stopped_by
from specguard_chains.decoding.decoder import Request
from specguard_chains.decoding.engine import Capabilities, Prompt
from specguard_chains.decoding.fair_lock import FairLock
from specguard_chains.decoding.steps import Source, Step, StepSeconds, StepTokens, Verdict
from specguard_chains.errors import DecodingCancelled, EngineError

REQUEST = Request(Prompt(text="?"))
TOKEN_S = 0.002


class FakeEngine:
    """Only its queue."""

    capabilities = Capabilities(in_process=True)

    def __init__(self) -> None:
        self.queue = FairLock()

    @contextmanager
    def exclusive(
        self, cancelled: Callable[[], bool] | None = None, *, max_waiting: int | None = None
    ) -> Iterator[None]:
        self.queue.acquire(cancelled, max_waiting=max_waiting)
        try:
            yield
        finally:
            self.queue.release()

    def assert_free(self) -> None:
        with self.exclusive(cancelled=lambda: True):  # else it raises
            pass


class FakeServer(FakeEngine):
    """It needs no turn on the thread on which models compute."""

    capabilities = Capabilities(in_process=False)


class FakeDecoder:
    """Writes `steps` steps of `tokens` tokens; checks like a session whether it is cancelled."""

    def __init__(self, *engines: FakeEngine, steps: int = 3, tokens: int = 1) -> None:
        self.engines = engines or (FakeEngine(),)
        self.tokens_written = 0
        self.closed = threading.Event()
        self.before_step: Callable[[int], None] = lambda number: None
        self._steps = steps
        self._tokens = tokens
        self._entered = threading.Lock()

    def decode(self, request: Request) -> Iterator[Step]:
        assert self._entered.acquire(blocking=False), "two requests at once"
        try:
            for number in range(1, self._steps + 1):
                self.before_step(number)
                for _ in range(self._tokens):
                    if request.cancelled is not None and request.cancelled():
                        raise DecodingCancelled("stopped")
                    time.sleep(TOKEN_S)
                    self.tokens_written += 1
                yield step(number, last=number == self._steps)
        finally:
            self._entered.release()
            self.closed.set()


def step(number: int, *, last: bool = False) -> Step:
    return Step(
        number=number,
        text=f"{number} ",
        source=Source.DRAFT,
        verdict=Verdict.ACCEPTED,
        score=1.0,
        confidence=0.0,
        grounding=1.0,
        threshold=0.5,
        rejected_early=False,
        num_candidates=1,
        chosen=0,
        candidates=(f"{number} ",),
        tokens=StepTokens(),
        seconds=StepSeconds(),
        span=(0, 1),
        answer_tokens=1,
        finish_reason="stop" if last else None,
    )


def numbers(steps: Iterator[Step]) -> list[int]:
    return [each.number for each in steps]


def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.001)


def assert_stops(decoder: FakeDecoder) -> None:
    """The decoding ends within some tokens and leaves the engines free."""
    assert decoder.closed.wait(10)
    written = decoder.tokens_written
    assert written < 500
    for engine in decoder.engines:
        engine.assert_free()
    assert decoder.tokens_written == written


def long_decoder(*engines: FakeEngine) -> FakeDecoder:
    return FakeDecoder(*engines, steps=1000, tokens=10)


def test_steps_arrive_in_order() -> None:
    assert numbers(run(FakeDecoder(), REQUEST)) == [1, 2, 3]


async def test_steps_arrive_in_order_async() -> None:
    assert [each.number async for each in arun(FakeDecoder(), REQUEST)] == [1, 2, 3]


def test_nothing_is_decoded_before_the_first_step_is_asked_for() -> None:
    decoder = FakeDecoder()
    steps = run(decoder, REQUEST)
    time.sleep(0.02)
    assert decoder.tokens_written == 0
    assert next(steps).number == 1


def test_decoding_goes_on_while_the_consumer_works() -> None:
    decoder = FakeDecoder()
    steps = run(decoder, REQUEST)
    next(steps)
    assert decoder.closed.wait(10), "the decoder waits for its consumer"
    assert numbers(steps) == [2, 3]


def test_a_nested_call_queues_and_does_not_deadlock() -> None:
    engine = FakeEngine()
    inner = [numbers(run(FakeDecoder(engine), REQUEST)) for _ in run(FakeDecoder(engine), REQUEST)]
    assert inner == [[1, 2, 3]] * 3


async def test_a_nested_call_queues_and_does_not_deadlock_async() -> None:
    engine = FakeEngine()
    async for _ in arun(FakeDecoder(engine), REQUEST):
        assert [each.number async for each in arun(FakeDecoder(engine), REQUEST)] == [1, 2, 3]


def test_sixteen_threads_take_turns() -> None:
    first, second = FakeEngine(), FakeEngine()
    shared = FakeDecoder(first, second)
    turned = FakeDecoder(second, first)  # names the same engines the other way round
    turned._entered = shared._entered
    got: list[list[int]] = []
    threads = [
        threading.Thread(target=lambda d=decoder: got.append(numbers(run(d, REQUEST))))
        for decoder in [shared, turned] * 8
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert got == [[1, 2, 3]] * 16


@pytest.mark.parametrize("error", [EngineError("broken"), ValueError("odd"), KeyboardInterrupt()])
def test_errors_reach_the_consumer_unchanged(error: BaseException) -> None:
    decoder = FakeDecoder()

    def fail(number: int) -> None:
        if number == 2:
            raise error

    decoder.before_step = fail
    steps = run(decoder, REQUEST)
    assert next(steps).number == 1
    with pytest.raises(type(error)) as caught:
        next(steps)
    assert caught.value is error
    decoder.before_step = lambda number: None
    assert numbers(run(decoder, REQUEST)) == [1, 2, 3]


async def test_errors_reach_the_consumer_unchanged_async() -> None:
    decoder, error = FakeDecoder(), EngineError("broken")

    def fail(number: int) -> None:
        raise error

    decoder.before_step = fail
    with pytest.raises(EngineError) as caught:
        [each async for each in arun(decoder, REQUEST)]
    assert caught.value is error


def test_closing_the_iterator_stops_within_a_token() -> None:
    decoder = long_decoder()
    steps = run(decoder, REQUEST)
    next(steps)
    steps.close()
    assert_stops(decoder)


def test_dropping_the_iterator_stops_within_a_token() -> None:
    decoder = long_decoder()
    for _ in run(decoder, REQUEST):
        break
    gc.collect()
    assert_stops(decoder)


def test_ctrl_c_in_the_consumer_stops_within_a_token() -> None:
    decoder = long_decoder()
    with pytest.raises(KeyboardInterrupt):
        for _ in run(decoder, REQUEST):
            raise KeyboardInterrupt
    assert_stops(decoder)


async def test_a_timeout_of_the_task_stops_within_a_token() -> None:
    decoder = long_decoder()

    async def consume() -> None:
        async for _ in arun(decoder, REQUEST):
            pass

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(consume(), 0.05)
    await asyncio.to_thread(assert_stops, decoder)


async def test_leaving_the_async_loop_stops_within_a_token() -> None:
    decoder = long_decoder()
    async for _ in arun(decoder, REQUEST):
        break
    await asyncio.to_thread(assert_stops, decoder)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_closed_event_loop_stops_within_a_token() -> None:
    decoder = long_decoder()
    loop = asyncio.new_event_loop()
    steps = arun(decoder, REQUEST)
    loop.run_until_complete(anext(steps))
    loop.close()
    assert_stops(decoder)


def test_the_callers_own_flag_cancels_with_an_error() -> None:
    decoder, flag = long_decoder(), threading.Event()
    steps = run(decoder, replace(REQUEST, cancelled=flag.is_set))
    next(steps)
    flag.set()
    with pytest.raises(DecodingCancelled):
        list(steps)
    assert_stops(decoder)


def test_what_is_made_together_stops_together_at_the_next_token() -> None:
    stop, reached = threading.Event(), threading.Event()
    decoders = [FakeDecoder(FakeServer(), steps=4, tokens=3) for _ in range(3)]

    def stop_both(number: int) -> None:
        if number == 3 and reached.wait(10):
            stop.set()

    def wait(number: int) -> None:
        if number == 2:
            reached.set()
            stop.wait(10)

    decoders[0].before_step, decoders[1].before_step = stop_both, wait
    with stopped_by(threading.Event()), stopped_by(stop):  # the outer one alone stops nothing
        together = [run(decoder, REQUEST) for decoder in decoders[:2]]
        assert [next(steps).number for steps in together] == [1, 1]
    alone = run(decoders[2], REQUEST)
    for steps in together:
        with pytest.raises(DecodingCancelled):
            list(steps)
    assert numbers(alone) == [1, 2, 3, 4]
    assert [decoder.tokens_written for decoder in decoders] == [6, 3, 12]


def test_what_a_stopped_request_has_asked_for_stops_too() -> None:
    outer, inner = FakeDecoder(FakeServer()), long_decoder()
    stop = threading.Event()
    inner.before_step = lambda number: stop.set() if number == 2 else None
    outer.before_step = lambda number: list(run(inner, REQUEST))
    with stopped_by(stop), stopped_by(threading.Event()), pytest.raises(DecodingCancelled):
        list(run(outer, REQUEST))
    assert (outer.tokens_written, inner.tokens_written) == (0, 10)


def test_whoever_is_cancelled_while_queueing_leaves_the_queue() -> None:
    engine, flag = FakeEngine(), threading.Event()
    waiting = FakeDecoder(engine)
    engine.queue.acquire()  # somebody else's long request
    caught: list[BaseException] = []

    def consume() -> None:
        try:
            numbers(run(waiting, replace(REQUEST, cancelled=flag.is_set)))
        except DecodingCancelled as error:
            caught.append(error)

    thread = threading.Thread(target=consume)
    thread.start()
    until(lambda: engine.queue.waiting == 1)
    flag.set()
    thread.join(10)
    assert engine.queue.waiting == 0
    assert len(caught) == 1
    assert waiting.tokens_written == 0
    engine.queue.release()
    assert numbers(run(FakeDecoder(engine), REQUEST)) == [1, 2, 3]


async def test_a_task_cancelled_while_queueing_leaves_the_queue() -> None:
    held, free = FakeEngine(), FakeEngine()
    held.queue.acquire()
    steps = arun(FakeDecoder(held, free), REQUEST)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(steps), 0.05)
    await asyncio.to_thread(until, lambda: held.queue.waiting == 0)
    held.queue.release()
    held.assert_free()
    free.assert_free()


async def test_the_event_loop_stays_responsive() -> None:
    gaps: list[float] = []

    async def tick() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.005)
            gaps.append(time.perf_counter() - before)

    ticker = asyncio.create_task(tick())
    async for _ in arun(FakeDecoder(steps=20, tokens=5), REQUEST):
        pass
    ticker.cancel()
    assert len(gaps) > 10
    assert sorted(gaps)[len(gaps) // 2] < 0.05


def test_context_variables_reach_the_decoder() -> None:
    variable: ContextVar[str] = ContextVar("variable")
    variable.set("seen")
    seen: list[str] = []
    decoder = FakeDecoder()
    decoder.before_step = lambda number: seen.append(variable.get())
    numbers(run(decoder, REQUEST))
    assert seen == ["seen"] * 3


def test_the_end_of_the_process_waits_for_the_token_in_progress_only() -> None:
    program = """
from tests.unit_tests.test_background import REQUEST, long_decoder, run
steps = run(long_decoder(), REQUEST)
print(next(steps).number)
"""
    done = run_process([sys.executable, "-c", program], capture_output=True, text=True, timeout=15)
    assert (done.stdout, done.stderr, done.returncode) == ("1\n", "", 0)


def test_at_the_end_of_the_process_the_thread_stops_before_what_engines_have_registered() -> None:
    program = """
import atexit, threading
from tests.unit_tests.test_background import REQUEST, long_decoder, run
threads = lambda: [thread.name for thread in threading.enumerate()]
atexit.register(lambda: print("specguard" in threads()))  # as llama.cpp's memory is freed
steps = run(long_decoder(), REQUEST)
next(steps)
print("specguard" in threads())
"""
    done = run_process([sys.executable, "-c", program], capture_output=True, text=True, timeout=15)
    assert (done.stdout, done.stderr, done.returncode) == ("True\nFalse\n", "", 0)
