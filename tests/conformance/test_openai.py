"""The engine for servers keeps the contract: over text (llama-cpp-python) and token ids (vLLM)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import ClassVar

import pytest

from specguard_chains.decoding.engine import Engine, Prompt
from tests.conformance.llama_server import letters_model, serve
from tests.conformance.suite import EngineConformance

pytestmark = pytest.mark.integration

TEMPLATE = "{% for m in messages %}{{ m.role }} says {{ m.content }}. {% endfor %}it is "
"""Of letters only, as is what the model writes."""


@pytest.fixture(scope="module")
def letters_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of a random model whose tokens are letters: all text has one tokenization."""
    path = letters_model(tmp_path_factory.mktemp("models") / "letters.gguf")
    with serve(path, "letters", n_ctx=256) as url:
        yield url


class TestTextServer(EngineConformance):
    """llama-cpp-python takes text only, and writes one candidate at a time."""

    prompts = (
        Prompt(text="the cat in the hat"),
        Prompt(messages=[{"role": "user", "content": "why is the sky blue"}]),
    )
    logprob_tolerance = 0.01  # its KV memory is in 16 bits: 0.0013 has been seen
    repeat_tolerance = 0.01
    reuses_prefixes = False
    url: ClassVar[str]

    @pytest.fixture(autouse=True)
    def take_url(self, letters_url: str) -> None:
        type(self).url = letters_url

    def make_engine(self) -> Engine:
        from specguard_adapters.openai import OpenAIEngine

        return OpenAIEngine.from_url(self.url, context_length=256, chat_template=TEMPLATE)

    def text_of(self, engine: Engine, tokens: Sequence[int]) -> str:
        return engine.text(tokens)


VLLM_URL = os.environ.get("SPECGUARD_VLLM_URL")


@pytest.mark.skipif(VLLM_URL is None, reason="SPECGUARD_VLLM_URL names no server")
class TestVllm(EngineConformance):
    """vLLM takes token ids, and writes all candidates at once.

    It computes in 16 bits, in batches that requests share.
    """

    prompts = (
        Prompt(text="The capital of Italy is"),
        Prompt(
            messages=[
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Why is the sky blue?"},
            ]
        ),
    )
    ending_prompt = Prompt(messages=[{"role": "user", "content": "What is 1+1?"}])
    logprob_tolerance = 0.2
    repeat_tolerance = 0.2
    reuses_prefixes = False

    def make_engine(self) -> Engine:
        from specguard_adapters.openai import OpenAIEngine

        assert VLLM_URL is not None
        return OpenAIEngine.from_url(VLLM_URL, context_length=256)

    def text_of(self, engine: Engine, tokens: Sequence[int]) -> str:
        return engine.text(tokens)
