"""Controls accept as large a share of the steps as what they control."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from specguard_chains.errors import EvaluationError
from specguard_chains.evaluation.arms import Arm, parse_arms
from specguard_chains.evaluation.controls import History, longest_accepted, matched
from specguard_chains.evaluation.results import Result, StepResult
from specguard_chains.options import SpecGuardOptions

TARGET_TOKENS = 20


def step(length: int, accepted: bool | None, candidates: int = 1) -> StepResult:
    """A step of so many drafted tokens; None is one that nobody judges."""
    verdict = "unverified" if accepted is None else "accepted" if accepted else "rejected"
    return StepResult(
        source="target" if accepted is False else "draft",
        verdict=verdict,
        score=None,
        confidence=None,
        grounding=None,
        threshold=None,
        rejected_early=False,
        num_candidates=candidates,
        answer_tokens=TARGET_TOKENS if accepted is False else length,
        drafted=length * candidates,
        kept=0 if accepted is False else length,
        regenerated=TARGET_TOKENS if accepted is False else 0,
        seconds={},
        phase="reasoning",
    )


def result(*steps: StepResult) -> Result:
    return Result(
        problem="p",
        data="d",
        arm="a",
        right=True,
        extracted=None,
        timed_out=False,
        seconds=1.0,
        tokens=1,
        finish_reason="stop",
        seed=0,
        metrics={},
        peak_rss_mb=1.0,
        steps=steps,
        text="",
    )


def arm(name: str) -> Arm:
    arms = parse_arms(f"rsd,draft,{name}@rsd", SpecGuardOptions())
    return arms[-1]


def share(results: Sequence[Result]) -> float:
    return float(np.mean([s.accepted for r in results for s in r.steps if s.judged]))


def test_the_rate_is_that_of_judged_steps_so_far() -> None:
    seen = [result(step(3, True), step(3, False), step(3, None)), result(step(3, True))]
    assert matched(arm("random"), History(controlled=seen, own=())) == {"acceptance_rate": 2 / 3}


@pytest.mark.parametrize("name", ["random", "length"])
def test_nothing_is_matched_to_an_arm_that_has_judged_nothing(name: str) -> None:
    history = History(controlled=[result()], own=(), drafts=[result(step(3, None))])
    with pytest.raises(EvaluationError, match="cannot be matched: rsd has judged no step"):
        matched(arm(name), history)


@pytest.mark.parametrize(
    ("rate", "expected"), [(0.0, 0), (0.24, 0), (0.25, 10), (0.5, 20), (0.74, 20), (1.0, 40)]
)
def test_the_longest_length_that_accepts_at_most_the_rate(rate: float, expected: int) -> None:
    drafts = [result(*(step(n, None) for n in (40, 10, 30, 20)))]
    assert longest_accepted(rate, [], drafts) == expected


def test_own_steps_count_at_their_drafted_length() -> None:
    own = [result(step(10, True), step(30, False, candidates=4))]
    assert longest_accepted(0.5, own, []) == 10
    assert longest_accepted(1.0, own, []) == 30  # half is too few: now the longer ones too
    assert longest_accepted(0.0, own, []) == 0


def test_without_any_length_nothing_is_accepted() -> None:
    assert longest_accepted(1.0, [], []) == 0


Draw = Callable[[np.random.Generator], int]


@pytest.mark.parametrize("rate", [0.1, 0.37, 0.8])
@pytest.mark.parametrize(
    "draw",
    [lambda rng: int(rng.integers(1, 100)), lambda rng: int(rng.choice([5, 6, 40]))],
    ids=["spread out", "few lengths"],
)
def test_both_controls_converge_to_the_rate(rate: float, draw: Draw) -> None:
    """The draft alone writes longer steps than within other arms, and X's rate moves."""
    rng = np.random.default_rng(0)
    controlled: list[Result] = []
    drafts: list[Result] = []
    own: dict[str, list[Result]] = {"random": [], "length": []}
    for _ in range(300):
        steps = int(rng.integers(3, 9))
        controlled.append(result(*(step(9, bool(rng.random() < rate)) for _ in range(steps))))
        drafts.append(result(*(step(draw(rng) + 30, None) for _ in range(steps))))
        for name, earlier in own.items():
            options = matched(arm(name), History(controlled, earlier, drafts))
            drawn = [draw(rng) for _ in range(int(rng.integers(3, 9)))]
            if name == "random":
                accepted = [rng.random() < options["acceptance_rate"] for _ in drawn]
            else:
                accepted = [length <= options["max_accepted_tokens"] for length in drawn]
            pairs = zip(drawn, accepted, strict=True)
            earlier.append(result(*(step(n, bool(yes)) for n, yes in pairs)))
    assert share(own["length"]) == pytest.approx(share(controlled), abs=0.02)
    assert share(own["random"]) == pytest.approx(share(controlled), abs=0.05)
