"""Answers of a vote side by side: the same ones, on places that nobody else needs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import pytest

from specguard_chains.background import run
from specguard_chains.decoding import compute_thread, prefixes
from specguard_chains.decoding.baselines import SoloDecoder
from specguard_chains.decoding.boundaries import Boundary, StepShape
from specguard_chains.decoding.decoder import Decoder, Request
from specguard_chains.decoding.engine import Engine, Prompt
from specguard_chains.decoding.rewards import TextReward
from specguard_chains.decoding.rivals import AcceptAll, RewardVerifier
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.decoding.side_by_side import Cancelled, side_by_side
from specguard_chains.decoding.specguard import SpecGuardDecoder
from specguard_chains.decoding.steps import Review, Source, Step, StepSeconds
from specguard_chains.decoding.voting import VotingDecoder, best_value, majority
from specguard_chains.errors import ConfigurationError, DecodingCancelled
from specguard_chains.metrics import Metrics
from tests.toy_engine import ToyEngine, random_policy

PLACES = 4
PATIENCE_S = 120.0
SHAPE = StepShape(max_tokens=9)
WARM = Sampling(temperature=1, top_p=1)
MESSAGES = [{"role": "user", "content": "What all answers begin with, and a question?"}]


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "POLL_S", 0.005)


@pytest.fixture
def engines() -> Iterator[Callable[..., ToyEngine]]:
    """Makes engines, which are closed at the end."""
    with ExitStack() as stack:

        def make(seed: int = 1, *, places: int = PLACES, **settings: Any) -> ToyEngine:
            policy = random_policy(seed, end=settings.pop("end", 0.0))
            engine = ToyEngine(policy, max_parallel=places, **settings)
            return stack.enter_context(closing(engine))

        yield make


Make = Callable[..., ToyEngine]


def solo(engines: Make, rate: Any = None, **settings: Any) -> SoloDecoder:
    rating = None if rate is None else TextReward(rate)
    return SoloDecoder(engines(**settings), Source.DRAFT, SHAPE, scorer=AcceptAll(), rating=rating)


def rsd(engines: Make, **settings: Any) -> SpecGuardDecoder:
    rating = TextReward(lambda messages, steps: len(steps[-1]) % 3 / 2)
    draft, target = engines(1, **settings), engines(2, **settings)
    return SpecGuardDecoder(draft, target, RewardVerifier(rating), num_candidates=1, shape=SHAPE)


def request(seed: int = 0, **more: Any) -> Request:
    return Request(Prompt(messages=MESSAGES), WARM, seed=seed, **({"max_tokens": 60} | more))


def plain(steps: Sequence[Step]) -> list[Step]:
    """Steps without their time, and without who has read the prompt."""
    unread = {f"{model}_{what}": 0 for model in ("draft", "target") for what in ("read", "reused")}
    return [
        replace(step, tokens=replace(step.tokens, **unread), seconds=StepSeconds())
        for step in steps
    ]


def assert_usable(*used: Engine) -> None:
    """All places and all memory are free again."""
    for engine in used:
        assert isinstance(engine, ToyEngine)
        with ExitStack() as stack:
            for _ in range(engine.capabilities.max_parallel):
                stack.enter_context(engine.exclusive(max_waiting=0))
        engine.clear()
        assert engine.memory is None or engine.memory.taken == 0
        with closing(engine.open(Prompt(text="?"))) as session:
            assert session.sample(1, Boundary("\0", max_tokens=3), WARM, seed=[0])


class AtATime:
    """A reward model that waits until so many answers are rated at a time, if there ever are."""

    def __init__(self, wanted: int, timeout_s: float = PATIENCE_S) -> None:
        self.most = self._now = 0
        self._wanted = wanted
        self._timeout_s = timeout_s
        self._changed = threading.Condition()

    def __call__(self, messages: Any, steps: Sequence[str]) -> float:
        with self._changed:
            self._now += 1
            self.most = max(self.most, self._now)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.most >= self._wanted, self._timeout_s)
            self._now -= 1
        return min(1, len("".join(steps)) / 99)


# --- the same answers


@pytest.mark.parametrize("make", [solo, rsd])
@pytest.mark.parametrize("n", [2, 3, 9])
def test_the_answer_is_the_one_of_answers_one_after_the_other(
    make: Callable[..., Decoder], n: int, engines: Make
) -> None:
    for choose in (majority, best_value):
        together = VotingDecoder(make(engines), n, choose)
        alone = VotingDecoder(make(engines, places=1), n, choose)
        for seed in range(3):
            ours = list(run(together, request(seed)))
            theirs = list(run(alone, request(seed)))
            assert plain(ours) == plain(theirs)
            told, expected = (Metrics.of(steps) for steps in (ours, theirs))
            assert told.num_draft_tokens == expected.num_draft_tokens
            assert told.num_regenerated_tokens == expected.num_regenerated_tokens
        assert_usable(*together.engines)


def test_their_tokens_are_computed_together(engines: Make) -> None:
    used = {}
    for places in (1, PLACES):
        decoder = solo(engines, places=places, end=-40.0, delay_s=0.002)
        list(run(VotingDecoder(decoder, PLACES, majority), request()))
        (engine,) = decoder.engines
        assert isinstance(engine, ToyEngine)
        used[places] = engine.forward_passes
    assert used[PLACES] < 0.5 * used[1]


@pytest.mark.parametrize(("n", "places", "expected"), [(3, 4, 3), (9, 4, 4), (5, 1, 1), (1, 4, 1)])
def test_as_many_are_written_at_a_time_as_there_are_places(
    n: int, places: int, expected: int, engines: Make
) -> None:
    rates = AtATime(expected)
    list(run(VotingDecoder(solo(engines, rates, places=places), n, best_value), request()))
    assert rates.most == expected


def test_the_engine_with_the_fewest_places_counts(engines: Make) -> None:
    rates = AtATime(3, timeout_s=0.05)
    draft, target = engines(1, places=4), engines(2, places=2)
    decoder = SpecGuardDecoder(
        draft, target, RewardVerifier(TextReward(rates)), num_candidates=1, shape=SHAPE
    )
    list(run(VotingDecoder(decoder, 6, majority), request()))
    assert rates.most == 2
    assert_usable(draft, target)


def test_hooks_see_one_answer_after_the_other(engines: Make) -> None:
    def asked_of(decoder: Decoder) -> list[str]:
        asked: list[str] = []

        def review(step: Step) -> Review:
            asked.append(f"review {step.text}")
            return Review.KEEP

        def stop_when(step: Step) -> bool:
            asked.append(f"stop {step.text}")
            return step.number == 2

        list(run(VotingDecoder(decoder, 5, majority), request(review=review, stop_when=stop_when)))
        return asked

    assert asked_of(solo(engines)) == asked_of(solo(engines, places=1))


# --- with other requests


def test_another_request_gets_its_turn_between_two_answers(engines: Make) -> None:
    decoder = solo(engines, places=2, delay_s=0.002, end=-40.0)
    vote = run(VotingDecoder(decoder, 24, majority), request())
    done = threading.Event()
    voting = threading.Thread(target=lambda: (list(vote), done.set()))
    voting.start()
    (engine,) = decoder.engines
    assert isinstance(engine, ToyEngine)
    while engine.forward_passes < 20:
        time.sleep(0.001)
    assert list(run(decoder, request(5, max_tokens=9)))
    assert not done.is_set(), "the vote goes on"
    voting.join(PATIENCE_S)
    assert done.is_set()
    assert_usable(engine)


def test_votes_that_want_all_places_do_not_wait_for_each_other_for_ever(engines: Make) -> None:
    decoder = rsd(engines, places=3)
    expected = [list(VotingDecoder(decoder, 6, majority).decode(request(n))) for n in range(5)]
    answers: dict[int, list[Step]] = {}

    def ask(number: int) -> None:
        answers[number] = list(run(VotingDecoder(decoder, 6, majority), request(number)))

    threads = [threading.Thread(target=ask, args=[number]) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    for number in range(5):
        assert plain(answers[number]) == plain(expected[number])
    assert_usable(*decoder.engines)


def test_no_answer_may_ask_the_model_that_writes_it(engines: Make) -> None:
    def asks_own(messages: Any, steps: Sequence[str]) -> float:
        list(run(decoder, request()))
        return 0.5

    decoder = solo(engines, asks_own, places=PLACES)
    with pytest.raises(ConfigurationError, match="ask another model"):
        list(run(VotingDecoder(decoder, 4, best_value), request()))
    assert_usable(*decoder.engines)


# --- cancelling and errors


@pytest.mark.parametrize("make", [solo, rsd])
@pytest.mark.parametrize("asks", [0, 1, 30, 150])
def test_a_vote_that_is_cancelled_ends_all_its_answers(
    make: Callable[..., Decoder], asks: int, engines: Make
) -> None:
    decoder = make(engines, end=-40.0)
    left = threading.Semaphore(asks)
    asked = request(cancelled=lambda: not left.acquire(blocking=False))
    with pytest.raises(DecodingCancelled):
        list(run(VotingDecoder(decoder, 8, majority), asked))
    assert_usable(*decoder.engines)


def test_who_stops_listening_stops_all_answers(engines: Make) -> None:
    decoder = solo(engines, delay_s=0.002, end=-40.0)
    (engine,) = decoder.engines
    assert isinstance(engine, ToyEngine)
    stop = threading.Event()
    steps = run(VotingDecoder(decoder, 64, majority), request(cancelled=stop.is_set))
    threading.Timer(0.2, stop.set).start()
    with pytest.raises(DecodingCancelled):
        list(steps)
    passes = engine.forward_passes
    time.sleep(0.05)
    assert engine.forward_passes == passes
    assert not [each for each in threading.enumerate() if each.name == "specguard-helper"]
    assert_usable(engine)


@pytest.mark.parametrize("failing", [0, 1, 5])
def test_an_error_in_one_answer_is_the_votes_own_and_ends_the_others(
    failing: int, engines: Make
) -> None:
    calls, lock = [], threading.Lock()

    def fails(messages: Any, steps: Sequence[str]) -> float:
        with lock:
            calls.append(steps)
            number = len(calls) - 1
        if number == failing:
            raise ZeroDivisionError
        return 0.5

    decoder = solo(engines, fails)
    with pytest.raises(ZeroDivisionError):
        list(run(VotingDecoder(decoder, 24, best_value), request()))
    assert len(calls) <= failing + 1 + PLACES
    assert_usable(*decoder.engines)


# --- jobs


def number_of(number: int) -> Callable[[Cancelled], int]:
    def job(cancelled: Cancelled) -> int:
        time.sleep(0.01 * ((number * 7) % 3))
        return number

    return job


def test_results_come_in_the_order_of_the_jobs(engines: Make) -> None:
    engine = engines()
    with engine.exclusive():
        assert side_by_side([number_of(n) for n in range(12)], [engine], None) == [*range(12)]
        assert side_by_side([], [engine], None) == []
    assert_usable(engine)


def test_on_the_compute_thread_there_is_no_help(engines: Make) -> None:
    engine = engines()
    threads: set[str] = set()

    def job(cancelled: Cancelled) -> None:
        threads.add(threading.current_thread().name)

    with engine.exclusive():
        compute_thread.run(lambda: side_by_side([job] * 6, [engine], None))
    assert threads == {"specguard-compute"}
