"""Answers held to a grammar: by every decoder, in every way to write, cut and hand over a step."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from specguard_chains.decoding.baselines import SoloDecoder
from specguard_chains.decoding.boundaries import Boundary, StepShape
from specguard_chains.decoding.calibration import Bounds, Calibration
from specguard_chains.decoding.constraint import Constraint, TokenTrie
from specguard_chains.decoding.decoder import Decoder, Request
from specguard_chains.decoding.engine import Capabilities, Prompt
from specguard_chains.decoding.sampling import Sampling, distribution, logprob
from specguard_chains.decoding.specguard import SpecGuardDecoder
from specguard_chains.decoding.speculation import Children, Speculation
from specguard_chains.decoding.speculative import SpeculativeDecoder
from specguard_chains.decoding.speculative_session import SpeculativeSession
from specguard_chains.decoding.steps import Source, Step, Verdict
from specguard_chains.decoding.verification import EnsembleVerifier
from specguard_chains.errors import ConfigurationError, EngineError
from tests.toy_engine import ANSWER, END, VOCABULARY, FloatArray, Policy, ToyEngine, one_hot
from tests.unit_tests.enumeration import law_of

GREEDY = Sampling(temperature=0)
WARM = Sampling(temperature=1, top_p=1)
FILTERED = Sampling(temperature=0.7, top_p=0.8, top_k=5, min_p=0.01)
PROMPT = Prompt(text="question")
BOUNDS = Calibration(confidence=Bounds(low=-5, high=0), grounding=Bounds(low=0, high=1))


def policy(seed: int) -> Policy:
    """A random table over the last two tokens that likes JSON, cut characters and ends."""
    alphabet = np.full(VOCABULARY, -20.0, dtype=np.float32)
    alphabet[[*b'{}[]":,0123456789abnt.\n ', *"é😀".encode(), END]] = 0.0

    @cache
    def row(last: tuple[int, ...]) -> FloatArray:
        noise = np.random.default_rng([seed, *last]).normal(size=VOCABULARY)
        return (alphabet + 2 * noise).astype(np.float32)

    return lambda tokens: row(tokens[-2:])


def toy(seed: int, **settings: Any) -> ToyEngine:
    return ToyEngine(policy(seed), **settings)


# --- grammars, and what satisfies them

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["é", "😀", "a\n\nb"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
REASONED = 'start: /(.|\\n){0,20}/ "\\n\\n=" /[0-9]{1,3}/'
PATTERN = r"(é|😀|a)+\n\n[0-9]{2,3}(\.b)?"


def is_person(text: str) -> bool:
    found = json.loads(text)
    return (
        list(found) == ["name", "age", "tags"]
        and len(found["name"]) <= 5
        and 0 <= found["age"] <= 99
        and len(found["tags"]) <= 2
        and all(tag in ("é", "😀", "a\n\nb") for tag in found["tags"])
    )


GRAMMARS: dict[str, tuple[Constraint, Callable[[str], object]]] = {
    "schema": (Constraint.json_schema(PERSON), is_person),
    "regex": (Constraint.regex(PATTERN), re.compile(PATTERN).fullmatch),
    "lark": (
        Constraint.lark(REASONED),
        re.compile(r"(.|\n){0,20}\n\n=[0-9]{1,3}").fullmatch,
    ),
}


def specguard(
    draft: ToyEngine, target: ToyEngine, shape: StepShape, *, k: int = 3, **settings: Any
) -> Decoder:
    verifier = EnsembleVerifier(BOUNDS, confidence_weight=1, threshold=0.4)
    return SpecGuardDecoder(draft, target, verifier, num_candidates=k, shape=shape, **settings)


def speculative(widths: tuple[int, ...]) -> Callable[[StepShape], Decoder]:
    return lambda shape: SpeculativeDecoder(toy(1), toy(2), Speculation(widths), shape=shape)


DECODERS: dict[str, Callable[[StepShape], Decoder]] = {
    "target": lambda shape: SoloDecoder(toy(2), Source.TARGET, shape=shape),
    "draft": lambda shape: SoloDecoder(toy(1), Source.DRAFT, shape=shape),
    "specguard": lambda shape: specguard(toy(1), toy(2), shape),
    "specguard, one candidate": lambda shape: specguard(toy(1), toy(2), shape, k=1),
    "specguard, late rejection": lambda s: specguard(toy(1), toy(2), s, early_rejection=False),
    "specguard, target reads": lambda s: specguard(toy(1), toy(2), s, verify_with="target"),
    "specguard, one model": lambda s: (lambda e: specguard(e, e, s))(toy(1)),
    "specguard, as text": lambda s: specguard(toy(1, vocabulary="other"), toy(2), s),
    "specguard, text is read": lambda s: specguard(
        toy(1, vocabulary="other"), toy(2), s, verify_with="target"
    ),
    "chain": speculative((1, 1, 1, 1)),
    "tree": speculative((3, 2, 1)),
    "prompt lookup": lambda shape: SpeculativeDecoder(
        None, toy(2), Speculation((1,) * 8, adaptive=False), shape=shape
    ),
}


def ask(
    decoder: Decoder, constraint: Constraint, seed: int, sampling: Sampling = WARM, **more: Any
) -> list[Step]:
    more = {"max_tokens": 150} | more
    return list(decoder.decode(Request(PROMPT, sampling, seed=seed, constraint=constraint, **more)))


def text_of(steps: Sequence[Step]) -> str:
    return "".join(step.text for step in steps)


def assert_begins(constraint: Constraint, text: str) -> None:
    """The text can become one that the grammar allows."""
    TokenTrie(toy(0)).start(constraint).advance(list(text.encode()))


def assert_held(steps: Sequence[Step], name: str) -> None:
    constraint, satisfies = GRAMMARS[name]
    if steps[-1].finish_reason == "stop":
        assert satisfies(text_of(steps)), text_of(steps)
    else:
        assert_begins(constraint, text_of(steps))


@pytest.mark.parametrize("max_step_tokens", [3, 256])
@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("grammar", GRAMMARS)
def test_answers_follow_their_grammar(grammar: str, decoder: str, max_step_tokens: int) -> None:
    writes = DECODERS[decoder](StepShape(max_tokens=max_step_tokens))
    ended = 0
    for seed, sampling in enumerate((WARM, GREEDY, FILTERED)):
        steps = ask(writes, GRAMMARS[grammar][0], seed, sampling)
        ended += steps[-1].finish_reason == "stop"
        assert_held(steps, grammar)
    assert ended, "no answer has been checked to its end"


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("grammar", GRAMMARS)
def test_an_answer_that_is_cut_off_is_the_beginning_of_one(grammar: str, decoder: str) -> None:
    constraint, _ = GRAMMARS[grammar]
    for max_tokens in (1, 2, 3, 5, 8, 13):
        steps = ask(DECODERS[decoder](StepShape()), constraint, 1, max_tokens=max_tokens)
        assert_held(steps, grammar)
        assert sum(step.answer_tokens for step in steps) <= max_tokens


def test_both_models_write_and_are_verified_under_a_grammar() -> None:
    """Else the tests above would say little of handing steps over."""
    for decoder in ("specguard", "specguard, as text", "specguard, text is read"):
        writes = DECODERS[decoder](StepShape(max_tokens=2))
        steps = [s for seed in range(8) for s in ask(writes, GRAMMARS["schema"][0], seed)]
        assert {step.source for step in steps} == {Source.DRAFT, Source.TARGET}, decoder


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_tokens_and_text_hand_over_the_same_answers(grammar: str) -> None:
    """Whole characters only: a cut one is given up when it goes over as text."""
    constraint, _ = GRAMMARS[grammar]
    for seed in range(6):
        texts = [
            text_of(ask(DECODERS[decoder](StepShape()), constraint, seed))
            for decoder in ("specguard", "specguard, as text")
        ]
        assert texts[0] == texts[1]


# --- its log-probs, and its law


@pytest.mark.parametrize("grammar", GRAMMARS)
@pytest.mark.parametrize("k", [1, 3])
def test_log_probs_are_those_of_the_allowed_tokens(grammar: str, k: int) -> None:
    constraint, _ = GRAMMARS[grammar]
    engine = toy(1)
    session = engine.open(PROMPT, constraint=constraint)
    for number in range(5):
        length = session.length
        for candidate in session.sample(k, Boundary(max_tokens=6), WARM, seed=(1, number)):
            matcher = TokenTrie(engine).start(constraint)
            matcher.advance(session._tokens[len(engine.encode(PROMPT)) :])
            for i, token in enumerate(candidate.tokens):
                before = (*session._tokens, *candidate.tokens[:i])
                row = matcher.allowed(engine.policy(before))
                expected = logprob(row, token)
                assert candidate.reading.logprobs[i] == pytest.approx(expected, abs=1e-5)
                matcher.advance([token])
            assert session.read(candidate).logprobs == pytest.approx(
                candidate.reading.logprobs, abs=1e-5
            )
        assert session.length == length
        if candidate.ends_sequence:
            break
        session.accept(candidate)


def test_a_token_without_a_choice_is_certain() -> None:
    session = toy(1).open(PROMPT, constraint=Constraint.regex("abc"))
    (candidate,) = session.sample(1, Boundary(), WARM, seed=(1,))
    assert candidate.tokens == (*b"abc", END)
    assert candidate.reading.logprobs == pytest.approx([0, 0, 0, 0], abs=1e-6)


def masked_law(target: ToyEngine, constraint: Constraint, tokens: int) -> dict[Any, float]:
    """The target's law under the grammar, by the definition: one token after the other."""
    start = target.encode(PROMPT)
    trie = TokenTrie(target)
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(tokens):
        longer: dict[tuple[int, ...], float] = {}
        for path, probability in law.items():
            if END in path:
                longer[path] = probability
                continue
            matcher = trie.start(constraint)
            matcher.advance(path)
            row = distribution(matcher.allowed(target.policy((*start, *path))), WARM)
            for token in np.flatnonzero(row):
                longer[(*path, int(token))] = probability * float(row[token])
        law = longer
    return law


@pytest.mark.parametrize("children", ["independent", "without-replacement", "likeliest"])
@pytest.mark.parametrize("widths", [(1,), (1, 1), (2,), (2, 1)], ids=str)
@pytest.mark.parametrize("pattern", ["(a|b|n){2}b?", "ab|a+n?|ba", "abc"])
def test_speculation_has_the_targets_law_under_a_grammar(
    pattern: str, widths: tuple[int, ...], children: Children
) -> None:
    constraint, tokens = Constraint.regex(pattern), 3
    draft, target = toy(1), toy(2)
    session = SpeculativeSession(
        draft.open(PROMPT, constraint=constraint),
        target.open(PROMPT, constraint=constraint),
        Speculation(widths, children),
    )
    boundary = Boundary(max_tokens=tokens)
    law = law_of(lambda choose: session.write(boundary, WARM, choose).tokens)
    expected = masked_law(target, constraint, tokens)
    assert {path for path, p in law.items() if p > 1e-9} == set(expected)
    for path, probability in expected.items():
        assert law[path] == pytest.approx(probability, abs=1e-6)


@pytest.mark.parametrize("decoder", ["chain", "tree"])
@pytest.mark.parametrize("grammar", GRAMMARS)
def test_speculation_at_temperature_0_writes_what_the_target_does(
    grammar: str, decoder: str
) -> None:
    constraint, _ = GRAMMARS[grammar]
    for step_tokens in (1, 4, 256):
        shape = StepShape(max_tokens=step_tokens)
        alone, fast = (DECODERS[name](shape) for name in ("target", decoder))
        assert text_of(ask(fast, constraint, 0, GREEDY)) == text_of(
            ask(alone, constraint, 0, GREEDY)
        )


def test_early_rejection_changes_no_text_under_a_grammar() -> None:
    constraint, _ = GRAMMARS["schema"]
    for seed in range(8):
        shape = StepShape(max_tokens=5)
        early, late = (
            ask(DECODERS[name](shape), constraint, seed)
            for name in ("specguard", "specguard, late rejection")
        )
        assert text_of(early) == text_of(late)


# --- sessions


def test_rolling_back_takes_the_grammar_back() -> None:
    constraint = Constraint.regex("ab(c|d)e")
    session = toy(1).open(PROMPT, constraint=constraint)
    length = session.length
    for _ in range(3):
        session.extend(b"ab")
        session.extend(b"c")
        session.rollback(length + 2)
        (rest,) = session.sample(1, Boundary(), WARM, seed=(5,))
        assert bytes(rest.tokens[:-1]) in (b"ce", b"de")
        session.accept(rest)
        session.rollback(length)
        (whole,) = session.sample(1, Boundary(), WARM, seed=(5,))
        assert whole.text in ("abce", "abde")


def test_a_reused_prefix_begins_its_grammar_anew() -> None:
    engine = toy(1)
    for pattern in ("a{3}", "b{2}", "a{3}"):
        session = engine.open(PROMPT, constraint=Constraint.regex(pattern))
        (candidate,) = session.sample(1, Boundary(), WARM, seed=(1,))
        assert re.fullmatch(pattern, candidate.text)
        session.accept(candidate)
        session.close()
    session = engine.open(PROMPT)
    session.sample(1, Boundary(max_tokens=3), WARM, seed=(1,))
    assert session.counters.reused == len(engine.encode(PROMPT)), "the prompt was cached"


def test_the_prompt_is_no_part_of_the_grammar() -> None:
    """A raw prompt that begins the answer is continued, not matched."""
    constraint = Constraint.json_schema({"enum": [1]})
    session = toy(1).open(Prompt(text='{"name": '), constraint=constraint)
    assert session.sample(1, Boundary(), WARM, seed=(1,))[0].text == "1"


class SeveralEnds(ToyEngine):
    def is_end(self, token: int) -> bool:
        return token in (END, ANSWER)


@pytest.mark.parametrize("end", [END, ANSWER])
def test_every_end_token_may_end_an_answer_that_is_complete(end: int) -> None:
    def ends(tokens: tuple[int, ...]) -> FloatArray:
        return one_hot(end)

    engine = SeveralEnds(ends)
    (step,) = engine.open(PROMPT, constraint=Constraint.regex("ab")).sample(
        1, Boundary(), GREEDY, seed=(1,)
    )
    assert (step.tokens, step.text) == ((*b"ab", end), "ab")


@pytest.mark.parametrize("cut", range(1, 8))
def test_a_character_that_one_model_has_begun_is_whole_when_the_other_goes_on(cut: int) -> None:
    """Steps end within "😀" and "é", and the other vocabulary only ever sees their text."""
    text = '"é😀é"'
    constraint = Constraint.json_schema({"enum": ["é😀é"]})
    for verify_with in ("draft", "target"):
        for threshold in (0.0, 0.5, 1.0):
            draft = toy(1, vocabulary="other")
            decoder = SpecGuardDecoder(
                draft,
                toy(2),
                EnsembleVerifier(BOUNDS, confidence_weight=0.5, threshold=threshold),
                shape=StepShape(max_tokens=cut),
                verify_with=verify_with,  # type: ignore[arg-type]
            )
            assert text_of(ask(decoder, constraint, 1)) == text


# --- logits processors


class Processing(ToyEngine):
    """Draws from what a function makes of the logits."""

    def __init__(self, process: Callable[[FloatArray], FloatArray]) -> None:
        super().__init__(policy(1), attention=False)
        self.capabilities = Capabilities(in_process=True, max_candidates=4, constraints=True)
        self.process_logits = lambda tokens, logits: process(logits)


def test_a_logits_processor_cannot_lift_the_grammar() -> None:
    engine = Processing(lambda logits: np.zeros_like(logits))  # everything is as likely
    constraint, _ = GRAMMARS["schema"]
    for seed in range(5):
        steps = ask(SoloDecoder(engine, Source.DRAFT), constraint, seed)
        assert_held(steps, "schema")


def test_a_processor_that_forbids_what_the_grammar_demands_is_met_with_advice() -> None:
    def without_a(logits: FloatArray) -> FloatArray:
        logits[ord("a")] = -np.inf
        return logits

    decoder = SoloDecoder(Processing(without_a), Source.DRAFT)
    assert text_of(ask(decoder, Constraint.regex("(a|b)c"), 1)) == "bc"
    with pytest.raises(EngineError, match="processor forbids every token"):
        ask(decoder, Constraint.regex("ac"), 1)
    assert text_of(ask(decoder, Constraint.regex("bc"), 1)) == "bc"


# --- errors


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "banana"}, "banana"),
        ({"not": {"type": "string"}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "string", "pattern": "("}, "unclosed"),
        ({"type": "string", "format": "zzz"}, "zzz"),
        ({"$ref": "#/nope"}, "nope"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
        ({"anyOf": []}, "anyOf"),
        ({"const": ...}, "not a JSON schema"),
        (True, "not a JSON schema"),
    ],
    ids=str,
)
def test_a_schema_that_cannot_be_held_is_refused(schema: Any, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        Constraint.json_schema(schema)


@pytest.mark.parametrize("pattern", ["(", "a(?=b)", r"(a)\1"])
def test_a_pattern_that_cannot_be_held_is_refused(pattern: str) -> None:
    with pytest.raises(ConfigurationError, match="invalid regex"):
        Constraint.regex(pattern)


@pytest.mark.parametrize("source", ["", "start: unknown", "begin: /a/", 'start: "a'])
def test_a_grammar_that_cannot_be_held_is_refused(source: str) -> None:
    with pytest.raises(ConfigurationError, match="cannot be constrained so"):
        Constraint.lark(source)


def test_a_pattern_may_hold_anything() -> None:
    for pattern, text in ((r'a/b\n"[/]', 'a/b\n"/'), ("a\nb", "a\nb"), (r"\{é\}", "{é}")):
        steps = ask(SoloDecoder(toy(1), Source.DRAFT), Constraint.regex(pattern), 1)
        assert text_of(steps) == text


@pytest.mark.parametrize("decoder", ["target", "specguard", "tree"])
@pytest.mark.parametrize("lead", ["", '"xy" '])
def test_a_dead_end_is_an_error_that_leaves_the_engines_usable(lead: str, decoder: str) -> None:
    writes = DECODERS[decoder](StepShape())
    dead_end = Constraint.lark(f"start: {lead}NONE\nNONE: /a/ & /b/")
    with pytest.raises(EngineError, match="dead end"):
        ask(writes, dead_end, 1)
    assert text_of(ask(writes, Constraint.regex("xyz"), 1)) == "xyz"


def test_an_engine_without_constraints_is_refused_with_its_name() -> None:
    server = toy(2, name="far away")
    server.capabilities = Capabilities(max_candidates=4)
    for decoder in (SoloDecoder(server, Source.TARGET), specguard(toy(1), server, StepShape())):
        with pytest.raises(ConfigurationError, match="far away cannot be held to a grammar"):
            ask(decoder, Constraint.regex("a"), 1)
    draft = decoder.engines[0]
    assert isinstance(draft, ToyEngine)
    assert text_of(ask(SoloDecoder(draft, Source.DRAFT), Constraint.regex("a"), 1)) == "a"


def test_what_another_model_has_written_against_the_grammar_is_an_error() -> None:
    session = toy(1).open(PROMPT, constraint=Constraint.regex("ab"))
    session.extend(b"a")
    with pytest.raises(EngineError, match="cannot follow its constraint"):
        session.extend(b"z")


def test_verdicts_are_made_under_the_grammar() -> None:
    """A draft that has no choice is sure of itself, and is kept at any threshold."""
    verifier = EnsembleVerifier(BOUNDS, confidence_weight=1, threshold=1)
    decoder = SpecGuardDecoder(toy(1), toy(2), verifier)
    (step,) = ask(decoder, Constraint.regex("abc"), 1)
    assert (step.verdict, step.source, step.score) == (Verdict.ACCEPTED, Source.DRAFT, 1.0)
