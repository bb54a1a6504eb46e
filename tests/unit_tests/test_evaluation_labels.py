"""Labels of steps: an answer goes on with the tokens that it has left, and no more."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from specguard_chains.decoding.baselines import SoloDecoder
from specguard_chains.decoding.decoder import Request
from specguard_chains.decoding.engine import Candidate, Prompt, Reading
from specguard_chains.decoding.rivals import AcceptAll
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.decoding.specguard import SpecGuardDecoder
from specguard_chains.decoding.steps import Judgement, Source
from specguard_chains.decoding.verification import Situation
from specguard_chains.evaluation.checking import Checked
from specguard_chains.evaluation.labels import OracleVerifier
from specguard_chains.evaluation.problems import Problem
from specguard_chains.evaluation.recordings import Recorder
from tests.toy_engine import ToyEngine, scripted_policy

PROBLEM = Problem(id="p/1", question="What is one and one?", answer="B.\n\nCCCCCCCC")
DRAFTED, WRITTEN = ("aa\n\n", "bB.\n\n", "c"), ("AA\n\n", "B.\n\n", "CCCCCCCC")
STEP, SECOND, WHOLE = 4, 5, 8
"""Tokens of the first step, the second drafted one, and the last that the target writes."""


@dataclass
class Ends:
    """Right is what has the answer in it; keeps what was asked."""

    texts: list[str] = field(default_factory=list)

    def check(self, text: str, problem: Problem) -> Checked:
        self.texts.append(text)
        return Checked(right=problem.answer in text, extracted=None, timed_out=False)


@dataclass(frozen=True)
class Watching(AcceptAll):
    """Notes how many tokens the answer has left whenever a step is judged."""

    seen: list[int] = field(default_factory=list)

    def judge(self, candidate: Candidate, reading: Reading, situation: Situation) -> Judgement:
        self.seen.append(situation.tokens_left)
        return super().judge(candidate, reading, situation)


def toy(steps: tuple[str, ...], **settings: Any) -> ToyEngine:
    return ToyEngine(scripted_policy(*steps), **settings)


def request(max_tokens: int | None) -> Request:
    return Request(Prompt(text="q"), Sampling(temperature=0), max_tokens=max_tokens)


@pytest.mark.parametrize("alone", [True, False])
def test_a_verifier_sees_how_many_tokens_the_answer_has_left(alone: bool) -> None:
    verifier = Watching()
    draft, target = toy(DRAFTED), toy(WRITTEN, context_length=40)
    both = SpecGuardDecoder(draft, target, verifier, num_candidates=1)
    decoder = SoloDecoder(target, Source.TARGET, scorer=verifier) if alone else both
    steps = list(decoder.decode(request(11)))
    assert verifier.seen == [11, 7, 3 if alone else 2]
    assert sum(step.answer_tokens for step in steps) == 11
    verifier.seen.clear()
    list(decoder.decode(request(None)))
    room = 40 - len(target.encode(Prompt(text="q")))
    assert verifier.seen[:2] == [room, room - 4], "by the room in the smallest context"


@pytest.mark.parametrize("spare", [0, -1])
def test_a_step_from_which_too_little_is_left_is_bad(spare: int) -> None:
    max_tokens = STEP + SECOND + WHOLE + spare
    recorder = Recorder(
        *(toy(DRAFTED, name="draft"), toy(WRITTEN, name="target"), Ends()),  # type: ignore[arg-type]
        max_tokens=max_tokens,
        hopeless_too=True,
    )
    _, second, *_ = recorder.record(PROBLEM).steps
    assert second.drafted.text == "bB.\n\n"
    assert second.good == (spare == 0)


@pytest.mark.parametrize("spare", [0, -1])
def test_the_oracle_knows_what_is_left(spare: int) -> None:
    max_tokens = STEP + SECOND + WHOLE + spare
    checker = Ends()
    verifier = OracleVerifier(PROBLEM, checker)  # type: ignore[arg-type]
    decoder = SpecGuardDecoder(toy(DRAFTED), toy(WRITTEN), verifier, num_candidates=1)
    _, second, *_ = list(decoder.decode(request(max_tokens)))
    assert second.score == float(spare == 0)
    assert max(map(len, checker.texts)) <= max_tokens
