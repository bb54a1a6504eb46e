"""Several requests at a time on one pair of engines: each gets what it would get alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from specguard_chains import ChatSpecGuard
from specguard_chains.background import run
from specguard_chains.decoding import prefixes
from specguard_chains.decoding.baselines import SoloDecoder
from specguard_chains.decoding.boundaries import Boundary, StepShape
from specguard_chains.decoding.calibration import Bounds, Calibration
from specguard_chains.decoding.constraint import Constraint
from specguard_chains.decoding.decoder import Decoder, Request
from specguard_chains.decoding.engine import Candidate, Engine, Prompt, Session
from specguard_chains.decoding.grounding import GroundingSpec
from specguard_chains.decoding.rewards import ValueHead
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.decoding.specguard import SpecGuardDecoder
from specguard_chains.decoding.speculation import Speculation
from specguard_chains.decoding.speculative import SpeculativeDecoder
from specguard_chains.decoding.steps import Review, Source, Step, StepSeconds
from specguard_chains.decoding.verification import EnsembleVerifier
from specguard_chains.errors import DecodingCancelled, EngineError, QueueFullError
from tests.toy_engine import END, FloatArray, ToyEngine, random_policy

N = 8
GREEDY, WARM = Sampling(temperature=0), Sampling(temperature=0.9, top_p=0.95)
SHAPE = StepShape(max_tokens=12)
CALIBRATION = Calibration(
    confidence=Bounds(low=-5.0, high=0.0), grounding=Bounds(low=0.0, high=1.0)
)
HEAD = ValueHead(draft="draft", layer=1, weights=(1.0, 1.0, 1.0, 1.0), bias=0.5)
PATIENCE_S = 30.0


def policy(seed: int, spread: float) -> Callable[[tuple[int, ...]], FloatArray]:
    """Every token of the sequence changes what comes next; the larger the spread, the more."""
    letters = random_policy(1, end=-40.0)

    def logits(tokens: tuple[int, ...]) -> FloatArray:
        noise = np.random.default_rng([seed, crc32(repr(tokens).encode())]).normal(size=258)
        row = letters(tokens) + spread * noise.astype(np.float32)
        row[END] = -40.0
        return row

    return logits


class Pair:
    """A draft and a target that mostly agree."""

    def __init__(self, max_parallel: int, **settings: Any) -> None:
        self.draft = ToyEngine(policy(1, 1.0), name="draft", max_parallel=max_parallel, **settings)
        self.target = ToyEngine(
            policy(1, 1.1), name="target", max_parallel=max_parallel, **settings
        )

    def specguard(self, **settings: Any) -> Decoder:
        verifier = EnsembleVerifier(
            CALIBRATION,
            confidence_weight=settings.pop("confidence_weight", 0.5),
            threshold=settings.pop("threshold", 0.45),
            value_head=settings.pop("value_head", None),
            value_weight=settings.pop("value_weight", 0.0),
        )
        return SpecGuardDecoder(self.draft, self.target, verifier, shape=SHAPE, **settings)

    def close(self) -> None:
        self.draft.close()
        self.target.close()


Make = Callable[[Pair], Decoder]
KINDS: dict[str, Make] = {
    "grounded, three candidates": lambda pair: pair.specguard(num_candidates=3),
    "with a hidden state": lambda pair: pair.specguard(
        num_candidates=2, value_head=HEAD, value_weight=0.3
    ),
    "confidence alone": lambda pair: pair.specguard(confidence_weight=1.0, threshold=0.7),
    "nothing accepted": lambda pair: pair.specguard(threshold=1.0, num_candidates=2),
    "everything accepted": lambda pair: pair.specguard(threshold=0.0),
    "target reads": lambda pair: pair.specguard(verify_with="target", num_candidates=2),
    "target looks on": lambda pair: pair.specguard(verify_with="target", num_candidates=1),
    "dense grounding": lambda pair: pair.specguard(grounding=GroundingSpec.named("dense")),
    "target alone": lambda pair: SoloDecoder(pair.target, Source.TARGET, SHAPE),
    "a chain": lambda pair: SpeculativeDecoder(
        pair.draft, pair.target, Speculation((1,) * 4), SHAPE
    ),
    "a tree": lambda pair: SpeculativeDecoder(
        pair.draft, pair.target, Speculation((3, 2, 1)), SHAPE
    ),
}


def request(number: int, **settings: Any) -> Request:
    prompt = Prompt(text=f"{'What all of them begin with. ' * 2}Question {number}?")
    sampling = GREEDY if number % 3 == 0 else WARM
    return Request(
        **{"prompt": prompt, "sampling": sampling, "max_tokens": 60, "seed": number, **settings}
    )


def ask(decoder: Decoder, request: Request) -> list[Step] | BaseException:
    try:
        return list(run(decoder, request))
    except BaseException as error:
        return error


def ask_together(
    jobs: Sequence[tuple[Decoder, Request]],
) -> list[list[Step] | BaseException]:
    """Ask all of them at once, and wait until all have been answered."""
    barrier = threading.Barrier(len(jobs))

    def work(job: tuple[Decoder, Request]) -> list[Step] | BaseException:
        barrier.wait(PATIENCE_S)
        return ask(*job)

    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(work, jobs, timeout=PATIENCE_S))


SIGNALS = ("score", "confidence", "grounding", "value")


def plain(step: Step) -> Step:
    """A step without its signals, its time, and who has read the prompt."""
    unread = {f"{model}_{what}": 0 for model in ("draft", "target") for what in ("read", "reused")}
    return replace(
        step,
        tokens=replace(step.tokens, **unread),
        seconds=StepSeconds(),
        passages=(),
        **dict.fromkeys(SIGNALS),
    )


def assert_same(ours: list[Step] | BaseException, theirs: list[Step] | BaseException) -> None:
    """Sums may differ in the last digit, as they are taken in the order of the cells."""
    assert isinstance(ours, list), ours
    assert isinstance(theirs, list), theirs
    assert [*map(plain, ours)] == [*map(plain, theirs)]
    for one, other in zip(ours, theirs, strict=True):
        assert one.passages == pytest.approx(other.passages, abs=1e-5)
        for name in SIGNALS:
            assert getattr(one, name) == pytest.approx(getattr(other, name), abs=1e-5)


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "POLL_S", 0.005)


@pytest.fixture
def pair() -> Iterator[Pair]:
    with closing(Pair(N)) as pair:
        yield pair


@pytest.fixture
def alone() -> Iterator[Pair]:
    with closing(Pair(1)) as pair:
        yield pair


def passes(pair: Pair) -> int:
    return pair.draft.forward_passes + pair.target.forward_passes


def assert_clean(*engines: ToyEngine) -> None:
    """Nothing is left but what is kept for later requests, and that goes when it is told to."""
    for engine in engines:
        assert engine.memory is not None
        engine.clear()
        assert engine.memory.taken == 0
        with closing(engine.open(Prompt(text="still alive?"))) as session:
            assert session.sample(1, Boundary("\0", max_tokens=3), GREEDY, seed=[0])


# --- each as alone


@pytest.mark.parametrize("kind", KINDS)
def test_each_is_answered_as_if_it_were_alone(kind: str, pair: Pair, alone: Pair) -> None:
    expected = [ask(KINDS[kind](alone), request(n)) for n in range(N)]
    answers = ask_together([(KINDS[kind](pair), request(n)) for n in range(N)])
    for ours, theirs in zip(answers, expected, strict=True):
        assert_same(ours, theirs)
    assert passes(pair) < 0.7 * passes(alone)
    assert_clean(pair.draft, pair.target)


@pytest.mark.parametrize("round_", range(3))
def test_different_decoders_do_not_disturb_each_other(round_: int, pair: Pair, alone: Pair) -> None:
    kinds = [*KINDS.values()][round_::2][:N]
    numbers = range(10 * round_, 10 * round_ + len(kinds))
    expected = [ask(kind(alone), request(n)) for kind, n in zip(kinds, numbers, strict=True)]
    answers = ask_together(
        [(kind(pair), request(n)) for kind, n in zip(kinds, numbers, strict=True)]
    )
    for ours, theirs in zip(answers, expected, strict=True):
        assert_same(ours, theirs)
    assert_clean(pair.draft, pair.target)


def test_constraints_and_passages_go_together(pair: Pair, alone: Pair) -> None:
    limits = [Constraint.regex("[ab]{20,30}"), None, Constraint.regex("(cd ?){9,12}"), None]
    passages = [(), ("all of them",), (), ("begin with", "Question")]

    def jobs(pair: Pair) -> list[tuple[Decoder, Request]]:
        requests = [
            replace(base := request(n), constraint=c, prompt=replace(base.prompt, passages=p))
            for n, (c, p) in enumerate(zip(limits, passages, strict=True))
        ]
        return [(pair.specguard(num_candidates=2), each) for each in requests]

    expected = [ask(*job) for job in jobs(alone)]
    for ours, theirs in zip(ask_together(jobs(pair)), expected, strict=True):
        assert_same(ours, theirs)


def test_more_requests_than_places_queue(alone: Pair) -> None:
    with closing(Pair(3)) as pair:
        numbers = range(10)
        expected = [ask(alone.specguard(), request(n)) for n in numbers]
        answers = ask_together([(pair.specguard(), request(n)) for n in numbers])
        for ours, theirs in zip(answers, expected, strict=True):
            assert_same(ours, theirs)
        refused = ask_together([(pair.specguard(), request(n, max_waiting=0)) for n in range(8)])
        assert {type(answer) for answer in refused} == {list, QueueFullError}


def test_a_request_that_does_something_else_holds_up_nobody(pair: Pair) -> None:
    """Its reviewer waits until all the others have been answered."""
    answered = threading.Event()

    def review(_: Step) -> Review:
        assert answered.wait(PATIENCE_S)
        return Review.KEEP

    with ThreadPoolExecutor(4) as pool:
        slow = pool.submit(ask, pair.specguard(), request(0, review=review))
        others = [pool.submit(ask, pair.specguard(), request(n)) for n in (1, 2, 3)]
        for other in others:
            assert isinstance(other.result(PATIENCE_S), list)
        answered.set()
        assert isinstance(slow.result(PATIENCE_S), list)


# --- faults of one of them


def test_one_that_is_cancelled_leaves_the_others_alone(pair: Pair, alone: Pair) -> None:
    asked = 0

    def cancelled() -> bool:
        nonlocal asked
        asked += 1
        return asked > 90  # in the middle of a pass, as the toy asks for every token

    requests = [request(n) for n in range(4)]
    expected = [ask(alone.specguard(num_candidates=3), each) for each in requests]
    requests[1] = replace(requests[1], cancelled=cancelled)
    answers = ask_together([(pair.specguard(num_candidates=3), each) for each in requests])
    assert isinstance(answers[1], DecodingCancelled)
    for number in (0, 2, 3):
        assert_same(answers[number], expected[number])
    assert_clean(pair.draft, pair.target)


def test_many_that_are_cancelled_at_any_moment_leave_nothing_behind(pair: Pair) -> None:
    kinds = [*KINDS.values()]

    def work(number: int) -> list[Step] | BaseException:
        left = int(np.random.default_rng(number).integers(1, 400))

        def cancelled() -> bool:
            nonlocal left
            left -= 1
            return left < 0

        asked = request(number % 5, seed=number, cancelled=cancelled)
        return ask(kinds[number % len(kinds)](pair), asked)

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(work, range(60), timeout=4 * PATIENCE_S))
    assert {type(answer) for answer in answers} == {list, DecodingCancelled}
    assert_clean(pair.draft, pair.target)


def test_one_that_fails_leaves_the_others_alone(
    pair: Pair, alone: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    fragile = pair.target.policy
    marked = tuple(b"Question 2?")

    def failing(tokens: tuple[int, ...]) -> FloatArray:
        if len(tokens) > 100 and tokens[58 : 58 + len(marked)] == marked:
            raise EngineError("this one cannot be computed")
        return fragile(tokens)

    monkeypatch.setattr(pair.target, "policy", failing)
    make = KINDS["target alone"]
    expected = [ask(make(alone), request(n)) for n in range(4)]
    answers = ask_together([(make(pair), request(n)) for n in range(4)])
    assert isinstance(answers[2], EngineError)
    for number in (0, 1, 3):
        assert_same(answers[number], expected[number])
    monkeypatch.undo()
    assert_clean(pair.target)


def test_closing_the_engine_ends_all_requests() -> None:
    with closing(Pair(3, delay_s=0.002)) as pair:
        decoder = SoloDecoder(pair.target, Source.TARGET, SHAPE)
        with ThreadPoolExecutor(6) as pool:  # three of them wait
            asked = [pool.submit(ask, decoder, request(n, max_tokens=2000)) for n in range(6)]
            while pair.target.forward_passes < 20:
                time.sleep(0.001)
            pair.close()
            for each in asked:
                assert isinstance(each.result(PATIENCE_S), EngineError)
        assert pair.target.memory is not None
        assert pair.target.memory.taken == 0


# --- common beginnings

SHARED = "The same words for everybody, again and again. " * 3


def sessions(engine: Engine, *texts: str, **settings: Any) -> list[Session]:
    return [engine.open(Prompt(text=text), **settings) for text in texts]


def sample(session: Session, n: int = 2) -> list[Candidate]:
    return session.sample(n, Boundary("\0", max_tokens=8), WARM, seed=[3])


def sample_together(opened: Sequence[Session]) -> list[list[Candidate]]:
    with ThreadPoolExecutor(len(opened)) as pool:
        return list(pool.map(sample, opened, timeout=PATIENCE_S))


@pytest.mark.parametrize("spec", [None, GroundingSpec()], ids=["plain", "grounded"])
def test_a_common_beginning_is_read_once(spec: GroundingSpec | None) -> None:
    engine, alone = ToyEngine(policy(1, 1.0), max_parallel=N), ToyEngine(policy(1, 1.0))
    texts = [f"{SHARED}{number}" for number in range(N)]
    opened = sessions(engine, *texts, grounding=spec)
    together = sample_together(opened)
    read = sum(session.counters.read for session in opened)
    assert len(SHARED) <= read <= len(SHARED) + N * 3
    assert sum(session.counters.reused for session in opened) >= (N - 1) * len(SHARED)
    for text, ours in zip(texts, together, strict=True):
        with closing(alone.open(Prompt(text=text), grounding=spec)) as session:
            for one, other in zip(ours, sample(session), strict=True):
                assert one.tokens == other.tokens
                if spec is not None:
                    assert one.reading.grounding == pytest.approx(other.reading.grounding, abs=2e-6)
    for session in opened:
        session.close()


def test_what_is_read_for_another_grounding_is_not_shared() -> None:
    engine = ToyEngine(policy(1, 1.0), max_parallel=3)
    specs = [None, GroundingSpec(), GroundingSpec.named("dense")]
    opened = [engine.open(Prompt(text=SHARED), grounding=spec) for spec in specs]
    sample_together(opened)
    assert [session.counters.reused for session in opened] == [0, 0, 0]


def test_one_that_gives_up_reading_is_not_waited_for() -> None:
    engine = ToyEngine(policy(1, 1.0), max_parallel=2, delay_s=0.01)
    stop = threading.Event()
    first, second = (
        engine.open(Prompt(text=SHARED * 4 + end), cancelled=asked)
        for end, asked in (("a", stop.is_set), ("b", None))
    )
    with ThreadPoolExecutor(2) as pool:
        reading = pool.submit(sample, first)
        while not engine.forward_passes:
            time.sleep(0.001)
        waiting = pool.submit(sample, second)
        stop.set()
        with pytest.raises(DecodingCancelled):
            reading.result(PATIENCE_S)
        waiting.result(PATIENCE_S)
    first.close()
    second.close()
    assert_clean(engine)


def test_memory_of_one_s_own_is_not_kept_for_others() -> None:
    """Nobody could begin with it, and it would stand in the place of what they can."""
    engine = ToyEngine(policy(1, 1.0), max_parallel=2)
    with closing(engine.open(Prompt(text="question"))) as session:
        sample(session)
    assert len(engine._prefixes._idle) == 1
    shared, engine.memory = engine.memory, None
    with closing(engine.open(Prompt(text="question"))) as session:
        sample(session)
    engine.memory = shared
    assert len(engine._prefixes._idle) == 1
    assert engine._prefixes._idle[0].cache.shareable


def test_a_conversation_goes_on_where_it_was_and_takes_one_place() -> None:
    engine = ToyEngine(policy(1, 1.0), max_parallel=2)
    text = SHARED
    for turn in range(4):
        with closing(engine.open(Prompt(text=text))) as session:
            (step, _) = sample(session)
            session.accept(step)
            sample(session)
            reused = session.counters.reused
            assert reused == 0 if turn == 0 else reused >= len(text) - len(step.text) - 12
        text += step.text
    assert len(engine._prefixes._idle) <= 2


def test_the_sequence_that_was_not_used_for_longest_makes_room() -> None:
    engine = ToyEngine(policy(1, 1.0), max_parallel=3, context_length=300)
    assert engine.memory is not None
    engine.memory = type(engine.memory)(700)  # room for three prompts, not for four
    texts = [letter * 200 for letter in "abc"]
    for text in texts:
        with closing(engine.open(Prompt(text=text))) as session:
            sample(session)
    with closing(engine.open(Prompt(text=texts[0]))) as again:  # is used now, "b" was not
        sample(again)
        assert again.counters.reused == 201
    with closing(engine.open(Prompt(text="d" * 200))) as session:
        sample(session)
    reused = {}
    for text in ("a" * 200, "b" * 200):
        with closing(engine.open(Prompt(text=text))) as session:
            sample(session)
            reused[text[0]] = session.counters.reused
    assert reused == {"a": 201, "b": 0}


# --- LangChain


def test_a_batch_is_decoded_together() -> None:
    questions = [f"{SHARED}{number}" for number in range(N)]
    answers, used = {}, {}
    for n in (1, N):
        pair = Pair(n)
        model = ChatSpecGuard(
            draft=pair.draft,
            target=pair.target,
            confidence_weight=1.0,
            threshold=0.6,
            temperature=0,
            max_tokens=40,
            seed=1,
        )
        answers[n] = [answer.text for answer in model.batch(questions, {"max_concurrency": N})]
        used[n] = passes(pair)
    assert answers[1] == answers[N]
    assert used[N] < 0.7 * used[1]
