"""The off-switch: answers stay within a share of the seconds of the target alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest

from specguard_chains.decoding.calibration import Bounds, Calibration
from specguard_chains.decoding.decoder import Request
from specguard_chains.decoding.engine import Prompt
from specguard_chains.decoding.pacing import Pacing, Patience
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.decoding.slowdown import ENOUGH_TOKENS, Slowdown
from specguard_chains.decoding.specguard import SpecGuardDecoder
from specguard_chains.decoding.steps import (
    Judgement,
    Source,
    Step,
    StepSeconds,
    StepTokens,
    Verdict,
)
from specguard_chains.decoding.verification import EnsembleVerifier
from specguard_chains.errors import ConfigurationError
from tests.toy_engine import ToyEngine, random_policy

PROMPT, STEPS = 150, 8
DECODE_S, PREFILL_S = 0.040, 0.010
"""Of the target, a token."""


@dataclass(frozen=True)
class Pair:
    """What a token costs a draft, and its reading the target; how often it is accepted."""

    draft_s: float
    read_s: float
    rate: float
    verify_with: str = "target"
    draft_prefill_s: float = 0.004


def step(source: Source, tokens: int, *, drafted: int, read: int, seconds: float) -> Step:
    judged = Verdict.ACCEPTED if source is Source.DRAFT else Verdict.REJECTED
    return Step(
        number=1,
        text="",
        source=source,
        verdict=judged if drafted else Verdict.UNVERIFIED,
        score=None,
        confidence=None,
        grounding=None,
        threshold=None,
        rejected_early=False,
        num_candidates=1 if drafted else 0,
        chosen=0,
        candidates=(),
        tokens=StepTokens(drafted=drafted, target_read=read),
        seconds=StepSeconds(draft=seconds / 4, verify=seconds / 4, target=seconds / 2),
        span=(0, 0),
        answer_tokens=tokens,
    )


def answers(
    pair: Pair, limit: float | None, n: int, patience: Patience | None = None, steps: int = STEPS
) -> Iterator[tuple[Step, float]]:
    """Yield the steps of n answers, and of each what the target alone would have taken."""
    slowdown = None if limit is None else Slowdown(limit)
    random = Random(1)
    for _ in range(n):
        pacing = Pacing(patience, slowdown)
        unread, draft_behind = PROMPT, PROMPT
        for number in range(steps):
            tokens = random.randint(10, 50)
            alone = tokens * DECODE_S + (0 if number else PROMPT * PREFILL_S)
            if pacing.pauses():
                seconds = tokens * DECODE_S + unread * PREFILL_S
                done = step(Source.TARGET, tokens, drafted=0, read=unread, seconds=seconds)
                draft_behind += tokens
                unread = 0
            else:
                accepted = random.random() < pair.rate
                drafted = tokens if accepted else random.randint(1, tokens)
                seconds = drafted * pair.draft_s + draft_behind * pair.draft_prefill_s
                draft_behind, read = 0, 0
                if pair.verify_with == "target":
                    seconds += drafted * pair.read_s + unread * PREFILL_S
                    read, unread = unread + drafted, 0
                elif accepted:
                    unread += tokens
                if not accepted:
                    seconds += tokens * DECODE_S + unread * PREFILL_S
                    read, unread = read + unread, 0
                    draft_behind += tokens
                source = Source.DRAFT if accepted else Source.TARGET
                done = step(source, tokens, drafted=drafted, read=read, seconds=seconds)
                pacing.note(Judgement(done.verdict))
            pacing.settle(done)
            yield done, alone


@dataclass(frozen=True)
class Told:
    """What became of some answers."""

    steps: list[tuple[Step, float]]

    @classmethod
    def of(cls, *arguments: Any) -> Told:
        return cls(list(answers(*arguments)))

    @property
    def losses(self) -> list[float]:
        spent = (s.seconds.draft + s.seconds.verify + s.seconds.target for s, _ in self.steps)
        return [seconds - alone for seconds, (_, alone) in zip(spent, self.steps, strict=True)]

    @property
    def alone(self) -> float:
        return sum(alone for _, alone in self.steps)

    @property
    def slowdown(self) -> float:
        return sum(self.losses) / self.alone

    @property
    def drafted(self) -> float:
        """The share of steps that were."""
        return sum(done.num_candidates for done, _ in self.steps) / len(self.steps)


DEAR = Pair(0.025, 0.020, 0.6)
CHEAP = Pair(0.004, 0.002, 0.8)
DRAFTS_OWN = Pair(0.025, 0.0, 0.3, "draft")


@pytest.mark.parametrize("pair", [DEAR, DRAFTS_OWN, Pair(0.04, 0.04, 0.0)])
@pytest.mark.parametrize("limit", [0.0, 0.02, 0.05, 0.1])
@pytest.mark.parametrize("n", [1, 3, 20, 200])
def test_where_drafting_does_not_pay_answers_stay_within_the_limit(
    pair: Pair, limit: float, n: int
) -> None:
    told = Told.of(pair, limit, n)
    assert sum(told.losses) <= limit * told.alone + max(told.losses)  # one is dearer than the mean
    assert told.slowdown < Told.of(pair, None, n).slowdown
    if limit and n == 200:
        assert told.slowdown == pytest.approx(limit, abs=0.01)
        assert told.drafted > 0.005  # it is tried again


def test_what_is_not_used_is_not_lost() -> None:
    """The limit is made use of: with a high one more is drafted than with a low one."""
    shares = [Told.of(DEAR, limit, 200).drafted for limit in (0.02, 0.05, 0.1, 1.0)]
    assert shares == sorted(shares)
    assert shares[0] < shares[1] < shares[2] < shares[3] > 0.95


@pytest.mark.parametrize("pair", [CHEAP, Pair(0.004, 0.0, 0.8, "draft")])
def test_where_drafting_pays_it_is_drafted(pair: Pair) -> None:
    told = Told.of(pair, 0.05, 200)
    assert told.drafted > 0.95
    assert told.slowdown < -0.3


@pytest.mark.parametrize("pair", [DEAR, DRAFTS_OWN])
def test_answers_of_one_step_tell_the_pace_too(pair: Pair) -> None:
    told = Told.of(pair, 0.05, 400, None, 1)
    assert 0 < told.drafted < 0.5
    assert told.slowdown == pytest.approx(0.05, abs=0.02)
    cheap = Told.of(CHEAP, 0.05, 200, None, 1)
    assert cheap.drafted > 0.85
    assert cheap.slowdown < 0


def test_patience_counts_beside_it() -> None:
    rejects = Pair(0.004, 0.002, 0.0)
    assert 0 < Told.of(rejects, 1.0, 100, Patience(1, 4)).drafted < 0.3


def test_nothing_is_drafted_before_the_targets_pace_is_known() -> None:
    slowdown = Slowdown(10.0)
    assert not slowdown.allows_draft()
    slowdown.note(step(Source.TARGET, ENOUGH_TOKENS - 1, drafted=0, read=0, seconds=1), 0)
    assert not slowdown.allows_draft()
    slowdown.note(step(Source.TARGET, 1, drafted=0, read=0, seconds=1), 0)
    assert slowdown.allows_draft()


@pytest.mark.parametrize("wrong", [-0.1, float("inf"), float("nan")])
def test_a_limit_is_a_share(wrong: float) -> None:
    with pytest.raises(ConfigurationError, match="max_slowdown must be 0 or more"):
        Slowdown(wrong)


@pytest.mark.parametrize("verify_with", ["draft", "target"])
def test_a_decoder_keeps_account_over_its_answers(verify_with: str) -> None:
    """With no time to lose every step is the target's; with any to spare, drafts come later."""
    confidence, grounding = Bounds(low=-3.0, high=0.0), Bounds(low=0.0, high=1.0)
    calibration = Calibration(confidence=confidence, grounding=grounding)

    def told(limit: float | None, n: int) -> list[list[Step]]:
        decoder = SpecGuardDecoder(
            ToyEngine(random_policy(1)),
            ToyEngine(random_policy(2)),
            EnsembleVerifier(calibration, confidence_weight=1.0, threshold=0.0),
            num_candidates=1,
            verify_with=verify_with,
            slowdown=None if limit is None else Slowdown(limit),
        )
        drawn = Sampling(temperature=1, top_p=1)
        requests = [
            Request(Prompt(text=f"question {i}"), drawn, seed=i, max_tokens=80) for i in range(n)
        ]
        return [list(decoder.decode(request)) for request in requests]

    assert not any(step.paused for answer in told(None, 3) for step in answer)
    written, steps = 0, [step for answer in told(1e9, 20) for step in answer]
    for done in steps:
        assert done.paused == (written < ENOUGH_TOKENS)
        written += done.answer_tokens
    assert not steps[-1].paused
    assert told(0.0, 1)[0][0].paused
