"""Several prompts in one call of a plain LLM: what belongs to each of them, and one result of all.

LangChain hands the model the run of the first prompt only, whose events would then be those of all
prompts. So each prompt is a call of its own, and the results are put together here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.callbacks import BaseCallbackManager, Callbacks
from langchain_core.outputs import LLMResult

from specguard_chains.decoding.steps import Step
from specguard_chains.errors import ConfigurationError
from specguard_chains.messages import STEPS_KEY
from specguard_chains.metrics import Metrics

OF_A_RUN = ("tags", "metadata", "run_name", "run_id")


@dataclass(frozen=True, slots=True)
class PromptRun:
    """A prompt and what LangChain is told about its run."""

    prompt: str
    callbacks: Callbacks
    arguments: dict[str, Any]


def prompt_runs(
    prompts: Any, callbacks: Callbacks | list[Callbacks], arguments: dict[str, Any]
) -> list[PromptRun]:
    """Return the runs of several prompts, and take what concerns them out of the arguments.

    As in LangChain, callbacks, tags, metadata and run names are either those of every prompt, or
    lists with one of each for every prompt; a single run id is that of the first prompt.

    Raises:
        ConfigurationError: The prompts are no list, or a list has another length than theirs.
    """
    if not isinstance(prompts, list):
        raise ConfigurationError(f"prompts must be a list of texts, not {prompts!r}")
    n = len(prompts)
    given = {name: arguments.pop(name, None) for name in OF_A_RUN}
    each = {"callbacks": _each("callbacks", callbacks, n, _separate(callbacks))}
    for name in ("tags", "metadata", "run_name"):
        each[name] = _each(name, given[name], n, _separate(callbacks) and given[name] is not None)
    run_id = given["run_id"]
    run_ids = run_id if isinstance(run_id, list) else [run_id] + [None] * (n - 1)
    each["run_id"] = _each("run_id", run_ids, n, True) if n else []
    return [
        PromptRun(
            prompt,
            each["callbacks"][i] or None,  # of [], LangChain (core 1.8.3) asks the first, if async
            {
                **{name: each[name][i] for name in OF_A_RUN},
                "metadata": each["metadata"][i] or {},  # without, LangChain adds no ls_* of its own
            },
        )
        for i, prompt in enumerate(prompts)
    ]


def _separate(callbacks: Any) -> bool:
    """Whether there are callbacks for each prompt, rather than for all of them."""
    first = callbacks[0] if isinstance(callbacks, list) and callbacks else ()
    return first is None or isinstance(first, list | BaseCallbackManager)


def _each(name: str, value: Any, n: int, separate: bool) -> list[Any]:
    if not separate:
        return [value] * n
    if not isinstance(value, list) or len(value) != n:
        raise ConfigurationError(
            f"{name} must be a list of {n}, one for each prompt, not {value!r}"
        )
    return value


def joined(results: Sequence[LLMResult]) -> LLMResult:
    """Return the results of several prompts as one; what comes from a cache has cost nothing."""
    if len(results) == 1:
        return results[0]
    computed = [result for result in results if result.llm_output]
    return LLMResult(
        generations=[generation for result in results for generation in result.generations],
        llm_output=_summed(computed) if computed else {},
        run=[run for result in results for run in result.run or ()] or None,
    )


def _summed(results: Sequence[LLMResult]) -> dict[str, Any]:
    outputs = [result.llm_output or {} for result in results]
    infos = [
        generation.generation_info or {}
        for result in results
        for generations in result.generations
        for generation in generations
    ]
    steps = [Step.from_dict(step) for info in infos for step in info[STEPS_KEY]]
    usages = [output["token_usage"] for output in outputs]
    return {
        **outputs[0],
        "token_usage": {name: sum(usage[name] for usage in usages) for name in usages[0]},
        "specguard": {**outputs[0]["specguard"], **Metrics.of(steps).to_dict()},
    }
