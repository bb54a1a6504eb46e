"""Sessions over a KV cache against a model without memory that computes everything anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from typing import get_args
from zlib import crc32

import numpy as np
import numpy.typing as npt
import pytest

from specguard_chains.decoding import local
from specguard_chains.decoding.boundaries import Boundary, StepShape, StepText, unfinished_character
from specguard_chains.decoding.decoder import Request
from specguard_chains.decoding.engine import Candidate, Prompt, Reading, Session
from specguard_chains.decoding.grounding import GroundingForm, GroundingSpec
from specguard_chains.decoding.sampling import Sampling, draw
from specguard_chains.decoding.specguard import SpecGuardDecoder
from specguard_chains.decoding.verification import EnsembleVerifier
from specguard_chains.errors import (
    AttentionUnavailableError,
    ConfigurationError,
    ContextOverflowError,
    DecodingCancelled,
    EngineError,
)
from tests.toy_engine import ANSWER, END, Policy, ToyEngine, random_policy, scripted_policy
from tests.unit_tests.test_grounding import reference
from tests.unit_tests.test_verification import CALIBRATION

ANY = Sampling(temperature=1, top_p=1)
GREEDY = Sampling(temperature=0)
SPARSE = GroundingSpec.named("sparse")
SHORT = Boundary(max_tokens=12)
SEED = (3, 1, False)


def remembering_policy(seed: int) -> Policy:
    """Like `random_policy`, but every token of the sequence changes what comes next."""
    base = random_policy(seed)

    def logits(tokens: tuple[int, ...]) -> npt.NDArray[np.float32]:
        noise = np.random.default_rng([seed, crc32(repr(tokens).encode())])
        row = base(tokens)
        return row + noise.normal(size=row.shape).astype(np.float32)

    return logits


class Engine(ToyEngine):
    """A toy whose prompts may hold answers: "question|answer|question|"."""

    def encode(self, prompt: Prompt) -> list[int]:
        return [ANSWER if byte == ord("|") else byte for byte in (prompt.text or "").encode()]

    def start(self, text: str = "q|", spec: GroundingSpec | None = SPARSE) -> Session:
        return self.open(Prompt(text=text), grounding=spec)


def new_engine(seed: int = 1, **settings: object) -> Engine:
    return Engine(remembering_policy(seed), **settings)


@dataclass
class Memoryless:
    """What a session must be equal to."""

    engine: ToyEngine
    tokens: list[int]
    spec: GroundingSpec | None = SPARSE
    prompt_length: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)

    @classmethod
    def of(cls, engine: Engine, text: str = "q|") -> Memoryless:
        return cls(engine, engine.encode(Prompt(text=text)))

    def read(self, tokens: Sequence[int]) -> Reading:
        logprobs, context = [], list(self.tokens)
        for token in tokens:
            row = self.engine.policy(tuple(context)).astype(np.float64)
            logprobs.append(row[token] - np.log(np.exp(row).sum()))
            context.append(token)
        grounding = self.spec and reference(tuple(context), len(self.tokens), self.spec)
        return Reading(np.array(logprobs, dtype=np.float32), grounding)

    def sample(
        self, i: int, boundary: Boundary, sampling: Sampling, seed: Sequence[int]
    ) -> Candidate:
        rng = np.random.default_rng([*seed, i])
        answer = b"".join(map(self.engine.token_bytes, self.tokens[self.prompt_length :]))
        text, tokens, ending = StepText(boundary, unfinished_character(answer)), [], None
        while ending is None:
            token, _ = draw(self.engine.policy((*self.tokens, *tokens)), sampling, rng)
            tokens.append(token)
            ending = (
                "end_of_sequence"
                if self.engine.is_end(token)
                else text.add(self.engine.token_bytes(token))
            )
        reading, vocabulary = self.read(tokens), self.engine.vocabulary
        return Candidate(tuple(tokens), text.text, reading, ending, vocabulary)


def assert_readings_equal(ours: Reading, expected: Reading) -> None:
    np.testing.assert_allclose(ours.logprobs, expected.logprobs, atol=2e-5)
    assert (ours.grounding is None) == (expected.grounding is None)
    if ours.grounding is not None:
        np.testing.assert_allclose(ours.grounding, expected.grounding, atol=2e-6)


def assert_equal(ours: Candidate, expected: Candidate) -> None:
    assert replace(ours, reading=expected.reading) == expected
    assert_readings_equal(ours.reading, expected.reading)


def assert_samples(
    session: Session,
    expected: Memoryless,
    n: int = 3,
    boundary: Boundary = SHORT,
    sampling: Sampling = ANY,
    seed: Sequence[int] = SEED,
) -> list[Candidate]:
    candidates = session.sample(n, boundary, sampling, seed=seed)
    assert len(candidates) == n
    for i, candidate in enumerate(candidates):
        drawn = 0 if sampling.greedy else i
        assert_equal(candidate, expected.sample(drawn, boundary, sampling, seed))
    return candidates


def foreign(text: str | bytes, vocabulary: str = "bytes") -> Candidate:
    """A candidate that another model has written."""
    data = text.encode() if isinstance(text, str) else text
    reading = Reading(np.zeros(len(data), dtype=np.float32))
    return Candidate(tuple(data), data.decode(errors="replace"), reading, "boundary", vocabulary)


def cut(candidate: Candidate, length: int, *more: int) -> Candidate:
    """A candidate that shares only the beginning of another's tokens."""
    return replace(candidate, tokens=(*candidate.tokens[:length], *more))


# --- sampling and reading


@pytest.mark.parametrize("sampling", [ANY, GREEDY, Sampling(1.3, 0.9, 20, 0.01)], ids=str)
@pytest.mark.parametrize("spec", [SPARSE, GroundingSpec.named("dense", layers=1), None], ids=str)
def test_samples_equal_those_of_a_model_without_memory(
    spec: GroundingSpec | None, sampling: Sampling
) -> None:
    for seed in range(3):
        engine = new_engine(seed)
        session, expected = engine.start(f"{seed}|", spec), Memoryless.of(engine, f"{seed}|")
        expected.spec = spec
        assert_samples(session, expected, 4, Boundary(max_tokens=20), sampling)


def test_the_prompt_is_chat_messages_too() -> None:
    engine = ToyEngine(remembering_policy(1))
    prompt = Prompt(messages=[{"role": "user", "content": "why?"}])
    expected = Memoryless(engine, engine.encode(prompt))
    assert_samples(engine.open(prompt, grounding=SPARSE), expected)


def test_a_sampled_step_read_again_gives_the_same_signals() -> None:
    for seed in range(5):
        session, other = new_engine(seed).start(), new_engine(seed).start()
        for candidate in session.sample(3, SHORT, ANY, seed=SEED):
            for reader in (session, other):
                assert_readings_equal(reader.read(candidate), candidate.reading)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 17])
def test_a_long_step_is_read_as_if_at_once(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "READ_BLOCK", 8)
    engine = new_engine()
    text = bytes(np.random.default_rng(length).choice(list(b"abcd \n"), size=length))
    session, expected = engine.start(), Memoryless.of(engine)
    assert_readings_equal(session.read(foreign(text)), expected.read(text))
    session.accept(foreign(text))
    expected.tokens += text
    assert_samples(session, expected, 2)


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_a_candidate_does_not_depend_on_how_many_there_are(k: int) -> None:
    alone, together = new_engine().start(), new_engine().start()
    for turn in range(4):
        first, *_ = ours = together.sample(k, SHORT, ANY, seed=(turn, 1, True))
        (single,) = alone.sample(1, SHORT, ANY, seed=(turn, 1, True))
        assert_equal(first, single)
        eight = together.sample(8, SHORT, ANY, seed=(turn, 1, True))
        for one, other in zip(ours, eight, strict=False):
            assert_equal(one, other)
        for session in (alone, together):
            session.accept(first)


def test_sampling_leaves_the_sequence_as_it_is() -> None:
    session, expected = new_engine().start(), Memoryless.of(new_engine())
    room = session.room
    for n in (1, 4, 2):
        assert_samples(session, expected, n)
        assert session.room == room


def test_greedy_candidates_are_computed_once() -> None:
    engine = new_engine()
    session = engine.start()
    candidates = session.sample(4, SHORT, GREEDY, seed=SEED)
    assert candidates == [candidates[0]] * 4
    assert session.counters.written == len(candidates[0].tokens)
    assert engine.computed_tokens == len("q|") + len(candidates[0].tokens)


@pytest.mark.parametrize(
    ("boundary", "text", "ending"),
    [
        (Boundary(), "one\n\n", "boundary"),
        (Boundary(max_tokens=2), "on", "step_limit"),
        (Boundary(stop=("ne",)), "one", "stop_string"),
        (Boundary(stop=("!on",), preceding="!"), "on", "stop_string"),
        (Boundary("never"), "one\n\ntwo", "end_of_sequence"),
    ],
)
def test_a_candidate_says_why_it_ends(boundary: Boundary, text: str, ending: str) -> None:
    engine = Engine(scripted_policy("one\n\n", "two"))
    (candidate,) = engine.start().sample(1, boundary, ANY, seed=SEED)
    assert (candidate.text, candidate.ending) == (text, ending)
    end = [END] if ending == "end_of_sequence" else []
    assert list(candidate.tokens) == [*text.encode(), *end]
    assert candidate.ends_sequence == bool(end)


@pytest.mark.parametrize("limit", [1, 2, 3, 5])
def test_characters_cut_by_the_step_limit_come_out_whole(limit: int) -> None:
    text = "né → 😀!"
    session, steps = Engine(scripted_policy(text)).start(), []
    while True:
        (candidate,) = session.sample(1, Boundary(max_tokens=limit), GREEDY, seed=SEED)
        session.accept(candidate)
        steps.append(candidate.text)
        if candidate.ends_sequence:
            break
    assert "".join(steps) == text


# --- accepting


def test_an_accepted_own_step_is_not_computed_again() -> None:
    engine = new_engine()
    session, expected = engine.start(), Memoryless.of(engine)
    for turn in range(5):
        candidates = assert_samples(session, expected, 3, seed=(turn,))
        before, written = engine.computed_tokens, session.counters.written
        chosen = candidates[turn % 3]
        session.accept(chosen)
        expected.tokens += chosen.tokens
        assert_samples(session, expected, 2, seed=(turn, 0))
        fresh = engine.computed_tokens - before
        assert fresh == session.counters.written - written
    assert session.counters.read == len("q|")


def test_an_accepted_foreign_step_is_read_when_it_is_needed() -> None:
    engine = new_engine()
    session, expected = engine.start(), Memoryless.of(engine)
    assert engine.computed_tokens == 0
    for n, text in enumerate([b"abc\n\n", b"de", b"\n\n"], 1):
        session.accept(foreign(text))
        expected.tokens += text
        assert (session.counters.read, engine.computed_tokens) == (0, 0)
        assert session.room == engine.context_length - len(expected.tokens), n
    assert_samples(session, expected, 2)
    assert session.counters.read == len(expected.tokens)
    session.accept(foreign("more"))
    expected.tokens += b"more"
    assert_readings_equal(session.read(foreign("xyz")), expected.read(b"xyz"))
    assert session.counters.read == len(expected.tokens) + 3


def test_a_foreign_step_replaces_the_candidates() -> None:
    session, expected = new_engine().start(), Memoryless.of(new_engine())
    assert_samples(session, expected)
    session.accept(foreign("zzz"))
    expected.tokens += b"zzz"
    assert_samples(session, expected)


@pytest.mark.parametrize("more", [(), (ord("x"),), (*b"xyz",)])
@pytest.mark.parametrize("shared", [1, 2, 5])
def test_what_a_step_shares_with_a_candidate_is_kept(shared: int, more: tuple[int, ...]) -> None:
    engine = new_engine()
    session, expected = engine.start(), Memoryless.of(engine)
    candidates = assert_samples(session, expected, 4, Boundary("never", max_tokens=6))
    longest = max(candidates[1:], key=lambda candidate: len(candidate.tokens))
    assert len(longest.tokens) > shared
    step = cut(longest, shared, *more)
    read, computed, written = (
        session.counters.read,
        engine.computed_tokens,
        session.counters.written,
    )
    session.accept(step)
    expected.tokens += step.tokens
    assert_samples(session, expected)
    # Without tokens of its own the last shared one is read again, for what comes after it.
    assert session.counters.read - read == max(len(more), 1)
    assert engine.computed_tokens - computed == (
        max(len(more), 1) + session.counters.written - written
    )


def test_a_step_that_has_been_read_is_not_computed_again() -> None:
    engine = new_engine()
    session, expected = engine.start(), Memoryless.of(engine)
    session.read(foreign("abc\n\n"))
    computed = engine.computed_tokens
    session.accept(foreign("abc\n\n"))
    expected.tokens += b"abc\n\n"
    candidates = assert_samples(session, expected, 1)
    assert engine.computed_tokens == computed + len(candidates[0].tokens)


def test_an_accepted_step_may_be_longer_than_what_was_read() -> None:
    session, expected = new_engine().start(), Memoryless.of(new_engine())
    session.read(foreign("abc"))
    session.accept(foreign("abcdef"))
    expected.tokens += b"abcdef"
    assert_samples(session, expected)


# --- rolling back


def test_rolled_back_equals_never() -> None:
    for keep in (0, 1, 3):
        session, expected = new_engine().start(), Memoryless.of(new_engine())
        first, *_ = assert_samples(session, expected)
        length = len(expected.tokens)
        session.accept(first)
        session.sample(2, SHORT, ANY, seed=(9,))
        session.accept(foreign("other"))
        session.rollback(length + keep)
        expected.tokens += first.tokens[:keep]
        assert session.room == 4096 - len(expected.tokens)
        assert_samples(session, expected, seed=(4,))


def test_steps_not_read_yet_can_be_rolled_back() -> None:
    engine = new_engine()
    session, expected = engine.start(), Memoryless.of(engine)
    session.accept(foreign("abc"))
    session.accept(foreign("def"))
    session.rollback(len("q|ab"))
    expected.tokens += b"ab"
    assert_samples(session, expected)
    assert session.counters.read == len(expected.tokens)


def test_rolling_back_to_where_it_is_only_drops_the_candidates() -> None:
    engine = new_engine()
    session, expected = engine.start(), Memoryless.of(engine)
    (first,) = assert_samples(session, expected, 1)
    computed = engine.computed_tokens
    session.rollback(len("q|"))
    assert_samples(session, expected, 1)
    assert engine.computed_tokens == computed + len(first.tokens)


def test_only_the_answer_can_be_rolled_back() -> None:
    session = new_engine().start("four|")
    session.accept(foreign("ab"))
    for length in (4, 8):
        with pytest.raises(ValueError, match=f"roll back to {length} .* has 5, the sequence 7"):
            session.rollback(length)
    session.rollback(5)


# --- any history


@pytest.mark.parametrize("seed", range(8))
def test_any_sequence_of_operations_equals_a_model_without_memory(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "READ_BLOCK", 3)
    rng = np.random.default_rng(seed)
    engine = new_engine(seed)
    text = "first|"
    session, expected = engine.start(text), Memoryless.of(engine, text)
    candidates: list[Candidate] = []
    for turn in range(20):
        match rng.choice(["sample", "read", "own", "part", "foreign", "rollback", "reopen"]):
            case "sample":
                limit = Boundary(max_tokens=int(rng.integers(1, 12)))
                sampling = ANY if rng.random() < 0.8 else GREEDY
                k = int(rng.integers(1, 5))
                candidates = assert_samples(session, expected, k, limit, sampling, (seed, turn))
            case "read":
                step = foreign(bytes(rng.choice(list(b"abc\n"), size=rng.integers(1, 9))))
                if candidates and rng.random() < 0.5:
                    step = candidates[rng.integers(len(candidates))]
                assert_readings_equal(session.read(step), expected.read(step.tokens))
                candidates = [step]
            case "own" | "part" as which if candidates:
                step = candidates[rng.integers(len(candidates))]
                if which == "part":
                    step = cut(step, int(rng.integers(len(step.tokens) + 1)), *b"de")
                session.accept(step)
                expected.tokens += step.tokens
                candidates = []
            case "foreign":
                step = foreign(bytes(rng.choice(list(b"abc\n"), size=rng.integers(1, 9))))
                session.accept(step)
                expected.tokens += step.tokens
                candidates = []
            case "rollback":
                length = int(rng.integers(expected.prompt_length, len(expected.tokens) + 1))
                session.rollback(length)
                del expected.tokens[length:]
                candidates = []
            case "reopen":
                session.close()
                answer = expected.tokens[expected.prompt_length :]
                said = bytes(t for t in answer if t < END).decode(errors="replace")
                text = [text, f"{text}{said}|next|", f"{text[:-3]}?|", "first|"][rng.integers(4)]
                session, expected = engine.start(text), Memoryless.of(engine, text)
                candidates = []
        assert session.length == len(expected.tokens)
        assert session.room == engine.context_length - session.length
    assert_samples(session, expected)


@pytest.mark.parametrize("how", ["sample", "read"])
def test_fifty_rejections_leave_no_trace(how: str) -> None:
    engine = new_engine(context_length=64)
    session, expected = engine.start(), Memoryless.of(engine)
    for turn in range(50):
        if how == "sample":
            session.sample(3, Boundary("never", max_tokens=9), ANY, seed=(turn, 7))
        else:
            session.read(foreign("abcdefghij"[turn % 8 :]))
    candidates = assert_samples(session, expected)
    session.accept(candidates[1])
    expected.tokens += candidates[1].tokens
    assert_samples(session, expected)


# --- reusing earlier requests

CONVERSATION = [
    "question|",
    "question|answer one|and then|",
    "question|answer one|and then|",
    "question|answer two|",
    "quite another|",
    "quest|",
    "question|",
]


def test_a_reused_prefix_gives_what_a_fresh_engine_gives() -> None:
    engine, previous = new_engine(), []
    for turn, text in enumerate(CONVERSATION):
        session, expected = engine.start(text), Memoryless.of(new_engine(), text)
        prompt = list(expected.tokens)
        candidates = assert_samples(session, expected, seed=(turn,))
        cached = max((common(prompt, tokens) for tokens in previous), default=0)
        if cached < len(prompt):
            assert session.counters.reused == cached
        assert session.counters.read + session.counters.reused == len(prompt)
        session.accept(candidates[turn % 3])
        expected.tokens += candidates[turn % 3].tokens
        candidates = assert_samples(session, expected, seed=(turn, 1))
        session.accept(candidates[0])
        session.close()
        previous = [[*expected.tokens, *candidates[0].tokens]]


def common(first: Sequence[int], second: Sequence[int]) -> int:
    equal = [a == b for a, b in zip(first, second, strict=False)]
    return equal.index(False) if False in equal else len(equal)


def test_an_accepted_answer_is_reused_as_the_next_prompts_history() -> None:
    engine = Engine(scripted_policy("answer\n\n", "more"))
    first = engine.start("question|")
    (step,) = first.sample(1, Boundary(), GREEDY, seed=SEED)
    first.accept(step)
    first.close()
    text = "question|answer\n\n|and then|"
    session, expected = engine.start(text), Memoryless.of(engine, text)
    assert_samples(session, expected)
    assert session.counters.reused == len("question|answer\n\n")
    assert session.counters.read == len("|and then|")


def test_the_same_prompt_again_costs_nothing() -> None:
    engine = new_engine()
    first = engine.start("question|")
    expected = first.sample(3, SHORT, ANY, seed=SEED)
    first.accept(expected[0])
    first.close()
    computed = engine.computed_tokens
    session = engine.start("question|")
    assert session.counters.reused == 0, "nothing has been used yet"
    for ours, theirs in zip(session.sample(3, SHORT, ANY, seed=SEED), expected, strict=True):
        np.testing.assert_array_equal(ours.reading.logprobs, theirs.reading.logprobs)
        assert_equal(ours, theirs)
    assert (session.counters.read, session.counters.reused) == (0, len("question|"))
    assert engine.computed_tokens == computed + session.counters.written


def test_another_prompt_of_the_same_length_is_not_taken_for_the_earlier_one() -> None:
    engine = new_engine()
    first = engine.start("question A|")
    first.sample(1, SHORT, ANY, seed=SEED)  # remembers the logits after its prompt
    first.close()
    second = engine.start("question B|")
    second.accept(foreign("step"))  # reads prompt and step in one go
    second.sample(1, SHORT, ANY, seed=SEED)
    second.close()
    assert_samples(engine.start("question B|"), Memoryless.of(engine, "question B|"))


def test_a_prompt_within_an_earlier_one_counts_every_token_once() -> None:
    engine = new_engine()
    first = engine.start("long|question|")
    first.sample(1, SHORT, ANY, seed=SEED)
    first.close()
    session = engine.start("long|")
    assert_samples(session, Memoryless.of(engine, "long|"))
    assert session.counters.read + session.counters.reused == len("long|")


def test_a_prompt_read_for_another_form_of_grounding_is_read_anew() -> None:
    engine = new_engine()
    for spec in (SPARSE, None, GroundingSpec.named("dense"), GroundingSpec(layers=1), SPARSE):
        session, expected = engine.start(spec=spec), Memoryless.of(engine)
        expected.spec = spec
        assert_samples(session, expected)
        assert session.counters.read == len("q|")
        session.close()


def test_sessions_at_the_same_time_do_not_share_a_cache() -> None:
    engine = new_engine()
    texts = ["one|", "two|", "one|", "three|"]
    for _ in range(2):
        sessions = [engine.start(text) for text in texts]
        expected = [Memoryless.of(engine, text) for text in texts]
        for turn in range(3):
            for session, model in zip(sessions, expected, strict=True):
                candidates = assert_samples(session, model, 2, seed=(turn,))
                session.accept(candidates[1])
                model.tokens += candidates[1].tokens
        for session in sessions:
            session.close()
            session.close()  # once more does no harm


@pytest.mark.parametrize("max_idle", [1, 2])
def test_an_engine_remembers_as_many_conversations_as_it_may(max_idle: int) -> None:
    engine = new_engine()
    engine.max_idle = max_idle
    for turn in range(3):
        for text in ("first question|", "second one|"):
            session = engine.start(text)
            assert_samples(session, Memoryless.of(engine, text), 1)
            remembered = turn > 0 and max_idle == 2
            assert session.counters.reused == (len(text) if remembered else 0)
            session.close()


def test_a_cleared_engine_starts_cold() -> None:
    engine = new_engine()
    first = engine.start()
    first.sample(1, SHORT, ANY, seed=SEED)
    first.close()
    engine.clear()
    session = engine.start()
    assert_samples(session, Memoryless.of(engine))
    assert (session.counters.read, session.counters.reused) == (2, 0)


# --- grounding


@pytest.mark.parametrize("form", get_args(GroundingForm))
def test_grounding_depends_on_the_text_alone(form: str) -> None:
    """Not on the number of branches, their order, or how the context came about."""
    spec = GroundingSpec.named(form)
    prompt, context, step = b"q", b"abc\n\nde\n\n", b"step of it"
    expected = reference((*prompt, ANSWER, *context, *step), len(prompt) + 1 + len(context), spec)

    def read_after(*history: Callable[[Session], object]) -> None:
        session = new_engine().start(spec=spec)
        for act in history:
            act(session)
        ours = session.read(foreign(step)).grounding
        np.testing.assert_allclose(ours, expected, atol=2e-6)
        assert np.ptp(expected) > 1e-3

    def noise(session: Session) -> None:
        session.sample(5, SHORT, ANY, seed=(5,))

    def accept(text: bytes) -> Callable[[Session], object]:
        return lambda session: session.accept(foreign(text))

    def read(text: bytes) -> Callable[[Session], object]:
        return lambda session: session.read(foreign(text))

    whole, first, second = accept(context), accept(context[:5]), accept(context[5:])
    read_after(whole)
    read_after(first, second)
    read_after(noise, first, noise, noise, second, noise)
    read_after(read(context), whole, noise)
    read_after(read(context[:5] + b"xyz"), first, read(context[5:]), second)
    read_after(whole, noise, accept(b"gone"), noise, lambda s: s.rollback(len(b"q|" + context)))


# --- giving a step up


def test_a_step_is_given_up_once_no_candidate_can_be_accepted() -> None:
    session, expected = new_engine().start(), Memoryless.of(new_engine())
    candidates = session.sample(3, SHORT, ANY, seed=SEED, watch=lambda *_: False)
    assert [candidate.ending for candidate in candidates] == ["rejected_early"] * 3
    assert [len(candidate.tokens) for candidate in candidates] == [1] * 3
    assert session.counters.written == 3
    assert_samples(session, expected)


def test_a_watch_that_never_denies_changes_nothing() -> None:
    watched = new_engine().start().sample(3, SHORT, ANY, seed=SEED, watch=lambda *_: True)
    for ours, theirs in zip(
        watched, new_engine().start().sample(3, SHORT, ANY, seed=SEED), strict=True
    ):
        assert_equal(ours, theirs)


@pytest.mark.parametrize("spec", [SPARSE, None], ids=str)
def test_what_is_watched_is_what_will_be_read(spec: GroundingSpec | None) -> None:
    for seed in range(20):
        seen: list[tuple[float, float | None]] = []

        def watch(*signals: float, seen: list = seen) -> bool:
            seen.append(signals)
            return True

        session = new_engine(seed).start(spec=spec)
        (candidate,) = session.sample(1, SHORT, ANY, seed=SEED, watch=watch)
        assert seen[-1] == (candidate.reading.confidence, candidate.reading.min_grounding)
        confidences = [confidence for confidence, _ in seen]
        assert confidences == sorted(confidences, reverse=True)


@pytest.mark.parametrize("more", [b"", b"xy"])
@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_a_step_rejected_early_can_still_be_accepted(tokens: int, more: bytes) -> None:
    for looked in (2 * tokens - 1, 2 * tokens):  # before and after the last token is computed
        session, expected = new_engine().start(), Memoryless.of(new_engine())
        asked = iter([True] * (looked - 1) + [False] * 100)
        (step,) = session.sample(1, SHORT, ANY, seed=SEED, watch=lambda *_, a=asked: next(a))
        assert (step.ending, len(step.tokens)) == ("rejected_early", tokens)
        step = cut(step, tokens, *more)
        session.accept(step)
        expected.tokens += step.tokens
        assert_samples(session, expected)


# --- too long


def test_a_prompt_that_fills_the_context_is_refused() -> None:
    engine = new_engine(context_length=20)
    for length in (19, 40):
        with pytest.raises(ContextOverflowError, match=rf"has {length + 1} tokens .* of 20; raise"):
            engine.start("x" * length + "|")
    session = engine.start("x" * 18 + "|")
    assert session.room == 1
    assert_samples(session, Memoryless.of(engine, "x" * 18 + "|"), boundary=Boundary(max_tokens=1))


def test_a_session_works_on_after_an_overflow() -> None:
    engine = new_engine(context_length=20)
    session, expected = engine.start("x" * 9 + "|"), Memoryless.of(engine, "x" * 9 + "|")
    too_long = foreign("abcdefghijk")
    for act in (
        lambda: session.sample(2, Boundary(max_tokens=11), ANY, seed=SEED),
        lambda: session.read(too_long),
        lambda: session.accept(too_long),
    ):
        assert not session.fits(too_long)
        with pytest.raises(ContextOverflowError, match=r"11 .* 10 of the context's 20"):
            act()
        candidates = assert_samples(session, expected, boundary=Boundary("never", max_tokens=10))
    assert session.fits(foreign("abcdefghij"))
    session.accept(candidates[0])
    expected.tokens += candidates[0].tokens
    with pytest.raises(ContextOverflowError):
        session.sample(1, Boundary(max_tokens=11 - len(candidates[0].tokens)), ANY, seed=SEED)
    session.rollback(15)
    del expected.tokens[15:]
    assert_samples(session, expected, boundary=Boundary(max_tokens=5))


# --- cancelling


@pytest.mark.parametrize("polls", [0, 1, 3, 5, 8, 20, 33])
def test_after_a_cancelled_request_the_engine_works_on(polls: int) -> None:
    engine, asked = new_engine(), iter(range(1000))
    prompt = Prompt(text="question|")
    with pytest.raises(DecodingCancelled), ExitStack() as stack:
        session = engine.open(prompt, grounding=SPARSE, cancelled=lambda: next(asked) >= polls)
        stack.enter_context(closing(session))
        for turn in range(10):
            session.accept(session.sample(3, SHORT, ANY, seed=(turn,))[0])
            session.read(foreign("abc"))
    for text in ("question|", "question|", "other|"):
        fresh = engine.start(text)
        candidates = assert_samples(fresh, Memoryless.of(engine, text))
        fresh.accept(candidates[0])
        fresh.close()


@pytest.mark.parametrize("polls", [1, 2, 5, 12])
def test_a_session_goes_on_where_it_was_interrupted(polls: int) -> None:
    engine, asked = new_engine(), iter(range(1000))
    session = engine.open(
        Prompt(text="question|"), grounding=SPARSE, cancelled=lambda: next(asked) == polls
    )
    expected = Memoryless.of(engine, "question|")
    with pytest.raises(DecodingCancelled):
        session.sample(3, SHORT, ANY, seed=SEED)
    step = assert_samples(session, expected)[2]
    session.accept(step)
    expected.tokens += step.tokens
    assert_samples(session, expected)


def test_a_request_that_is_cancelled_from_the_start_computes_nothing() -> None:
    engine = new_engine()
    with pytest.raises(DecodingCancelled):
        engine.open(Prompt(text="q|"), cancelled=lambda: True).sample(1, SHORT, ANY, seed=SEED)
    assert engine.computed_tokens == 0


# --- models with other tokenizers


class Mirrored(Engine):
    """Its token for byte b is 255 - b."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy, vocabulary="mirrored")

    def encode(self, prompt: Prompt) -> list[int]:
        return [255 - t if t < END else t for t in super().encode(prompt)]

    def encode_text(self, text: str) -> list[int]:
        return [255 - byte for byte in text.encode()]

    def token_bytes(self, token: int) -> bytes:
        return bytes([255 - token]) if token < END else b""


def mirrored_engine() -> Mirrored:
    base = remembering_policy(4)

    def policy(tokens: tuple[int, ...]) -> npt.NDArray[np.float32]:
        row = base(tuple(255 - t if t < END else t for t in tokens))
        return np.concatenate([row[:END][::-1], row[END:]])

    return Mirrored(policy)


def test_a_step_in_another_vocabulary_is_taken_over_as_text() -> None:
    draft, target = new_engine(), mirrored_engine()
    session, expected = target.start(), Memoryless.of(target)
    (step,) = draft.start().sample(1, SHORT, ANY, seed=SEED)
    assert step.vocabulary != target.vocabulary
    assert not step.ends_sequence
    own = target.encode_text(step.text)
    assert_readings_equal(session.read(step), expected.read(own))
    session.accept(step)
    expected.tokens += own
    assert_samples(session, expected)
    session.accept(foreign("é!", "unknown"))
    expected.tokens += target.encode_text("é!")
    assert_samples(session, expected)


@pytest.mark.parametrize("verify_with", ["draft", "target"])
def test_an_answer_that_ends_at_once_is_judged_across_vocabularies(verify_with: str) -> None:
    decoder = SpecGuardDecoder(
        Engine(scripted_policy("")),
        mirrored_engine(),
        EnsembleVerifier(CALIBRATION, threshold=0),
        num_candidates=1,
        verify_with=verify_with,
    )
    (step,) = decoder.decode(Request(Prompt(text="q|")))
    assert (step.text, step.finish_reason) == ("", "stop")


@pytest.mark.parametrize("verify_with", ["draft", "target"])
def test_a_step_without_a_whole_character_is_judged_across_vocabularies(verify_with: str) -> None:
    decoder = SpecGuardDecoder(
        Engine(scripted_policy("né!")),
        mirrored_engine(),
        EnsembleVerifier(CALIBRATION, threshold=0),
        num_candidates=1,
        verify_with=verify_with,
        shape=StepShape(max_tokens=1),
    )
    steps = list(decoder.decode(Request(Prompt(text="q|"), GREEDY)))
    assert [step.text for step in steps] == ["n", "", "é", "!", ""]


# --- what an engine refuses


def test_a_closed_engine_opens_no_session() -> None:
    engine = new_engine()
    engine.start().close()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.start()


@pytest.mark.parametrize("used", [False, True])
def test_sessions_of_a_closed_engine_fail(used: bool) -> None:
    engine = new_engine()
    session = engine.start()
    if used:
        session.sample(1, SHORT, ANY, seed=SEED)
    engine.close()
    for _ in range(2):
        with pytest.raises(EngineError, match="closed"):
            session.sample(1, SHORT, ANY, seed=SEED)
        with pytest.raises(EngineError, match="closed"):
            session.read(foreign("abc"))
    session.close()


def test_a_closed_session_leaves_the_next_one_alone() -> None:
    engine = new_engine()
    closed = engine.start()
    (candidate,) = closed.sample(1, SHORT, ANY, seed=SEED)
    closed.close()
    session = engine.start()
    (expected,) = session.sample(1, SHORT, ANY, seed=SEED)
    for use in (
        lambda: closed.accept(candidate),
        lambda: closed.sample(1, SHORT, ANY, seed=SEED),
        lambda: closed.rollback(closed.length - 1),
    ):
        with pytest.raises(EngineError, match="closed"):
            use()
    closed.close()
    assert session.sample(1, SHORT, ANY, seed=SEED)[0].tokens == expected.tokens
    session.close()


def test_grounding_needs_attention() -> None:
    engine = new_engine(attention=False)
    with pytest.raises(AttentionUnavailableError, match="confidence_weight=1"):
        engine.start()
    (candidate,) = engine.start(spec=None).sample(1, SHORT, ANY, seed=SEED)
    assert candidate.reading.grounding is None


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="prompt is empty"):
        new_engine().start("")
