"""Votes: one of several answers is given, and its steps tell what all of them have cost."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, replace
from itertools import count
from typing import Any

import numpy as np
import pytest

from specguard_chains import background
from specguard_chains.decoding.baselines import SoloDecoder
from specguard_chains.decoding.boundaries import StepShape
from specguard_chains.decoding.decoder import Decoder, Request
from specguard_chains.decoding.engine import Prompt
from specguard_chains.decoding.rewards import TextReward, ValueHead
from specguard_chains.decoding.rivals import AcceptAll, RandomVerifier, RewardVerifier
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.decoding.specguard import SpecGuardDecoder
from specguard_chains.decoding.steps import (
    Review,
    Source,
    Step,
    StepSeconds,
    StepTokens,
    Verdict,
)
from specguard_chains.decoding.voting import (
    Choose,
    VotingDecoder,
    _seeds,
    best_confidence,
    best_value,
    majority,
)
from specguard_chains.errors import ConfigurationError, DecodingCancelled
from specguard_chains.metrics import Metrics
from tests.toy_engine import (
    ANSWER,
    VOCABULARY,
    FloatArray,
    ToyEngine,
    random_policy,
    scripted_policy,
)

GREEDY = Sampling(temperature=0)
WARM = Sampling(temperature=1, top_p=1)
SHORT = StepShape(max_tokens=9)


def take(number: int) -> Choose:
    """A choice that was made beforehand."""
    return lambda answers: number


def step(text: str, **changes: Any) -> Step:
    values: dict[str, Any] = {
        "number": 1,
        "text": text,
        "source": Source.DRAFT,
        "verdict": Verdict.ACCEPTED,
        **dict.fromkeys(("score", "confidence", "grounding", "threshold")),
        "rejected_early": False,
        "num_candidates": 1,
        "chosen": 0,
        "candidates": (text,),
        "tokens": StepTokens(),
        "seconds": StepSeconds(),
        "span": (0, len(text)),
        "answer_tokens": len(text),
    }
    return Step(**(values | changes))


def solo(end: float = 0.5, **settings: Any) -> SoloDecoder:
    engine = ToyEngine(random_policy(1, end=end), **settings)
    return SoloDecoder(engine, Source.DRAFT, SHORT, scorer=AcceptAll())


def talkative() -> SoloDecoder:
    """Writes until something stops it."""
    return solo(end=-40.0)


def rsd(**settings: Any) -> SpecGuardDecoder:
    draft, target = (ToyEngine(random_policy(n, end=0.5), **settings) for n in (1, 2))
    rating = TextReward(lambda messages, steps: len(steps[-1]) % 3 / 2)
    return SpecGuardDecoder(draft, target, RewardVerifier(rating), num_candidates=1, shape=SHORT)


def request(seed: int = 0, sampling: Sampling = WARM, **more: Any) -> Request:
    prompt = Prompt(messages=[{"role": "user", "content": "question"}])
    return Request(prompt, sampling, seed=seed, **({"max_tokens": 60} | more))


def text_of(steps: Sequence[Step]) -> str:
    return "".join(step.text for step in steps)


def answers_of(decoder: Decoder, asked: Request, n: int) -> list[list[Step]]:
    """What a vote of n should have to choose from."""
    seeds = _seeds(asked.seed, n)
    return [list(decoder.decode(replace(asked, seed=seed))) for seed in seeds]


# --- choosing


@pytest.mark.parametrize(
    ("texts", "chosen"),
    [
        (["so 1", "so 2", "so 2"], 1),
        (["so 1", "so 2", "now 2", "now 1"], 0),  # a tie: the earlier
        (["so 3", "so 2", "now 2", "so 3"], 0),
        (["nothing", "so 2", "so 1"], 1),
        (["nothing", "no more", "so 2"], 2),
        (["nothing", "nothing", "none"], 0),
        (["", "so 2"], 1),
        (["so 7"], 0),
        (["nothing"], 0),
        (["so 1,000", "so 1000", "so 7", "so 7", "it is \\boxed{1000} of 7"], 0),
        (["\\boxed{\\frac{1}{2}}", "so 2", "1 or 2, \\boxed{\\frac{1}{2}}"], 0),
        (["so 7", "\\boxed{\\$18}", "so 7", "\\boxed{ 18.0 }", "\\boxed{x = 18}"], 1),
        (["so 7", "\\boxed{18 \\text{ dollars}}", "so 7", "so 18"], 0),  # a tie: the earlier
        (["so 0.5", "\\boxed{50}", "\\boxed{50\\%}", "it is 50"], 0),
        (["so 7", "so 25%", "so 7", "so 0.25", "\\boxed{25\\%}"], 1),
        (["so 25%", "so 25", "it is 25"], 1),
        (["\\boxed{(C)}", "\\boxed{\\text{b}}", "\\boxed{(B) 42}"], 1),
    ],
)
def test_the_final_answer_that_most_have_wins(texts: list[str], chosen: int) -> None:
    assert majority([[step(text)] for text in texts]) == chosen


def test_final_answers_are_read_over_all_steps() -> None:
    answers = [["3 + 4 =", " 7"], ["7 - ", "3 = 4"], ["it is ", "7", ""]]
    assert majority([[step(text) for text in texts] for texts in answers]) == 0
    assert majority([[step(text) for text in texts] for texts in (*answers, ["4"], ["4"])]) == 1


def test_the_last_steps_value_tells_which_answer_is_best() -> None:
    values = [[0.9, 0.2], [0.1, 0.6], [None, 0.6], [1.0, None]]
    answers = [[step("a", value=value) for value in own] for own in values]
    assert best_value(answers) == 1
    assert best_value(answers[:1]) == 0
    assert best_value([answers[3], answers[3]]) == 0


def test_the_least_confident_step_tells_how_confident_an_answer_is() -> None:
    values = [[-0.1, -5.0], [-1.0, -1.5], [-1.5, -1.0, -1.2], [-0.1, None]]
    answers = [[step("a", confidence=value) for value in own] for own in values]
    assert best_confidence(answers) == 1
    assert best_confidence(answers[2:]) == 0


# --- the answers


def test_the_first_answer_is_the_one_without_a_vote() -> None:
    for seed in range(5):
        for voted in (solo(), rsd()):
            vote = VotingDecoder(voted, 3, take(0))
            expected = list(voted.decode(request(seed)))
            steps = list(vote.decode(request(seed)))
            assert [s.text for s in steps] == [s.text for s in expected]
            assert [s.verdict for s in steps] == [s.verdict for s in expected]


def test_more_answers_leave_the_first_ones_as_they_are() -> None:
    for seed in (0, 1, 2**32, 2**64 - 1):
        assert _seeds(seed, 1) == [seed]
        assert _seeds(seed, 16)[:4] == _seeds(seed, 4)
        assert len(set(_seeds(seed, 64))) == 64
    assert not set(_seeds(0, 9)[1:]) & set(_seeds(1, 9)[1:])


@pytest.mark.parametrize("make", [solo, rsd], ids=["solo", "rsd"])
@pytest.mark.parametrize("choose", [majority, best_confidence, best_value])
def test_what_is_given_is_what_was_chosen(make: Any, choose: Any) -> None:
    given = set()
    for seed in range(12):
        decoder = make()
        answers = answers_of(decoder, request(seed), 4)
        assert len({text_of(answer) for answer in answers}) > 1
        chosen = choose(answers)
        steps = list(VotingDecoder(decoder, 4, choose).decode(request(seed)))
        assert [s.text for s in steps] == [s.text for s in answers[chosen]]
        assert [s.number for s in steps] == list(range(1, len(steps) + 1))
        assert [text_of(steps)[slice(*s.span)] for s in steps] == [s.text for s in steps]
        assert steps[-1].finish_reason is not None
        given.add(chosen)
    if choose is best_confidence:
        assert len(given) > 1


def test_most_votes_win_over_the_first_answer() -> None:
    """The first digit is drawn: 7 mostly. A vote is right more often than one answer."""
    row = np.full(VOCABULARY, -40.0, dtype=np.float32)
    row[[*b"123456"]] = -2.0
    row[ord("7")] = 0.0

    def policy(tokens: tuple[int, ...]) -> FloatArray:
        return row if tokens[-1] == ANSWER else scripted_policy("0.")(tokens)

    decoder = SoloDecoder(ToyEngine(policy), Source.TARGET)
    right = {
        n: sum(
            text_of(list(VotingDecoder(decoder, n, majority).decode(request(seed)))).startswith("7")
            for seed in range(60)
        )
        for n in (1, 15)
    }
    assert 20 < right[1] < 45
    assert right[15] >= 57


@pytest.mark.parametrize("make", [solo, rsd], ids=["solo", "rsd"])
def test_the_same_seed_gives_the_same_answer(make: Any) -> None:
    texts = set()
    for seed in range(6):
        shared = VotingDecoder(make(), 3, majority)
        first, again = (list(shared.decode(request(seed))) for _ in range(2))
        fresh = list(VotingDecoder(make(), 3, majority).decode(request(seed)))
        assert [s.text for s in first] == [s.text for s in again] == [s.text for s in fresh]
        texts.add(text_of(first))
    assert len(texts) > 1


# --- what they cost


@pytest.mark.parametrize("make", [solo, rsd], ids=["solo", "rsd"])
@pytest.mark.parametrize("chosen", [0, 1, 3])
def test_the_first_step_carries_what_the_lost_answers_have_cost(make: Any, chosen: int) -> None:
    decoder = make()
    answers = answers_of(make(), request(), 4)
    # Caches are warm from the second answer on, as they are within a vote.
    steps = list(VotingDecoder(decoder, 4, take(chosen)).decode(request()))
    spent = Metrics.of([step for answer in answers for step in answer]).to_dict()
    told = Metrics.of(steps).to_dict()
    kept = sum(step.tokens.kept for step in answers[chosen])
    for name in ("num_draft_tokens", "num_regenerated_tokens"):
        assert told[name] == spent[name] > 0 or make is solo
    for who in ("draft", "target"):
        name = f"{who}_tokens"
        assert told[f"{name}_read"] == spent[f"{name}_read"]
        assert told[f"{name}_reused"] == spent[f"{name}_reused"]
    assert told["num_accepted_tokens"] == kept
    assert told["num_accepted_tokens"] <= sum(step.answer_tokens for step in steps)
    assert told["num_steps"] == len(answers[chosen])
    assert told["acceptance_rate"] == Metrics.of(answers[chosen]).acceptance_rate
    for step_, own in zip(steps[1:], answers[chosen][1:], strict=True):
        assert step_.tokens == own.tokens


@pytest.mark.parametrize("make", [solo, rsd], ids=["solo", "rsd"])
def test_tokens_and_seconds_are_those_that_were_spent(make: Any) -> None:
    decoder = make(delay_s=0.001)
    start = time.perf_counter()
    steps = list(VotingDecoder(decoder, 3, majority).decode(request()))
    elapsed = time.perf_counter() - start
    computed = sum(engine.computed_tokens for engine in decoder.engines)
    passes = sum(engine.forward_passes for engine in decoder.engines)
    tokens = [step.tokens for step in steps]
    written = sum(t.drafted + t.regenerated for t in tokens)
    read = sum(t.draft_read + t.target_read for t in tokens)
    assert computed <= written + read
    assert computed >= written + read - 3 * 60
    seconds = sum(sum(asdict(step.seconds).values()) for step in steps)
    assert 0.001 * passes <= seconds <= elapsed


def test_a_vote_of_one_changes_nothing() -> None:
    for sampling in (WARM, GREEDY):
        for make in (solo, rsd):
            expected = list(make().decode(request(sampling=sampling)))
            for choose in (majority, best_value, best_confidence):
                steps = list(VotingDecoder(make(), 1, choose).decode(request(sampling=sampling)))
                assert [(s.text, s.tokens) for s in steps] == [(s.text, s.tokens) for s in expected]


# --- what cannot be


def test_equal_answers_are_not_voted_on() -> None:
    vote = VotingDecoder(solo(), 4, majority)
    with pytest.raises(ConfigurationError, match=r"4 answers at temperature 0.*num_samples=1"):
        list(vote.decode(request(sampling=GREEDY)))
    assert list(vote.decode(request()))


@pytest.mark.parametrize("n", [0, -1])
def test_there_is_an_answer(n: int) -> None:
    with pytest.raises(ConfigurationError, match=f"num_samples must be 1 or more, not {n}"):
        VotingDecoder(solo(), n, majority)


# --- best of n


def scored(scorer: Any) -> SoloDecoder:
    return replace(solo(), scorer=scorer)


def test_scored_steps_tell_their_signals_and_no_verdict() -> None:
    head = ValueHead(draft="toy", layer=1, weights=(1.0, 0.0, 0.0, 0.0), bias=0.0)
    by_text = TextReward(lambda messages, steps: 1 / len(steps))
    plain = list(solo().decode(request()))
    assert len(plain) > 1
    for scorer in (RewardVerifier(head), RewardVerifier(by_text), AcceptAll()):
        steps = list(scored(scorer).decode(request()))
        assert [s.text for s in steps] == [s.text for s in plain]
        assert {(s.verdict, s.threshold) for s in steps} == {(Verdict.UNVERIFIED, None)}
        assert all(s.confidence is not None and s.confidence < 0 for s in steps)
        assert Metrics.of(steps).acceptance_rate is None
        if isinstance(scorer, AcceptAll):
            assert {s.value for s in steps} == {None}
        else:
            assert all(0 <= s.value <= 1 for s in steps if s.value is not None)
            assert len({s.value for s in steps}) > 1
    assert [s.value for s in scored(RewardVerifier(by_text)).decode(request())] == [
        1 / n for n in range(1, len(plain) + 1)
    ]


def test_the_best_of_n_has_the_best_value() -> None:
    by_length = RewardVerifier(TextReward(lambda messages, steps: min(1, len("".join(steps)) / 99)))
    for seed in range(6):
        answers = answers_of(scored(by_length), request(seed), 5)
        steps = list(VotingDecoder(scored(by_length), 5, best_value).decode(request(seed)))
        assert len(text_of(steps)) == max(map(len, map(text_of, answers)))


class Rates:
    """A reward model that remembers what it was asked."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s
        self.asked: list[list[str]] = []

    def __call__(self, messages: Any, steps: Sequence[str]) -> float:
        time.sleep(self.delay_s)
        self.asked.append(list(steps))
        return min(1, len("".join(steps)) / 99)


def rated(model: Rates, **settings: Any) -> SoloDecoder:
    return replace(solo(**settings), rating=TextReward(model))


def test_a_reward_model_rates_complete_answers_alone() -> None:
    for seed in range(6):
        model, every = Rates(), Rates()
        answers = answers_of(solo(), request(seed), 5)
        steps = list(VotingDecoder(rated(model), 5, best_value).decode(request(seed)))
        assert model.asked == [[s.text for s in answer] for answer in answers]
        assert [s.value for s in steps[:-1]] == [None] * (len(steps) - 1)
        assert steps[-1].value == model({}, [text_of(steps)])
        assert all(s.confidence is not None for s in steps)
        scoring = scored(RewardVerifier(TextReward(every)))
        same = list(VotingDecoder(scoring, 5, best_value).decode(request(seed)))
        assert [s.text for s in steps] == [s.text for s in same]
        assert steps[-1].value == same[-1].value
        assert len(every.asked) == sum(map(len, answers)) > 5


def test_an_answer_is_rated_once_whatever_ends_it() -> None:
    whole = list(talkative().decode(request()))
    stop = text_of(whole)[len(whole[0].text) + 1 :][:3]
    for ending in (
        {},
        {"stop_when": lambda shown: shown.number == 2},
        {"review": lambda shown: Review.STOP},
        {"stop": (stop,)},
        {"max_tokens": 5},
    ):
        model = Rates()
        steps = list(rated(model, end=-40.0).decode(request(**ending)))
        assert model.asked == [[s.text for s in steps]], "the answer as it is given"
        assert steps[-1].value is not None


def test_to_rate_an_answer_takes_time_of_verification() -> None:
    steps = list(rated(Rates(delay_s=0.02)).decode(request()))
    assert [s.seconds.verify > 0.02 for s in steps] == [False] * (len(steps) - 1) + [True]


def test_what_cannot_be_rated_is_refused_before_it_is_written() -> None:
    decoder = rated(Rates())
    asked = replace(request(), prompt=Prompt(text="question"))
    with pytest.raises(ConfigurationError, match="bare text"):
        next(decoder.decode(asked))
    (engine,) = decoder.engines
    assert engine.computed_tokens == 0


def test_a_reviewed_step_is_rated_anew() -> None:
    seen: list[Step] = []

    def review(shown: Step) -> Review:
        seen.append(shown)
        return Review.REGENERATE if len(seen) == 1 else Review.KEEP

    by_text = RewardVerifier(TextReward(lambda messages, steps: len(steps[-1]) / 100))
    first = next(scored(by_text).decode(request(review=review)))
    assert len(seen) == 2
    assert [shown.value for shown in seen] == [len(shown.candidates[0]) / 100 for shown in seen]
    assert first.value == seen[1].value
    assert first.tokens.drafted == sum(
        len(text) for shown in seen for text in shown.candidates
    ) or first.tokens.drafted > len(first.candidates[0])


# --- hooks


def test_a_reviewer_reads_every_answer_and_shapes_that_one() -> None:
    seen: list[Step] = []

    def review(shown: Step) -> Review:
        seen.append(shown)
        return Review.REGENERATE if shown.number == 1 and not shown.reviews else Review.KEEP

    asked = request(review=review)
    answers = answers_of(talkative(), asked, 3)
    told = [(shown.number, shown.text) for shown in seen]
    seen.clear()
    steps = list(VotingDecoder(talkative(), 3, take(2)).decode(asked))
    assert [(shown.number, shown.text) for shown in seen] == told
    assert [s.number for s in seen].count(1) == 6, "two versions of each answer's first step"
    assert [s.text for s in steps] == [s.text for s in answers[2]]
    assert steps[0].reviews == (Review.REGENERATE, Review.KEEP)


def test_a_reviewer_ends_the_answer_that_it_speaks_of() -> None:
    whole = answers_of(talkative(), request(), 2)
    assert all(len(answer) > 1 for answer in whole)
    for chosen in (0, 1):
        said = iter([Review.STOP])
        asked = request(review=lambda shown, said=said: next(said, Review.KEEP))
        steps = list(VotingDecoder(talkative(), 2, take(chosen)).decode(asked))
        expected = whole[chosen][:1] if chosen == 0 else whole[chosen]
        assert [s.text for s in steps][: len(expected)] == [s.text for s in expected]
        assert len(steps) == len(expected)


def test_stop_when_ends_every_answer_by_its_own_steps() -> None:
    asked: list[Step] = []

    def stop_when(shown: Step) -> bool:
        asked.append(shown)
        return shown.number == 2

    cut = [answer[:2] for answer in answers_of(talkative(), request(), 4)]
    vote = VotingDecoder(talkative(), 4, best_confidence)
    steps = list(vote.decode(request(stop_when=stop_when)))
    assert [shown.text for shown in asked] == [s.text for answer in cut for s in answer]
    assert text_of(steps) in map(text_of, cut)
    assert steps[-1].finish_reason == "stop"


# --- cancelling


@pytest.mark.parametrize("make", [solo, rsd], ids=["solo", "rsd"])
def test_a_vote_that_is_cancelled_in_the_middle_leaves_the_engines_usable(make: Any) -> None:
    decoder = make()
    vote = VotingDecoder(decoder, 3, majority)
    expected = [s.text for s in vote.decode(request())]
    polls = count()
    list(vote.decode(request(cancelled=lambda: next(polls) < 0)))
    every = next(polls)
    for limit in (0, 1, every // 3, every // 2, every - 2):
        polls = count()
        with pytest.raises(DecodingCancelled):
            list(vote.decode(request(cancelled=lambda polls=polls, n=limit: next(polls) >= n)))
        assert [s.text for s in vote.decode(request())] == expected
        for engine in decoder.engines:
            assert len(engine._idle) == 1, "every session was closed"


def test_a_vote_in_the_background_can_be_cancelled() -> None:
    decoder = solo(delay_s=0.01)
    stop = threading.Event()
    steps = background.run(VotingDecoder(decoder, 64, majority), request(cancelled=stop.is_set))
    threading.Timer(0.2, stop.set).start()
    with pytest.raises(DecodingCancelled):
        list(steps)
    (engine,) = decoder.engines
    computed = engine.computed_tokens
    assert computed < 64 * 60 / 2
    with closing(background.run(VotingDecoder(decoder, 1, majority), request())) as steps:
        next(steps)
    assert list(background.run(VotingDecoder(decoder, 2, majority), request()))


def test_an_error_in_one_answer_is_the_votes_own() -> None:
    calls = count()

    def fails(messages: Any, steps: Any) -> float:
        if next(calls) == 3:
            raise ZeroDivisionError
        return 0.5

    decoder = scored(RewardVerifier(TextReward(fails)))
    with pytest.raises(ZeroDivisionError):
        list(VotingDecoder(decoder, 4, best_value).decode(request()))
    (engine,) = decoder.engines
    assert len(engine._idle) == 1
    assert list(VotingDecoder(solo(), 4, majority).decode(request()))


def test_a_vote_needs_what_its_decoder_needs() -> None:
    inner = rsd()
    vote = VotingDecoder(inner, 2, majority)
    assert vote.engines == inner.engines
    assert vote.asks_others
    assert not VotingDecoder(solo(), 2, majority).asks_others
    assert VotingDecoder(rated(Rates()), 2, best_value).asks_others
    control = replace(inner, verifier=RandomVerifier(0.5))
    assert not VotingDecoder(control, 2, majority).asks_others
