"""Faults that peers have shown, as cases of their own; others stand with what they concern."""

from __future__ import annotations

import tracemalloc
from typing import Any, get_args

import numpy as np
import pytest

from specguard_chains import ChatSpecGuard
from specguard_chains.decoding.grounding import GroundingForm, GroundingSpec, Rollout
from specguard_chains.messages import STEPS_KEY
from tests.paper import PAPER
from tests.toy_engine import ToyEngine, scripted_policy

QUESTION = "What now?"

# --- 1: an error while attention is read


@pytest.mark.parametrize("decoder", ["specguard", "specguard-greedy"])
def test_peers_case_01_an_error_while_attention_is_read_is_raised(
    decoder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ToyEngine(scripted_policy("One a.\n\n", "Two b."))
    model = ChatSpecGuard(draft=engine, target=engine, decoder=decoder, calibration=None, **PAPER)
    expected = model.invoke(QUESTION).text
    for failing in ("absorb", "grounding", "commit"):
        with monkeypatch.context() as patch:
            patch.setattr(Rollout, failing, _fail)
            with pytest.raises(RuntimeError, match="attention could not be read"):
                model.invoke(QUESTION + failing)
        assert model.invoke(QUESTION).text == expected


def _fail(*_: Any, **__: Any) -> Any:
    raise RuntimeError("attention could not be read")


# --- 3: where an answer ends

SCRIPTS = {
    "at a step's start": ("One a.\n\n", ""),
    "within a step": ("One a.\n\n", "Two b.\n\n", "Th"),
    "at a step's end": ("One a.\n\n", "Two b.\n\n"),
    "at once": ("",),
}
STOPS = [None, "O", "e a", "a.\n\nT", "\n\n", "wo b", "b.\n\nTh", "nowhere"]


def expected_end(script: str, stop: str | None, max_tokens: int) -> tuple[str, int, str]:
    """Return text, tokens and finish reason; a byte is a token, and so is the end."""
    text = script.encode()[:max_tokens].decode()
    if stop and stop in text:
        start = text.index(stop)
        return text[:start], start + len(stop), "stop"
    ended = len(script) < max_tokens
    return text, min(len(script) + 1, max_tokens), "stop" if ended else "length"


@pytest.mark.parametrize("decoder", ["specguard", "rejected", "speculative", "target", "draft"])
@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("where", SCRIPTS)
def test_peers_case_03_all_figures_agree_on_where_the_answer_ends(
    where: str, stop: str | None, decoder: str
) -> None:
    steps = SCRIPTS[where]
    rejected = decoder == "rejected"
    model = ChatSpecGuard(
        draft=ToyEngine(scripted_policy(*steps, logprobs=[-6.0] * len(steps) * rejected)),
        target=ToyEngine(scripted_policy(*steps)),
        decoder="specguard" if rejected else decoder,  # type: ignore[arg-type]
        confidence_weight=1.0,
        threshold=0.5,
        num_candidates=2,
        temperature=0.1,
        seed=1,
        stop=stop and [stop],
    )
    script = "".join(steps)
    for max_tokens in range(1, len(script) + 3):
        message = model.invoke(QUESTION, max_tokens=max_tokens)
        text, tokens, reason = expected_end(script, stop, max_tokens)
        told = message.additional_kwargs[STEPS_KEY]
        assert message.text == "".join(step["text"] for step in told) == text
        assert message.usage_metadata
        assert message.usage_metadata["output_tokens"] == tokens
        assert sum(step["answer_tokens"] for step in told) == tokens
        assert message.response_metadata["finish_reason"] == told[-1]["finish_reason"] == reason
        assert [step["finish_reason"] for step in told[:-1]] == [None] * (len(told) - 1)
        if decoder in ("specguard", "rejected"):
            source = "target" if rejected else "draft"
            assert {step["source"] for step in told} == {source}
            metrics = message.response_metadata["specguard"]
            assert metrics["num_accepted_tokens"] == (0 if rejected else tokens)


# --- 6: tokenizers that differ

UNICODE = "a😀b 👩‍👩‍👧 é三\n\n 🏳️‍🌈 z\n\nend 😀"


@pytest.mark.parametrize("verify_with", ["draft", "target"])
@pytest.mark.parametrize("max_step_tokens", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("logprob", [-0.01, -9.0], ids=["accepted", "rejected"])
def test_peers_case_06_characters_cut_by_a_step_stay_whole_between_two_tokenizers(
    max_step_tokens: int, logprob: float, verify_with: Any
) -> None:
    model = ChatSpecGuard(
        draft=ToyEngine(scripted_policy(UNICODE, logprobs=[logprob]), vocabulary="one"),
        target=ToyEngine(scripted_policy(UNICODE), vocabulary="other"),
        confidence_weight=1.0,
        threshold=0.5,
        num_candidates=2,
        temperature=0.05,
        verify_with=verify_with,
        step_delimiter="\n\n\n",
        max_step_tokens=max_step_tokens,
        seed=1,
    )
    assert model.invoke(QUESTION).text == UNICODE


# --- 11: a draft that is of no use


@pytest.mark.parametrize(("logprob", "rate"), [(-0.01, 1.0), (-9.0, 0.0)])
def test_peers_case_11_the_metrics_show_a_draft_that_is_never_or_always_taken(
    logprob: float, rate: float
) -> None:
    steps = [f"step {i}\n\n" for i in range(12)]
    model = ChatSpecGuard(
        draft=ToyEngine(scripted_policy(*steps, "end", logprobs=[logprob] * 13)),
        target=ToyEngine(scripted_policy(*steps, "end")),
        confidence_weight=1.0,
        threshold=0.5,
    )
    message = model.invoke(QUESTION)
    metrics = message.response_metadata["specguard"]
    assert metrics["acceptance_rate"] == rate
    assert metrics["steps_by_source"] == {"draft": 13 * rate, "target": 13 * (1 - rate)}
    assert (metrics["num_accepted_tokens"] == 0) is (rate == 0)
    alone = model.invoke(QUESTION, decoder="target").response_metadata["specguard"]
    assert alone["acceptance_rate"] is None
    assert alone["num_draft_tokens"] == 0


# --- 12: memory for attention


@pytest.mark.parametrize("form", get_args(GroundingForm))
def test_peers_case_12_memory_for_attention_grows_with_the_context_not_with_its_square(
    form: Any,
) -> None:
    def peak_bytes(length: int) -> int:
        rng = np.random.default_rng(0)
        tracemalloc.start()
        rollout = Rollout(GroundingSpec.named(form), length)
        for start in range(0, length, 512):
            slots = np.arange(start, min(start + 64, length))  # a part stands for all
            rollout.begin(slots, context=True, positions=slots)
            for layer in range(3):
                rows = rng.random((2, len(slots), length), dtype=np.float32)
                rollout.absorb(layer, rows, slots)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    small, large = peak_bytes(4096), peak_bytes(8192)
    assert large < 2.2 * small
    assert large < 32e6
