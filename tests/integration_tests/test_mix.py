"""Two models of different families: steps cross from one vocabulary to the other as text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from specguard_chains import ChatSpecGuard
from specguard_chains.assembly import unload
from specguard_chains.decoding.boundaries import Boundary, Ending
from specguard_chains.decoding.engine import Candidate, Engine, Prompt, Reading, Session
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.decoding.speculative import SpeculativeDecoder
from specguard_chains.errors import ConfigurationError
from tests.integration_tests.conftest import ModelPath
from tests.paper import PAPER

pytestmark = pytest.mark.integration

QWEN, SMOLLM = "qwen2.5-coder-0.5b-instruct", "smollm2-135m-instruct"
BOTH_WAYS = [(QWEN, SMOLLM), (SMOLLM, QWEN)]
GREEDY = Sampling(temperature=0)

TEXTS = [
    "First, we add.\n\n",
    " a leading space",
    "  two of them, and a trailing one ",
    "\n\n\nempty lines first",
    "an emoji \U0001f600",
    "\U0001f469\u200d\U0001f4bb first, then text",
    "中文 und Ümläute, \u00e9 and e\u0301",
    "<|im_end|>",
    "it says <|endoftext|> and <|im_start|>assistant",
    "<think>x</think> <tool_call>{}</tool_call>",
    "\ttabs\r\nand a line break of two characters",
]


@pytest.fixture(scope="module")
def engines(model_path: ModelPath) -> Iterator[dict[str, Any]]:
    from specguard_adapters.llama_cpp import LlamaCppEngine

    loaded = {
        name: LlamaCppEngine(model_path(name), n_ctx=512, max_candidates=2, n_threads=2)
        for name in (QWEN, SMOLLM)
    }
    yield loaded
    for engine in loaded.values():
        engine.close()


def text_step(text: str, *, ends: bool = False) -> Candidate:
    """A step that a model with another tokenizer has written."""
    ending = Ending.END_OF_SEQUENCE if ends else Ending.BOUNDARY
    return Candidate(
        (1,), text, Reading(np.zeros(1, dtype=np.float32)), ending, "another vocabulary"
    )


def greedy(session: Session, tokens: int) -> Candidate:
    (step,) = session.sample(1, Boundary("\0", tokens), GREEDY, seed=(0,))
    return step


@pytest.mark.parametrize("name", [QWEN, SMOLLM])
@pytest.mark.parametrize("text", TEXTS)
def test_a_steps_text_arrives_unchanged(engines: dict[str, Any], name: str, text: str) -> None:
    engine = engines[name]
    tokens = engine.encode_text(text)
    assert b"".join(map(engine.token_bytes, tokens)).decode() == text
    assert not any(map(engine.is_end, tokens)), "text has become a special token"


@pytest.mark.parametrize(("writer", "reader"), BOTH_WAYS)
def test_borders_between_steps_neither_add_nor_swallow_anything(
    engines: dict[str, Any], writer: str, reader: str
) -> None:
    """What a session holds after several foreign steps is their texts, one after the other."""
    engine = engines[reader]
    prompt = Prompt(text="Say something.")
    for one, other in pairwise(TEXTS):
        with closing(engine.open(prompt)) as session:
            start = session.length
            for text in (one, other):
                session.accept(text_step(text))
            held = session._tokens[start:]
            assert b"".join(map(engine.token_bytes, held)).decode() == one + other
            assert greedy(session, 3).tokens


@pytest.mark.parametrize(("writer", "reader"), BOTH_WAYS)
def test_what_one_model_writes_the_other_scores_and_continues(
    engines: dict[str, Any], writer: str, reader: str
) -> None:
    prompt = Prompt(messages=[{"role": "user", "content": "Greet me with an emoji, in one line."}])
    source: Engine = engines[writer]
    with (
        closing(source.open(prompt)) as drafting,
        closing(engines[reader].open(prompt)) as judging,
    ):
        for _ in range(3):
            (step,) = drafting.sample(1, Boundary("\n", 16), GREEDY, seed=(0,))
            reading = judging.read(step)
            assert len(reading.logprobs) >= 1
            assert -60 < reading.confidence <= 0
            before = judging.length
            for session in (drafting, judging):
                session.accept(step)
            assert judging.length - before == len(reading.logprobs)
            if step.ends_sequence:
                break
        assert greedy(judging, 2).tokens


@pytest.mark.parametrize("name", [QWEN, SMOLLM])
def test_a_foreign_end_of_the_answer_is_the_readers_own(engines: dict[str, Any], name: str) -> None:
    engine = engines[name]
    with closing(engine.open(Prompt(text="Yes or no?"))) as session:
        before = session.length
        session.accept(text_step("Yes", ends=True))
        held = session._tokens[before:]
        assert engine.is_end(held[-1])
        assert b"".join(map(engine.token_bytes, held)) == b"Yes"


@pytest.mark.parametrize(("draft", "target"), BOTH_WAYS)
@pytest.mark.parametrize("verify_with", ["draft", "target"])
def test_a_pair_of_two_families_answers(draft: str, target: str, verify_with: Any) -> None:
    try:
        llm = ChatSpecGuard(
            draft=draft,
            target=target,
            **PAPER | {"verify_with": verify_with, "num_candidates": 2},
            threshold=0.45,
            n_ctx=1024,
            seed=3,
            max_tokens=60,
        )
        message = llm.invoke(
            "Tom has 3 boxes of 12 pencils \U0001f4da and gives away 9 pencils. How many are left? "
            "Think in short steps with an empty line between them."
        )
        steps = message.additional_kwargs["specguard_steps"]
        assert "".join(step["text"] for step in steps) == message.text
        assert "\ufffd" not in message.text
        assert all(step["confidence"] <= 0 for step in steps)
        assert {step["verdict"] for step in steps} <= {"accepted", "rejected"}
        metrics = message.response_metadata["specguard"]
        assert metrics["confidence_from"] == metrics["grounding_from"] == verify_with
        assert message.usage_metadata is not None
    finally:
        unload()


@pytest.mark.parametrize(("draft", "target"), BOTH_WAYS)
def test_token_level_decoding_of_two_families_is_refused(
    engines: dict[str, Any], draft: str, target: str
) -> None:
    with pytest.raises(ConfigurationError, match=r"one vocabulary.*decoder='specguard'"):
        SpeculativeDecoder(engines[draft], engines[target])
