"""Several prompts in one call of a plain LLM, side by side where its models admit that."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.outputs import LLMResult

from specguard_chains.errors import EngineError
from specguard_chains.llm import SpecGuardLLM
from tests.toy_engine import FloatArray, ToyEngine, random_policy

PROMPTS = [f"What all prompts begin with, and then question {number}" for number in range(4)]
ROUTES = ["generate", "agenerate", "batch", "abatch"]


def model(max_parallel: int, **settings: Any) -> SpecGuardLLM:
    policy = settings.pop("policy", random_policy(1, end=-40.0))
    delay_s = settings.pop("delay_s", 0.0)
    engine = ToyEngine(policy, max_parallel=max_parallel, delay_s=delay_s)
    options = {"decoder": "target", "target": engine, "seed": 1, "max_tokens": 30}
    return SpecGuardLLM(**options | settings)


def texts(llm: SpecGuardLLM, route: str, **settings: Any) -> list[str]:
    match route:
        case "generate":
            result = llm.generate(PROMPTS, **settings)
        case "agenerate":
            result = asyncio.run(llm.agenerate(PROMPTS, **settings))
        case "batch":
            return llm.batch(PROMPTS, **settings)
        case _:
            return asyncio.run(llm.abatch(PROMPTS, **settings))
    return [generations[0].text for generations in result.generations]


class Handler(BaseCallbackHandler):
    """Notes which runs begin and end."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def on_llm_start(self, serialized: Any, prompts: list[str], **_: Any) -> None:
        self.told.append(f"start {PROMPTS.index(prompts[0])}")

    def on_llm_end(self, response: LLMResult, **_: Any) -> None:
        self.told.append("end")

    def on_llm_error(self, error: BaseException, **_: Any) -> None:
        self.told.append("error")


@pytest.mark.parametrize("route", ROUTES)
def test_prompts_are_computed_together_if_the_models_admit_it(route: str) -> None:
    said, passes = {}, {}
    for n in (1, len(PROMPTS)):
        llm = model(n, delay_s=0.003)  # time enough for all of them to come
        said[n] = texts(llm, route)
        assert isinstance(llm.target, ToyEngine)
        passes[n] = llm.target.forward_passes
    assert said[1] == said[4]
    assert len(set(said[1])) > 1
    assert passes[4] < 0.7 * passes[1]


@pytest.mark.parametrize("route", ["generate", "agenerate"])
def test_one_after_the_other_events_come_in_the_prompts_order(route: str) -> None:
    handler = Handler()
    texts(model(1), route, callbacks=[handler])
    assert handler.told == [each for n in range(4) for each in (f"start {n}", "end")]


@pytest.mark.parametrize("route", ["generate", "agenerate"])
@pytest.mark.parametrize("callbacks", [[], [[]] * 4])
def test_a_list_of_no_callbacks_is_none(route: str, callbacks: list[Any]) -> None:
    assert len(texts(model(1), route, callbacks=callbacks)) == 4


@pytest.mark.parametrize("route", ["generate", "agenerate"])
def test_side_by_side_every_prompt_has_a_run_and_a_result_of_its_own(route: str) -> None:
    handler = Handler()
    llm = model(4)
    result = (
        llm.generate(PROMPTS, callbacks=[handler])
        if route == "generate"
        else asyncio.run(llm.agenerate(PROMPTS, callbacks=[handler]))
    )
    assert sorted(handler.told) == ["end"] * 4 + [f"start {n}" for n in range(4)]
    assert len({run.run_id for run in result.run or ()}) == 4
    alone = model(1).generate(PROMPTS)
    assert result.llm_output is not None
    assert alone.llm_output is not None
    assert result.llm_output["token_usage"] == alone.llm_output["token_usage"]


@pytest.mark.parametrize("max_parallel", [1, 4])
@pytest.mark.parametrize("route", ["generate", "agenerate"])
def test_the_error_of_a_prompt_is_raised_and_the_model_usable(
    route: str, max_parallel: int
) -> None:
    letters = random_policy(1, end=-40.0)

    def policy(tokens: tuple[int, ...]) -> FloatArray:
        if bytes(t for t in tokens if t < 256).startswith(PROMPTS[1].encode()):
            raise EngineError("this one cannot be computed")
        return letters(tokens)

    llm, handler = model(max_parallel, policy=policy), Handler()
    with pytest.raises(EngineError, match="this one"):
        texts(llm, route, callbacks=[handler])
    assert "error" in handler.told
    if max_parallel == 1:
        assert handler.told == ["start 0", "end", "start 1", "error"]
    assert llm.generate(PROMPTS[2:]).generations[0][0].text
