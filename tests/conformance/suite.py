"""What every engine must do, as tests: subclass `EngineConformance` for an engine of your own.

Written against the protocols in `specguard_chains.decoding.engine` and nothing else. Where two
ways lead to one sequence, both must give one model's numbers: what a session writes another reads,
and accepting, rolling back, reusing and rejecting leave no trace. README.md says how to subclass.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from itertools import count
from math import prod
from typing import ClassVar, cast

import numpy as np
import pytest

from specguard_chains.decoding.arrays import FloatArray, IntArray
from specguard_chains.decoding.boundaries import Boundary, Ending
from specguard_chains.decoding.constraint import Constraint
from specguard_chains.decoding.engine import (
    Candidate,
    Engine,
    LogitSession,
    Prompt,
    Reading,
    Session,
)
from specguard_chains.decoding.grounding import GroundingSpec
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.decoding.token_tree import TokenTree
from specguard_chains.errors import (
    AttentionUnavailableError,
    ConfigurationError,
    ContextOverflowError,
    DecodingCancelled,
    EngineError,
    StatesUnavailableError,
)

GREEDY = Sampling(temperature=0)
WARM = Sampling(temperature=0.8, top_p=0.9)
DEAD_END = 'start: "x" NONE\nNONE: /a/ & /b/'
NEVER = "\0never\0"
SEED = (7, 1, False)


def limit(tokens: int) -> Boundary:
    """Steps that only their length ends."""
    return Boundary(NEVER, max_tokens=tokens)


class EngineConformance:
    prompts: ClassVar[Sequence[Prompt]]
    """At least two, of which no two begin alike; greedy answers of 12 printable tokens or more."""
    ending_prompt: ClassVar[Prompt | None] = None
    """A prompt whose greedy answer the model ends within 40 tokens; None leaves that unchecked."""
    logprob_tolerance: ClassVar[float] = 1e-4
    """How far a token's log-prob may differ between two ways to compute it."""
    grounding_tolerance: ClassVar[float] = 1e-4
    repeat_tolerance: ClassVar[float] = 1e-6
    """How far both may differ between two runs of the same calls."""
    state_layer: ClassVar[int] = 0
    """A layer whose hidden states are read if the engine gives some; neither the last nor the one
    before it."""
    state_tolerance: ClassVar[float] = 1e-4
    """How far a hidden state may be off between two ways to compute it, relative to its length."""
    spec: ClassVar[GroundingSpec] = GroundingSpec()
    """The form of grounding that is read if the engine gives attention."""
    equal_draws: ClassVar[float] = 0.8
    """Least share of sampled steps of six tokens that do not change when others are drawn beside
    them: rounding moves a draw that falls on an edge."""
    reuses_prefixes: ClassVar[bool] = True
    """Whether a session takes over what an earlier one has computed of its prompt."""

    def make_engine(self) -> Engine:
        """Load the engine anew, with a context of a few hundred tokens; the test closes it."""
        raise NotImplementedError

    def text_of(self, engine: Engine, tokens: Sequence[int]) -> str:
        """Return what tokens mean, control tokens nothing."""
        pytest.skip("text_of is not implemented")

    # --- fixtures

    @pytest.fixture
    def load(self) -> Iterator[Callable[[], Engine]]:
        """Loads engines that nobody has been admitted to."""
        with ExitStack() as stack:
            yield lambda: stack.enter_context(closing(self.make_engine()))

    @pytest.fixture
    def admit(self, load: Callable[[], Engine]) -> Iterator[Callable[[], Engine]]:
        """Loads engines and admits the test to them."""
        with ExitStack() as stack:

            def admit() -> Engine:
                engine = load()
                stack.enter_context(engine.exclusive())
                return engine

            yield admit

    @pytest.fixture
    def engine(self, admit: Callable[[], Engine]) -> Engine:
        return admit()

    @pytest.fixture
    def start(self, admit: Callable[[], Engine]) -> Callable[..., Session]:
        """Opens sessions: on the given engine, else on one that has never done anything."""

        def start(
            prompt: Prompt | int = 0,
            *,
            on: Engine | None = None,
            cancelled: Callable[[], bool] | None = None,
            state_layer: int | None = None,
        ) -> Session:
            prompt = self.prompts[prompt] if isinstance(prompt, int) else prompt
            return self.open(on or admit(), prompt, cancelled, state_layer)

        return start

    @pytest.fixture
    def observe(self, engine: Engine, start: Callable[..., Session]) -> Callable[..., Session]:
        """Opens sessions that read hidden states, as `start` does."""
        if not engine.capabilities.states:
            pytest.skip("the engine does not give hidden states")
        return lambda *args, **settings: start(
            *args, **{"state_layer": self.state_layer, **settings}
        )

    @pytest.fixture
    def k(self, engine: Engine) -> int:
        return min(engine.capabilities.max_candidates, 4)

    @pytest.fixture
    def several(self, k: int) -> int:
        return k if k > 1 else pytest.skip("the engine samples one candidate at a time")

    @pytest.fixture(params=[(1, 1, 1), (2, 2), (3, 1)], ids=str)
    def widths(self, engine: Engine, request: pytest.FixtureRequest) -> tuple[int, ...]:
        """Shapes of token trees that the engine has room for."""
        widths: tuple[int, ...] = request.param
        if prod(widths) > engine.capabilities.max_candidates:
            pytest.skip("the engine has no room for such a tree")
        return widths

    # --- means

    def open(
        self,
        engine: Engine,
        prompt: Prompt,
        cancelled: Callable[[], bool] | None = None,
        state_layer: int | None = None,
    ) -> Session:
        spec = self.spec if engine.capabilities.attention else None
        return engine.open(prompt, grounding=spec, cancelled=cancelled, state_layer=state_layer)

    def assert_readings_close(
        self, ours: Reading, expected: Reading, *, repeated: bool = False
    ) -> None:
        logprob, grounding = self.logprob_tolerance, self.grounding_tolerance
        if repeated:
            logprob = grounding = self.repeat_tolerance
        np.testing.assert_allclose(ours.logprobs, expected.logprobs, rtol=0, atol=logprob)
        assert (ours.grounding is None) == (expected.grounding is None), "grounding is missing"
        if ours.grounding is not None and expected.grounding is not None:
            np.testing.assert_allclose(ours.grounding, expected.grounding, rtol=0, atol=grounding)

    def assert_states_close(self, ours: Reading, expected: Reading) -> None:
        difference = self.states_differ(ours, expected)
        assert difference <= self.state_tolerance, f"off by {difference:.2g}"

    def states_differ(self, ours: Reading, expected: Reading) -> float:
        """How far two hidden states are apart, relative to the length of the second."""
        assert ours.state is not None, "the hidden state is missing"
        assert expected.state is not None, "the hidden state is missing"
        assert ours.state.shape == expected.state.shape
        return float(np.linalg.norm(ours.state - expected.state) / np.linalg.norm(expected.state))

    def assert_repeats(self, ours: Sequence[Candidate], expected: Sequence[Candidate]) -> None:
        """The same calls give the same candidates."""
        assert [c.tokens for c in ours] == [c.tokens for c in expected], "other tokens"
        assert [c.text for c in ours] == [c.text for c in expected], "other texts"
        assert [c.ending for c in ours] == [c.ending for c in expected], "other endings"
        for one, other in zip(ours, expected, strict=True):
            self.assert_readings_close(one.reading, other.reading, repeated=True)

    def assert_same_sequence(self, ours: Session, expected: Session) -> None:
        """Each session reads what the other one writes as the other one does."""
        assert (ours.length, ours.room) == (expected.length, expected.room), "other lengths"
        for writer, reader in ((ours, expected), (expected, ours)):
            step = greedy(writer, 3)
            self.assert_readings_close(reader.read(step), step.reading)

    # --- what an engine says of itself

    def test_it_describes_itself(self, engine: Engine) -> None:
        assert isinstance(engine, Engine), "a part of the protocol is missing"
        assert engine.name
        assert engine.vocabulary
        assert engine.context_length > 0
        assert engine.capabilities.max_candidates >= 1

    def test_a_session_starts_with_the_encoded_prompt(self, engine: Engine) -> None:
        for prompt in self.prompts:
            tokens = engine.encode(prompt)
            assert tokens == engine.encode(prompt)
            with closing(self.open(engine, prompt)) as session:
                assert session.length == len(tokens)
                assert session.room == engine.context_length - len(tokens)

    def test_raw_text_is_encoded_as_it_stands(self, engine: Engine) -> None:
        for prompt in self.prompts:
            if prompt.text is not None:
                assert self.text_of(engine, engine.encode(prompt)) == prompt.text

    @pytest.mark.parametrize("empty", [Prompt(text=""), Prompt()], ids=["text", "messages"])
    def test_an_empty_prompt_is_refused(self, engine: Engine, empty: Prompt) -> None:
        with pytest.raises(ConfigurationError):
            self.open(engine, empty)

    def test_grounding_is_read_where_it_is_asked_for(self, engine: Engine) -> None:
        with closing(engine.open(self.prompts[0])) as session:
            assert greedy(session, 2).reading.grounding is None
        if engine.capabilities.attention:
            with closing(engine.open(self.prompts[0], grounding=self.spec)) as session:
                assert greedy(session, 2).reading.grounding is not None
        else:
            with pytest.raises(AttentionUnavailableError):
                engine.open(self.prompts[0], grounding=self.spec)

    # --- candidates

    @pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
    def test_a_candidate_is_whole(
        self, engine: Engine, start: Callable[..., Session], sampling: Sampling
    ) -> None:
        for number in range(len(self.prompts)):
            session = start(number, on=engine)
            (candidate,) = session.sample(1, limit(8), sampling, seed=SEED)
            assert 1 <= len(candidate.tokens) <= 8
            assert candidate.vocabulary == engine.vocabulary
            reading = candidate.reading
            assert reading.logprobs.shape == (len(candidate.tokens),)
            assert (reading.logprobs <= 0).all()
            if reading.grounding is not None:
                assert reading.grounding.shape == (len(candidate.tokens),)
                assert (reading.grounding >= 0).all()
                assert (reading.grounding <= 1.001).all()
            session.close()

    def test_a_candidates_text_is_what_its_tokens_mean(
        self, engine: Engine, start: Callable[..., Session]
    ) -> None:
        for number in range(len(self.prompts)):
            step = greedy(start(number, on=engine), 8)
            assert step.text == self.text_of(engine, step.tokens)

    @pytest.mark.parametrize("tokens", [1, 3, 5])
    def test_steps_add_up_to_the_answer(self, start: Callable[..., Session], tokens: int) -> None:
        whole, session = greedy(start(), 12), start()
        steps: list[Candidate] = []
        while sum(len(step.tokens) for step in steps) < len(whole.tokens):
            written = sum(len(step.tokens) for step in steps)
            steps.append(greedy(session, min(tokens, len(whole.tokens) - written)))
            session.accept(steps[-1])
        assert tuple(t for step in steps for t in step.tokens) == whole.tokens
        assert "".join(step.text for step in steps) == whole.text

    def test_sampling_leaves_the_sequence_as_it_is(self, start: Callable[..., Session]) -> None:
        session = start()
        length = session.length
        first = session.sample(1, limit(6), WARM, seed=SEED)
        session.sample(1, limit(6), WARM, seed=(8,))
        assert session.length == length
        self.assert_repeats(session.sample(1, limit(6), WARM, seed=SEED), first)

    def test_tokens_are_counted(self, engine: Engine, start: Callable[..., Session]) -> None:
        session = start(on=engine)
        step = greedy(session, 6)
        counters = session.counters
        assert counters.written == len(step.tokens)
        assert counters.read + counters.reused == len(engine.encode(self.prompts[0]))
        read = counters.read
        session.read(step)
        assert session.counters.read == read + len(step.tokens)

    def test_the_model_ends_its_answer(self, start: Callable[..., Session]) -> None:
        if self.ending_prompt is None:
            pytest.skip("no ending_prompt")
        step = greedy(start(self.ending_prompt), 40)
        assert step.ending is Ending.END_OF_SEQUENCE
        assert step.ends_sequence
        reader = start(self.ending_prompt)
        self.assert_readings_close(reader.read(step), step.reading)  # of the end token too

    # --- several candidates

    def test_a_candidate_does_not_depend_on_how_many_there_are(
        self, start: Callable[..., Session], several: int
    ) -> None:
        session, wholly_equal, seeds = start(), 0, 20
        for seed in range(seeds):
            (alone,) = session.sample(1, limit(6), WARM, seed=(seed,))
            first = session.sample(several, limit(6), WARM, seed=(seed,))[0]
            shared = shared_tokens(alone.tokens, first.tokens)
            assert shared, "the first token differs"
            self.assert_readings_close(head(first.reading, shared), head(alone.reading, shared))
            wholly_equal += alone.tokens == first.tokens
        assert wholly_equal >= self.equal_draws * seeds

    def test_candidates_differ(self, start: Callable[..., Session], several: int) -> None:
        candidates = start().sample(
            several, limit(8), Sampling(temperature=1.5, top_p=1), seed=SEED
        )
        assert len(candidates) == several
        assert len({candidate.tokens for candidate in candidates}) > 1

    def test_greedy_candidates_are_equal(self, start: Callable[..., Session], several: int) -> None:
        session = start()
        candidates = session.sample(several, limit(6), GREEDY, seed=SEED)
        assert len(candidates) == several
        self.assert_repeats(candidates[1:], candidates[:-1])
        assert candidates[0].tokens == greedy(session, 6).tokens

    # --- reading

    def test_what_one_session_writes_another_reads(
        self, start: Callable[..., Session], k: int
    ) -> None:
        """Log-probs and grounding depend neither on k nor on the candidate's index."""
        for number in range(len(self.prompts)):
            writer, reader = start(number), start(number)
            candidates = writer.sample(k, limit(6), WARM, seed=SEED)
            for candidate in reversed(candidates):
                self.assert_readings_close(reader.read(candidate), candidate.reading)
            self.assert_readings_close(writer.read(candidates[-1]), candidates[-1].reading)
            self.assert_same_sequence(writer, reader)

    def test_history_leaves_no_trace_in_readings(
        self, start: Callable[..., Session], k: int
    ) -> None:
        session, fresh = start(), start()
        step, length = greedy(start(), 8), session.length
        for turn in range(4):
            session.sample(k, limit(5), WARM, seed=(turn,))
            session.accept(text_step(" and so on"))
            session.read(text_step(" but not this"))
            session.rollback(length)
        self.assert_readings_close(session.read(step), fresh.read(step))
        self.assert_same_sequence(session, fresh)

    # --- accepting

    def test_an_accepted_own_step_equals_one_that_is_read(
        self, start: Callable[..., Session], k: int
    ) -> None:
        writer, reader = start(), start()
        for turn in range(3):
            candidates = writer.sample(k, limit(5), WARM, seed=(turn,))
            chosen = candidates[(k - 1 - turn) % k]
            length = writer.length
            for session in (writer, reader):
                session.accept(chosen)
                assert session.length == length + len(chosen.tokens)
            self.assert_same_sequence(writer, reader)

    def test_an_accepted_own_step_is_not_computed_again(
        self, start: Callable[..., Session], k: int
    ) -> None:
        session = start()
        candidates = session.sample(k, limit(5), WARM, seed=SEED)
        read = session.counters.read
        session.accept(candidates[-1])
        session.sample(k, limit(2), WARM, seed=SEED)
        assert session.counters.read == read

    def test_a_part_of_a_candidate_can_be_accepted(
        self, start: Callable[..., Session], k: int
    ) -> None:
        writer, reader = start(), start()
        parts = start().sample(k, limit(3), WARM, seed=SEED)
        wholes = writer.sample(k, limit(6), WARM, seed=SEED)
        assert [whole.tokens[:3] for whole in wholes] == [part.tokens for part in parts]
        for session in (writer, reader):
            session.accept(parts[-1])
        self.assert_same_sequence(writer, reader)

    def test_a_foreign_step_replaces_the_candidates(self, start: Callable[..., Session]) -> None:
        other, late, early = start(1), start(), start()
        foreign = greedy(other, 6)
        greedy(late, 5)
        for session in (late, early):
            session.accept(foreign)
        self.assert_same_sequence(late, early)

    def test_a_step_of_another_vocabulary_is_taken_over_as_text(
        self, start: Callable[..., Session]
    ) -> None:
        own, other = start(), start()
        step = greedy(own, 6)
        translated = text_step(step.text)
        assert other.fits(translated)
        self.assert_readings_close(other.read(translated), step.reading)
        own.accept(step)
        other.accept(translated)
        self.assert_same_sequence(own, other)

    # --- token trees

    def test_the_logits_of_a_tree_are_those_of_its_paths(
        self, start: Callable[..., Session], widths: tuple[int, ...]
    ) -> None:
        """Grown level by level, as a draft does, or whole, as a target reads it."""
        drafting, reading, plain = (start_logits(start) for _ in range(3))
        tree, whole = TokenTree(widths), TokenTree(widths)
        level, rows = [0], [drafting.logits(tree).copy()]
        for width in widths:
            children = [
                (int(token), node)
                for node, row in zip(level, rows[-1], strict=True)
                for token in np.argsort(-row, kind="stable")[:width]
            ]
            level = [tree.add(*child) for child in children]
            rows.append(drafting.logits(tree).copy())
        for node in tree.nodes[1:]:
            whole.add(node.token, node.parent)
        grown, read = np.concatenate(rows), reading.logits(whole).copy()
        length = plain.length
        assert drafting.length == reading.length == length
        for node in range(len(tree.nodes)):
            plain.rollback(length)
            plain.extend(tree.path(node))
            expected = log_softmax(plain.logits(TokenTree((1,)))[0])
            for ours in (grown[node], read[node]):
                np.testing.assert_allclose(
                    log_softmax(ours)[likely(expected)],
                    expected[likely(expected)],
                    rtol=0,
                    atol=self.logprob_tolerance,
                )

    def test_a_path_of_a_tree_can_be_accepted(
        self, start: Callable[..., Session], widths: tuple[int, ...]
    ) -> None:
        session, plain = start_logits(start), start_logits(start)
        for turn in range(4):
            tree, level = TokenTree(widths), [0]
            row = session.logits(tree)[0]
            tokens = iter(np.argsort(-row, kind="stable")[:32].tolist())
            for width in widths:
                level = [tree.add(next(tokens), node) for node in level for _ in range(width)]
            session.logits(tree)
            node = (5 * turn + 3) % len(tree.nodes)
            path = [*tree.path(node), *([next(tokens)] if turn % 2 else [])]
            for each in (session, plain):
                length = each.length
                each.extend(path)
                assert each.length == length + len(path)
            if turn < 2:  # else what is pending is read together with the next tree
                self.assert_same_sequence(session, plain)
        self.assert_same_sequence(session, plain)

    def test_a_tree_that_does_not_fit_is_refused(self, start: Callable[..., Session]) -> None:
        session = start_logits(start)
        with pytest.raises(ContextOverflowError):
            session.logits(TokenTree((1,) * (session.room + 1)))
        self.assert_same_sequence(session, start())

    # --- grammars

    @pytest.fixture
    def held(self, engine: Engine) -> Callable[[Constraint], Session]:
        """Opens sessions that are held to a grammar."""
        if not engine.capabilities.constraints:
            pytest.skip("the engine cannot hold a session to a grammar")
        spec = self.spec if engine.capabilities.attention else None
        return lambda constraint: engine.open(
            self.prompts[0], grounding=spec, constraint=constraint
        )

    def test_a_grammar_is_kept_or_refused(self, engine: Engine) -> None:
        constraint = Constraint.regex("a")
        if engine.capabilities.constraints:
            with closing(engine.open(self.prompts[0], constraint=constraint)) as session:
                assert greedy(session, 4).text == "a"
        else:
            with pytest.raises(ConfigurationError):
                engine.open(self.prompts[0], constraint=constraint)
        with closing(self.open(engine, self.prompts[0])) as session:
            assert greedy(session, 4).tokens

    @pytest.mark.parametrize("pattern", ["[0-9]{3}-(a|bc){2}", "(é|😀){2}", "x\n\n+y"])
    @pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
    def test_candidates_follow_a_grammar_to_its_end(
        self, held: Callable[[Constraint], Session], k: int, sampling: Sampling, pattern: str
    ) -> None:
        with closing(held(Constraint.regex(pattern))) as session:
            for candidate in session.sample(k, limit(16), sampling, seed=SEED):
                if "+" not in pattern:
                    assert candidate.ends_sequence
                if candidate.ends_sequence:
                    assert re.fullmatch(pattern, candidate.text)
                self.assert_readings_close(session.read(candidate), candidate.reading)

    @pytest.mark.parametrize("tokens", [1, 2, 5])
    def test_steps_under_a_grammar_add_up_to_the_answer(
        self, held: Callable[[Constraint], Session], tokens: int
    ) -> None:
        schema = {"type": "object", "properties": {"é": {"enum": ["😀 ab", "cd"]}}}
        constraint = Constraint.json_schema({**schema, "required": ["é"]})
        with closing(held(constraint)) as session:
            whole = greedy(session, 16)
            length = session.length
            for _ in range(2):
                steps: list[Candidate] = []
                while sum(len(step.tokens) for step in steps) < len(whole.tokens):
                    steps.append(greedy(session, tokens))
                    session.accept(steps[-1])
                text = "".join(step.text for step in steps)
                assert text.startswith(whole.text)
                session.rollback(length)

    def test_log_probs_are_those_of_the_allowed_tokens(
        self, held: Callable[[Constraint], Session], start: Callable[..., Session]
    ) -> None:
        """Nothing is as likely among all tokens as among some of them."""
        with closing(held(Constraint.regex("[a-c]{4}"))) as session:
            step = greedy(session, 4)
        free = start().read(step).logprobs
        assert (step.reading.logprobs >= free - self.logprob_tolerance).all()
        assert step.reading.logprobs.sum() > free.sum()

    def test_a_step_of_another_vocabulary_is_followed_in_the_grammar(
        self, held: Callable[[Constraint], Session]
    ) -> None:
        with closing(held(Constraint.regex("é (ab|xyz) 1"))) as session:
            for text in ("é ", "xy"):
                step = text_step(text)
                assert (session.read(step).logprobs <= 0).all()
                session.accept(step)
            assert greedy(session, 8).text == "z 1"

    def test_a_trees_logits_forbid_what_the_grammar_does(
        self, engine: Engine, held: Callable[[Constraint], Session]
    ) -> None:
        if not engine.capabilities.logits:
            pytest.skip("the engine does not show its logits")
        with closing(held(Constraint.regex("abc"))) as opened:
            session, tree = cast("LogitSession", opened), TokenTree((1,) * 4)
            text, node = "", 0
            while text != "abc":
                rest = "abc"[len(text) :]
                row = session.logits(tree)[-1]
                allowed = np.flatnonzero(np.isfinite(row)).tolist()
                assert allowed
                assert all(rest.startswith(self.text_of(engine, [token])) for token in allowed)
                node = tree.add(int(row.argmax()), node)
                text = self.text_of(engine, tree.path(node))
            ends = np.flatnonzero(np.isfinite(session.logits(tree)[-1])).tolist()
            assert ends
            assert self.text_of(engine, ends) == ""

    def test_a_dead_end_leaves_the_engine_usable(
        self, held: Callable[[Constraint], Session], start: Callable[..., Session], engine: Engine
    ) -> None:
        with pytest.raises(EngineError), closing(held(Constraint.lark(DEAD_END))) as session:
            greedy(session, 4)
        self.assert_same_sequence(start(on=engine), start())

    # --- rolling back

    def test_rolled_back_equals_never(self, start: Callable[..., Session]) -> None:
        session, never = start(), start()
        length = session.length
        session.accept(greedy(session, 6))
        session.sample(1, limit(4), WARM, seed=SEED)
        session.accept(text_step(" otherwise"))
        session.rollback(length)
        for other in (session, never):
            other.accept(text_step(" instead"))
        self.assert_same_sequence(session, never)

    def test_a_part_of_a_step_can_be_rolled_back(self, start: Callable[..., Session]) -> None:
        session, expected = start(), start()
        part = greedy(start(), 3)
        length = session.length
        session.accept(greedy(session, 6))
        session.rollback(length + len(part.tokens))
        expected.accept(part)
        self.assert_same_sequence(session, expected)

    # --- reusing earlier requests

    def test_a_reused_prefix_equals_a_fresh_one(
        self, engine: Engine, start: Callable[..., Session]
    ) -> None:
        prompt = self.prompts[0]
        first = start(prompt, on=engine)
        step = greedy(first, 8)
        first.accept(step)
        sequence = [*engine.encode(prompt), *step.tokens]
        first.close()
        longer = follow_up(prompt, step.text)
        tokens = engine.encode(longer)
        session = start(longer, on=engine)
        self.assert_same_sequence(session, start(longer))
        counters = session.counters
        assert counters.read >= len(tokens) - counters.reused
        assert counters.reused <= shared_tokens(sequence, tokens)
        assert (counters.reused > 0) == self.reuses_prefixes

    def test_an_unrelated_prompt_reuses_nothing_wrong(
        self, engine: Engine, start: Callable[..., Session]
    ) -> None:
        for number in (0, 1, 0):
            session = start(number, on=engine)
            self.assert_same_sequence(session, start(number))
            session.accept(greedy(session, 4))
            session.close()

    def test_the_same_prompt_again_gives_the_same_numbers(
        self, engine: Engine, start: Callable[..., Session], k: int
    ) -> None:
        first = start(on=engine)
        expected = first.sample(k, limit(6), WARM, seed=SEED)
        first.accept(expected[0])
        first.close()
        again = start(on=engine)
        self.assert_repeats(again.sample(k, limit(6), WARM, seed=SEED), expected)
        if self.reuses_prefixes:
            assert again.counters.reused >= len(engine.encode(self.prompts[0])) - 1

    def test_open_sessions_do_not_disturb_each_other(
        self, engine: Engine, start: Callable[..., Session]
    ) -> None:
        numbers = (0, 1, 0)
        together = [start(number, on=engine) for number in numbers]
        alone = [start(number) for number in numbers]
        for turn in range(2):
            for session, expected in zip(together, alone, strict=True):
                (step,) = session.sample(1, limit(4), WARM, seed=(turn,))
                self.assert_readings_close(expected.read(step), step.reading)
                session.accept(step)
                expected.accept(step)
        for session, expected in zip(together, alone, strict=True):
            self.assert_same_sequence(session, expected)

    # --- rejecting

    def test_fifty_rejections_equal_none(self, start: Callable[..., Session], k: int) -> None:
        session, fresh = start(), start()
        for turn in range(50):
            watch = (lambda *_: False) if turn % 2 else None
            session.sample(k, limit(1 + turn % 3), WARM, seed=(turn, 9), watch=watch)
        self.assert_same_sequence(session, fresh)
        expected = fresh.sample(k, limit(6), WARM, seed=SEED)
        self.assert_repeats(session.sample(k, limit(6), WARM, seed=SEED), expected)

    def test_drafting_stops_once_no_candidate_can_be_accepted(
        self, start: Callable[..., Session], k: int
    ) -> None:
        session, fresh = start(), start()
        wholes = start().sample(k, limit(8), WARM, seed=SEED)
        early = session.sample(k, limit(8), WARM, seed=SEED, watch=lambda *_: False)
        for candidate, whole in zip(early, wholes, strict=True):
            assert candidate.ending is Ending.REJECTED_EARLY
            assert len(candidate.tokens) < len(whole.tokens)
            assert candidate.tokens == whole.tokens[: len(candidate.tokens)]
        self.assert_same_sequence(session, fresh)
        early = session.sample(k, limit(8), WARM, seed=SEED, watch=lambda *_: False)
        for other in (session, fresh):
            other.accept(early[-1])
            other.accept(text_step(" after all"))
        self.assert_same_sequence(session, fresh)

    def test_the_watch_sees_what_will_be_read(self, start: Callable[..., Session], k: int) -> None:
        seen: list[tuple[float, float | None]] = []

        def watch(confidence: float, grounding: float | None) -> bool:
            seen.append((confidence, grounding))
            return True

        session = start()
        (step,) = session.sample(1, limit(6), WARM, seed=SEED, watch=watch)
        confidences = [confidence for confidence, _ in seen]
        assert confidences == sorted(confidences, reverse=True), "the lowest so far can only fall"
        assert seen[-1] == (step.reading.confidence, step.reading.min_grounding)
        watched = session.sample(k, limit(6), WARM, seed=SEED, watch=lambda *_: True)
        self.assert_repeats(watched, session.sample(k, limit(6), WARM, seed=SEED))

    # --- hidden states

    def test_hidden_states_are_read_where_they_are_asked_for(
        self, engine: Engine, start: Callable[..., Session]
    ) -> None:
        plain = start(on=engine)
        step = greedy(plain, 4)
        assert step.reading.state is None
        assert plain.read(step).state is None
        plain.close()
        if not engine.capabilities.states:
            with pytest.raises(StatesUnavailableError):
                start(on=engine, state_layer=self.state_layer)
            self.assert_same_sequence(start(on=engine), start())
            return
        shapes = set()
        for number in range(len(self.prompts)):
            session = start(number, on=engine, state_layer=self.state_layer)
            for candidate in session.sample(1, limit(6), WARM, seed=SEED):
                for reading in (candidate.reading, session.read(candidate)):
                    assert reading.state is not None
                    assert np.isfinite(reading.state).all()
                    assert reading.state.any()
                    shapes.add(reading.state.shape)
            session.close()
        ((width,),) = shapes
        assert width > 1
        again = start(on=engine)
        assert greedy(again, 4).reading.state is None, "the next session asks for none"

    def test_a_hidden_state_is_that_of_the_steps_last_token(
        self, observe: Callable[..., Session], k: int
    ) -> None:
        """It depends neither on k nor on the candidate's index, nor on who has written the step."""
        for number in range(len(self.prompts)):
            writer, reader = observe(number), observe(number)
            candidates = writer.sample(k, limit(6), WARM, seed=SEED)
            for candidate in reversed(candidates):
                self.assert_states_close(reader.read(candidate), candidate.reading)
            (alone,) = writer.sample(1, limit(6), WARM, seed=SEED)
            if alone.tokens == candidates[0].tokens:  # rounding may move a draw
                self.assert_states_close(alone.reading, candidates[0].reading)
            part = greedy(reader, 3)
            whole = greedy(reader, 6)
            assert self.states_differ(part.reading, whole.reading) > 2 * self.state_tolerance
            for session in (writer, reader):
                session.accept(part)
            rest = greedy(writer, 3)
            assert part.tokens + rest.tokens == whole.tokens
            self.assert_states_close(rest.reading, whole.reading)
            self.assert_states_close(reader.read(rest), whole.reading)

    def test_a_step_that_comes_as_text_has_the_same_hidden_state(
        self, observe: Callable[..., Session]
    ) -> None:
        step = greedy(observe(), 6)
        self.assert_states_close(observe().read(text_step(step.text)), step.reading)

    def test_history_leaves_no_trace_in_hidden_states(
        self, engine: Engine, observe: Callable[..., Session], k: int
    ) -> None:
        session, fresh = observe(on=engine), observe()
        step, length = greedy(observe(), 8), session.length
        for turn in range(6):
            watch = (lambda *_: False) if turn % 2 else None
            session.sample(k, limit(1 + turn % 3), WARM, seed=(turn, 9), watch=watch)
            session.accept(text_step(" and so on"))
            session.rollback(length)
        for reading in (session.read(step), greedy(session, 8).reading, fresh.read(step)):
            self.assert_states_close(reading, step.reading)
        session.close()
        self.assert_states_close(observe(on=engine).read(step), step.reading)

    def test_a_longer_step_has_the_hidden_state_of_its_end(
        self, observe: Callable[..., Session]
    ) -> None:
        """Also where it is computed in several passes."""
        whole, session, reader = greedy(observe(), 40), observe(), observe()
        session.accept(replace(whole, tokens=whole.tokens[:-1]))
        last = replace(whole, tokens=whole.tokens[-1:])
        self.assert_states_close(session.read(last), whole.reading)
        self.assert_states_close(reader.read(whole), whole.reading)

    def test_reading_hidden_states_changes_nothing_else(
        self, observe: Callable[..., Session], start: Callable[..., Session], k: int
    ) -> None:
        with_states, without = observe(), start()
        ours = with_states.sample(k, limit(6), WARM, seed=SEED)
        expected = without.sample(k, limit(6), WARM, seed=SEED)
        for one, other in zip(ours, expected, strict=True):
            shared = shared_tokens(one.tokens, other.tokens)
            assert shared
            self.assert_readings_close(head(one.reading, shared), head(other.reading, shared))
        self.assert_same_sequence(with_states, without)

    def test_what_is_rejected_early_has_no_hidden_state(
        self, observe: Callable[..., Session], k: int
    ) -> None:
        session = observe()
        asked = count()
        for watch in (lambda *_: False, lambda *_: next(asked) < 3 * k):
            for candidate in session.sample(k, limit(8), WARM, seed=SEED, watch=watch):
                assert candidate.ending is Ending.REJECTED_EARLY
                assert candidate.reading.state is None
        self.assert_states_close(greedy(session, 6).reading, greedy(observe(), 6).reading)

    def test_layers_have_hidden_states_of_their_own(
        self, engine: Engine, observe: Callable[..., Session]
    ) -> None:
        session, above = observe(on=engine), observe(state_layer=self.state_layer + 1)
        step = greedy(session, 4)
        assert self.states_differ(above.read(step), step.reading) > 2 * self.state_tolerance
        session.close()
        for layer in (-1, 10**6):
            with pytest.raises(StatesUnavailableError, match=str(layer)):
                observe(on=engine, state_layer=layer)
        self.assert_states_close(observe(on=engine).read(step), step.reading)

    # --- where a step ends

    def test_a_step_ends_at_its_limit(self, start: Callable[..., Session]) -> None:
        session = start()
        for tokens in (1, 2, 7):
            step = greedy(session, tokens)
            assert (step.ending, len(step.tokens)) == (Ending.STEP_LIMIT, tokens)

    def test_a_step_ends_with_the_token_that_completes_a_delimiter(
        self, start: Callable[..., Session]
    ) -> None:
        session = start()
        whole = greedy(session, 12)
        delimiter = middle(whole.text)
        (step,) = session.sample(1, Boundary(delimiter, max_tokens=12), GREEDY, seed=SEED)
        assert step.ending is Ending.BOUNDARY
        assert step.tokens == whole.tokens[: len(step.tokens)]
        visible = len(whole.text) - len(whole.text.lstrip())
        assert delimiter in step.text[visible + 1 :]
        if len(step.tokens) > 1:
            assert delimiter not in greedy(session, len(step.tokens) - 1).text[visible + 1 :]

    def test_a_step_ends_with_the_token_that_completes_a_stop_string(
        self, start: Callable[..., Session]
    ) -> None:
        session = start()
        whole = greedy(session, 12)
        stop = middle(whole.text)
        (step,) = session.sample(1, replace(limit(12), stop=("#~#", stop)), GREEDY, seed=SEED)
        assert step.ending is Ending.STOP_STRING
        assert step.tokens == whole.tokens[: len(step.tokens)]
        assert stop in step.text
        if len(step.tokens) > 1:
            assert stop not in greedy(session, len(step.tokens) - 1).text

    def test_a_stop_string_may_begin_in_the_answer_so_far(
        self, start: Callable[..., Session]
    ) -> None:
        session = start()
        whole = greedy(session, 12)
        boundary = replace(limit(12), preceding="so far#~", stop=("#~" + whole.text[:1],))
        (step,) = session.sample(1, boundary, GREEDY, seed=SEED)
        assert step.ending is Ending.STOP_STRING
        assert step.text == whole.text[: len(step.text)]
        assert len(step.tokens) < len(whole.tokens)

    # --- too long

    def test_a_prompt_that_does_not_fit_is_refused(
        self, engine: Engine, start: Callable[..., Session]
    ) -> None:
        with pytest.raises(ContextOverflowError):
            start(follow_up(self.prompts[0], " 7" * engine.context_length), on=engine)
        self.assert_same_sequence(start(on=engine), start())

    def test_a_session_works_on_after_an_overflow(
        self, engine: Engine, start: Callable[..., Session], k: int
    ) -> None:
        session = start(on=engine)
        too_long = text_step(" 7" * engine.context_length)
        assert not session.fits(too_long)
        for act in (
            lambda: session.sample(k, limit(session.room + 1), WARM, seed=SEED),
            lambda: session.read(too_long),
            lambda: session.accept(too_long),
        ):
            with pytest.raises(ContextOverflowError):
                act()
            self.assert_same_sequence(session, start())

    def test_the_context_can_be_filled_to_the_last_token(
        self, engine: Engine, start: Callable[..., Session], k: int
    ) -> None:
        session = start(on=engine)
        sevens = 1
        while session.fits(text_step(" 7" * (sevens + 1))):
            sevens += 1
        with pytest.raises(ContextOverflowError):
            session.accept(text_step(" 7" * (sevens + 1)))
        session.accept(text_step(" 7" * (sevens - 2)))
        room = session.room
        candidates = session.sample(k, limit(room), WARM, seed=SEED)
        longest = max(candidates, key=lambda candidate: len(candidate.tokens))
        assert session.fits(longest)
        session.accept(longest)
        assert session.room == room - len(longest.tokens)
        with pytest.raises(ContextOverflowError):
            session.sample(k, limit(session.room + 1), WARM, seed=SEED)
        session.close()
        self.assert_same_sequence(start(on=engine), start())

    # --- cancelling

    @pytest.mark.parametrize("polls", [0, 1, 2, 3, 6])
    def test_a_cancelled_request_leaves_the_engine_usable(
        self, engine: Engine, start: Callable[..., Session], polls: int
    ) -> None:
        """`cancelled` is asked at every token: eight of them suffice for every case."""
        asked = count()
        with pytest.raises(DecodingCancelled), ExitStack() as stack:
            session = start(on=engine, cancelled=lambda: next(asked) >= polls)
            stack.callback(session.close)
            greedy(session, 8)
        self.assert_same_sequence(start(on=engine), start())

    def test_what_was_cancelled_while_it_was_read_is_not_reused(
        self, engine: Engine, start: Callable[..., Session]
    ) -> None:
        stop = threading.Event()
        session = start(on=engine, cancelled=stop.is_set)
        session.accept(greedy(session, 4))
        stop.set()
        session.accept(text_step(" one two three four five six seven eight nine ten"))
        with pytest.raises(DecodingCancelled):
            greedy(session, 2)
        session.close()
        self.assert_same_sequence(start(on=engine), start())

    # --- queueing

    def test_requests_are_served_in_the_order_in_which_they_came(
        self, load: Callable[[], Engine]
    ) -> None:
        engine, served, inside = load(), [], []
        places = engine.capabilities.max_parallel

        def request(number: int) -> None:
            with engine.exclusive():
                inside.append(number)
                assert len(inside) <= places
                served.append(number)
                time.sleep(0.01)
                inside.remove(number)

        with occupied(engine):
            threads = [run(request, number) for number in range(5)]
            assert not served
        join(threads)
        assert (served if places == 1 else sorted(served)) == list(range(5))

    def test_a_request_that_is_cancelled_while_it_queues_leaves_the_queue(
        self, load: Callable[[], Engine]
    ) -> None:
        engine, outcome, cancelled = load(), [], threading.Event()

        def give_up(_: int) -> None:
            try:
                with engine.exclusive(cancelled.is_set):
                    outcome.append("admitted")
            except DecodingCancelled:
                outcome.append("cancelled")

        with occupied(engine):
            waiting = run(give_up, 0)
            cancelled.set()
            join([waiting])
        assert outcome == ["cancelled"]
        cancelled.clear()
        join([run(give_up, 1)])
        assert outcome == ["cancelled", "admitted"]

    def test_an_error_within_a_request_does_not_block_the_queue(
        self, load: Callable[[], Engine]
    ) -> None:
        engine, served = load(), []
        with pytest.raises(ZeroDivisionError), engine.exclusive():
            raise ZeroDivisionError

        def request(number: int) -> None:
            with engine.exclusive():
                served.append(number)

        join([run(request, 0)])
        assert served == [0]

    def test_requests_of_several_threads_give_what_each_gives_alone(
        self, load: Callable[[], Engine], start: Callable[..., Session]
    ) -> None:
        engine, written = load(), {}

        def request(number: int) -> None:
            with engine.exclusive(), closing(self.open(engine, self.prompts[number % 2])) as own:
                written[number] = greedy(own, 4)

        join([run(request, number, wait_s=0) for number in range(4)])
        readers = start(0), start(1)
        assert sorted(written) == list(range(4))
        for number, step in written.items():
            self.assert_readings_close(readers[number % 2].read(step), step.reading)

    # --- closing

    def test_a_session_is_closed_twice_without_harm(
        self, engine: Engine, start: Callable[..., Session]
    ) -> None:
        session = start(on=engine)
        session.accept(greedy(session, 4))
        session.close()
        session.close()
        self.assert_same_sequence(start(on=engine), start())
        self.assert_same_sequence(start(on=engine), start())

    def test_a_closed_engine_refuses_work(self, load: Callable[[], Engine]) -> None:
        engine = load()
        with engine.exclusive():
            unused, used = (self.open(engine, self.prompts[0]) for _ in range(2))
            step = greedy(used, 2)
            used.accept(step)
            engine.close()
            engine.close()
            with pytest.raises(EngineError):
                self.open(engine, self.prompts[0])
            for session in (unused, used):
                with pytest.raises(EngineError):
                    greedy(session, 2)
                with pytest.raises(EngineError):
                    session.read(step)
                session.close()


@contextmanager
def occupied(engine: Engine) -> Iterator[None]:
    """An engine that admits nobody else."""
    with ExitStack() as stack:
        for _ in range(engine.capabilities.max_parallel):
            stack.enter_context(engine.exclusive())
        yield


def greedy(session: Session, tokens: int) -> Candidate:
    """The one step that a session would write greedily."""
    (candidate,) = session.sample(1, limit(tokens), GREEDY, seed=SEED)
    return candidate


def start_logits(start: Callable[..., Session]) -> LogitSession:
    """A session that shows its logits."""
    session = start()
    if not hasattr(session, "logits"):
        pytest.skip("the engine does not show its logits")
    return cast("LogitSession", session)


def log_softmax(logits: FloatArray) -> FloatArray:
    shifted = logits - logits.max()
    result: FloatArray = shifted - np.log(np.exp(shifted).sum())
    return result


def likely(logprobs: FloatArray) -> IntArray:
    """The tokens that can matter: rounding moves the unlikely ones most."""
    return np.argsort(-logprobs)[:10]


def text_step(text: str) -> Candidate:
    """A step that a model with another tokenizer has written."""
    reading = Reading(np.zeros(1, dtype=np.float32))
    return Candidate((1,), text, reading, Ending.STEP_LIMIT, "another vocabulary")


def shared_tokens(first: Sequence[int], second: Sequence[int]) -> int:
    """How many leading tokens two sequences share."""
    equal = [a == b for a, b in zip(first, second, strict=False)]
    return equal.index(False) if False in equal else len(equal)


def middle(text: str) -> str:
    """Three characters from the middle of a text."""
    assert len(text) >= 9, "the greedy answer is too short for this test"
    return text[len(text) // 2 :][:3]


def head(reading: Reading, tokens: int) -> Reading:
    """The signals of a step's first tokens."""
    grounding = None if reading.grounding is None else reading.grounding[:tokens]
    return Reading(reading.logprobs[:tokens], grounding)


def follow_up(prompt: Prompt, answer: str) -> Prompt:
    """A prompt that goes on where an answer ended."""
    if prompt.text is not None:
        return replace(prompt, text=f"{prompt.text}{answer} And then?")
    turn = ({"role": "assistant", "content": answer}, {"role": "user", "content": "And then?"})
    return replace(prompt, messages=(*prompt.messages, *turn))


def run(work: Callable[[int], None], number: int, *, wait_s: float = 0.1) -> threading.Thread:
    """Do work in another thread, and give it the time to queue."""
    thread = threading.Thread(target=work, args=(number,), daemon=True)
    thread.start()
    time.sleep(wait_s)
    return thread


def join(threads: Sequence[threading.Thread], *, timeout_s: float = 60) -> None:
    for thread in threads:
        thread.join(timeout_s)
        assert not thread.is_alive(), "a request waits for ever"
