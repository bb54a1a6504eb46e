"""The toy engine keeps the contract: the suite itself is tested here, without weights."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import numpy as np

from specguard_chains.decoding.engine import Engine, Prompt
from tests.conformance.suite import EngineConformance
from tests.toy_engine import ANSWER, END, FloatArray, ToyEngine, one_hot, random_policy

_letters = random_policy(1, end=-40.0)


def policy(tokens: tuple[int, ...]) -> FloatArray:
    """Every token of the sequence changes what comes next; an answer to "!" ends after ten."""
    if tokens[:2] == (ord("!"), ANSWER) and len(tokens) > 12:
        return one_hot(END)
    row = _letters(tokens)
    noise = np.random.default_rng(crc32(repr(tokens).encode())).normal(size=row.shape)
    return row + noise.astype(np.float32)


class TestToy(EngineConformance):
    prompts = (
        Prompt(text="a question"),
        Prompt(messages=[{"role": "user", "content": "why?"}]),  # of the same length
        Prompt(text="another question"),
    )
    ending_prompt = Prompt(text="!")
    logprob_tolerance = 2e-5
    grounding_tolerance = 2e-6

    def make_engine(self) -> Engine:
        return ToyEngine(policy, context_length=128)

    def text_of(self, engine: Engine, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < END).decode()


class TestToyWithoutAttention(TestToy):
    def make_engine(self) -> Engine:
        return ToyEngine(policy, context_length=128, attention=False)
