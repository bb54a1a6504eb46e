"""Which passage of the prompt a step leans on: against the formula, on every route to a step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specguard_chains.decoding.baselines import SoloDecoder
from specguard_chains.decoding.boundaries import Boundary
from specguard_chains.decoding.calibration import Bounds, Calibration
from specguard_chains.decoding.decoder import Request
from specguard_chains.decoding.engine import Prompt
from specguard_chains.decoding.grounding import (
    FloatArray,
    GroundingSpec,
    Rollout,
    passages_reference,
)
from specguard_chains.decoding.passages import locate
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.decoding.specguard import SpecGuardDecoder
from specguard_chains.decoding.speculative import SpeculativeDecoder
from specguard_chains.decoding.steps import Review, Source, Step, Verdict
from specguard_chains.decoding.verification import EnsembleVerifier
from specguard_chains.errors import AttentionUnavailableError, ConfigurationError
from tests.toy_engine import ToyEngine, random_policy, scripted_policy
from tests.unit_tests.test_grounding import FORMS, SLOTS, full_attention

APPLE, PEAR, PLUM = "An apple is red.", "A pear is green.", "A plum is blue."
FRUIT = (APPLE, PEAR, PLUM)
TEXT = f"{APPLE}\n\n{PEAR}\n\n{PLUM}\n\nWhich is green?"
PROMPT = Prompt(text=TEXT, passages=FRUIT)
SPEC = GroundingSpec()
ANY = Sampling(temperature=1, top_p=1)
STEPS = ("One a.\n\n", "Two b.\n\n", "Three c.")


def expected(
    engine: ToyEngine, tokens: Sequence[int], text: str = TEXT, before: str = "", **spec: Any
) -> FloatArray:
    """What the formula says of tokens that follow the prompt and an answer's earlier steps."""
    located = replace(SPEC, passages=locate(FRUIT, engine.encode(Prompt(text=text)), engine))
    located = replace(located, **spec)
    context = (*engine.encode(Prompt(text=text)), *before.encode())
    attention = full_attention((*context, *tokens), located.layers)
    return passages_reference(attention, len(context), located)


# --- the rollout


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_a_session_equals_the_formula(form: str, layers: int) -> None:
    """Three candidates in scrambled cells, one of them accepted, and what comes after it."""
    spec = GroundingSpec.named(form, layers=layers)
    engine = ToyEngine(random_policy(1, end=-9))
    with closing(engine.open(PROMPT, grounding=spec)) as session:
        for candidate in session.sample(3, Boundary(max_tokens=12), ANY, seed=(1,)):
            values = expected(engine, candidate.tokens, **_form(spec))
            np.testing.assert_allclose(candidate.reading.passages, values, atol=1e-6)
            assert candidate.reading.passages.std() > 0.002, "the numbers tell passages apart"
            assert (values >= 0).all()
            assert (values.sum(axis=1) < 1).all(), "what is paid to the rest is missing"
        session.accept(candidate)
        (after,) = session.sample(1, Boundary(max_tokens=12), ANY, seed=(2,))
        values = expected(engine, after.tokens, before=candidate.text, **_form(spec))
        np.testing.assert_allclose(after.reading.passages, values, atol=1e-6)


def _form(spec: GroundingSpec) -> dict[str, Any]:
    return {"layers": spec.layers, "threshold": spec.threshold, "renormalise": spec.renormalise}


def test_reading_equals_writing() -> None:
    engine = ToyEngine(random_policy(1))
    with closing(engine.open(PROMPT, grounding=SPEC)) as session:
        (written,) = session.sample(1, Boundary(max_tokens=40), ANY, seed=(1,))
        read = session.read(written)
        np.testing.assert_allclose(read.passages, written.reading.passages, atol=1e-6)
        assert read.passage_shares == pytest.approx(read.passages.mean(axis=0))


def test_candidates_beside_it_do_not_matter() -> None:
    alone, among = (_sampled(n)[0].reading for n in (1, 4))
    np.testing.assert_allclose(alone.passages, among.passages, atol=1e-7)


def _sampled(n: int, prompt: Prompt = PROMPT) -> Any:
    engine = ToyEngine(random_policy(1))
    with closing(engine.open(prompt, grounding=SPEC)) as session:
        return session.sample(n, Boundary(max_tokens=12), ANY, seed=(1,))


def test_their_order_does_not_matter() -> None:
    (usual,) = _sampled(1)
    (turned,) = _sampled(1, replace(PROMPT, passages=FRUIT[::-1]))
    (one,) = _sampled(1, replace(PROMPT, passages=[PEAR]))
    np.testing.assert_allclose(turned.reading.passages[:, ::-1], usual.reading.passages, atol=1e-7)
    np.testing.assert_allclose(one.reading.passages[:, 0], usual.reading.passages[:, 1], atol=1e-7)


def test_grounding_is_the_same_to_the_last_bit() -> None:
    without, given = (_sampled(2, prompt) for prompt in (Prompt(text=TEXT), PROMPT))
    for bare, told in zip(without, given, strict=True):
        assert bare.reading.passages is None
        assert bare.reading.passage_shares == ()
        assert bare.tokens == told.tokens
        np.testing.assert_array_equal(bare.reading.grounding, told.reading.grounding)


def test_a_cached_prompt_is_read_again_from_the_first_passage_that_may_differ() -> None:
    engine = ToyEngine(random_policy(1))
    text = f"Read this: {TEXT}"
    whole, before = len(engine.encode(Prompt(text=text))), len("Read this: ")
    reused = []
    for passages in (FRUIT, FRUIT, (PLUM,), (), (PEAR, PLUM), FRUIT):
        with closing(engine.open(Prompt(text=text, passages=passages), grounding=SPEC)) as session:
            (step,) = session.sample(1, Boundary(max_tokens=12), ANY, seed=(1,))
            reused.append(session.counters.reused)
        values = expected(engine, step.tokens, text)
        for number, passage in enumerate(passages):
            told = step.reading.passages[:, number]
            np.testing.assert_allclose(told, values[:, FRUIT.index(passage)], atol=1e-6)
        cold = ToyEngine(engine.policy)
        with closing(cold.open(Prompt(text=text), grounding=SPEC)) as session:
            (fresh,) = session.sample(1, Boundary(max_tokens=12), ANY, seed=(1,))
        np.testing.assert_allclose(step.reading.grounding, fresh.reading.grounding, atol=1e-6)
    pear, plum = (text.encode().index(fruit.encode()) for fruit in (PEAR, PLUM))
    assert reused == [0, whole, before, plum, pear, before]


def test_tokens_that_move_keep_their_values() -> None:
    spec = replace(SPEC, passages=(((1, 3),), ((0, 1), (4, 5))), layers=1)
    path = tuple(range(12))
    (attention,) = full_attention(path, 1)
    rollout = Rollout(spec, SLOTS)
    slots = np.arange(len(path))
    rollout.begin(slots, context=True, positions=slots)
    rollout.absorb(0, attention, slots)
    rollout.move(slots, slots + 3)
    np.testing.assert_allclose(
        rollout.passages(slots[6:] + 3), passages_reference(attention[None], 6, spec), atol=1e-6
    )


# --- finding them


class Words(ToyEngine):
    """Tokens of several bytes: those that are given, and bytes; "|" is a control token."""

    def __init__(self, *pieces: str) -> None:
        super().__init__(random_policy(1))
        self.pieces = [piece.encode() for piece in pieces]

    def encode(self, prompt: Prompt) -> list[int]:
        return self.encode_text(prompt.text or "")

    def encode_text(self, text: str) -> list[int]:
        tokens, rest = [], text.encode()
        while rest:
            found = [i for i, piece in enumerate(self.pieces) if rest.startswith(piece)]
            size = len(self.pieces[found[0]]) if found else 1
            tokens.append(1000 + found[0] if found else rest[0])
            rest = rest[size:]
        return tokens

    def token_bytes(self, token: int) -> bytes:
        if token == ord("|"):
            return b""
        return self.pieces[token - 1000] if token >= 1000 else bytes([token])


def found(text: str, *passages: str, pieces: Sequence[str] = ()) -> tuple[Any, ...]:
    engine = Words(*pieces)
    return locate(passages, engine.encode(Prompt(text=text)), engine)


def test_passages_are_found_in_any_order() -> None:
    assert found("ab cd ef", "ef", "ab") == (((6, 8),), ((0, 2),))


def test_every_place_counts() -> None:
    assert found("ab cd ab", "ab", "cd") == (((0, 2), (6, 8)), ((3, 5),))
    assert found("aaaa", "aa") == (((0, 4),),)


def test_white_space_around_a_passage_does_not_matter() -> None:
    assert found("say: ab cd.", " \n ab cd\n\n") == (((5, 10),),)


def test_a_token_that_a_passage_begins_or_ends_in_is_its_own() -> None:
    assert found("x ab. y", "ab", pieces=[" ab", ". "]) == (((1, 2),),)
    assert found("x ab. y", "ab.", pieces=[" ab", ". "]) == (((1, 3),),)


def test_a_token_that_two_passages_meet_in_is_the_first_ones() -> None:
    assert found("abcd", "cd", "ab", pieces=["bc"]) == (((2, 3),), ((0, 2),))


def test_a_passage_within_a_longer_one_stands_where_that_one_does_not() -> None:
    assert found("a b c, b.", "b", "a b c") == (((7, 8),), ((0, 5),))


def test_characters_of_several_bytes_are_found() -> None:
    assert found("é 🙂 größe", "🙂", "größe") == (((3, 7),), ((8, 15),))


class Lowering(Words):
    """Some tokenizers normalise what they are given."""

    def encode_text(self, text: str) -> list[int]:
        return super().encode_text(text.lower())


def test_text_is_sought_as_the_tokenizer_normalises_it() -> None:
    engine = Lowering()
    assert locate(["AB"], engine.encode(Prompt(text="x Ab")), engine) == (((2, 4),),)


@pytest.mark.parametrize(
    ("text", "passages", "message"),
    [
        ("ab", ["xy z"], r"passage 1 \('xy z'\) does not stand in the prompt"),
        ("ab", ["ab", "one two three four five six seven"], r"passage 2 \('one .* six'…\) does"),
        ("a\\nb", ["a\nb"], "JSON"),
        ("a|b", ["ab"], "special token"),
        ("a b", ["a b", "b"], r"passage 2 \('b'\) .*within another passage"),
        ("ab", ["ab", ""], "passage 2 is empty"),
        ("ab", [" \n"], "passage 1 is empty"),
        ("ab", ["ab", "ab\n"], r"passage 2 \('ab'\) is the same as passage 1"),
        ("ab", "ab", "list of texts, not the text 'ab'"),
        ("ab", [b"ab"], "passage 1 is of type bytes"),
    ],
)
def test_what_cannot_be_found_is_named(text: str, passages: Any, message: str) -> None:
    engine = Words()
    with pytest.raises(ConfigurationError, match=message):
        locate(passages, engine.encode(Prompt(text=text)), engine)


def test_a_passage_that_is_not_there_leaves_the_engine_as_it_was() -> None:
    engine = ToyEngine(random_policy(1))
    with pytest.raises(ConfigurationError, match="does not stand"):
        engine.open(replace(PROMPT, passages=["A fig."]), grounding=SPEC)
    with closing(engine.open(PROMPT, grounding=SPEC)) as session:
        (step,) = session.sample(1, Boundary(max_tokens=12), ANY, seed=(1,))
    np.testing.assert_allclose(step.reading.passages, expected(engine, step.tokens), atol=1e-6)


# --- steps


def decoder(draft: ToyEngine, target: ToyEngine, **settings: Any) -> SpecGuardDecoder:
    bounds = Calibration(confidence=Bounds(low=-3, high=0), grounding=Bounds(low=0, high=1))
    weight = settings.pop("confidence_weight", 1.0)
    verifier = EnsembleVerifier(bounds, confidence_weight=weight, threshold=0.5)
    return SpecGuardDecoder(draft, target, verifier, num_candidates=2, **settings)


def pair(vocabulary: str = "bytes") -> tuple[ToyEngine, ToyEngine]:
    """The draft is unsure of the second step, which the target rewrites."""
    draft = scripted_policy(*STEPS, logprobs=[-0.01, -4.0])
    target = scripted_policy("Uno a.\n\n", "Dos b.\n\n", "Tres c.")
    return ToyEngine(draft), ToyEngine(target, vocabulary=vocabulary)


def told(decoder: SpecGuardDecoder, **request: Any) -> list[Step]:
    asked = {"prompt": PROMPT, "sampling": Sampling(temperature=0), "max_tokens": 60, **request}
    return list(decoder.decode(Request(**asked)))


def assert_as_the_formula_says(steps: Sequence[Step], engine: ToyEngine) -> None:
    before = ""
    for step in steps:
        ending = [256] if step.finish_reason == "stop" else []
        values = expected(engine, [*step.text.encode(), *ending], before=before)
        np.testing.assert_allclose(step.passages, values.mean(axis=0), atol=1e-6)
        before += step.text


@pytest.mark.parametrize("vocabulary", ["bytes", "another"])
@pytest.mark.parametrize("weight", [0.8, 1.0])
@pytest.mark.parametrize("reader", ["draft", "target"])
def test_steps_tell_of_the_text_that_is_in_the_answer(
    reader: Any, weight: float, vocabulary: str
) -> None:
    draft, target = pair(vocabulary)
    steps = told(decoder(draft, target, grounding_from=reader, confidence_weight=weight))
    assert [step.source for step in steps] == [Source.DRAFT, Source.TARGET, Source.DRAFT]
    assert steps[1].text == "Dos b.\n\n"
    assert_as_the_formula_says(steps, draft if reader == "draft" else target)


def test_one_model_in_both_roles_tells_of_its_steps() -> None:
    engine = pair()[0]
    steps = told(decoder(engine, engine))
    assert [step.source for step in steps] == [Source.DRAFT, Source.TARGET, Source.DRAFT]
    assert_as_the_formula_says(steps, engine)


def test_passages_change_no_answer_and_cost_no_second_pass() -> None:
    plain, asked = (
        told(decoder(*pair(), confidence_weight=0.8), prompt=prompt)
        for prompt in (Prompt(text=TEXT), PROMPT)
    )
    for without, step in zip(plain, asked, strict=True):
        assert without.passages == ()
        assert len(step.passages) == 3
        for name in ("text", "score", "grounding", "verdict", "candidates"):
            assert getattr(step, name) == getattr(without, name)
    assert _computed(asked) == _computed(plain)


def _computed(steps: Sequence[Step]) -> int:
    return sum(s.tokens.drafted + s.tokens.draft_read + s.tokens.target_read for s in steps)


def test_a_step_that_was_rejected_early_tells_of_the_one_in_its_place() -> None:
    draft, target = pair()
    steps = told(decoder(draft, target, early_rejection=True))
    assert steps[1].rejected_early
    assert_as_the_formula_says(steps, draft)


def test_a_reviewer_sees_them() -> None:
    draft, target = pair()
    seen: list[tuple[float, ...]] = []

    def review(step: Step) -> Review:
        seen.append(step.passages)
        return Review.REGENERATE if step.source is Source.DRAFT else Review.KEEP

    steps = told(decoder(draft, target), review=review)
    assert [len(shares) for shares in seen] == [3] * 5
    assert all(step.source is Source.TARGET for step in steps)
    assert [step.passages for step in steps] == [seen[1], seen[2], seen[4]]
    assert_as_the_formula_says(steps, draft)


def test_steps_travel_as_plain_data() -> None:
    (first, *_) = told(decoder(*pair()))
    assert first.to_dict()["passages"] == list(first.passages)
    assert Step.from_dict(first.to_dict()) == first


def test_a_last_step_that_does_not_fit_tells_nothing() -> None:
    draft, target = pair()
    draft.context_length = len(draft.encode(PROMPT)) + 12
    target.policy = scripted_policy("Uno a.\n\n", "Dos b, and so on and on.\n\n", "Tres c.")
    steps = told(decoder(draft, target, verify_with="draft"), max_tokens=None)
    assert steps[-1].finish_reason == "length"
    assert len(steps[0].passages) == 3


def test_a_reader_without_attention_is_refused() -> None:
    draft, target = pair()
    blind = ToyEngine(draft.policy, attention=False)
    words = r"passages need.* confidence_weight below 1 .*or give no passages"
    with pytest.raises(AttentionUnavailableError, match=words):
        told(decoder(blind, target))
    steps = told(decoder(blind, target, grounding_from="target"))
    assert all(len(step.passages) == 3 for step in steps)
    assert steps[0].verdict is Verdict.ACCEPTED


def test_a_model_alone_tells_passages_too() -> None:
    engine = ToyEngine(scripted_policy("One.\n\n", "Two."))
    decoder = SoloDecoder(engine, Source.TARGET)
    prompt = Prompt([{"role": "user", "content": "First text. Second text."}])
    prompt = replace(prompt, passages=("First text.", "Second text."))
    shares = [step.passages for step in decoder.decode(Request(prompt, Sampling(0)))]
    assert [len(each) for each in shares] == [2, 2]


def test_speculative_decoding_refuses_passages() -> None:
    engine = ToyEngine(scripted_policy("One."))
    prompt = Prompt([{"role": "user", "content": "First text."}], passages=("First text.",))
    with pytest.raises(ConfigurationError, match="give no passages"):
        list(SpeculativeDecoder(engine, engine).decode(Request(prompt)))
