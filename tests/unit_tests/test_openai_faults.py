"""What goes wrong between the engine and a server ends in time, says why, and leaves no trace."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("httpx")

from specguard_adapters.openai import OpenAIEngine, retries
from specguard_chains.decoding.boundaries import Boundary
from specguard_chains.decoding.engine import Candidate, Prompt, Session
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.errors import (
    ConfigurationError,
    ContextOverflowError,
    DecodingCancelled,
    EngineError,
    ServerError,
    ServerTimeoutError,
)
from tests.scripted_server import Fault, ScriptedServer, serve

PROMPT = Prompt(text="a question")

Make = Callable[..., OpenAIEngine]


@pytest.fixture(autouse=True)
def fast_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "_backoff_s", lambda _: 0.01)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with serve(ScriptedServer()) as server:
        yield server


@pytest.fixture
def make(server: ScriptedServer) -> Iterator[Make]:
    engines: list[OpenAIEngine] = []

    def make(**settings: Any) -> OpenAIEngine:
        settings = {"model": "toy", "base_url": server.url, "timeout_s": 20, **settings}
        engines.append(OpenAIEngine(**settings))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def write(session: Session, tokens: int = 8, n: int = 1) -> list[Candidate]:
    return session.sample(n, Boundary("\0", max_tokens=tokens), Sampling(), seed=(1,))


def tokens(candidates: list[Candidate]) -> list[tuple[int, ...]]:
    return [candidate.tokens for candidate in candidates]


# --- faults of one request

FINAL = {
    "refused": (Fault("status", 400), "status 400"),
    "forbidden": (Fault("status", 403), "api_key"),
    "garbage": (Fault("body", body="no JSON"), "event"),
    "HTML": (Fault("body", body="<html>", headers={"Content-Type": "text/html"}), "text/html"),
    "an error in the stream": (Fault("stream error", 400), "out of memory"),
    "a candidate too many": (Fault("choice", body='{"index": 7}'), "candidate 7 too many"),
    "an implausible choice": (Fault("choice", body='{"text": 3}'), "cannot be read"),
    "an implausible log-prob": (
        Fault("choice", body='{"logprobs": {"tokens": ["a"], "token_logprobs": ["x"]}}'),
        "cannot be read",
    ),
    "no log-probs": (Fault("no logprobs"), "lacks log-probs"),
    "a filter": (
        Fault("choice", body='{"finish_reason": "content_filter"}'),
        "broken off .*filter",
    ),
    "moved": (Fault("status", 307, {"Location": "http://127.0.0.1:1/"}), "status 307"),
}
TRANSIENT = {
    "busy": (Fault("status", 429, {"Retry-After": "0.1"}), "status 429"),
    "broken": (Fault("status", 500), "status 500"),
    "starting": (Fault("status", 503, body="not yet"), "not yet"),
    "cut": (Fault("cut stream"), "broke"),
    "short": (Fault("short stream"), "ends before its time"),
    "given up": (Fault("choice", body='{"finish_reason": "abort"}'), "broken off .*'abort'"),
    "an overload in the stream": (Fault("stream error", 503), "out of memory"),
}


@pytest.mark.parametrize("name", FINAL)
def test_a_final_fault_is_told_at_once(server: ScriptedServer, make: Make, name: str) -> None:
    fault, told = FINAL[name]
    session = make().open(PROMPT)
    server.faults = [fault]
    before = len(server.requests)
    with pytest.raises(ServerError, match=told) as caught:
        write(session)
    assert len(server.requests) == before + 1, "repeated"
    if fault.kind == "status":
        assert caught.value.status == fault.status
    assert tokens(write(session)) == tokens(write(session))


@pytest.mark.parametrize("name", TRANSIENT)
def test_a_transient_fault_passes(server: ScriptedServer, make: Make, name: str) -> None:
    session = make().open(PROMPT)
    expected = tokens(write(session, n=3))
    server.faults = [TRANSIENT[name][0]] * 2
    assert tokens(write(session, n=3)) == expected


@pytest.mark.parametrize("name", TRANSIENT)
def test_a_fault_that_stays_is_told(server: ScriptedServer, make: Make, name: str) -> None:
    fault, told = TRANSIENT[name]
    session = make().open(PROMPT)
    server.faults = [fault] * 3
    before = len(server.requests)
    with pytest.raises(ServerError, match=told):
        write(session)
    assert len(server.requests) == before + 3
    assert tokens(write(session)) == tokens(write(session))


@pytest.mark.parametrize("kind", ["cut", "body"])
def test_an_answer_in_one_piece_is_asked_for_again(
    server: ScriptedServer, make: Make, kind: str
) -> None:
    session = make().open(PROMPT)
    (step,) = write(session)
    server.faults = [Fault(kind, body='{"choices": [{"te')] * 2
    assert session.read(step).logprobs == pytest.approx(step.reading.logprobs)
    server.faults = [Fault(kind, body='{"choices": [{"te')] * 3
    with pytest.raises(ServerError, match=r"broke|not JSON"):
        session.read(step)
    assert session.read(step).logprobs == pytest.approx(step.reading.logprobs)


def test_a_web_page_is_named(server: ScriptedServer, make: Make) -> None:
    session = make().open(PROMPT)
    (step,) = write(session)
    server.faults = [Fault("body", body="<html>hi", headers={"Content-Type": "text/html"})]
    with pytest.raises(ServerError, match=r"web page.*<html>hi.*base_url"):
        session.read(step)


def test_scores_that_are_missing_are_told(server: ScriptedServer, make: Make) -> None:
    session = make().open(PROMPT)
    (step,) = write(session)
    server.lacks.add("scoring")
    with pytest.raises(ServerError, match="lacks log-probs of the prompt"):
        session.read(step)


def test_a_model_that_has_gone_is_told(server: ScriptedServer, make: Make) -> None:
    session = make().open(PROMPT)
    server.models = ("other",)
    with pytest.raises(ServerError, match=r"has no model 'toy'.*does not exist"):
        write(session)


def test_a_server_that_writes_nothing_is_told(server: ScriptedServer, make: Make) -> None:
    session = make().open(PROMPT)
    nothing = '{"text": "", "token_ids": [], "logprobs": null, "finish_reason": "stop", '
    server.faults = [Fault("choice", body=nothing + '"stop_reason": "x"}')] * 3
    with pytest.raises(ServerError, match="stops before it has begun"):
        write(session)


@pytest.mark.parametrize("told", ["maximum context length is 128", "maximum model length of 128"])
def test_an_overflow_on_the_server_is_an_overflow(
    server: ScriptedServer, make: Make, told: str
) -> None:
    session = make().open(PROMPT)
    server.faults = [Fault("status", 400, body=f'{{"error": {{"message": "the {told}."}}}}')]
    with pytest.raises(ContextOverflowError, match=told):
        write(session)
    assert write(session)


def test_retry_after_is_obeyed(server: ScriptedServer, make: Make) -> None:
    session = make().open(PROMPT)
    server.faults = [Fault("status", 429, {"Retry-After": "0.4"})]
    start = time.monotonic()
    write(session)
    assert time.monotonic() - start > 0.4


def test_who_has_no_time_to_wait_is_told_at_once(server: ScriptedServer, make: Make) -> None:
    session = make(timeout_s=5).open(PROMPT)
    server.faults = [Fault("status", 429, {"Retry-After": "3600"})]
    start = time.monotonic()
    with pytest.raises(ServerError, match="status 429"):
        write(session)
    assert time.monotonic() - start < 10


# --- time


@pytest.mark.parametrize("kind", ["drip", "hang"])
def test_nothing_lasts_longer_than_its_timeout(
    server: ScriptedServer, make: Make, kind: str
) -> None:
    session = make(timeout_s=0.5).open(PROMPT)
    server.faults = [Fault("status", 500), Fault(kind)]
    start = time.monotonic()
    with pytest.raises(ServerTimeoutError, match=r"timeout_s=0\.5"):
        write(session)
    assert time.monotonic() - start < 10
    assert server.aborted.wait(5)
    assert write(session)


@pytest.mark.parametrize("kind", ["drip", "hang", None])
def test_a_cancelled_request_closes_its_connection(
    server: ScriptedServer, make: Make, kind: str | None
) -> None:
    stop = threading.Event()
    session = make().open(PROMPT, cancelled=stop.is_set)
    server.faults = [Fault(kind)] if kind else []
    server.token_s = 0.05
    threading.Timer(0.3, stop.set).start()
    start = time.monotonic()
    with pytest.raises(DecodingCancelled):
        write(session, 100)
    assert time.monotonic() - start < 10
    assert server.aborted.wait(5)
    streamed = server.streamed
    time.sleep(0.15)
    assert server.streamed == streamed < 50
    stop.clear()
    assert len(write(session)[0].tokens) == 8


def test_a_request_can_be_cancelled_while_it_waits_to_be_repeated(
    server: ScriptedServer, make: Make
) -> None:
    stop = threading.Event()
    session = make().open(PROMPT, cancelled=stop.is_set)
    server.faults = [Fault("status", 429, {"Retry-After": "15"})]
    threading.Timer(0.2, stop.set).start()
    start = time.monotonic()
    with pytest.raises(DecodingCancelled):
        write(session)
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("kind", ["drip", "hang", None])
def test_closing_aborts_requests(server: ScriptedServer, make: Make, kind: str | None) -> None:
    engine = make()
    session = engine.open(PROMPT)
    server.faults = [Fault(kind)] if kind else []
    server.token_s = 0.05
    threading.Timer(0.3, engine.close).start()
    with pytest.raises(EngineError, match="closed"):
        write(session, 100)
    assert server.aborted.wait(5)


def test_what_is_enough_aborts_the_rest(server: ScriptedServer, make: Make) -> None:
    """A step that ends with a delimiter which the server does not see: it began before."""
    session = make().open(PROMPT)
    server.token_s = 0.02
    (step,) = session.sample(
        1, Boundary("\0", max_tokens=100, stop=("#a", "#b", "#c")), Sampling(), seed=(1,)
    )
    assert len(step.tokens) == 100
    server.streamed = 0
    stop = tuple("#" + letter for letter in "abcdefgh ")
    (step,) = session.sample(
        1, Boundary("\0", max_tokens=100, stop=stop, preceding="#"), Sampling(), seed=(1,)
    )
    assert len(step.tokens) == 1
    assert server.aborted.wait(5)
    assert server.streamed < 10


def test_a_step_is_not_lost_by_what_comes_after_it(server: ScriptedServer, make: Make) -> None:
    session = make(timeout_s=60).open(PROMPT)
    expected = tokens(write(session))
    server.lingers = True
    start = time.monotonic()
    assert tokens(write(session)) == expected
    assert time.monotonic() - start < 20
    assert server.aborted.wait(5)


def test_an_engine_of_another_process_says_so(
    server: ScriptedServer, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = make().open(PROMPT)
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: -1)
        with pytest.raises(EngineError, match=r"before this process was forked.*make an engine"):
            write(session)
    assert tokens(write(session))


def test_an_engine_that_is_forgotten_ends_its_thread(server: ScriptedServer) -> None:
    engine = OpenAIEngine("toy", base_url=server.url)
    write(engine.open(PROMPT))
    del engine
    gc.collect()
    assert not [t for t in threading.enumerate() if t.name == "specguard-http"]


# --- servers that are not there


def test_a_server_that_is_not_there_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        with pytest.raises(ServerError, match=rf"no server answers at {url}.*start it"):
            OpenAIEngine("toy", base_url=url)


def test_a_host_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ServerError, match=r"no server answers at http://nowhere\.invalid.*URL"):
        OpenAIEngine("toy", base_url="http://nowhere.invalid/v1", timeout_s=5)


def test_a_server_without_tls_is_told_from_one_that_is_not_there(server: ScriptedServer) -> None:
    url = server.url.replace("http:", "https:")
    with pytest.raises(ServerError, match=r"does not speak TLS.*is it http"):
        OpenAIEngine("toy", base_url=url)


def test_an_engine_that_cannot_be_made_leaves_no_thread(server: ScriptedServer) -> None:
    server.models = ("other",)
    with pytest.raises(ConfigurationError):
        OpenAIEngine("toy", base_url=server.url)
    assert not [t for t in threading.enumerate() if t.name == "specguard-http"]
