"""llama.cpp keeps the contract, with and without attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import pytest

from specguard_chains.decoding.engine import Engine, Prompt
from specguard_chains.models import resolve
from tests.conformance.suite import EngineConformance

pytestmark = pytest.mark.integration

ROUNDING = 1.0
"""Log-prob by which this model's numbers may move once the last digit of an attention sum changes,
as activations are rounded to 8 bits: up to 0.35 [run], and each kind of processor has sums of its
own. The same tests on this model with weights and KV memory in float32 differ by 5e-6 [run];
`test_llama_cpp.TestExactly` keeps watch over that."""


class TestLlamaCpp(EngineConformance):
    """With flash attention the same sequence has the same numbers to the last bit [run, x86].

    Except where its KV cells are out of order, since an accepted candidate or path of a tree left
    holes between them, and where 64 tokens or more are read at once, by another kernel.
    """

    prompts = (
        Prompt(text="The capital of Italy is"),
        Prompt(
            messages=[
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Why is the sky blue?"},
            ]
        ),
    )
    ending_prompt = Prompt(messages=[{"role": "user", "content": "What is 1+1?"}])
    logprob_tolerance = 1e-5
    state_layer = 20  # of 30
    state_tolerance = 1e-5
    attention: ClassVar[bool] = False
    rounded: ClassVar[set[str]] = {
        "test_an_accepted_own_step_equals_one_that_is_read",
        "test_a_part_of_a_candidate_can_be_accepted",
        "test_a_path_of_a_tree_can_be_accepted",
        "test_the_context_can_be_filled_to_the_last_token",
    }

    @pytest.fixture(autouse=True)
    def allow_for_rounding(self, request: pytest.FixtureRequest) -> None:
        if request.node.originalname in self.rounded:
            self.logprob_tolerance = ROUNDING

    def make_engine(self) -> Engine:
        from specguard_adapters.llama_cpp import LlamaCppEngine

        return LlamaCppEngine(
            resolve("smollm2-135m-instruct"),
            n_ctx=128,
            max_candidates=4,
            candidate_tokens=16,
            attention=self.attention,
            states=True,
            n_threads=1,
        )

    def text_of(self, engine: Engine, tokens: Sequence[int]) -> str:
        return b"".join(map(engine.token_bytes, tokens)).decode()


class TestLlamaCppWithAttention(TestLlamaCpp):
    """Without flash attention a sum's last digit depends on where the KV cells lie."""

    logprob_tolerance = ROUNDING
    grounding_tolerance = 0.03  # 0.006 has been seen
    state_tolerance = 0.06  # 0.014 has been seen
    equal_draws = 0.4  # 0.7 has been seen
    attention = True
