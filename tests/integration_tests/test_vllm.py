"""A vLLM server in either role, beside a local model or alone, on word problems.

The server is named by SPECGUARD_VLLM_URL; `make integration-vllm` starts one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from statistics import median_high
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage
from pydantic import SecretStr

from specguard_chains import ChatSpecGuard
from specguard_chains.assembly import unload
from specguard_chains.errors import ServerAuthenticationError
from tests.paper import PAPER

URL = os.environ.get("SPECGUARD_VLLM_URL", "")
LOCAL = "qwen2.5-coder-0.5b-instruct"

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not URL, reason="SPECGUARD_VLLM_URL names no server"),
]

QUESTIONS = (
    "A baker fills 6 trays with 15 rolls each. At noon 38 rolls are sold. How many are left?",
    "Mia reads 24 pages on Monday and half as many on Tuesday. How many pages has she read?",
)
STEPWISE = "Reason step by step, with a blank line between steps: "
OPTIONS: dict[str, Any] = {
    **PAPER,
    "num_candidates": 2,
    "num_target_candidates": 2,
    "n_ctx": 1024,
    "n_threads": 1,  # the server computes too
    "max_tokens": 64,
    "seed": 1,
}


@pytest.fixture(scope="module", autouse=True)
def free_memory_afterwards() -> Iterator[None]:
    yield
    unload()


@dataclass
class Recorder(BaseCallbackHandler):
    steps: list[dict[str, Any]] = field(default_factory=list)

    def on_custom_event(self, name: str, data: Any, **kwargs: Any) -> None:
        self.steps.append(data)


@dataclass
class Answer:
    message: AIMessage
    steps: list[dict[str, Any]]

    @property
    def metrics(self) -> dict[str, Any]:
        metrics: dict[str, Any] = self.message.response_metadata["specguard"]
        return metrics


def answers(**models: Any) -> list[Answer]:
    """Return the answers to all questions, under a threshold that lets both models write.

    It lies amid the scores of the answers' first steps, which are drafted alike under any
    threshold: one at least is accepted, and one rejected unless all scores are equal.
    """
    accept_all = ChatSpecGuard(**OPTIONS | models, threshold=0)
    scores = [first_step(accept_all, question)["score"] for question in QUESTIONS]
    llm = ChatSpecGuard(**OPTIONS | models, threshold=median_high(scores))
    found = [answer(llm, question) for question in QUESTIONS]
    for one in found:
        check_steps(one)
    assert {step["source"] for one in found for step in one.steps} == {"draft", "target"}
    return found


def first_step(llm: ChatSpecGuard, question: str) -> dict[str, Any]:
    recorder = Recorder()
    next(llm.stream(STEPWISE + question, config={"callbacks": [recorder]}))
    return recorder.steps[0]


def answer(llm: ChatSpecGuard, question: str) -> Answer:
    recorder = Recorder()
    message = llm.invoke(STEPWISE + question, config={"callbacks": [recorder]})
    assert isinstance(message, AIMessage)
    return Answer(message, recorder.steps)


def check_steps(answer: Answer) -> None:
    metrics, steps = answer.metrics, answer.steps
    assert answer.message.text == "".join(step["text"] for step in steps)
    assert answer.message.text.strip()
    for step in steps:
        kept = step["score"] >= step["threshold"] and not step["rejected_early"]
        assert step["verdict"] == ("accepted" if kept else "rejected")
        assert step["source"] == ("draft" if kept else "target")
        assert 0 <= step["score"] <= 1
        assert step["confidence"] <= 0
        if step["rejected_early"]:
            assert step["tokens"]["regenerated"] > 0
        else:
            assert len(step["candidates"]) == OPTIONS["num_candidates"]
    sources = [step["source"] for step in steps]
    assert metrics["steps_by_source"] == {s: sources.count(s) for s in ("draft", "target")}
    assert metrics["num_accepted_steps"] == sources.count("draft")


def check_grounding(answer: Answer) -> None:
    for step in answer.steps:
        if not step["rejected_early"]:
            assert 0 < step["grounding"] <= 1


def test_a_local_draft_and_a_target_on_the_server() -> None:
    for answer in answers(draft=LOCAL, target=URL):
        assert answer.metrics["confidence_from"] == "draft"
        assert answer.metrics["grounding_from"] == "draft"
        check_grounding(answer)


def test_the_server_judges_what_a_local_draft_writes() -> None:
    """The server scores a step that it has not written; grounding is the draft's."""
    for answer in answers(draft=LOCAL, target=URL, verify_with="target"):
        assert answer.metrics["confidence_from"] == "target"
        assert answer.metrics["grounding_from"] == "draft"
        check_grounding(answer)


def test_a_draft_on_the_server_and_a_local_target() -> None:
    """The draft's confidence comes with its text; a model that is here reads its grounding."""
    for answer in answers(draft=URL, target=LOCAL):
        assert answer.metrics["confidence_from"] == "draft"
        assert answer.metrics["grounding_from"] == "target"
        check_grounding(answer)


def test_both_models_on_servers(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody shows attention: confidence alone decides, and the answer says so."""
    from specguard_adapters.openai import OpenAIEngine

    target = OpenAIEngine.from_url(URL, context_length=OPTIONS["n_ctx"])
    with closing(target), caplog.at_level(logging.WARNING):
        for answer in answers(draft=URL, target=target):
            assert answer.metrics["confidence_from"] == "draft"
            assert answer.metrics["grounding_from"] is None
            assert answer.metrics["confidence_weight"] == 1
            assert all(step["grounding"] is None for step in answer.steps)
    assert "judged by confidence alone" in caplog.text


def test_one_model_on_a_server_in_both_roles() -> None:
    for answer in answers(draft=URL, target=URL, confidence_weight=1):
        assert answer.metrics["grounding_from"] is None


@pytest.mark.skipif("OPENAI_API_KEY" not in os.environ, reason="the server has no key")
def test_a_wrong_key_is_refused_and_not_told() -> None:
    llm = ChatSpecGuard(**OPTIONS, decoder="target", target=URL, api_key=SecretStr("a-wrong-key"))
    with pytest.raises(ServerAuthenticationError) as refusal:
        llm.invoke("Hello")
    assert "a-wrong-key" not in str(refusal.value)
