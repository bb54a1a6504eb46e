"""Rare places of the loop: each was once wrong."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from specguard_chains.decoding import compute_thread
from specguard_chains.decoding.boundaries import Boundary, Ending, StepShape
from specguard_chains.decoding.calibration import Bounds, Calibration
from specguard_chains.decoding.decoder import Decoder, Request
from specguard_chains.decoding.engine import Candidate, Prompt, Reading
from specguard_chains.decoding.pacing import Patience
from specguard_chains.decoding.rewards import TextReward
from specguard_chains.decoding.rivals import RewardVerifier
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.decoding.specguard import SpecGuardDecoder
from specguard_chains.decoding.steps import Step
from specguard_chains.decoding.verification import EnsembleVerifier
from specguard_chains.errors import DecodingCancelled
from tests.toy_engine import ANSWER, END, FloatArray, ToyEngine, one_hot, scripted_policy
from tests.unit_tests.test_parallel import policy

GREEDY = Sampling(temperature=0)
CALIBRATION = Calibration(
    confidence=Bounds(low=-3.0, high=0.0), grounding=Bounds(low=0.0, high=1.0)
)


def confidence(**settings: Any) -> EnsembleVerifier:
    return EnsembleVerifier(CALIBRATION, confidence_weight=1.0, **settings)


def request(**settings: Any) -> Request:
    return Request(Prompt(text="question"), **{"sampling": GREEDY, "max_tokens": 60} | settings)


def text(decoder: Decoder, asked: Request) -> str:
    return "".join(step.text for step in decoder.decode(asked))


def answer(tokens: tuple[int, ...]) -> bytes:
    start = tokens.index(ANSWER) + 1 if ANSWER in tokens else len(tokens)
    return bytes(token for token in tokens[start:] if token < END)


def test_early_rejection_changes_no_text_where_last_steps_are_the_targets() -> None:
    """A step that is cut early does not show that it would have been the last one."""

    def draft(tokens: tuple[int, ...]) -> FloatArray:
        written = answer(tokens)
        if not written.startswith(b"tt.\n\n"):  # unsure of its first token, and ends the answer
            script = b"x y z."
            if len(written) == len(script):
                return one_hot(END, -0.01)
            return one_hot(script[len(written)], -0.01 if written else -2.9)
        return one_hot(b"dd.\n\n"[len(written) % 5], -0.01)

    def target(tokens: tuple[int, ...]) -> FloatArray:
        return one_hot(b"tt.\n\n"[len(answer(tokens)) % 5], -0.01)

    texts = set()
    for early in (True, False):
        decoder = SpecGuardDecoder(
            *(ToyEngine(draft), ToyEngine(target), confidence(threshold=0.5), 1),
            early_rejection=early,
            patience=Patience(1, 4),
        )
        texts.add(text(decoder, request(critical_steps="target")))
    assert len(texts) == 1


def test_rewards_see_steps_as_they_were_written() -> None:
    """Also what may be the beginning of a stop string, and is shown only later."""
    seen: list[list[str]] = []

    def reward(messages: Sequence[Mapping[str, Any]], steps: Sequence[str]) -> float:
        seen.append(list(steps))
        return 0.9

    script = scripted_policy("One.\n\n", "Two.\n\n", "Three.")
    verifier = RewardVerifier(TextReward(reward))
    decoder = SpecGuardDecoder(ToyEngine(script), ToyEngine(script), verifier, 1)
    asked = Request(
        Prompt(messages=[{"role": "user", "content": "q"}]),
        sampling=GREEDY,
        max_tokens=60,
        stop=("\n\nQuestion:",),
    )
    list(decoder.decode(asked))
    assert seen[-1] == ["One.\n\n", "Two.\n\n", "Three."]


def test_the_target_is_not_asked_about_a_step_without_tokens() -> None:
    """Cut within a character, a step has no text, and so no tokens in another vocabulary."""

    def draft(tokens: tuple[int, ...]) -> FloatArray:
        script = "\u00e9.\n\n".encode()
        return one_hot(script[len(answer(tokens)) % len(script)], -1.0)

    decoder = SpecGuardDecoder(
        ToyEngine(draft),
        ToyEngine(draft, vocabulary="another"),
        confidence(threshold=0.7, doubt_margin=0.1),
        1,
        target_confidence=-5.0,
        shape=StepShape(max_tokens=1),
    )
    steps: list[Step] = list(decoder.decode(request(max_tokens=3)))
    assert not any(step.target_confidence != step.target_confidence for step in steps)


@pytest.mark.parametrize("seed", range(4))
def test_greedy_drafts_have_no_second_version(seed: int) -> None:
    texts = set()
    for one_first in (True, False):
        decoder = SpecGuardDecoder(
            *(ToyEngine(policy(1, 1.0)), ToyEngine(policy(1, 1.1))),
            confidence(threshold=0.3, doubt_margin=0.3),
            num_candidates=4,
            one_first=one_first,
        )
        texts.add(text(decoder, request(seed=seed)))
    assert len(texts) == 1


def test_a_session_that_waits_for_others_can_be_cancelled() -> None:
    free = threading.Event()
    threading.Thread(target=lambda: compute_thread.run(lambda: free.wait(10)), daemon=True).start()
    time.sleep(0.05)
    start = time.monotonic()
    session = ToyEngine(policy(1, 1.0)).open(
        Prompt(text="question"), cancelled=lambda: time.monotonic() - start > 0.1
    )
    try:
        with pytest.raises(DecodingCancelled):
            session.sample(1, Boundary("\n\n", max_tokens=4), GREEDY, seed=[0])
        assert not free.is_set()
    finally:
        free.set()


def test_a_token_across_two_characters_loses_neither() -> None:
    """Of "a\u00e9" and half a character the half is replaced, by a step that came as text."""

    class TwoBytes(ToyEngine):
        def token_bytes(self, token: int) -> bytes:
            return b"\xa9\xc3" if token == 255 else super().token_bytes(token)

    def script(tokens: tuple[int, ...]) -> FloatArray:
        written = tokens[tokens.index(ANSWER) + 1 :] if ANSWER in tokens else ()
        return one_hot((ord("a"), 0xC3, 255)[min(len(written), 2)])

    engine = TwoBytes(script)
    session = engine.open(Prompt(text="q"))
    start = session.length
    (step,) = session.sample(1, Boundary("\n\n", max_tokens=3), GREEDY, seed=[0])
    session.accept(step)
    foreign = Reading(np.zeros(1, dtype=np.float32))
    session.accept(Candidate((1,), "\u00e9!", foreign, Ending.BOUNDARY, "foreign"))
    held = b"".join(map(engine.token_bytes, session.tokens[start:])).decode()
    assert held == step.text + "\u00e9!" == "a\u00e9\u00e9!"


def test_hand_back_goes_by_what_was_drafted() -> None:
    """Which is why it depends on early rejection, as its documentation says."""
    lengths = {}
    for early in (True, False):
        decoder = SpecGuardDecoder(
            *(ToyEngine(policy(1, 1.0)), ToyEngine(policy(1, 2.0)), confidence(threshold=0.9), 1),
            early_rejection=early,
            hand_back=2,
        )
        steps = list(decoder.decode(request(max_tokens=120)))
        lengths[early] = [step.answer_tokens for step in steps]
    assert lengths[True] != lengths[False]
