"""All models of the process compute on one thread, whoever asks."""

from __future__ import annotations

import threading
import time
from contextvars import ContextVar

import pytest

from specguard_chains import background
from specguard_chains.decoding import compute_thread
from specguard_chains.decoding.baselines import SoloDecoder
from specguard_chains.decoding.decoder import Request
from specguard_chains.decoding.engine import Prompt
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.decoding.steps import Source
from specguard_chains.errors import DecodingCancelled
from tests.toy_engine import FloatArray, ToyEngine, scripted_policy


def thread_of() -> int:
    return compute_thread.run(threading.get_ident)


def test_every_job_runs_on_the_same_thread() -> None:
    idents = {thread_of()}

    def ask() -> None:
        idents.add(thread_of())

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(idents) == 1
    assert threading.get_ident() not in idents


def test_a_job_may_ask_for_another_one() -> None:
    assert compute_thread.run(lambda: compute_thread.run(lambda: 3)) == 3


def test_errors_come_back_and_the_thread_goes_on() -> None:
    before = thread_of()
    with pytest.raises(ZeroDivisionError):
        compute_thread.run(lambda: 1 // 0)
    assert thread_of() == before


def test_a_job_sees_the_callers_context() -> None:
    name = ContextVar("name", default="nobody")
    name.set("caller")
    assert compute_thread.run(name.get) == "caller"


def test_a_job_that_waits_can_be_cancelled() -> None:
    release = threading.Event()
    busy = threading.Thread(target=lambda: compute_thread.run(release.wait))
    busy.start()
    time.sleep(0.05)
    try:
        with pytest.raises(DecodingCancelled):
            compute_thread.run(lambda: None, cancelled=lambda: True)
    finally:
        release.set()
        busy.join()
    assert compute_thread.run(lambda: 1) == 1


def test_requests_to_models_of_this_process_compute_there() -> None:
    seen = set()
    script = scripted_policy("Yes.")

    def policy(tokens: tuple[int, ...]) -> FloatArray:
        seen.add(threading.get_ident())
        return script(tokens)

    for _ in range(2):
        engine = ToyEngine(policy)
        decoder = SoloDecoder(engine, Source.DRAFT)
        list(background.run(decoder, Request(Prompt(text="?"), Sampling(temperature=0))))
    assert seen == {thread_of()}
