"""The off-switch: answers stay within a share of the seconds of the target alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest

from specguard_chains.decoding.baselines import SoloDecoder
from specguard_chains.decoding.calibration import Bounds, Calibration
from specguard_chains.decoding.decoder import Request
from specguard_chains.decoding.engine import Prompt
from specguard_chains.decoding.pacing import Pacing, Patience
from specguard_chains.decoding.rewriting import SpeculativeRewriting
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.decoding.slowdown import ENOUGH_CHARACTERS, Slowdown
from specguard_chains.decoding.specguard import SpecGuardDecoder
from specguard_chains.decoding.speculation import Speculation
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
from tests.toy_engine import ToyEngine, random_policy, scripted_policy

DECODE_S, PREFILL_S = 0.040, 0.010
"""Of the target, a token."""
CALIBRATION = Calibration(
    confidence=Bounds(low=-3.0, high=0.0), grounding=Bounds(low=0.0, high=1.0)
)


@dataclass(frozen=True)
class Pair:
    """What a token costs a draft, and its reading the target; how often a step is accepted."""

    draft_s: float
    read_s: float
    rate: float
    draft_prefill_s: float = 0.004
    draft_tokens: float = 1.0
    """That the draft needs for one of the target's."""


DEAR = Pair(0.025, 0.020, 0.6)
CHEAP = Pair(0.004, 0.002, 0.8)


@dataclass(frozen=True)
class Work:
    """What is asked for."""

    prompt: int = 150
    steps: int = 8
    cached: int = 0
    """Of the prompt, by an earlier request."""


def step(number: int, source: Source, characters: int, drafted: int, **spent: float) -> Step:
    judged = Verdict.ACCEPTED if source is Source.DRAFT else Verdict.REJECTED
    return Step(
        number=number,
        text="x" * characters,
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
        tokens=StepTokens(drafted=drafted),
        seconds=StepSeconds(**spent),
        span=(0, 0),
        answer_tokens=drafted,
    )


def answer(pair: Pair, work: Work, pacing: Pacing, random: Random) -> Iterator[tuple[Step, float]]:
    """Yield the steps of an answer, and of each what the target alone would have taken."""
    unread = behind = work.prompt - work.cached
    for number in range(1, work.steps + 1):
        tokens = random.randint(10, 50)
        write_s, prompt_s = tokens * DECODE_S, unread * PREFILL_S
        unread = 0
        if pacing.pauses():
            done = step(number, Source.TARGET, 4 * tokens, 0, target=write_s + prompt_s)
            behind += tokens
        else:
            accepted = random.random() < pair.rate
            part = tokens if accepted else random.randint(1, tokens)
            drafted = round(part * pair.draft_tokens)
            spent = {
                "draft": drafted * pair.draft_s + behind * pair.draft_prefill_s,
                "verify": part * pair.read_s + prompt_s,
                "target": 0.0 if accepted else write_s,
            }
            behind = 0 if accepted else tokens
            source = Source.DRAFT if accepted else Source.TARGET
            done = step(number, source, 4 * tokens, max(drafted, 1), **spent)
            pacing.note(Judgement(done.verdict))
        if number == 1:
            done = replace(done, tokens=replace(done.tokens, target_reused=work.cached))
        pacing.note_time(done)
        yield done, write_s + prompt_s


@dataclass(frozen=True)
class Told:
    """What became of some answers."""

    answers: list[list[tuple[Step, float]]]

    @classmethod
    def of(
        cls,
        pair: Pair,
        limit: float | None,
        n: int,
        work: Work | None = None,
        patience: Patience | None = None,
    ) -> Told:
        slowdown, random, work = limit and Slowdown(limit), Random(1), work or Work()

        def one() -> list[tuple[Step, float]]:
            time = slowdown.begin(work.prompt) if slowdown else None
            steps = list(answer(pair, work, Pacing(patience, time), random))
            if time is not None:
                time.end()
            return steps

        return cls([one() for _ in range(n)])

    @property
    def losses(self) -> list[float]:
        """Of each answer, in seconds."""
        return [
            sum(s.seconds.draft + s.seconds.verify + s.seconds.target - alone for s, alone in steps)
            for steps in self.answers
        ]

    @property
    def alone(self) -> float:
        return sum(alone for steps in self.answers for _, alone in steps)

    @property
    def slowdown(self) -> float:
        return sum(self.losses) / self.alone

    @property
    def drafted(self) -> float:
        """The share of answers that were."""
        return sum(any(s.num_candidates for s, _ in steps) for steps in self.answers) / len(
            self.answers
        )


LONG = Work(prompt=1500, steps=12)
ONE_STEP = Work(steps=1)
CACHED = Work(prompt=1500, cached=1400)
WORKS = [Work(), LONG, ONE_STEP, CACHED]


@pytest.mark.parametrize("pair", [DEAR, Pair(0.04, 0.04, 0.0), Pair(0.04, 0.02, 0.8, 0.004, 1.3)])
@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize("limit", [0.02, 0.05, 0.1])
@pytest.mark.parametrize("n", [1, 20, 400])
def test_where_drafting_does_not_pay_answers_stay_within_the_limit(
    pair: Pair, work: Work, limit: float, n: int
) -> None:
    told = Told.of(pair, limit, n, work)
    if work is not ONE_STEP:  # their pace is less sure, and few of them may cost more
        assert sum(told.losses) <= limit * told.alone + max(told.losses)  # one may be a dear one
    if n == 400:
        assert told.slowdown == pytest.approx(limit, abs=0.015)
        assert told.slowdown < Told.of(pair, None, n, work).slowdown
        assert told.drafted > 0.005  # it is tried again


def test_the_limit_is_made_use_of() -> None:
    shares = [Told.of(DEAR, limit, 400).drafted for limit in (0.02, 0.05, 0.1, 1.0)]
    assert shares == sorted(shares)
    assert shares[0] < shares[1] < shares[2] < shares[3] > 0.95


@pytest.mark.parametrize("pair", [CHEAP, Pair(0.01, 0.002, 0.9, 0.001, 0.7)])
@pytest.mark.parametrize("work", WORKS)
def test_where_drafting_pays_it_is_drafted(pair: Pair, work: Work) -> None:
    told = Told.of(pair, 0.05, 400, work)
    assert told.slowdown < 0.75 * Told.of(pair, None, 400, work).slowdown < 0
    assert told.drafted > 0.85


def test_an_answer_is_drafted_as_a_whole_or_not() -> None:
    for steps in Told.of(DEAR, 0.1, 100).answers:
        assert len({done.num_candidates for done, _ in steps}) == 1


def test_patience_counts_beside_it() -> None:
    told = Told.of(Pair(0.004, 0.002, 0.0), 1.0, 100, Work(), Patience(1, 4))
    drafted = [done.num_candidates for steps in told.answers for done, _ in steps]
    assert 0 < sum(drafted) < 0.3 * len(drafted)


def test_nothing_is_drafted_before_the_targets_pace_is_known() -> None:
    slowdown = Slowdown(10.0)
    for _ in range(2):
        answer = slowdown.begin(10)
        assert not answer.drafts
        answer.note(step(1, Source.TARGET, ENOUGH_CHARACTERS // 2 + 4, 0, target=1.0))
        answer.end()
    assert slowdown.begin(10).drafts


def test_answers_in_flight_are_expected_to_lose_too() -> None:
    """At a twentieth, and half an answer's time that the first one may lose, one in ten drafts."""
    slowdown = Slowdown(0.05)
    for _ in range(15):
        answer = slowdown.begin(10)
        assert not answer.drafts or _ >= 10
        answer.note(step(1, Source.TARGET, ENOUGH_CHARACTERS, 0, target=1.0))
        if answer.drafts:
            break
        answer.end()
    assert [slowdown.begin(10).drafts for _ in range(4)] == [False] * 4
    answer.end()
    assert slowdown.begin(10).drafts, "it lost nothing"


@pytest.mark.parametrize("stalled_s", [20.0, 60.0])
@pytest.mark.parametrize("drafted", [True, False])
def test_a_stall_is_forgotten(stalled_s: float, drafted: bool) -> None:
    """Whichever pace it has spoilt: in the end what pays is drafted, and what does not is not."""
    for pair, pays in ((CHEAP, True), (DEAR, False)):
        slowdown, random, shares = Slowdown(0.05), Random(1), []
        stalled = False
        for _ in range(1500):
            time = slowdown.begin(150)
            pacing = Pacing(None, time)
            steps = [done for done, _ in answer(pair, Work(), pacing, random)]
            is_drafted = steps[0].num_candidates > 0
            shares.append(is_drafted)
            if not stalled and is_drafted == drafted:
                stall = step(2, Source.TARGET, 0, int(drafted), target=stalled_s)
                pacing.note_time(stall)
                stalled = True
            time.end()
        assert stalled
        latest = sum(shares[-300:]) / 300
        assert latest > 0.9 if pays else latest < 0.4


@pytest.mark.parametrize("wrong", [0.0, -0.1, float("inf"), float("nan")])
def test_a_limit_is_a_share(wrong: float) -> None:
    with pytest.raises(ConfigurationError, match="max_slowdown must be above 0"):
        Slowdown(wrong)


def decoder(**settings: Any) -> SpecGuardDecoder:
    given = {
        "num_candidates": 1,
        "verify_with": "target",
        "draft": ToyEngine(random_policy(1)),
        "target": ToyEngine(random_policy(2)),
        "verifier": EnsembleVerifier(CALIBRATION, confidence_weight=1.0, threshold=0.0),
    }
    return SpecGuardDecoder(**given | settings)


def request(number: int) -> Request:
    prompt = Prompt(text=f"question {number}")
    return Request(prompt, Sampling(temperature=1, top_p=1), seed=number, max_tokens=80)


def test_a_decoder_keeps_account_over_its_answers() -> None:
    drafting = decoder(slowdown=Slowdown(1e9))
    alone = SoloDecoder(drafting.target, Source.TARGET)
    drafted = []
    for number in range(100):
        steps = list(drafting.decode(request(number)))
        drafted.append(not steps[0].paused)
        assert {done.paused for done in steps} == {steps[0].paused}
        if steps[0].paused:
            own = list(alone.decode(request(number)))
            assert [done.text for done in steps] == [done.text for done in own]
    assert drafted[0] is False
    assert sum(drafted) > 20  # not all: such short texts are soon forgotten


def test_an_answer_that_is_given_up_is_not_in_flight() -> None:
    slowdown = Slowdown(0.05)
    drafting = decoder(slowdown=slowdown)
    for _ in range(20):
        answer = slowdown.begin(10)
        answer.note(step(1, Source.TARGET, ENOUGH_CHARACTERS, 0, target=1.0))
        answer.end()
    steps = drafting.decode(request(1))
    assert not next(steps).paused
    assert slowdown._in_flight == 1
    steps.close()  # type: ignore[attr-defined]
    assert slowdown._in_flight == 0


def test_what_the_target_reads_of_a_prompt_is_told() -> None:
    """The tokens of the prompt, less those that it has found computed."""
    told: list[int] = []

    class Watching(Slowdown):
        def note(self, step: Step, prompt_tokens: int) -> None:
            told.append(prompt_tokens)
            super().note(step, prompt_tokens)

    drafting = decoder(slowdown=Watching(0.05))
    tokens = len(drafting.target.encode(request(3).prompt))
    steps = list(drafting.decode(request(3)))
    assert told == [tokens - steps[0].tokens.target_reused] + [0] * (len(steps) - 1)


@pytest.mark.parametrize(
    ("settings", "needed"),
    [
        ({"verify_with": "draft"}, "verify_with='target'"),
        ({"num_candidates": 2}, "num_target_candidates=1"),
        ({"num_target_candidates": 2}, "num_target_candidates=1"),
        ({"rewriting": SpeculativeRewriting(Speculation((1, 1)))}, "speculate_rewrites=False"),
    ],
)
def test_it_needs_a_target_whose_own_pace_shows(settings: dict[str, Any], needed: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^max_slowdown .* needs {needed}"):
        decoder(slowdown=Slowdown(0.05), **settings)


def test_it_needs_two_models() -> None:
    one = ToyEngine(scripted_policy("Yes."))
    with pytest.raises(ConfigurationError, match="needs two models"):
        decoder(slowdown=Slowdown(0.05), draft=one, target=one)
