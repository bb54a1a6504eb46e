"""Keys reach the server that they are meant for, and nobody else."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

pytest.importorskip("httpx")

import httpx
from pydantic import SecretStr

from specguard_adapters.openai import OpenAIEngine
from specguard_adapters.openai.errors import Translator
from specguard_adapters.openai.settings import is_local, secret_key
from specguard_chains.decoding.boundaries import Boundary
from specguard_chains.decoding.engine import Prompt
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.errors import ConfigurationError, ServerAuthenticationError, ServerError
from tests.scripted_server import Fault, ScriptedServer, serve

KEY = "sk-very-secret"
ELSEWHERE = "http://models.example/v1"

Make = Callable[..., OpenAIEngine]


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with serve(ScriptedServer()) as server:
        yield server


@pytest.fixture
def make(server: ScriptedServer) -> Iterator[Make]:
    with ExitStack() as stack:

        def make(**settings: Any) -> OpenAIEngine:
            settings = {"model": "toy", "base_url": server.url, **settings}
            return stack.enter_context(closing(OpenAIEngine(**settings)))

        yield make


def told(error: BaseException) -> str:
    """Return what an error says, with its causes even where they are suppressed."""
    shown = "".join(traceback.format_exception_only(error))
    before = [e for e in (error.__cause__, error.__context__) if e is not None]
    return shown + "".join(map(told, before))


# --- sending


@pytest.mark.parametrize("key", [KEY, SecretStr(KEY), None], ids=["text", "secret", "environment"])
@pytest.mark.parametrize("around", ["", "\n"])
def test_the_key_is_sent(
    server: ScriptedServer, make: Make, monkeypatch: pytest.MonkeyPatch, key: Any, around: str
) -> None:
    server.key = KEY
    if key is None:
        monkeypatch.setenv("OPENAI_API_KEY", KEY + around)
    elif isinstance(key, str):
        key += around
    assert make(api_key=key)


@pytest.mark.parametrize("name", ["Authorization", "authorization"])
def test_whoever_signs_in_by_a_header_sends_no_key(
    server: ScriptedServer, make: Make, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-environment")
    server.key = KEY
    assert make(headers={name: f"Bearer {KEY}"})
    with pytest.raises(ConfigurationError, match="api_key and headers both say how to sign in"):
        make(headers={name: "Basic eDp5"}, api_key="sk-another")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "127.0.0.1", "127.1.2.3", "[::1]:8"])
def test_hosts_that_are_this_machine(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    assert secret_key(None, f"http://{host}/v1") == SecretStr(KEY)


@pytest.mark.parametrize(
    "host", ["models.example", "10.0.0.1", "128.0.0.1", "[2001:db8::1]", "localhost.example"]
)
def test_the_environments_key_leaves_this_machine_by_tls_only(
    monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    assert not is_local(f"http://{host}/v1")
    with pytest.raises(ConfigurationError, match=r"clear text.*openais://.*api_key") as caught:
        OpenAIEngine("toy", base_url=f"HTTP://{host}/v1")
    assert KEY not in told(caught.value)
    assert secret_key(None, f"https://{host}/v1") == SecretStr(KEY)
    assert secret_key("mine", f"http://{host}/v1") == SecretStr("mine")
    assert secret_key("", f"http://{host}/v1") is None
    monkeypatch.setenv("OPENAI_API_KEY", " ")
    assert secret_key(None, f"http://{host}/v1") is None


def test_no_proxy_stands_between_this_machine_and_itself(
    server: ScriptedServer, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    assert make()
    assert make(base_url=server.url.replace("127.0.0.1", "LocalHost"))


# --- never shown


@pytest.mark.parametrize("key", ["sk-hush\nmore", "sk-hush\x00", "sk-hush-É", "sk-hush\u200b"])
@pytest.mark.parametrize("where", ["text", "secret", "environment", "headers"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(
    server: ScriptedServer, make: Make, monkeypatch: pytest.MonkeyPatch, key: str, where: str
) -> None:
    settings: dict[str, Any] = {
        "text": {"api_key": key},
        "secret": {"api_key": SecretStr(key)},
        "headers": {"headers": {"x-token": key}},
        "environment": {},
    }[where]
    named = {"environment": r"\$OPENAI_API_KEY", "headers": r"headers\['x-token'\]"}
    if where == "environment":
        monkeypatch.setattr("os.environ", {"OPENAI_API_KEY": key})  # a real one holds no NUL
    with pytest.raises(ConfigurationError, match=named.get(where, "api_key") + ".*ASCII") as caught:
        make(**settings)
    assert "hush" not in told(caught.value)
    assert not server.requests


def test_other_headers_that_cannot_be_sent_are_refused(make: Make) -> None:
    for headers in ({"x token": "hush"}, {"hush\n": "a"}, {"": "hush"}, {"É": "hush"}):
        with pytest.raises(ConfigurationError, match="headers has a name") as caught:
            make(headers=headers)
        assert "hush" not in told(caught.value)
    with pytest.raises(ConfigurationError, match=r"headers\['x'\] must be text, not int"):
        make(headers={"x": 1})


def test_white_space_around_a_header_is_left_out(server: ScriptedServer, make: Make) -> None:
    server.key = KEY
    assert make(headers={"authorization": f" Bearer {KEY}\r\n"})


def test_what_httpx_refuses_to_send_is_no_cause() -> None:
    refusal = httpx.LocalProtocolError(f"Illegal header value b'Bearer {KEY}'")
    error = Translator(ELSEWHERE, "toy", [KEY]).failure(refusal, ELSEWHERE)
    assert isinstance(error, ConfigurationError)
    assert KEY not in told(error)


@pytest.mark.parametrize("key", [None, "sk-wrong-key"])
def test_a_wrong_key_is_refused_and_not_shown(
    server: ScriptedServer, make: Make, key: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    server.key = KEY
    caplog.set_level("DEBUG")
    with pytest.raises(ServerAuthenticationError, match="OPENAI_API_KEY") as caught:
        make(api_key=key, headers={"x-token": "hush-hush"})
    assert len(server.requests) == 1, "repeated"
    shown = f"{caught.getrepr(style='long', showlocals=True)} {caplog.text}"
    assert "sk-wrong" not in f"{told(caught.value)} {caplog.text}"
    assert "hush-hush" not in told(caught.value)
    assert KEY not in shown


def test_the_key_is_in_no_representation(server: ScriptedServer, make: Make) -> None:
    engine = make(api_key=KEY)
    assert repr(engine) == f"OpenAIEngine('toy', base_url='{server.url}')"
    session = engine.open(Prompt(text="a question"))
    server.faults = [Fault("status", 400, body=f'{{"error": "your key {KEY} is fine"}}')]
    with pytest.raises(ServerError, match=r"your key \*\*\* is fine"):
        session.sample(1, Boundary("\0", max_tokens=8), Sampling(), seed=(1,))
