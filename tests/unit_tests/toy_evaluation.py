"""Evaluations of toy models: run as a module, one that can be killed while it is going on."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specguard_chains.decoding.arrays import FloatArray
from specguard_chains.evaluation.arms import Arm, parse_arms
from specguard_chains.evaluation.checking import Checked
from specguard_chains.evaluation.folder import open_run, read_results
from specguard_chains.evaluation.problems import Problem
from specguard_chains.evaluation.results import Result
from specguard_chains.evaluation.runner import Runner
from specguard_chains.evaluation.settings import RunSettings
from specguard_chains.evaluation.tasks import Plan
from specguard_chains.options import SpecGuardOptions
from tests.paper import PAPER
from tests.toy_engine import ANSWER, Policy, ToyEngine, random_policy

ARMS = "target,draft,specguard-greedy,specguard:num_candidates=2"


class ToyChecker:
    """Right is what has the answer in it."""

    def check(self, text: str, problem: Problem) -> Checked:
        return Checked(right=problem.answer in text, extracted=text[-1:], timed_out=False)


def by_question(seed: int) -> Policy:
    """Other random tables for each length of the prompt, and as the answer goes on."""
    tables: dict[int, Policy] = {}

    def policy(tokens: tuple[int, ...]) -> FloatArray:
        prompt = tokens.index(ANSWER) if ANSWER in tokens else 0  # it is still being read
        number = 1000 * seed + 31 * prompt + len(tokens) // 6
        return tables.setdefault(number, random_policy(number, end=-2.0))(tokens)

    return policy


def options(*, delay_s: float = 0.0, **more: Any) -> SpecGuardOptions:
    values: dict[str, Any] = {
        "draft": ToyEngine(by_question(1), name="toy draft", delay_s=delay_s),
        "target": ToyEngine(by_question(2), name="toy target", delay_s=delay_s),
        "max_tokens": 80,
        **PAPER,
        "num_target_candidates": 2,
        "confidence_weight": 1.0,
        "threshold": 0.76,
        "seed": 3,
    }
    return SpecGuardOptions(**values | more)


def problems(n: int) -> list[Problem]:
    return [
        Problem(id=f"toy/{i}", question="?" * (i + 1), answer="abcdef"[i % 6]) for i in range(n)
    ]


def plan(given: SpecGuardOptions, n: int, arms: str = ARMS) -> Plan:
    return Plan({"toy": problems(n)}, parse_arms(arms, given), given.seed or 0)


def settings(given: SpecGuardOptions, arms: Sequence[Arm]) -> RunSettings:
    return RunSettings.of(given, arms, ["toy"], given.seed or 0)


def run(
    folder: Path,
    n: int = 3,
    arms: str = ARMS,
    *,
    given: SpecGuardOptions | None = None,
    **hooks: Any,
) -> list[Result]:
    """Run an evaluation and return all that is recorded."""
    given = given or options()
    todo = plan(given, n, arms)
    with open_run(folder, settings(given, todo.arms)) as log:
        Runner(todo, log, ToyChecker(), **hooks).run()  # type: ignore[arg-type]
    return read_results(folder)


if __name__ == "__main__":
    run(Path(sys.argv[1]), given=options(delay_s=float(sys.argv[2])))
