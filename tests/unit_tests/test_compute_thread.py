"""All models of the process compute on one thread, whoever asks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar

import numpy as np
import pytest

from specguard_chains import background
from specguard_chains.decoding import compute_thread
from specguard_chains.decoding.baselines import SoloDecoder
from specguard_chains.decoding.decoder import Request
from specguard_chains.decoding.engine import Prompt
from specguard_chains.decoding.rivals import AcceptAll
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.decoding.selection import HashedNgrams, Selector
from specguard_chains.decoding.specguard import SpecGuardDecoder
from specguard_chains.decoding.steps import Source, Step
from specguard_chains.errors import ConfigurationError, DecodingCancelled
from tests.toy_engine import FloatArray, ToyEngine, random_policy, scripted_policy


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


# --- functions of the user that take part in decoding


def selecting(encoder: Callable[[Sequence[str]], FloatArray], k: int = 3) -> SpecGuardDecoder:
    pair = [ToyEngine(random_policy(seed)) for seed in (1, 2)]
    return SpecGuardDecoder(*pair, AcceptAll(), num_candidates=k, select=Selector(encoder))


def ask(decoder: SpecGuardDecoder | SoloDecoder) -> list[Step]:
    request = Request(Prompt(text="?"), Sampling(temperature=1), max_tokens=30)
    return list(background.run(decoder, request))


def constant(texts: Sequence[str]) -> FloatArray:
    return np.ones((len(texts), 2), dtype=np.float32)


def test_an_encoder_of_the_user_keeps_nobody_waiting() -> None:
    """It waits until a request that came later has been answered."""
    begun, answered = threading.Event(), threading.Event()
    in_time: list[bool] = []

    def slow(texts: Sequence[str]) -> FloatArray:
        begun.set()
        in_time.append(answered.wait(20))
        return constant(texts)

    waiting = threading.Thread(target=ask, args=[selecting(slow)])
    waiting.start()
    assert begun.wait(20)
    assert ask(SoloDecoder(ToyEngine(random_policy(3)), Source.DRAFT))
    answered.set()
    waiting.join(20)
    assert in_time
    assert all(in_time)


def test_an_encoder_may_ask_another_model_of_this_process_and_not_its_own() -> None:
    other = SoloDecoder(ToyEngine(random_policy(3)), Source.DRAFT)
    asked: list[list[Step]] = []

    def asks_other(texts: Sequence[str]) -> FloatArray:
        asked.append(ask(other))
        return constant(texts)

    steps = ask(selecting(asks_other))
    assert asked
    assert [step.text for step in steps] == [step.text for step in ask(selecting(constant))]

    def asks_own(texts: Sequence[str]) -> FloatArray:
        ask(decoder)
        return constant(texts)

    decoder = selecting(asks_own)
    with pytest.raises(ConfigurationError, match=r"encoder of that answer ask another model"):
        ask(decoder)


def test_only_an_encoder_of_the_user_asks_others() -> None:
    class Computes:
        asks_others = False

        def __call__(self, texts: Sequence[str]) -> FloatArray:
            return constant(texts)

    assert selecting(constant).asks_others
    assert not selecting(constant, k=1).asks_others, "nothing is selected"
    assert not selecting(Computes()).asks_others
    assert not selecting(HashedNgrams()).asks_others
    pair = [ToyEngine(random_policy(seed)) for seed in (1, 2)]
    assert not SpecGuardDecoder(*pair, AcceptAll()).asks_others
