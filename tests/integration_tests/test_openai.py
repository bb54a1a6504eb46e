"""Models on llama-cpp-python's server, beside local ones and alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from specguard_adapters.llama_cpp import LlamaCppEngine
from specguard_adapters.openai import OpenAIEngine
from specguard_chains.decoding.baselines import SoloDecoder
from specguard_chains.decoding.boundaries import Boundary, StepShape
from specguard_chains.decoding.calibration import Bounds, Calibration
from specguard_chains.decoding.decoder import Request
from specguard_chains.decoding.engine import Candidate, Engine, Prompt, Reading
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.decoding.specguard import SpecGuardDecoder
from specguard_chains.decoding.steps import Judgement, Source, Step, Verdict
from specguard_chains.decoding.verification import EnsembleVerifier, Situation, Verifier
from specguard_chains.errors import ConfigurationError, DecodingCancelled
from tests.conformance.llama_server import serve
from tests.integration_tests.conftest import ModelPath

pytestmark = pytest.mark.integration

MODEL = "smollm2-135m-instruct"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{{ '<|im_start|>assistant\n' }}"
)
QUESTION = Prompt(
    messages=[
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "A box holds 12 pencils. How many do 4 boxes hold?"},
    ]
)
BOUNDS = Calibration(confidence=Bounds(low=-4, high=0), grounding=Bounds(low=0, high=1))
GREEDY = Sampling(temperature=0)
SHAPE = StepShape(delimiter=".", max_tokens=12)


@pytest.fixture(scope="module")
def url(model_path: ModelPath) -> Iterator[str]:
    with serve(model_path(MODEL), MODEL, n_ctx=256) as url:
        yield url


@pytest.fixture(scope="module")
def remote(url: str) -> Iterator[OpenAIEngine]:
    engine = OpenAIEngine.from_url(url, context_length=256, chat_template=TEMPLATE)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def local(model_path: ModelPath) -> Iterator[LlamaCppEngine]:
    engine = LlamaCppEngine(model_path(MODEL), n_ctx=256, max_candidates=2, n_threads=1)
    yield engine
    engine.close()


@dataclass(frozen=True)
class EveryOther:
    """Accepts every other step, whatever the signals say; needs no grounding."""

    needs_confidence: bool = True
    needs_grounding: bool = False
    state_layer: int | None = None
    asks_others: bool = False

    def can_accept(self, confidence: float, grounding: float | None) -> bool:
        return True

    def judge(self, candidate: Candidate, reading: Reading, situation: Situation) -> Judgement:
        verdict = Verdict.ACCEPTED if situation.number % 2 else Verdict.REJECTED
        return Judgement(verdict, reading.confidence, reading.confidence)


@dataclass(frozen=True)
class Pair:
    draft: Engine
    target: Engine

    def decode(self, verifier: Verifier, sampling: Sampling, n: int) -> list[Step]:
        decoder = SpecGuardDecoder(self.draft, self.target, verifier, num_candidates=n, shape=SHAPE)
        request = Request(QUESTION, sampling, max_tokens=30, seed=3)
        return list(decoder.decode(request))


@pytest.fixture(params=["local-remote", "remote-local", "remote-remote"])
def pair(request: pytest.FixtureRequest, local: Engine, remote: Engine) -> Pair:
    engines = {"local": local, "remote": remote}
    draft, target = request.param.split("-")
    return Pair(engines[draft], engines[target])


def test_the_server_declares_what_it_can(remote: OpenAIEngine) -> None:
    assert remote.features.dialect == "llama_cpp_python"
    assert remote.capabilities.logprobs
    assert not remote.features.token_ids
    assert not remote.features.several


def test_scores_that_are_one_row_late_are_found_out(remote: OpenAIEngine) -> None:
    """This model's prompts begin without a token of their own: see `ServerFeatures.scoring`.

    If this fails, llama-cpp-python tells scores rightly now, and its servers can verify.
    """
    assert not remote.capabilities.scoring
    session = remote.open(QUESTION)
    (step,) = session.sample(1, Boundary(max_tokens=2), GREEDY, seed=(1,))
    with pytest.raises(ConfigurationError, match="verify_with"):
        session.read(step)


def test_both_engines_see_the_same(local: LlamaCppEngine, remote: OpenAIEngine) -> None:
    """The same weights give the same log-probs, but for rounding: up to 0.2 has been seen."""
    session, reader = remote.open(QUESTION), local.open(QUESTION)
    assert session.length == reader.length
    (step,) = session.sample(1, Boundary(max_tokens=12), GREEDY, seed=(1,))
    translated = reader.read(step)
    np.testing.assert_allclose(translated.logprobs, step.reading.logprobs, rtol=0, atol=0.6)
    reader.close()


def test_steps_come_from_both_models(pair: Pair) -> None:
    steps = pair.decode(EveryOther(), Sampling(), n=2)
    assert len(steps) >= 3
    for step in steps:
        assert step.source is (Source.DRAFT if step.number % 2 else Source.TARGET)
        assert step.confidence is not None
        assert -30 < step.confidence < 0
        assert len(step.candidates) == 2


def test_what_is_rejected_is_the_targets_text(pair: Pair) -> None:
    none = EnsembleVerifier(BOUNDS, confidence_weight=1, threshold=1)
    steps = pair.decode(none, GREEDY, n=1)
    assert {step.source for step in steps} == {Source.TARGET}
    assert {step.verdict for step in steps} == {Verdict.REJECTED}
    request = Request(QUESTION, GREEDY, max_tokens=30)
    alone = list(SoloDecoder(pair.target, Source.TARGET, SHAPE).decode(request))
    assert "".join(s.text for s in steps) == "".join(s.text for s in alone)


def test_characters_over_several_tokens_survive(remote: OpenAIEngine) -> None:
    foxes = "\U0001f98a\U0001f994 \u4f60\u597d"
    text = f"<|im_start|>user\nRepeat: {foxes} {foxes}<|im_end|>\n<|im_start|>assistant\n{foxes} "
    session = remote.open(Prompt(text=text))
    (step,) = session.sample(1, Boundary(max_tokens=14), GREEDY, seed=(1,))
    assert set(step.text) & set(foxes) - {" "}
    session.accept(step)
    session.sample(1, Boundary(max_tokens=1), GREEDY, seed=(1,))


def test_a_cancelled_request_frees_the_server(remote: OpenAIEngine) -> None:
    stop = threading.Event()
    session = remote.open(QUESTION, cancelled=stop.is_set)
    threading.Timer(0.5, stop.set).start()
    with pytest.raises(DecodingCancelled):
        session.sample(2, Boundary("\0", max_tokens=180), Sampling(), seed=(1,))
    start = time.monotonic()
    remote.open(QUESTION).sample(1, Boundary(max_tokens=1), GREEDY, seed=(1,))
    assert time.monotonic() - start < 5
