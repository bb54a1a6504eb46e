"""Chunks of a message: what steps become, and what the last chunk says."""

import json
from typing import Any

from langchain_core.messages import AIMessageChunk

from specguard_chains.chunks import ChunkWriter
from specguard_chains.decoding.steps import (
    FinishReason,
    Source,
    Step,
    StepSeconds,
    StepTokens,
    Verdict,
)
from specguard_chains.messages import STEPS_KEY
from specguard_chains.tools.formats import ReasoningTags
from specguard_chains.tools.reader import AnswerReader


def step(number: int, text: str, **values: Any) -> Step:
    return Step(
        **{
            "number": number,
            "text": text,
            "source": Source.DRAFT,
            "verdict": Verdict.ACCEPTED,
            "score": 0.5,
            "confidence": -1.5,
            "grounding": 0.25,
            "threshold": 0.5,
            "rejected_early": False,
            "num_candidates": 2,
            "chosen": 1,
            "candidates": (text, "other"),
            "tokens": StepTokens(draft_reused=3),
            "seconds": StepSeconds(draft=0.5),
            "span": (0, len(text)),
            "answer_tokens": 2,
            **values,
        }
    )


def message(*texts: str, reasoning_steps: bool = False, **reader: Any) -> AIMessageChunk:
    """The whole message of an answer whose steps have these texts."""
    writer = ChunkWriter(AnswerReader(**reader), reasoning_steps=reasoning_steps)
    steps = [step(i, text) for i, text in enumerate(texts[:-1], 1)]
    steps.append(step(len(texts), texts[-1], finish_reason=FinishReason.STOP))
    chunks = [writer.chunk(each) for each in steps]
    last = writer.last(10, {"finish_reason": "stop"})
    return sum([*chunks[1:], last], start=chunks[0])


def test_peers_streamed_scores_merge_without_being_added_up() -> None:
    merged = message("a", "b", "")
    steps = merged.additional_kwargs[STEPS_KEY]
    assert merged.content == "ab"
    assert [(each["number"], each["score"], each["span"]) for each in steps] == [
        (1, 0.5, [0, 1]),
        (2, 0.5, [0, 1]),
        (3, 0.5, [0, 0]),
    ]


def test_steps_in_messages_are_plain_json() -> None:
    chunk = ChunkWriter(AnswerReader()).chunk(step(1, "a\u00e9"))
    assert json.loads(json.dumps(chunk.additional_kwargs)) == chunk.additional_kwargs
    (plain,) = chunk.additional_kwargs[STEPS_KEY]
    assert type(plain["source"]) is type(plain["verdict"]) is str


def test_a_step_comes_back_from_its_plain_form() -> None:
    original = step(1, "a\u00e9", finish_reason=FinishReason.LENGTH)
    assert Step.from_dict(original.to_dict()) == original
    older = original.to_dict()
    for added in ("value", "critical", "reviews", "passages"):
        del older[added]
    del older["seconds"]["select"]
    assert Step.from_dict(older) == original


def test_the_last_chunk_has_usage_and_metadata() -> None:
    writer = ChunkWriter(AnswerReader())
    first = writer.chunk(step(1, "a"))
    tokens = StepTokens(target_reused=4)
    writer.chunk(step(2, "b", tokens=tokens, finish_reason=FinishReason.STOP))
    chunk = writer.last(10, {"finish_reason": "stop"})
    assert chunk.chunk_position == "last"
    assert chunk.usage_metadata == {
        "input_tokens": 10,
        "output_tokens": 4,
        "total_tokens": 14,
        "input_token_details": {"cache_read": 4},
    }
    merged = first + chunk
    assert merged.response_metadata == {"finish_reason": "stop"}


def test_calls_get_ids_of_their_own_and_end_the_answer_as_tool_calls() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    merged = message("Let me see.\n\n", f"{call}\n{call}", names=["f"])
    assert merged.content == "Let me see."
    assert [(c["name"], c["args"]) for c in merged.tool_calls] == [("f", {"x": 1})] * 2
    assert len({c["id"] for c in merged.tool_calls}) == 2
    assert merged.response_metadata["finish_reason"] == "tool_calls"


def test_arguments_that_are_no_json_make_a_call_invalid() -> None:
    merged = message('<tool_call>\n{"name": "f", "arguments": {"x": 1', names=["f"])
    assert merged.tool_calls == []
    (call,) = merged.invalid_tool_calls
    assert call["name"] == "f"
    assert call["args"] == '(the call is not valid JSON) {"x": 1'


def test_marked_reasoning_stands_apart() -> None:
    merged = message("<think>One.\n\n", "Two.</think>", "\n\nThree.", reasoning=ReasoningTags())
    assert merged.content == "Three."
    assert merged.additional_kwargs["reasoning_content"] == "One.\n\nTwo."


def test_all_steps_but_the_last_can_count_as_reasoning() -> None:
    merged = message("One.\n\n", "Two.\n\n", "Three.", reasoning_steps=True)
    assert merged.content == "Three."
    assert merged.additional_kwargs["reasoning_content"] == "One.\n\nTwo.\n\n"


def test_an_answer_that_ends_between_two_steps_still_has_a_text() -> None:
    assert message("One.\n\n", "Two.\n\n", "", reasoning_steps=True).content == "Two.\n\n"


def test_a_call_that_a_stop_string_has_cut_off_does_not_end_the_answer_as_tool_calls() -> None:
    cut = '<tool_call>\n{"name": "f", "arguments": {"x": 1'
    assert message(cut, names=["f"]).response_metadata["finish_reason"] == "stop"
    both = message(f"{cut}}}}}\n</tool_call>\n", cut, names=["f"])
    assert (len(both.tool_calls), len(both.invalid_tool_calls)) == (1, 1)
    assert both.response_metadata["finish_reason"] == "tool_calls"
