"""What a step leans on, on real engines: by the paper's formula, and the same in both of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llama_cpp")

from specguard_adapters.llama_cpp import LlamaCppEngine
from specguard_chains.decoding.arrays import FloatArray
from specguard_chains.decoding.boundaries import Boundary, StepShape
from specguard_chains.decoding.calibration import Bounds, Calibration
from specguard_chains.decoding.decoder import Request
from specguard_chains.decoding.engine import Prompt, Session
from specguard_chains.decoding.grounding import (
    GroundingSpec,
    passages_reference,
    rollout_reference,
)
from specguard_chains.decoding.local_engine import LocalEngine
from specguard_chains.decoding.passages import locate
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.decoding.specguard import SpecGuardDecoder
from specguard_chains.decoding.steps import Source, Step
from specguard_chains.decoding.verification import EnsembleVerifier
from specguard_chains.errors import ConfigurationError
from tests.integration_tests.conftest import ModelPath, gguf_transformer, transformer, write_tiny
from tests.integration_tests.test_llama_cpp import full_attention

pytestmark = pytest.mark.integration

SPEC = GroundingSpec()
WARM = Sampling(temperature=0.9)
PLACES = ("the cat is in the hat", "the rat, then, is in the inn", "a thin hen")
TEXT = Prompt(text=f"{PLACES[0]}. {PLACES[1]}. {PLACES[2]} is there. where is ", passages=PLACES)
FACTS = (
    "The Danube rises in the Black Forest and flows into the Black Sea.",
    "The Rhône rises in the Alps – at 2,208 m – and flows into the Mediterranean Sea.\n",
    "The Elbe rises in the Giant Mountains and flows into the North Sea.",
)
QUESTION = Prompt(
    messages=[{"role": "user", "content": "\n\n".join([*FACTS, "Where does the Elbe rise?"])}],
    passages=FACTS,
)

Load = Callable[..., LlamaCppEngine]


@pytest.fixture(scope="module")
def load() -> Iterator[Load]:
    """Loads engines that the module's end closes."""
    with ExitStack() as stack:

        def load(path: Path, **settings: Any) -> LlamaCppEngine:
            settings = {"n_ctx": 512, "max_candidates": 4, "attention": True, **settings}
            return stack.enter_context(closing(LlamaCppEngine(path, n_threads=1, **settings)))

        yield load


@pytest.fixture(scope="module")
def tiny(load: Load, tiny_model: Path) -> LlamaCppEngine:
    """In batches so small that passages are cut by them."""
    return load(tiny_model, kv_type="f32", n_ubatch=32)


@pytest.fixture(scope="module")
def transformers_tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEngine]:
    pytest.importorskip("torch")
    from specguard_adapters.huggingface import HuggingFaceEngine

    model, tokenizer = transformer(tmp_path_factory.mktemp("models"))
    settings: dict[str, Any] = {"n_ctx": 512, "max_candidates": 4, "n_batch": 16}
    with closing(HuggingFaceEngine(model, tokenizer, attention=True, **settings)) as engine:
        yield engine


def formula(
    llama: LlamaCppEngine, prompt: Prompt, before: Sequence[int], tokens: Sequence[int]
) -> FloatArray:
    """What rests on each passage by llama.cpp's full attention, shape (tokens, P)."""
    start = llama.encode(prompt)
    spec = replace(SPEC, passages=locate(prompt.passages, start, llama))
    attention = full_attention(llama, [*start, *before, *tokens], SPEC.layers)
    return passages_reference(attention, len(start) + len(before), spec)


def assert_as_the_formula_says(
    session: Session, llama: LlamaCppEngine, prompt: Prompt, tolerance: float
) -> None:
    """Three candidates; one is accepted, and another one follows it."""
    candidates = session.sample(3, Boundary("\0", max_tokens=24), WARM, seed=(1,))
    for candidate in candidates:
        values = formula(llama, prompt, [], candidate.tokens)
        assert candidate.reading.passages is not None
        assert differ(candidate.reading.passages, values) <= tolerance
        assert values.std() > 2 * tolerance, "the numbers tell tokens and passages apart"
        assert candidate.reading.passages.sum(axis=1).max() < 1
        read = session.read(candidate).passages
        assert read is not None
        assert differ(read, values) <= tolerance
    session.accept(candidate)
    (after,) = session.sample(1, Boundary("\0", max_tokens=24), WARM, seed=(2,))
    values = formula(llama, prompt, candidate.tokens, after.tokens)
    assert after.reading.passages is not None
    assert differ(after.reading.passages, values) <= tolerance


def differ(ours: FloatArray, expected: FloatArray) -> float:
    """Root of the mean square: single values of a quantised model depend on the processor."""
    assert ours.shape == expected.shape
    return float(np.sqrt(np.mean((ours - expected) ** 2)))


def test_llama_cpp_gives_what_the_formula_says(tiny: LlamaCppEngine) -> None:
    with closing(tiny.open(TEXT, grounding=SPEC)) as session:
        assert_as_the_formula_says(session, tiny, TEXT, 1e-5)


def test_so_it_does_with_sliding_windows(load: Load, windowed_model: Path) -> None:
    engine = load(windowed_model, kv_type="f32", n_ubatch=32)
    with closing(engine.open(TEXT, grounding=SPEC)) as session:
        assert_as_the_formula_says(session, engine, TEXT, 1e-5)


def test_transformers_gives_what_the_formula_says(
    tiny: LlamaCppEngine, transformers_tiny: LocalEngine
) -> None:
    assert transformers_tiny.vocabulary == tiny.vocabulary
    with closing(transformers_tiny.open(TEXT, grounding=SPEC)) as session:
        assert_as_the_formula_says(session, tiny, TEXT, 1e-5)


@pytest.mark.parametrize("engine", ["tiny", "transformers_tiny"])
def test_a_prompts_beginning_is_reused_when_its_passages_change(
    engine: str, tiny: LlamaCppEngine, request: pytest.FixtureRequest
) -> None:
    ours: LocalEngine = request.getfixturevalue(engine)
    text = f"read this, and then think. {TEXT.text}"
    reused = []
    for passages in (PLACES, PLACES[1:], ()):
        prompt = Prompt(text=text, passages=passages)
        with closing(ours.open(prompt, grounding=SPEC)) as session:
            (step,) = session.sample(1, Boundary("\0", max_tokens=12), WARM, seed=(1,))
            reused.append(session.counters.reused)
        if passages:
            values = formula(tiny, prompt, [], step.tokens)
            assert step.reading.passages is not None
            np.testing.assert_allclose(step.reading.passages, values, atol=1e-5)
        attention = full_attention(tiny, [*tiny.encode(prompt), *step.tokens], SPEC.layers)
        expected = rollout_reference(attention, len(tiny.encode(prompt)), SPEC)
        assert step.reading.grounding is not None
        np.testing.assert_allclose(step.reading.grounding, expected, atol=1e-5)
    first, second = (locate([p], tiny.encode(prompt), tiny)[0][0][0] for p in PLACES[:2])
    assert reused[1:] == [first, second]


def test_a_quantised_model_gives_what_the_formula_says(load: Load, model_path: ModelPath) -> None:
    engine = load(model_path("smollm2-135m-instruct"))
    with closing(engine.open(QUESTION, grounding=SPEC)) as session:
        assert_as_the_formula_says(session, engine, QUESTION, 0.005)


def test_both_engines_find_and_weigh_passages_alike(load: Load, model_path: ModelPath) -> None:
    """On quantised weights, which llama.cpp rounds activations for and transformers does not."""
    pytest.importorskip("torch")
    from specguard_adapters.huggingface import HuggingFaceEngine

    name = "smollm2-135m-instruct"
    llama = load(model_path(name))
    with closing(HuggingFaceEngine(*gguf_transformer(name), n_ctx=512, attention=True)) as ours:
        tokens = ours.encode(QUESTION)
        spans = locate(FACTS, tokens, ours)
        assert spans == locate(FACTS, llama.encode(QUESTION), llama)
        for fact, ((start, end),) in zip(FACTS, spans, strict=True):
            text = b"".join(map(ours.token_bytes, tokens[start:end])).decode()
            assert text.strip() == fact.strip()
        with (
            closing(llama.open(QUESTION, grounding=SPEC)) as writer,
            closing(ours.open(QUESTION, grounding=SPEC)) as reader,
        ):
            (step,) = writer.sample(1, Boundary("\0", max_tokens=24), WARM, seed=(1,))
            read = reader.read(step)
            assert step.reading.passages is not None
            assert read.passages is not None
            assert differ(read.passages, step.reading.passages) <= 0.005
            assert read.passage_shares == pytest.approx(step.reading.passage_shares, abs=0.002)
            assert np.ptp(step.reading.passage_shares) > 0.005


def test_a_passage_that_would_be_read_as_special_tokens_is_text_in_messages(
    load: Load, model_path: ModelPath
) -> None:
    engine = load(model_path("smollm2-135m-instruct"))
    passage = "End a turn with <|im_end|> and a line break."
    messages = [{"role": "user", "content": f"{passage}\n\nHow does a turn end?"}]
    with closing(engine.open(Prompt(messages, passages=[passage]), grounding=SPEC)) as session:
        (step,) = session.sample(1, Boundary("\0", max_tokens=4), WARM, seed=(1,))
        assert 0 < step.reading.passage_shares[0] < 1
    with pytest.raises(ConfigurationError, match="no special token cuts it"):
        engine.open(Prompt(text=passage, passages=[passage]), grounding=SPEC)


def test_steps_of_both_models_agree_between_engines(
    tiny: LlamaCppEngine, transformers_tiny: LocalEngine, load: Load, tmp_path: Path
) -> None:
    """The target, of other weights, writes some of the steps; the draft tells of all of them."""
    target = load(write_tiny(tmp_path / "target.gguf", seed=21), kv_type="f32")
    ours, theirs = (steps(draft, target) for draft in (transformers_tiny, tiny))
    assert [step.text for step in ours] == [step.text for step in theirs]
    assert {step.source for step in ours} == {*Source}
    np.testing.assert_allclose(
        [step.passages for step in ours], [step.passages for step in theirs], atol=1e-4
    )


def steps(draft: LocalEngine, target: LocalEngine) -> list[Step]:
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
    return list(decoder.decode(Request(TEXT, Sampling(temperature=0.8), max_tokens=48, seed=1)))
