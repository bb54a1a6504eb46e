"""The engine for servers keeps the contract on scripted ones, whose numbers are exact."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import pytest

pytest.importorskip("httpx")

from specguard_adapters.openai import OpenAIEngine
from specguard_chains.decoding.engine import Engine, Prompt
from tests.conformance.suite import EngineConformance
from tests.scripted_server import ScriptedServer, serve


class TestIds(EngineConformance):
    """Token ids, several candidates in one request."""

    prompts = (
        Prompt(text="a question"),
        Prompt(messages=[{"role": "user", "content": "why?"}]),
    )
    ending_prompt = Prompt(text="!")
    logprob_tolerance = 1e-6
    reuses_prefixes = False
    settings: ClassVar[dict[str, object]] = {}
    script: ClassVar[dict[str, object]] = {}

    @pytest.fixture(autouse=True)
    def run_server(self) -> Iterator[None]:
        with serve(ScriptedServer(**self.script)) as server:  # type: ignore[arg-type]
            self.server = server
            yield

    def make_engine(self) -> Engine:
        return OpenAIEngine("toy", base_url=self.server.url, **self.settings)  # type: ignore[arg-type]

    def text_of(self, engine: Engine, tokens: Sequence[int]) -> str:
        assert isinstance(engine, OpenAIEngine)
        return engine.text(list(tokens))


class TestIdsOneByOne(TestIds):
    """A server without `n` and without stop strings."""

    script: ClassVar[dict[str, object]] = {"lacks": {"n", "stops"}}


class TestText(TestIds):
    """Text only."""

    script: ClassVar[dict[str, object]] = {"dialect": "llama_cpp_python"}
    settings: ClassVar[dict[str, object]] = {
        "context_length": 128,
        "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    }
