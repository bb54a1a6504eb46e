"""Verified steps -> the chunks of a plain LLM's answer, and the result that they add up to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.outputs import Generation, GenerationChunk, LLMResult

from specguard_chains.call import Call
from specguard_chains.decoding.steps import Step
from specguard_chains.messages import STEPS_KEY
from specguard_chains.model_base import usage


def step_chunk(step: Step) -> GenerationChunk:
    """Return the chunk that a step is streamed as."""
    return GenerationChunk(text=step.text, generation_info={STEPS_KEY: [step.to_dict()]})


def last_chunk(call: Call, steps: Sequence[Step]) -> GenerationChunk:
    """Return the empty chunk that ends a stream: what the answer has cost, and how it ended.

    Merging adds whole numbers up and refuses others, so both stand on this one chunk only.
    """
    info = {**call.metadata(steps), "usage_metadata": usage(steps, call.input_tokens)}
    return GenerationChunk(text="", generation_info=info)


def result(chunks: Sequence[GenerationChunk]) -> LLMResult:
    """Return the result of a prompt from the chunks of its answer."""
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    info: dict[str, Any] = whole.generation_info or {}
    spent = info["usage_metadata"]
    return LLMResult(
        generations=[[Generation(text=whole.text, generation_info=info)]],
        llm_output={
            "token_usage": {
                "prompt_tokens": spent["input_tokens"],
                "completion_tokens": spent["output_tokens"],
                "total_tokens": spent["total_tokens"],
            },
            "model_name": info["model_name"],
            "specguard": info["specguard"],
        },
    )
