"""llama.cpp and transformers give the same model's numbers, and so the same answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("llama_cpp")

from specguard_adapters.huggingface import HuggingFaceEngine
from specguard_adapters.llama_cpp import LlamaCppEngine
from specguard_chains.decoding.arrays import FloatArray
from specguard_chains.decoding.boundaries import Ending, StepShape
from specguard_chains.decoding.calibration import Bounds, Calibration
from specguard_chains.decoding.decoder import Request
from specguard_chains.decoding.engine import Candidate, Prompt, Reading
from specguard_chains.decoding.grounding import GroundingSpec
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.decoding.specguard import SpecGuardDecoder
from specguard_chains.decoding.steps import Step, Verdict
from specguard_chains.decoding.verification import EnsembleVerifier
from tests.integration_tests.conftest import (
    LAYERS,
    VOCABULARY,
    ModelPath,
    gguf_transformer,
    transformer,
    write_tiny,
)
from tests.integration_tests.test_llama_cpp import full_attention

pytestmark = pytest.mark.integration

SPEC = GroundingSpec()
Engine = LlamaCppEngine | HuggingFaceEngine


@dataclass
class Both:
    """One model in both engines."""

    gguf: LlamaCppEngine
    transformers: HuggingFaceEngine


@pytest.fixture(scope="module")
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def pair(stack: ExitStack, tmp_path_factory: pytest.TempPathFactory) -> list[Both]:
    """Two random Llamas in float32: a draft and a target."""
    return [tiny(stack, tmp_path_factory.mktemp("models"), seed) for seed in (20, 21)]


def tiny(stack: ExitStack, folder: Path, seed: int) -> Both:
    model, tokenizer = transformer(folder, seed=seed)
    model.save_pretrained(folder / "saved")
    tokenizer.save_pretrained(folder / "saved")
    assert (folder / "saved" / "model.safetensors").is_file()
    settings: dict[str, Any] = {
        "n_ctx": 512,
        "max_candidates": 4,
        "attention": True,
        "states": True,
    }
    path = write_tiny(folder / "tiny.gguf", seed=seed)
    return Both(
        stack.enter_context(closing(LlamaCppEngine(path, kv_type="f32", n_threads=1, **settings))),
        stack.enter_context(
            closing(HuggingFaceEngine(folder / "saved", device="cpu", n_threads=1, **settings))
        ),
    )


def logits(engine: Engine, tokens: Sequence[int]) -> FloatArray:
    with closing(engine.new_cache()) as cache:
        n = len(tokens)
        branches = [(0,)] * n
        return cache.forward(
            tokens, range(n), branches, context=False, all_logits=True
        ).logits.copy()


def attention(engine: HuggingFaceEngine, tokens: Sequence[int]) -> FloatArray:
    """The last layers' probabilities, shape (layers, heads, N, N)."""
    with closing(engine.new_cache()) as cache:
        cache.probe = []
        cache.configure(SPEC, None)
        n = len(tokens)
        cache.forward(tokens, range(n), [(0,)] * n, context=False, all_logits=False)
        return np.stack([layer.probabilities.numpy() for layer in cache.probe])


def test_logits_and_attention_agree(pair: list[Both]) -> None:
    tokens = [1, *np.random.default_rng(0).integers(259, len(VOCABULARY), 59).tolist()]
    for both in pair:
        ours, theirs = logits(both.transformers, tokens), logits(both.gguf, tokens)
        assert theirs.std() > 1, "the numbers tell tokens apart"
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
        expected = full_attention(both.gguf, tokens, SPEC.layers)
        np.testing.assert_allclose(attention(both.transformers, tokens), expected, atol=1e-4)


@pytest.mark.parametrize("layer", [0, 1, LAYERS - 2])
def test_hidden_states_agree(pair: list[Both], layer: int) -> None:
    step = Candidate(
        (), "the cat in the hat is thin ", Reading(np.zeros(0)), Ending.BOUNDARY, vocabulary="none"
    )
    for both in pair:
        ours, theirs = (state(engine, layer, step) for engine in (both.transformers, both.gguf))
        assert ours.std() > 0.1, "the numbers tell tokens apart"
        np.testing.assert_allclose(ours, theirs, atol=1e-3 * float(np.abs(theirs).max()))


def state(engine: Engine, layer: int, step: Candidate) -> FloatArray:
    """The hidden state at the end of a step."""
    prompt = Prompt(text="there is a hen and a rat, then ")
    with engine.exclusive(), closing(engine.open(prompt, state_layer=layer)) as session:
        read = session.read(step).state
    assert read is not None
    return read


def test_answers_and_verdicts_agree(pair: list[Both]) -> None:
    draft, target = pair
    verdicts = []
    for seed in range(5):
        ours = steps(draft.transformers, target.transformers, seed)
        theirs = steps(draft.gguf, target.gguf, seed)
        assert [step.text for step in ours] == [step.text for step in theirs]
        assert [step.candidates for step in ours] == [step.candidates for step in theirs]
        assert [step.verdict for step in ours] == [step.verdict for step in theirs]
        for name in ("score", "confidence", "grounding"):
            values = [[getattr(step, name) for step in steps] for steps in (ours, theirs)]
            np.testing.assert_allclose(*values, atol=1e-3)
        verdicts += [step.verdict for step in ours]
    assert min(verdicts.count(v) for v in (Verdict.ACCEPTED, Verdict.REJECTED)) >= 5


def test_engines_of_both_kinds_work_together(pair: list[Both]) -> None:
    draft, target = pair
    assert draft.gguf.vocabulary == target.transformers.vocabulary
    expected = [step.text for step in steps(draft.gguf, target.gguf, 0)]
    assert [step.text for step in steps(draft.gguf, target.transformers, 0)] == expected
    assert [step.text for step in steps(draft.transformers, target.gguf, 0)] == expected


def steps(draft: Engine, target: Engine, seed: int) -> list[Step]:
    bounds = Calibration(
        confidence=Bounds(low=-3, high=0), grounding=Bounds(low=0.4, high=0.9), source="test"
    )
    decoder = SpecGuardDecoder(
        draft,
        target,
        EnsembleVerifier(bounds, threshold=0.72),
        grounding=SPEC,
        shape=StepShape(delimiter=" ", max_tokens=8),
    )
    prompt = Prompt(text="the cat in the hat and the rat in the inn are thin, then")
    request = Request(prompt, Sampling(temperature=0.8), max_tokens=60, seed=seed)
    return list(decoder.decode(request))


def test_attention_of_a_quantised_model_agrees(stack: ExitStack, model_path: ModelPath) -> None:
    """llama.cpp rounds activations to 8 bits; transformers computes in float32."""
    name = "qwen2.5-coder-0.5b-instruct"
    llama = LlamaCppEngine(model_path(name), n_ctx=256, attention=True)
    ours = HuggingFaceEngine(*gguf_transformer(name), n_ctx=256, attention=True)
    with closing(llama), closing(ours):
        assert ours.vocabulary == llama.vocabulary
        prompt = Prompt(
            messages=[{"role": "user", "content": "A train leaves at 9 and arrives at 12:30."}]
        )
        tokens = ours.encode(prompt)
        assert tokens == llama.encode(prompt)
        values, expected = attention(ours, tokens), full_attention(llama, tokens, SPEC.layers)
        assert values.shape == (3, 14, len(tokens), len(tokens))
        assert np.corrcoef(values.ravel(), expected.ravel())[0, 1] > 0.999
        assert np.abs(values - expected).max() < 0.05


def test_a_file_has_one_vocabulary_in_both(model_path: ModelPath) -> None:
    name = "smollm2-135m-instruct"
    llama = LlamaCppEngine(model_path(name), n_ctx=256)
    other = LlamaCppEngine(model_path("qwen2.5-coder-0.5b-instruct"), n_ctx=256)
    ours = HuggingFaceEngine(*gguf_transformer(name), n_ctx=256)
    with closing(llama), closing(other), closing(ours):
        assert ours.vocabulary == llama.vocabulary != other.vocabulary
        for text in ("plain words", " two  spaces\n\nlines\t", "größer, 日本語, 🙂", "<|im_end|>"):
            assert ours.encode_text(text) == llama.encode_text(text)
            assert ours.encode(Prompt(text=text)) == llama.encode(Prompt(text=text))
        every = range(len(gguf_transformer(name)[1]))
        assert [*map(ours.token_bytes, every)] == [*map(llama.token_bytes, every)]
