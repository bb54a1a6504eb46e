"""The growing answer: stop strings, length, spans, and what each step has cost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from specguard_chains.decoding.answer import Answer, Proposal
from specguard_chains.decoding.baselines import SoloDecoder
from specguard_chains.decoding.boundaries import Ending, StepShape
from specguard_chains.decoding.decoder import Request
from specguard_chains.decoding.engine import Candidate, Counters, Prompt, Reading
from specguard_chains.decoding.ledger import Ledger
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.decoding.steps import (
    UNVERIFIED,
    Judgement,
    Phase,
    Source,
    Step,
    StepSeconds,
    StepTokens,
    Verdict,
)
from specguard_chains.errors import ConfigurationError, ContextOverflowError
from tests.toy_engine import ToyEngine, scripted_policy

PROMPT = Prompt(text="question")
PROMPT_TOKENS = len("question") + 1
SCRIPT = ("First, add.\n\n", "Then 3.\n\n", "So 7.")
TEXT = "".join(SCRIPT)
SHORT = StepShape(max_tokens=4)


def write(
    *script: str,
    max_tokens: int | None = None,
    stop: Sequence[str] = (),
    shape: StepShape | None = None,
    context_length: int = 4096,
) -> list[Step]:
    engine = ToyEngine(scripted_policy(*(script or SCRIPT)), context_length=context_length)
    decoder = SoloDecoder(engine, Source.DRAFT, shape=shape or StepShape())
    request = Request(PROMPT, Sampling(temperature=0), max_tokens=max_tokens, stop=tuple(stop))
    return list(decoder.decode(request))


def texts(steps: list[Step]) -> list[str]:
    return [step.text for step in steps]


def assert_consistent(steps: list[Step]) -> None:
    """What must hold of the steps of any answer."""
    answer = "".join(texts(steps))
    assert [step.number for step in steps] == list(range(1, len(steps) + 1))
    assert [answer[slice(*step.span)] for step in steps] == texts(steps)
    ends = [0, *(step.span[1] for step in steps)]
    assert [step.span[0] for step in steps] == ends[:-1]
    assert [step.finish_reason is None for step in steps] == [True] * (len(steps) - 1) + [False]
    phases = [Phase.REASONING] * (len(steps) - 1) + [Phase.ANSWER]
    assert [step.phase for step in steps] == phases
    for step in steps:
        assert step.tokens.kept == step.tokens.drafted == step.answer_tokens


# --- stop strings


@pytest.mark.parametrize("shape", [StepShape(), SHORT], ids=str)
@pytest.mark.parametrize("length", [1, 2, 3, 5, 8, 13])
def test_any_piece_of_the_text_can_stop_it(length: int, shape: StepShape) -> None:
    for at in range(len(TEXT) - length + 1):
        stop = TEXT[at : at + length]
        steps = write(stop=[stop], shape=shape)
        assert "".join(texts(steps)) == TEXT[: TEXT.index(stop)]
        assert steps[-1].finish_reason == "stop"
        assert_consistent(steps)
        written = sum(step.answer_tokens for step in steps)
        assert written == TEXT.index(stop) + length, "writing stops with the stop string"


def test_a_stop_string_across_two_steps_is_held_back() -> None:
    steps = write(stop=[".\n\nThen"])
    assert texts(steps) == ["First, add", ""]
    assert [step.span for step in steps] == [(0, 10), (10, 10)]
    assert [step.finish_reason for step in steps] == [None, "stop"]


def test_text_that_was_held_back_in_vain_comes_with_the_next_step() -> None:
    steps = write(stop=[".\n\nThus"])
    assert texts(steps) == ["First, add", ".\n\nThen 3", ".\n\nSo 7."]
    assert steps[-1].finish_reason == "stop"
    assert_consistent(steps)


def test_a_stop_string_at_a_steps_start_leaves_that_step_empty() -> None:
    steps = write(stop=["Then"])
    assert texts(steps) == ["First, add.\n\n", ""]
    assert_consistent(steps)


def test_text_held_back_at_the_end_is_released() -> None:
    for stop in ("7.!", "So 7.\n"):
        steps = write(stop=[stop])
        assert "".join(texts(steps)) == TEXT
        assert steps[-1].finish_reason == "stop"
    steps = write(stop=["add.!"], max_tokens=11)
    assert texts(steps) == ["First, add."]
    assert steps[-1].finish_reason == "length"


def test_of_several_stop_strings_the_first_counts() -> None:
    assert "".join(texts(write(stop=["So", "3.", "Then 3. And"]))) == "First, add.\n\nThen "


def test_a_stop_string_at_the_length_limit_is_a_stop() -> None:
    steps = write(stop=["add"], max_tokens=10)
    assert (texts(steps), steps[-1].finish_reason) == (["First, "], "stop")


def test_a_stop_string_of_other_characters() -> None:
    for shape in (StepShape(), StepShape(max_tokens=1)):
        assert "".join(texts(write("né → so\n\n", "ende", stop=["→ s"], shape=shape))) == "né "


# --- length


@pytest.mark.parametrize("shape", [StepShape(), SHORT, StepShape(".")], ids=str)
@pytest.mark.parametrize("max_tokens", range(1, len(TEXT) + 3))
def test_an_answer_has_max_tokens_at_most(max_tokens: int, shape: StepShape) -> None:
    steps = write(max_tokens=max_tokens, shape=shape)
    assert "".join(texts(steps)) == TEXT[:max_tokens]
    complete = max_tokens > len(TEXT)  # the end of the sequence is a token, too
    assert steps[-1].finish_reason == ("stop" if complete else "length")
    assert sum(step.answer_tokens for step in steps) == min(max_tokens, len(TEXT) + 1)
    assert_consistent(steps)


def test_without_a_limit_the_model_ends_the_answer() -> None:
    steps = write()
    assert texts(steps) == list(SCRIPT)
    assert [step.answer_tokens for step in steps] == [13, 9, 6]
    assert_consistent(steps)


def test_without_a_limit_a_full_context_ends_the_answer() -> None:
    for room in range(1, len(TEXT) + 1):
        steps = write(context_length=PROMPT_TOKENS + room)
        assert "".join(texts(steps)) == TEXT[:room]
        assert steps[-1].finish_reason == "length"
        assert_consistent(steps)
    assert write(context_length=PROMPT_TOKENS + len(TEXT) + 1)[-1].finish_reason == "stop"


def test_max_tokens_beyond_the_context_are_refused_before_anything_is_written() -> None:
    assert write(max_tokens=20, context_length=PROMPT_TOKENS + 20)
    with pytest.raises(ContextOverflowError, match=r"max_tokens=21 .* leaves 20 tokens .* n_ctx"):
        write(max_tokens=21, context_length=PROMPT_TOKENS + 20)


def test_a_character_cut_by_the_limit_is_left_out() -> None:
    text = "né → 😀!"
    for max_tokens in range(1, len(text.encode()) + 1):
        for shape in (StepShape(), StepShape(max_tokens=1)):
            steps = write(text, max_tokens=max_tokens, shape=shape)
            expected = text.encode()[:max_tokens].decode(errors="ignore")
            assert "".join(texts(steps)) == expected
            assert sum(step.answer_tokens for step in steps) == max_tokens
            assert_consistent(steps)


# --- the answer itself


class FakeSession:
    """Has this much room, keeps what it accepts, and needs `factor` tokens for each of others."""

    def __init__(self, room: int, factor: int = 1) -> None:
        self.room, self.factor = room, factor
        self.counters = Counters()
        self.accepted: list[Candidate] = []

    def fits(self, candidate: Candidate) -> bool:
        return self.factor * len(candidate.tokens) <= self.room

    def accept(self, candidate: Candidate) -> None:
        self.room -= self.factor * len(candidate.tokens)
        self.accepted.append(candidate)


def candidate(text: str, ending: str = "boundary") -> Candidate:
    reading = Reading(np.full(len(text), -1.0, dtype=np.float32))
    return Candidate(tuple(text.encode()), text, reading, Ending(ending), "bytes")


def extend(answer: Answer, text: str, ending: str = "boundary") -> Step:
    one = candidate(text, ending)
    return answer.extend(one, Source.DRAFT, Proposal([one], 0, UNVERIFIED))


def test_a_step_ends_where_the_tightest_limit_is() -> None:
    request = Request(PROMPT, max_tokens=30, stop=("ab",))
    answer = Answer(request, StepShape(".", 16), FakeSession(40), FakeSession(50))
    boundary = answer.boundary()
    assert (boundary.delimiter, boundary.max_tokens) == (".", 16)
    assert (boundary.stop, boundary.preceding) == (("ab",), "")
    extend(answer, "x" * 15 + "a")
    assert (answer.boundary().max_tokens, answer.boundary().preceding) == (14, "a")
    full = Answer(Request(PROMPT), StepShape(), FakeSession(40), FakeSession(8))
    assert full.boundary().max_tokens == 8


def test_all_sessions_go_on_with_the_step_and_each_once() -> None:
    draft, target = FakeSession(10), FakeSession(20)
    answer = Answer(Request(PROMPT), StepShape(), draft, target)
    extend(answer, "abc")
    assert len(draft.accepted) == len(target.accepted) == 1
    both = FakeSession(10)
    extend(Answer(Request(PROMPT), StepShape(), both, both), "abc")
    assert len(both.accepted) == 1


def test_the_tightest_session_decides_on_the_room() -> None:
    with pytest.raises(ContextOverflowError, match="leaves 7 tokens"):
        Answer(Request(PROMPT, max_tokens=8), StepShape(), FakeSession(9), FakeSession(7))
    answer = Answer(Request(PROMPT), StepShape(), FakeSession(9), FakeSession(3))
    assert extend(answer, "abc").finish_reason == "length"


def test_a_step_that_another_tokenizer_makes_too_long_is_the_last() -> None:
    draft, target = FakeSession(100), FakeSession(10, factor=3)
    answer = Answer(Request(PROMPT), StepShape(), draft, target)
    assert extend(answer, "abc").finish_reason is None
    step = extend(answer, "de")
    assert (step.text, step.finish_reason) == ("de", "length")
    assert answer.finished
    assert answer.text == "abcde"


def test_the_step_tells_of_the_proposal_whoever_wrote_it() -> None:
    answer = Answer(Request(PROMPT), StepShape(), FakeSession(99))
    drafts = [candidate("one"), candidate("two!")]
    judgement = Judgement(Verdict.REJECTED, 0.25, -2.0, 0.5, 0.7, rejected_early=True)
    proposal = Proposal(drafts, 1, judgement)
    assert proposal.candidate is drafts[1]
    step = answer.extend(candidate("three"), Source.TARGET, proposal)
    assert (step.text, step.source, step.verdict) == ("three", Source.TARGET, Verdict.REJECTED)
    assert (step.candidates, step.num_candidates, step.chosen) == (("one", "two!"), 2, 1)
    figures = (step.score, step.confidence, step.grounding, step.threshold)
    assert figures == (0.25, -2.0, 0.5, 0.7)
    assert step.rejected_early
    assert (step.answer_tokens, step.tokens.kept) == (5, 0)
    assert extend(answer, "four").tokens.kept == 4


def test_the_answer_grows_by_what_is_certain() -> None:
    answer = Answer(Request(PROMPT, stop=("cat",)), StepShape(), FakeSession(99))
    assert (answer.text, answer.number, answer.finished) == ("", 1, False)
    extend(answer, "a c")
    assert (answer.text, answer.number, answer.finished) == ("a ", 2, False)
    extend(answer, "ow")
    assert (answer.text, answer.number) == ("a cow", 3)
    extend(answer, "ca", "end_of_sequence")
    assert (answer.text, answer.finish_reason) == ("a cowca", "stop")


# --- costs


def test_costs_are_booked_to_who_did_the_work() -> None:
    ledger, draft, target = Ledger(), FakeSession(9), FakeSession(9)
    draft.counters.written = 1000  # of earlier steps
    with ledger.charge(Source.DRAFT, draft):
        draft.counters.written += 5
        draft.counters.read += 7
        draft.counters.reused += 11
    with ledger.charge(Source.TARGET, target, verify=True):
        target.counters.read += 13
        target.counters.reused += 17
    with ledger.charge(Source.TARGET, target):
        target.counters.written += 19
        target.counters.read += 23
    with ledger.charge(Source.DRAFT, draft):
        draft.counters.written += 1
    ledger.count(Source.DRAFT, "kept", 3)
    ledger.count(Source.TARGET, "passes", 2)
    tokens, seconds = ledger.settle()
    assert tokens == StepTokens(
        drafted=6,
        kept=3,
        regenerated=19,
        draft_read=7,
        target_read=36,
        draft_reused=11,
        target_reused=17,
        target_passes=2,
    )
    assert min(seconds.draft, seconds.verify, seconds.target) > 0
    assert ledger.settle() == (StepTokens(), StepSeconds())


def test_seconds_are_those_of_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 10.5, 20.0, 21.0, 30.0, 32.0, 40.0, 44.0])
    monkeypatch.setattr("specguard_chains.decoding.ledger.perf_counter", lambda: next(clock))
    ledger, session = Ledger(), FakeSession(9)
    for source, verify in (
        (Source.DRAFT, False),
        (Source.TARGET, True),
        (Source.TARGET, False),
        (Source.DRAFT, False),
    ):
        with ledger.charge(source, session, verify=verify):
            pass
    _, seconds = ledger.settle()
    assert seconds == StepSeconds(draft=4.5, verify=1.0, target=2.0)


def test_work_that_fails_is_booked_too() -> None:
    ledger, draft = Ledger(), FakeSession(9)
    with pytest.raises(ZeroDivisionError), ledger.charge(Source.DRAFT, draft):
        draft.counters.written += 2
        raise ZeroDivisionError
    assert ledger.settle()[0].drafted == 2


def test_the_prompt_is_booked_with_the_first_step() -> None:
    for step in (steps := write()):
        assert step.tokens.draft_read == (PROMPT_TOKENS if step is steps[0] else 0)
        assert step.seconds.draft > 0
        assert step.seconds.target == step.seconds.verify == 0


# --- requests


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1, not 0"),
        ({"max_tokens": -1}, "not -1"),
        ({"seed": -1}, "seed must be 0 or more, not -1"),
        ({"stop": ("a", "")}, "not empty"),
        ({"stop": "abc"}, "sequence of strings"),
    ],
)
def test_wrong_requests_are_refused(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Request(PROMPT, **wrong)
