"""Several requests at a time in one context of llama.cpp: what each gets, and what is shared."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specguard_adapters.llama_cpp import LlamaCppEngine
from specguard_adapters.llama_cpp.context import Context
from specguard_chains.decoding.batcher import Part
from specguard_chains.decoding.boundaries import Boundary
from specguard_chains.decoding.cache import Rows
from specguard_chains.decoding.engine import Candidate, Prompt, Session
from specguard_chains.decoding.grounding import GroundingSpec
from specguard_chains.decoding.local_trees import TreeSession
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.decoding.token_tree import TokenTree
from specguard_chains.errors import (
    ConfigurationError,
    ContextOverflowError,
    DecodingCancelled,
    EngineError,
)
from tests.integration_tests.conftest import write_long_rope

pytestmark = pytest.mark.integration

N = 6
WARM = Sampling(temperature=0.8)
COMMON = "the cat in the hat and the rat in the inn are thin, "
TEXTS = [
    f"{COMMON}then there is {what} " for what in ("a hen", "an ant", "a hut", "her", "ten", "it")
]
PATIENCE_S = 60.0

Load = Callable[..., LlamaCppEngine]


@pytest.fixture
def load(tiny_model: Path) -> Iterator[Load]:
    with ExitStack() as stack:

        def load(path: Path = tiny_model, **settings: Any) -> LlamaCppEngine:
            sizes = {"n_ctx": 256, "max_candidates": 4, "candidate_tokens": 24, "n_threads": 1}
            exact = {"attention": True, "states": True, "kv_type": "f32"}
            engine = LlamaCppEngine(path, **(sizes | exact | settings))
            return stack.enter_context(closing(engine))

        yield load


def limit(tokens: int) -> Boundary:
    return Boundary("\0", max_tokens=tokens)


def work(engine: LlamaCppEngine, number: int) -> list[Candidate]:
    """Write, guess, read and grow a tree, each number in its own way."""
    spec = [None, GroundingSpec(), GroundingSpec.named("dense", layers=2)][number % 3]
    layer = [None, 0, 1][number % 3]
    seen: list[Candidate] = []
    with (
        engine.exclusive(),
        closing(
            engine.open(Prompt(text=TEXTS[number]), grounding=spec, state_layer=layer)
        ) as session,
    ):
        for turn in range(4):
            drafts = session.sample(1 + number % 4, limit(10), WARM, seed=[number, turn])
            guess = drafts[0] if turn % 2 else None
            seen += drafts
            seen += session.sample(2, limit(12), WARM, seed=[number, turn], guess=guess)
            session.read(drafts[-1])
            session.accept(drafts[-1])
            grow_a_tree(session)
    return seen


def grow_a_tree(session: TreeSession) -> None:
    tree = TokenTree((2, 1))
    for parent in (0, 1):
        rows = session.logits(tree)
        tree.add(int(rows[-1].argmax()), parent)
    session.logits(tree)


def assert_equal(ours: list[Candidate], theirs: list[Candidate]) -> None:
    assert [each.tokens for each in ours] == [each.tokens for each in theirs]
    for one, other in zip(ours, theirs, strict=True):
        for signal in ("logprobs", "grounding", "state"):
            mine, alone = getattr(one.reading, signal), getattr(other.reading, signal)
            assert (mine is None) == (alone is None)
            if alone is not None:
                np.testing.assert_allclose(mine, alone, rtol=1e-4, atol=1e-4)


def in_threads(engine: LlamaCppEngine, numbers: range) -> list[list[Candidate]]:
    with ThreadPoolExecutor(len(numbers)) as pool:
        return list(pool.map(lambda n: work(engine, n), numbers, timeout=PATIENCE_S))


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("max_parallel", [3, N])
def test_each_is_answered_as_if_it_were_alone(
    load: Load, tiny_model: Path, windowed_model: Path, windowed: bool, max_parallel: int
) -> None:
    path = windowed_model if windowed else tiny_model
    alone, together = load(path), load(path, max_parallel=max_parallel, n_batch=64)
    expected = [work(alone, number) for number in range(N)]
    for _ in range(2):  # the second time on what the first one has left
        for ours, theirs in zip(in_threads(together, range(N)), expected, strict=True):
            assert_equal(ours, theirs)


class Decodes:
    """Counts what goes through llama.cpp, and may hold it up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        self.before: Callable[[], None] = lambda: None
        decode = Context.decode

        def counted(context: Context, tokens: Any, *args: Any, **settings: Any) -> Any:
            self.before()
            self.sizes.append(len(tokens))
            return decode(context, tokens, *args, **settings)

        monkeypatch.setattr(Context, "decode", counted)


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> Decodes:
    return Decodes(monkeypatch)


def sample(session: Session, tokens: int = 20) -> Candidate:
    return session.sample(1, limit(tokens), WARM, seed=[1])[0]


def test_tokens_of_all_requests_are_computed_together(load: Load, decodes: Decodes) -> None:
    engine = load(max_parallel=N)
    sessions = [engine.open(Prompt(text=text)) for text in TEXTS]
    with ThreadPoolExecutor(N) as pool:
        written = [*pool.map(sample, sessions, timeout=PATIENCE_S)]
    assert sum(len(step.tokens) for step in written) == N * 20
    assert decodes.sizes.count(N) >= 15
    assert len(decodes.sizes) < 40


def test_a_common_beginning_is_computed_once(load: Load, decodes: Decodes) -> None:
    engine = load(max_parallel=N)
    sessions = [engine.open(Prompt(text=text), grounding=GroundingSpec()) for text in TEXTS]
    with ThreadPoolExecutor(N) as pool:
        list(pool.map(sample, sessions, timeout=PATIENCE_S))
    common = len(engine.encode(Prompt(text=COMMON))) - 1
    assert sum(session.counters.reused for session in sessions) >= (N - 1) * common
    assert sum(decodes.sizes) < common + N * (20 + 20)


def test_prompts_are_read_together_if_nobody_looks_at_their_attention(
    load: Load, decodes: Decodes
) -> None:
    """Where one layer is read, context has no rows of it; but its cells must be known."""
    engine = load(max_parallel=2)
    tokens = engine.encode(Prompt(text=COMMON))
    own = [(0,)] * len(tokens)
    with ExitStack() as stack:
        caches = [stack.enter_context(closing(engine.new_cache())) for _ in range(2)]
        for cache in caches:
            cache.configure(GroundingSpec(layers=1), None)
        parts = [Part(cache, tokens, range(len(tokens)), own, True, False) for cache in caches]
        decodes.sizes.clear()
        outcomes = engine.compute(parts)
        assert all(isinstance(outcome, Rows) for outcome in outcomes), outcomes
        assert decodes.sizes == [2 * len(tokens)]


def test_a_pass_goes_on_for_those_who_were_not_cancelled(load: Load, decodes: Decodes) -> None:
    engine = load(max_parallel=3)
    stop = threading.Event()
    decodes.before = lambda: stop.set() if len(decodes.sizes) == 8 else None
    first = engine.open(Prompt(text=TEXTS[0]), cancelled=stop.is_set)
    others = [engine.open(Prompt(text=text)) for text in TEXTS[1:3]]
    with ThreadPoolExecutor(3) as pool:
        left = pool.submit(sample, first, 40)
        written = [pool.submit(sample, session, 40) for session in others]
        with pytest.raises(DecodingCancelled):
            left.result(PATIENCE_S)
        for text, step in zip(TEXTS[1:3], written, strict=True):
            with closing(load().open(Prompt(text=text))) as alone:
                assert_equal([step.result(PATIENCE_S)], [sample(alone, 40)])


def test_a_merged_pass_that_fails_is_done_again_for_each(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(max_parallel=3)
    sessions = [engine.open(Prompt(text=text)) for text in TEXTS[:3]]
    expected = [work(load(), number) for number in range(3)]
    decode = Context.decode

    def faulty(context: Context, tokens: Any, *args: Any, **settings: Any) -> Any:
        rows = decode(context, tokens, *args, **settings)
        if settings.get("wanted") is not None:
            raise EngineError("after all was computed")
        return rows

    monkeypatch.setattr(Context, "decode", faulty)
    for ours, theirs in zip(in_threads(engine, range(3)), expected, strict=True):
        assert_equal(ours, theirs)
    for session in sessions:
        session.close()


def test_a_token_that_does_not_exist_is_one_session_s_fault(load: Load) -> None:
    engine = load(max_parallel=2)
    bad, good = (engine.open(Prompt(text=text)) for text in TEXTS[:2])
    sample(bad)
    bad.extend([10**6])
    with ThreadPoolExecutor(2) as pool:
        failed, written = pool.submit(sample, bad), pool.submit(sample, good)
        with pytest.raises(EngineError, match="vocabulary"):
            failed.result(PATIENCE_S)
        assert len(written.result(PATIENCE_S).tokens) == 20


def test_what_is_left_behind_makes_room_for_running_requests(load: Load) -> None:
    """Two requests may fill their contexts; what earlier ones have left goes as need be."""
    engine = load(max_parallel=2, candidate_tokens=1, max_candidates=1)
    words = ["the cat in ", "the rat in ", "an inn in ", "a hut in "]
    for turn in range(3):
        for word in words:
            text = word * (200 // len(engine.encode(Prompt(text=word))))
            with (
                closing(engine.open(Prompt(text=text))) as one,
                closing(engine.open(Prompt(text=f"{turn} {text}"))) as other,
            ):
                for session in (one, other):
                    sample(session, 30)
    assert len(engine._prefixes._idle) <= 2


def test_one_request_more_than_places_waits(load: Load) -> None:
    engine = load(max_parallel=2)
    with engine.exclusive(), engine.exclusive(), pytest.raises(DecodingCancelled):
        engine.exclusive(lambda: True).__enter__()


def test_more_sessions_than_places_have_a_context_of_their_own(load: Load) -> None:
    engine = load(max_parallel=2)
    sessions = [engine.open(Prompt(text=text)) for text in TEXTS]
    with ThreadPoolExecutor(N) as pool:
        written = list(pool.map(sample, sessions, timeout=PATIENCE_S))
    for text, step in zip(TEXTS, written, strict=True):
        with closing(load().open(Prompt(text=text))) as alone:
            assert_equal([step], [sample(alone)])
    for session in sessions:
        session.close()


def test_a_context_of_one_s_own_turns_positions_as_the_shared_one_does(
    load: Load, tmp_path: Path
) -> None:
    """llama.cpp chooses the factors by the size of the context."""
    path = write_long_rope(tmp_path / "long.gguf")
    engine = load(path, max_parallel=2, n_ctx=500, max_candidates=1)
    sessions = [engine.open(Prompt(text=TEXTS[0])) for _ in range(5)]
    first, *_, own = (sample(session) for session in sessions)
    assert sessions[-1]._sequence.cache.context is not engine._shared_context().context
    assert_equal([own], [first])
    for session in sessions:
        session.close()


def test_closing_the_engine_ends_what_is_running(load: Load, decodes: Decodes) -> None:
    engine = load(max_parallel=3, n_ctx=512)
    decodes.before = lambda: time.sleep(0.005)
    sessions = [engine.open(Prompt(text=text)) for text in TEXTS[:3]]
    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(sample, session, 200) for session in sessions]
        while len(decodes.sizes) < 10 and not running[0].done():
            time.sleep(0.001)
        engine.close()
        for each in running:
            with pytest.raises(EngineError, match="closed"):
                each.result(PATIENCE_S)
    context = engine._shared_context().context
    for session in sessions:
        assert context._free.alive
        session.close()
    assert not context._free.alive, "the last one frees the memory"


def test_a_session_s_candidates_may_be_too_long_for_its_part(load: Load) -> None:
    engine = load(max_parallel=2, n_ctx=64, candidate_tokens=1)
    with closing(engine.open(Prompt(text="the cat "))) as session:
        with pytest.raises(ContextOverflowError):
            for turn in range(4):
                session.sample(4, limit(50), WARM, seed=[turn])
                session.sample(4, limit(60), WARM, seed=[turn])
        assert session.sample(1, limit(5), WARM, seed=[0])


def test_a_context_of_one_s_own_that_is_full_leaves_the_others_alone(load: Load) -> None:
    """What others have left behind is kept: there is no room to be gained by dropping it."""
    engine = load(max_parallel=2, n_ctx=100, candidate_tokens=1)
    sessions = [engine.open(Prompt(text=f"{number} the cat ")) for number in range(5)]
    for session in sessions:
        sample(session, 5)
    *others, alone = sessions
    assert alone._sequence.cache.context is not engine._shared_context().context
    for session in others:
        session.close()
    assert len(engine._prefixes._idle) == 2
    with closing(alone):
        with pytest.raises(ContextOverflowError):
            for turn in range(8):
                alone.sample(4, limit(80), WARM, seed=[turn])
        assert len(engine._prefixes._idle) == 2
    assert len(engine._prefixes._idle) == 2, "nobody could begin with what it has left behind"
    assert all(sequence.cache.shareable for sequence in engine._prefixes._idle)


def test_there_are_only_so_many_sequences(tiny_model: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"max_parallel=8 .* lower max_parallel to 4"):
        LlamaCppEngine(tiny_model, n_ctx=64, max_candidates=64, max_parallel=8)
