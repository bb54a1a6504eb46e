"""What a server can do is found once, when the engine is made, and declared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

pytest.importorskip("httpx")

from specguard_adapters.openai import OpenAIEngine
from specguard_chains.decoding.engine import Prompt
from specguard_chains.errors import ConfigurationError, ServerError
from tests.scripted_server import Fault, ScriptedServer, serve

CHAT = Prompt(messages=[{"role": "user", "content": "Hello"}])

Make = Callable[..., OpenAIEngine]


@pytest.fixture
def make() -> Iterator[Make]:
    with ExitStack() as stack:

        def make(server: ScriptedServer, **settings: Any) -> OpenAIEngine:
            stack.enter_context(serve(server))
            settings = {"model": "toy", "base_url": server.url, **settings}
            return stack.enter_context(closing(OpenAIEngine(**settings)))

        yield make


def test_everything_of_vllm_is_found(make: Make) -> None:
    engine = make(ScriptedServer())
    features = engine.features
    assert (features.dialect, features.max_length) == ("vllm", 128)
    assert features.scoring == "prompt_logprobs"
    found = (features.logprobs, features.token_ids, features.several, features.stops)
    assert all((*found, features.chat_template, features.neutral))
    assert engine.capabilities.logprobs
    assert engine.capabilities.scoring
    assert not engine.capabilities.attention
    assert not engine.capabilities.in_process
    assert engine.capabilities.max_candidates == 16


def test_what_a_text_server_has_is_found(make: Make) -> None:
    features = make(ScriptedServer(dialect="llama_cpp_python"), context_length=64).features
    assert (features.dialect, features.scoring) == ("llama_cpp_python", "echo")
    assert features.echo_has_answer
    assert features.logprobs
    assert not any((features.token_ids, features.several, features.stops, features.chat_template))


@pytest.mark.parametrize(
    ("lack", "attribute", "left"),
    [
        ("logprobs", "logprobs", False),
        ("raw_logprobs", "logprobs", False),
        ("token_ids", "token_ids", False),
        ("n", "several", False),
        ("stops", "stops", False),
        ("scoring", "scoring", None),
        ("chat_template", "chat_template", False),
        ("neutral", "neutral", None),
    ],
)
def test_what_a_server_lacks_is_found(make: Make, lack: str, attribute: str, left: Any) -> None:
    engine = make(ScriptedServer(lacks={lack}))
    assert getattr(engine.features, attribute) == left
    session = engine.open(Prompt(text="a question"))
    assert session.length == 10


def test_wrong_scores_are_no_scores(make: Make) -> None:
    """llama-cpp-python reads them one row late, unless the model has a token to begin with."""
    server = ScriptedServer(dialect="llama_cpp_python", lacks={"rows"})
    engine = make(server, context_length=64)
    assert engine.features.scoring is None
    assert not engine.capabilities.scoring


def test_a_fault_that_passes_hides_no_feature(make: Make) -> None:
    server = ScriptedServer(faults=[Fault("status", 500), Fault("cut")])
    assert make(server).features.token_ids


def test_a_fault_that_stays_is_told(make: Make) -> None:
    with pytest.raises(ServerError, match="status 503"):
        make(ScriptedServer(faults=[Fault("status", 503)] * 20), max_retries=0)


@pytest.mark.parametrize(
    ("server", "told"),
    [
        (ScriptedServer(models=("a", "b/c")), r"no model 'toy'; it has a, b/c"),
        (ScriptedServer(lacks={"tokenize"}), r"neither /tokenize \(vLLM\) nor /extras/tokenize"),
        (ScriptedServer(lacks={"length"}), r"give n_ctx \(context_length"),
        (ScriptedServer(lacks={"models"}), r"give n_ctx \(context_length"),
    ],
)
def test_what_cannot_work_is_refused(make: Make, server: ScriptedServer, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        make(server)


def test_a_server_that_cannot_stream_is_refused(make: Make) -> None:
    with pytest.raises(ServerError, match="no streams here"):
        make(ScriptedServer(lacks={"stream"}))


@pytest.mark.parametrize("dialect", ["vllm", "llama_cpp_python"])
def test_messages_need_a_template(make: Make, dialect: str) -> None:
    server = ScriptedServer(dialect=dialect, lacks={"chat_template"})
    with pytest.raises(ConfigurationError, match="give chat_template"):
        make(server, context_length=64).open(CHAT)


@pytest.mark.parametrize(
    ("url", "base_url", "model"),
    [
        ("openai://127.0.0.1:8000/toy", "http://127.0.0.1:8000/v1", "toy"),
        ("openais://host/Qwen/Qwen2.5-7B", "https://host/v1", "Qwen/Qwen2.5-7B"),
        ("OpenAIs://host/Qwen2.5", "https://host/v1", "Qwen2.5"),
    ],
)
def test_a_url_names_server_and_model(
    monkeypatch: pytest.MonkeyPatch, url: str, base_url: str, model: str
) -> None:
    made = []

    def note(self: OpenAIEngine, model: str, **settings: Any) -> None:
        made.append((model, settings))

    monkeypatch.setattr(OpenAIEngine, "__init__", note)
    OpenAIEngine.from_url(url, timeout_s=3)
    assert made == [(model, {"base_url": base_url, "timeout_s": 3})]


@pytest.mark.parametrize(
    "url",
    [
        "http://host/model",
        "openai://host",
        "openai://host/",
        "openai:///model",
        "host/model",
        "openai://me:hush@host/model",
        "openai://host/model?key=hush",
        "openai://host?hush/model",
        "openai://host/model#hush",
    ],
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        OpenAIEngine.from_url(url)
    assert "hush" not in str(caught.value)


def test_a_schemes_case_does_not_matter(make: Make) -> None:
    server = ScriptedServer()
    engine = make(server)
    with closing(OpenAIEngine("toy", base_url=server.url.replace("http:", "HTTP:") + "/")) as same:
        assert (same.base_url, same.vocabulary) == (engine.base_url, engine.vocabulary)
    with pytest.raises(ConfigurationError, match="is not a file of certificates"):
        OpenAIEngine("toy", base_url="HTTPS://127.0.0.1:1/v1", verify="no-such-file.pem")


@pytest.mark.parametrize(
    "settings",
    [
        {"base_url": "127.0.0.1:8000/v1"},
        {"base_url": "ftp://host/v1"},
        {"base_url": "http://"},
        {"base_url": "http://[::1/v1"},
        {"base_url": "http://me:hush@host/v1"},
        {"base_url": "http://host/v1?key=hush"},
        {"max_candidates": 0},
        {"timeout_s": 0},
        {"timeout_s": float("nan")},
        {"max_retries": -1},
        {"context_length": 1},
        {"chat_template": "{% if %}"},
        {"base_url": "https://host/v1", "verify": "no-such-file.pem"},
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        OpenAIEngine("toy", **{"base_url": "http://127.0.0.1:1/v1", **settings})
    assert "hush" not in str(caught.value)
