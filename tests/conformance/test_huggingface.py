"""Models of transformers keep the contract, with and without attention."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import pytest

from specguard_chains.decoding.engine import Engine, Prompt
from tests.conformance.suite import EngineConformance
from tests.conformance.test_llama_cpp import TestLlamaCpp as LlamaCppConformance
from tests.integration_tests.conftest import gguf_transformer, transformer

pytestmark = pytest.mark.integration
pytest.importorskip("torch")
pytest.importorskip("transformers")

LAYERS = 3

LoadedModel = tuple[Any, Any]


@cache
def tiny(window: int) -> LoadedModel:
    with TemporaryDirectory() as folder:
        return transformer(Path(folder), window=window)


@cache
def small() -> LoadedModel:
    """The first layers of a real model, so that a test takes no minutes."""
    model, tokenizer = gguf_transformer("smollm2-135m-instruct")
    model = deepcopy(model)
    model.config.num_hidden_layers = LAYERS
    del model.model.layers[LAYERS:]
    return model, tokenizer


def load(loaded: LoadedModel, **settings: Any) -> Engine:
    from specguard_adapters.huggingface import HuggingFaceEngine

    model, tokenizer = loaded
    return HuggingFaceEngine(
        model,
        tokenizer,
        max_candidates=4,
        candidate_tokens=16,
        **settings,
    )


class TestExactly(EngineConformance):
    """A tiny random Llama in float32: all ways to a sequence give the same numbers."""

    prompts = (
        Prompt(text="the cat in the hat and the rat in the inn are thin, then there is a hen "),
        Prompt(text="in a hut there is an ant, and then "),
    )
    logprob_tolerance = 5e-5
    grounding_tolerance = 1e-5
    window: ClassVar[int] = 0
    attention: ClassVar[bool] = True
    max_parallel: ClassVar[int] = 1

    def make_engine(self) -> Engine:
        return load(
            tiny(self.window),
            attention=self.attention,
            states=True,
            n_ctx=256,
            n_threads=1,
            max_parallel=self.max_parallel,
        )

    def text_of(self, engine: Any, tokens: Sequence[int]) -> str:
        text = b"".join(map(engine.token_bytes, tokens)).decode()
        return text.removeprefix(" ") if tokens[0] == 1 else text  # the vocabulary's own space


class TestExactlyWithoutAttention(TestExactly):
    attention = False


class TestExactlyInParallel(TestExactly):
    """A new sequence copies what it begins with from others."""

    max_parallel = 3


class TestExactlyWithWindow(TestExactly):
    """All layers see 16 tokens."""

    prompts = TestExactly.prompts[::-1]
    window = 16


class TestSmolLM2(EngineConformance):
    """A GGUF file's weights in float32, tokenizer and template; the first layers of the model."""

    prompts = (Prompt(text="1 2 3 4"), LlamaCppConformance.prompts[1])
    logprob_tolerance = 1e-4
    grounding_tolerance = 1e-4

    def make_engine(self) -> Engine:
        return load(small(), attention=True, states=True, n_ctx=128)

    def text_of(self, engine: Any, tokens: Sequence[int]) -> str:
        return b"".join(map(engine.token_bytes, tokens)).decode()
