"""Who uses a model takes part in the decoding: reviewing steps, stopping after one, queueing."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from specguard_chains import background
from specguard_chains.decoding.baselines import SoloDecoder
from specguard_chains.decoding.boundaries import StepShape
from specguard_chains.decoding.calibration import Bounds, Calibration
from specguard_chains.decoding.decoder import Decoder, Request
from specguard_chains.decoding.engine import Prompt
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.decoding.specguard import SpecGuardDecoder
from specguard_chains.decoding.speculation import Speculation
from specguard_chains.decoding.speculative import SpeculativeDecoder
from specguard_chains.decoding.steps import Review, Source, Step, Verdict
from specguard_chains.decoding.verification import EnsembleVerifier
from specguard_chains.errors import ConfigurationError, DecodingCancelled, QueueFullError
from specguard_chains.metrics import Metrics
from tests.toy_engine import ToyEngine, random_policy, scripted_policy

GREEDY = Sampling(temperature=0)
WARM = Sampling(temperature=1, top_p=1)
BOUNDS = Calibration(confidence=Bounds(low=-5, high=0), grounding=Bounds(low=0, high=1))
SCRIPT = ("One.\n\n", "Two.\n\n", "Three.")
Hook = Callable[[Step], Any]


def toy(seed: int, **settings: Any) -> ToyEngine:
    """Writes until it is stopped, and is of many minds."""
    return ToyEngine(random_policy(seed, spread=0.5, end=-40.0), **settings)


def scripted(**settings: Any) -> ToyEngine:
    return ToyEngine(scripted_policy(*SCRIPT), **settings)


def specguard(draft: ToyEngine, target: ToyEngine, **settings: Any) -> SpecGuardDecoder:
    verifier = EnsembleVerifier(BOUNDS, confidence_weight=1, threshold=0.4)
    return SpecGuardDecoder(draft, target, verifier, num_candidates=2, **settings)


SHORT = StepShape(max_tokens=12)
DECODERS: dict[str, Callable[[], Decoder]] = {
    "target": lambda: SoloDecoder(toy(2), Source.TARGET, SHORT),
    "specguard": lambda: specguard(toy(1), toy(2), shape=SHORT),
    "as text": lambda: specguard(toy(1, vocabulary="other"), toy(2), shape=SHORT),
    "one model": lambda: (lambda engine: specguard(engine, engine, shape=SHORT))(toy(1)),
    "chain": lambda: SpeculativeDecoder(toy(1), toy(2), shape=SHORT),
    "tree": lambda: SpeculativeDecoder(toy(1), toy(2), Speculation((2, 2)), SHORT),
}


def request(sampling: Sampling = WARM, **more: Any) -> Request:
    more = {"max_tokens": 60, "seed": 1} | more
    return Request(Prompt(text="question"), sampling, **more)


def ask(decoder: Decoder, sampling: Sampling = WARM, **more: Any) -> list[Step]:
    return list(decoder.decode(request(sampling, **more)))


def text_of(steps: Sequence[Step]) -> str:
    return "".join(step.text for step in steps)


def assert_consistent(steps: Sequence[Step]) -> None:
    answer = text_of(steps)
    assert [step.number for step in steps] == list(range(1, len(steps) + 1))
    assert [answer[slice(*step.span)] for step in steps] == [step.text for step in steps]
    assert [step.finish_reason is None for step in steps] == [True] * (len(steps) - 1) + [False]


def once(said: Review, at: int = 1) -> tuple[Hook, list[Step]]:
    """A reviewer that says so of the first version of a step, and keeps all else."""
    seen: list[Step] = []

    def review(step: Step) -> Review:
        first = step.number == at and all(other.number != at for other in seen)
        seen.append(step)
        return said if first else Review.KEEP

    return review, seen


# --- review


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("decoder", DECODERS)
def test_a_reviewer_that_keeps_everything_changes_nothing(decoder: str, sampling: Sampling) -> None:
    seen: list[Step] = []

    def review(step: Step) -> str:
        seen.append(step)
        return "keep"

    plain = ask(DECODERS[decoder](), sampling)
    reviewed = ask(DECODERS[decoder](), sampling, review=review, stop_when=lambda step: False)
    assert [step.text for step in reviewed] == [step.text for step in plain]
    assert [step.tokens for step in reviewed] == [step.tokens for step in plain]
    assert {step.reviews for step in reviewed} == {(Review.KEEP,)}
    for shown, kept in zip(seen, reviewed, strict=True):
        assert shown.reviews == ()
        same = ("number", "text", "span", "source", "phase", "verdict", "candidates", "score")
        assert [getattr(shown, name) for name in (*same, "finish_reason")] == [
            getattr(kept, name) for name in (*same, "finish_reason")
        ]


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("decoder", DECODERS)
def test_another_version_is_another_one_even_at_temperature_0(
    decoder: str, sampling: Sampling
) -> None:
    seen: list[Step] = []

    def review(step: Step) -> Review:
        seen.append(step)
        return Review.REGENERATE if step.number == 1 else Review.KEEP

    steps = ask(DECODERS[decoder](), sampling, review=review, max_reviews=4)
    versions = [step.text for step in seen if step.number == 1]
    assert len(versions) == 4
    assert len(set(versions)) >= 3, versions
    assert steps[0].text == versions[-1]
    assert steps[0].reviews == (Review.REGENERATE,) * 4
    assert_consistent(steps)
    again = ask(DECODERS[decoder](), sampling, review=review, max_reviews=4)
    assert [step.text for step in again] == [step.text for step in steps], "equal seeds"


@pytest.mark.parametrize("decoder", DECODERS)
def test_what_a_regenerated_step_is_followed_by_is_what_follows_its_text(decoder: str) -> None:
    """Nothing of the version that was given up stays in a session."""
    review, _ = once(Review.REGENERATE, at=2)
    steps = ask(DECODERS[decoder](), GREEDY, review=review)
    assert len(steps) > 2
    answer = text_of(steps)
    fresh = DECODERS[decoder]()
    if isinstance(fresh, SpecGuardDecoder):
        return  # its next step depends on verdicts; the models' own text is compared below
    engine = fresh.engines[-1]
    assert isinstance(engine, ToyEngine)
    tokens = engine.encode(Prompt(text="question")) + list(answer.encode())
    cut = steps[2].span[0]
    for at in range(cut, len(answer)):
        before = len(tokens) - len(answer) + at
        assert int(engine.policy(tuple(tokens[:before])).argmax()) == tokens[before]


def test_the_target_writes_a_step_that_was_drafted_and_accepted_anew() -> None:
    review, seen = once(Review.REGENERATE)
    draft = ToyEngine(scripted_policy("Draft one.\n\n", *SCRIPT[1:]))
    steps = ask(specguard(draft, scripted()), GREEDY, review=review)
    assert [step.text for step in seen[:2]] == ["Draft one.\n\n", "One.\n\n"]
    assert [step.source for step in seen[:2]] == ["draft", "target"]
    first = steps[0]
    assert (first.text, first.source, first.verdict) == ("One.\n\n", "target", Verdict.ACCEPTED)
    assert first.candidates == ("Draft one.\n\n",) * 2
    assert first.reviews == (Review.REGENERATE, Review.KEEP)
    assert (first.tokens.kept, first.tokens.regenerated) == (0, 6)
    assert Metrics.of(steps).num_accepted_tokens == sum(len(text) for text in SCRIPT[1:]) + 1


@pytest.mark.parametrize("decoder", ["chain", "tree"])
def test_drafted_tokens_count_as_kept_in_the_version_that_stays(decoder: str) -> None:
    def review(step: Step) -> Review:
        return Review.REGENERATE

    steps = ask(DECODERS[decoder](), WARM, review=review, max_reviews=3)
    for step in steps:
        assert step.tokens.kept <= step.answer_tokens
    assert Metrics.of(steps).num_accepted_tokens <= sum(step.answer_tokens for step in steps)


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("at", [1, 2])
def test_a_reviewer_ends_the_answer_with_a_step(decoder: str, at: int) -> None:
    review, seen = once(Review.STOP, at)
    steps = ask(DECODERS[decoder](), review=review)
    assert len(steps) == len(seen) == at
    assert (steps[-1].finish_reason, steps[-1].reviews) == ("stop", (Review.STOP,))
    assert_consistent(steps)
    assert text_of(steps) == text_of(ask(DECODERS[decoder]())[:at])


def test_the_last_review_is_heeded_if_it_stops() -> None:
    said = iter([Review.REGENERATE, Review.STOP])
    (step,) = ask(DECODERS["target"](), review=lambda step: next(said), max_reviews=2)
    assert (step.finish_reason, step.reviews) == ("stop", (Review.REGENERATE, Review.STOP))


def test_one_review_leaves_no_second_version() -> None:
    steps = ask(DECODERS["target"](), review=lambda step: "regenerate", max_reviews=1)
    assert [step.text for step in steps] == [step.text for step in ask(DECODERS["target"]())]
    assert {step.reviews for step in steps} == {(Review.REGENERATE,)}


def test_a_reviewer_sees_what_a_step_would_add_and_how_the_answer_would_end() -> None:
    seen: list[tuple[str, Any]] = []

    def review(step: Step) -> Review:
        seen.append((step.text, step.finish_reason))
        return Review.KEEP

    decoder = SoloDecoder(scripted(), Source.TARGET)
    ask(decoder, GREEDY, review=review, stop=(".\n\nTh",))
    assert seen == [("One", None), (".\n\nTwo", None), ("", "stop")]
    seen.clear()
    ask(decoder, GREEDY, review=review, max_tokens=9)
    assert seen == [("One.\n\n", None), ("Two", "length")]


@pytest.mark.parametrize("said", [None, True, "yes", 1, [], "KEEP", ("keep",)])
@pytest.mark.parametrize("decoder", ["target", "specguard", "chain"])
def test_what_is_no_review_is_refused_with_what_is_one(said: Any, decoder: str) -> None:
    writes = DECODERS[decoder]()
    with pytest.raises(ConfigurationError, match="must return 'keep', 'regenerate', 'stop', not"):
        ask(writes, review=lambda step: said)
    assert ask(writes), "the engines are usable"


@pytest.mark.parametrize("name", ["review", "stop_when"])
@pytest.mark.parametrize("decoder", DECODERS)
def test_an_error_of_a_hook_is_raised_unchanged_and_the_engines_are_usable(
    decoder: str, name: str
) -> None:
    def fail(step: Step) -> Any:
        if step.number == 2:
            raise ZeroDivisionError("of the user")
        return "keep" if name == "review" else False

    writes, steps = DECODERS[decoder](), []
    with pytest.raises(ZeroDivisionError, match="of the user"):
        for step in background.run(writes, request(**{name: fail})):
            steps.append(step)
    assert [step.number for step in steps] == [1]
    after = list(background.run(writes, request()))
    assert text_of(after) == text_of(ask(DECODERS[decoder]()))


@pytest.mark.parametrize(("name", "value"), [("max_reviews", 0), ("max_waiting", -1)])
def test_limits_are_validated(name: str, value: int) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} must be"):
        request(**{name: value})


# --- stopping after a step


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("at", [1, 2])
def test_an_answer_stops_after_a_step(decoder: str, at: int) -> None:
    asked: list[Step] = []

    def stop_when(step: Step) -> bool:
        asked.append(step)
        return step.number == at

    steps = ask(DECODERS[decoder](), stop_when=stop_when)
    assert len(steps) == len(asked) == at
    assert steps[-1].finish_reason == "stop"
    assert [step.finish_reason for step in asked] == [None] * at
    assert_consistent(steps)
    plain = ask(DECODERS[decoder]())
    assert [step.text for step in steps] == [step.text for step in plain[:at]]


def test_text_that_was_held_back_comes_with_the_step_that_is_the_last() -> None:
    decoder = SoloDecoder(scripted(), Source.TARGET)
    stop = (".\n\nThus",)
    for hook in ({"stop_when": lambda step: step.number == 2}, {"review": once(Review.STOP, 2)[0]}):
        steps = ask(decoder, GREEDY, stop=stop, **hook)
        assert [step.text for step in steps] == ["One", ".\n\nTwo.\n\n"]
        assert_consistent(steps)


def test_nobody_is_asked_about_an_answer_that_has_ended() -> None:
    asked: list[int] = []
    decoder = SoloDecoder(scripted(), Source.TARGET)
    steps = ask(decoder, GREEDY, stop_when=lambda step: asked.append(step.number))
    assert (len(steps), asked) == (3, [1, 2])


def test_both_hooks_are_asked_in_turn() -> None:
    asked: list[str] = []

    def review(step: Step) -> Review:
        asked.append(f"review {step.number}")
        return Review.KEEP

    def stop_when(step: Step) -> bool:
        asked.append(f"stop {step.number}? {step.reviews == (Review.KEEP,)}")
        return step.number == 2

    ask(SoloDecoder(scripted(), Source.TARGET), GREEDY, review=review, stop_when=stop_when)
    assert asked == ["review 1", "stop 1? True", "review 2", "stop 2? True"]


# --- hooks and other requests


def test_a_hook_may_ask_another_model_and_not_its_own() -> None:
    mine, other = SoloDecoder(scripted(), Source.TARGET), SoloDecoder(scripted(), Source.TARGET)
    asked: list[str] = []

    def ask_other(step: Step) -> str:
        asked.append(text_of(list(background.run(other, request(GREEDY)))))
        return "keep"

    steps = list(background.run(mine, request(GREEDY, review=ask_other)))
    assert asked == [text_of(steps)] * 3 == ["".join(SCRIPT)] * 3

    def ask_own(step: Step) -> str:
        list(background.run(mine, request(GREEDY)))
        return "keep"

    for name in ("review", "stop_when"):
        with pytest.raises(ConfigurationError, match=r"let the reviewer.*ask another model"):
            list(background.run(mine, request(GREEDY, **{name: ask_own})))
    assert text_of(list(background.run(mine, request(GREEDY)))) == "".join(SCRIPT)


def test_a_hook_may_not_ask_its_own_model_by_way_of_another() -> None:
    mine, other = SoloDecoder(scripted(), Source.TARGET), SoloDecoder(scripted(), Source.TARGET)

    def ask_own(step: Step) -> bool:
        return bool(list(background.run(mine, request(GREEDY))))

    def ask_other(step: Step) -> bool:
        return bool(list(background.run(other, request(GREEDY, stop_when=ask_own))))

    with pytest.raises(ConfigurationError, match="another model"):
        list(background.run(mine, request(GREEDY, stop_when=ask_other)))


def test_what_follows_a_step_outside_of_a_hook_may_ask_the_same_model() -> None:
    mine = SoloDecoder(scripted(), Source.TARGET)
    for _ in background.run(mine, request(GREEDY, stop_when=lambda step: False)):
        assert text_of(list(background.run(mine, request(GREEDY)))) == "".join(SCRIPT)


@pytest.mark.parametrize("asks_itself", [True, False])
async def test_coroutines_of_hooks_run_on_the_consumers_loop(asks_itself: bool) -> None:
    mine, other = SoloDecoder(scripted(), Source.TARGET), SoloDecoder(scripted(), Source.TARGET)
    loop, texts = asyncio.get_running_loop(), []

    async def review(step: Step) -> str:
        assert asyncio.get_running_loop() is loop
        asked = mine if asks_itself else other
        texts.append(text_of([s async for s in background.arun(asked, request(GREEDY))]))
        return "keep"

    answer = background.arun(mine, request(GREEDY, review=review))
    if asks_itself:
        with pytest.raises(ConfigurationError, match="another model"):
            [step async for step in answer]
    else:
        steps = [step async for step in answer]
        assert texts == [text_of(steps)] * 3


def test_another_model_decodes_while_a_hook_takes_its_time() -> None:
    mine, other = SoloDecoder(scripted(), Source.TARGET), SoloDecoder(scripted(), Source.TARGET)
    waits, go_on = threading.Event(), threading.Event()

    def wait(step: Step) -> str:
        waits.set()
        assert go_on.wait(5)
        return "keep"

    answer = background.run(mine, request(GREEDY, review=wait))
    reader = threading.Thread(target=lambda: list(answer))
    reader.start()
    assert waits.wait(5)
    assert text_of(list(background.run(other, request(GREEDY)))) == "".join(SCRIPT)
    assert not go_on.is_set()
    go_on.set()
    reader.join(5)
    assert not reader.is_alive()


def test_giving_up_while_a_hook_runs_ends_the_decoding_with_it() -> None:
    engine = scripted()
    mine = SoloDecoder(engine, Source.TARGET)
    waits, go_on = threading.Event(), threading.Event()

    def wait(step: Step) -> bool:
        if step.number == 2:
            waits.set()
            assert go_on.wait(5)
        return False

    answer = background.run(mine, request(GREEDY, stop_when=wait))
    next(answer)
    assert waits.wait(5)
    answer.close()
    passes = engine.forward_passes
    go_on.set()
    assert text_of(list(background.run(mine, request(GREEDY)))) == "".join(SCRIPT)
    spent = engine.forward_passes - passes
    assert spent <= len("".join(SCRIPT)) + 2, "nothing more was computed for nobody"


async def test_cancelling_a_task_cancels_the_coroutine_that_its_hook_waits_for() -> None:
    mine = SoloDecoder(scripted(), Source.TARGET)
    waits, cancelled = asyncio.Event(), asyncio.Event()

    async def review(step: Step) -> str:
        waits.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return "keep"

    async def consume() -> None:
        async for _ in background.arun(mine, request(GREEDY, review=review)):
            pass

    task = asyncio.create_task(consume())
    await asyncio.wait_for(waits.wait(), 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(cancelled.wait(), 5)
    steps = [step async for step in background.arun(mine, request(GREEDY))]
    assert text_of(steps) == "".join(SCRIPT)


def test_a_deadline_holds_while_a_coroutine_of_a_sync_call_is_waited_for() -> None:
    mine = SoloDecoder(scripted(), Source.TARGET)
    cancelled = threading.Event()

    async def review(step: Step) -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return "keep"

    deadline = time.monotonic() + 0.1
    late = request(GREEDY, review=review, cancelled=lambda: time.monotonic() >= deadline)
    with pytest.raises(DecodingCancelled, match="waited for a hook"):
        list(background.run(mine, late))
    assert cancelled.is_set()
    assert text_of(list(background.run(mine, request(GREEDY)))) == "".join(SCRIPT)


def test_an_answer_that_nobody_wants_asks_no_hook() -> None:
    mine = SoloDecoder(scripted(), Source.TARGET)
    asked = []
    unwanted = request(GREEDY, review=asked.append, cancelled=lambda: True)
    with pytest.raises(DecodingCancelled):
        list(background.run(mine, unwanted))
    assert asked == []


def test_a_deadline_holds_while_steps_are_written_anew() -> None:
    """A reviewer that is never content does not outlast the caller's patience."""
    mine = SoloDecoder(toy(1, delay_s=0.001), Source.TARGET)
    deadline = time.monotonic() + 0.1
    endless = request(
        review=lambda step: "regenerate",
        max_reviews=10**6,
        cancelled=lambda: time.monotonic() > deadline,
    )
    with pytest.raises(DecodingCancelled):
        list(background.run(mine, endless))
    assert time.monotonic() < deadline + 2


# --- the queue


def test_a_full_queue_refuses_at_once_and_leaks_nothing() -> None:
    draft, target = scripted(), scripted()
    mine = specguard(draft, target)
    waits, go_on = threading.Event(), threading.Event()

    def wait(step: Step) -> bool:
        waits.set()
        assert go_on.wait(10)
        return False

    answers: list[str] = []

    def consume(**more: Any) -> None:
        answers.append(text_of(list(background.run(mine, request(GREEDY, **more)))))

    threads = [threading.Thread(target=consume, kwargs={"stop_when": wait})]
    threads[0].start()
    assert waits.wait(5)
    for waiting in range(2):
        threads.append(threading.Thread(target=consume, kwargs={"max_waiting": 2}))
        threads[-1].start()
        _until(lambda n=waiting: _queued(draft, target) == n + 1)
    start = time.monotonic()
    for limit in (0, 1, 2):
        with pytest.raises(QueueFullError, match=f"max_queue={limit}"):
            list(background.run(mine, request(GREEDY, max_waiting=limit)))
    assert time.monotonic() - start < 10
    assert _queued(draft, target) == 2
    go_on.set()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert answers == ["".join(SCRIPT)] * 3
    assert _queued(draft, target) == 0
    assert text_of(list(background.run(mine, request(GREEDY, max_waiting=0)))) == "".join(SCRIPT)


def test_a_full_queue_of_one_model_gives_the_other_one_back() -> None:
    first, second = sorted((scripted(), scripted()), key=id)  # as requests take them
    mine = specguard(first, second)
    with second.exclusive(), pytest.raises(QueueFullError):
        list(background.run(mine, request(GREEDY, max_waiting=0)))
    with first.exclusive(cancelled=lambda: True):  # it raises if it has to wait
        pass
    assert text_of(list(background.run(mine, request(GREEDY, max_waiting=0)))) == "".join(SCRIPT)


def _queued(*engines: ToyEngine) -> int:
    return sum(engine._queue.waiting for engine in engines)


def _until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.001)
