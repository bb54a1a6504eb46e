"""The toy engine keeps the contract: the suite itself is tested here, without weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from zlib import crc32

import numpy as np

from specguard_chains.decoding.engine import Capabilities, Engine, Prompt, Session
from specguard_chains.decoding.speculation import Speculation
from specguard_chains.decoding.speculative_session import SpeculativeSession
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
        return ToyEngine(policy, context_length=128, attention=False, states=False)


class TestToyWithStatesAlone(TestToy):
    def make_engine(self) -> Engine:
        return ToyEngine(policy, context_length=128, attention=False)


class TestSharedToy(TestToy):
    """All sessions lie in one memory, and their passes are merged."""

    def make_engine(self) -> Engine:
        return ToyEngine(policy, context_length=128, max_parallel=4)


class SpeculativeEngine(ToyEngine):
    """Its sessions are sped up by a draft that is wrong half of the time."""

    def __init__(self) -> None:
        super().__init__(policy, context_length=128, attention=False)
        self.capabilities = Capabilities(in_process=True, max_candidates=4, constraints=True)
        self.draft = ToyEngine(self._guess, context_length=128)

    def _guess(self, tokens: tuple[int, ...]) -> FloatArray:
        return policy(tokens) * (1 if crc32(repr(tokens).encode()) % 2 else -1)

    def open(self, prompt: Prompt, **settings: Any) -> Session:
        target = super().open(prompt, **settings)
        draft = self.draft.open(prompt, constraint=settings.get("constraint"))
        return SpeculativeSession(draft, target, Speculation((2, 1, 1)))

    def close(self) -> None:
        super().close()
        self.draft.close()


class TestSpeculativeToy(TestToy):
    """A session that a draft speeds up is a session like any other."""

    # Its target reads tokens that it then rejects, and how a sampled step begins depends on its
    # length, as the last tokens are drafted in shorter blocks.
    test_tokens_are_counted = None
    test_an_accepted_own_step_is_not_computed_again = None
    test_a_part_of_a_candidate_can_be_accepted = None

    def make_engine(self) -> Engine:
        return SpeculativeEngine()
