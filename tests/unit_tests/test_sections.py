"""Parts of an answer: marks cut in any way, steps that end with them, phases, critical steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, product
from typing import Any

import pytest

from specguard_chains.decoding.baselines import SoloDecoder
from specguard_chains.decoding.boundaries import Phase, Section, SectionTracker, StepShape
from specguard_chains.decoding.calibration import Bounds, Calibration
from specguard_chains.decoding.decoder import Decoder, Request
from specguard_chains.decoding.engine import Prompt
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.decoding.specguard import SpecGuardDecoder
from specguard_chains.decoding.speculation import Speculation
from specguard_chains.decoding.speculative import SpeculativeDecoder
from specguard_chains.decoding.steps import Source, Step, Verdict
from specguard_chains.decoding.verification import EnsembleVerifier
from specguard_chains.metrics import Metrics
from tests.toy_engine import ANSWER, END, FloatArray, Policy, ToyEngine, one_hot

GREEDY = Sampling(temperature=0)
BOUNDS = Calibration(confidence=Bounds(low=-5, high=0), grounding=Bounds(low=0, high=1))
R, A, T = Phase.REASONING, Phase.ANSWER, Phase.TOOL_CALL
THINK = Section("<think>", "</think>", R)
CALL = Section("<call>", "</call>", T, whole=True)
BARE = Section('{"name"', "", T, whole=True)
FENCE = Section("```json\n", "```", A, whole=True)
ALL = (THINK, CALL, BARE, FENCE)


def answer_of(tokens: tuple[int, ...]) -> tuple[int, ...]:
    return tokens[tokens.index(ANSWER) + 1 :] if ANSWER in tokens else ()


def writes(text: str, logprob: float = -0.01) -> Policy:
    """Writes this text, whatever stands in it, and ends; a continued prompt goes on."""
    data = text.encode()

    def policy(tokens: tuple[int, ...]) -> FloatArray:
        written = len(answer_of(tokens))
        return one_hot(data[written], logprob) if written < len(data) else one_hot(END)

    return policy


class Pieces(ToyEngine):
    """Its tokens are pieces of up to `size` bytes of a text, so that marks are cut anyhow."""

    def __init__(self, text: str, size: int) -> None:
        data = text.encode()
        self._pieces = [data[i : i + size] for i in range(0, len(data), size)]
        assert len(self._pieces) < END
        super().__init__(self._next, name=f"pieces of {size}", vocabulary=f"pieces of {size}")

    def _next(self, tokens: tuple[int, ...]) -> FloatArray:
        written = len(answer_of(tokens))
        return one_hot(written if written < len(self._pieces) else END)

    def token_bytes(self, token: int) -> bytes:
        return self._pieces[token] if token < len(self._pieces) else b""


def ask(decoder: Decoder, sections: Sequence[Section] = ALL, **more: Any) -> list[Step]:
    more = {"sampling": GREEDY, "max_tokens": 300} | more
    return list(decoder.decode(Request(Prompt(text="q"), sections=tuple(sections), **more)))


def solo(text: str, *, max_tokens: int = 256) -> SoloDecoder:
    return SoloDecoder(ToyEngine(writes(text)), Source.TARGET, StepShape(max_tokens=max_tokens))


def cut(text: str, sections: Sequence[Section] = ALL, **more: Any) -> list[tuple[str, Phase]]:
    return [(step.text, step.phase) for step in ask(solo(text), sections, **more)]


def text_of(steps: Sequence[Step]) -> str:
    return "".join(step.text for step in steps)


# --- where steps end

CASES: dict[str, tuple[str, list[tuple[str, Phase]]]] = {
    "reasoning, then the answer": (
        "<think>a\n\nb\n</think>\n\nc\n\nd",
        [("<think>a\n\n", R), ("b\n</think>", R), ("\n\nc\n\n", A), ("d", A)],
    ),
    "text before a call": (
        "Let me see.<call>{1}</call>",
        [("Let me see.<call>", R), ("{1}</call>", T)],
    ),
    "a blank lead is no step": ("\n\n <call>x\n\ny</call>", [("\n\n <call>x\n\ny</call>", T)]),
    "calls side by side": (
        "<call>1</call>\n<call>2</call>",
        [("<call>1</call>\n<call>", T), ("2</call>", T)],
    ),
    "text after a call": (
        "<call>1</call>\n\nDone.",
        [("<call>1</call>\n\n", T), ("Done.", A)],
    ),
    "to the end": ('First.\n\n{"name": "\n\n"}', [("First.\n\n", R), ('{"name": "\n\n"}', T)]),
    "a fence that touches the next": (
        "x ```json\n1```json\n2```",
        [("x ```json\n", R), ("1```json\n2```", A)],
    ),
    "unclosed": ("<think>a\n\nb", [("<think>a\n\n", R), ("b", R)]),
    "nested": (
        "<think>a<call>b</call>c</think>d",
        [("<think>a<call>b</call>c</think>", R), ("d", A)],
    ),
    "closed without being opened": ("a</think>b", [("a</think>b", A)]),
    "opened twice": ("<think><think>a</think>b", [("<think><think>a</think>", R), ("b", A)]),
    "empty": ("<think></think>a", [("<think></think>", R), ("a", A)]),
    "almost a mark": ("<thin>a<think b\n\n<call", [("<thin>a<think b\n\n", R), ("<call", A)]),
    "a mark begins within a mark": (
        "<<think>a</think>",
        [("<<think>", R), ("a</think>", R), ("", A)],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_steps_end_with_marks(case: str) -> None:
    text, expected = CASES[case]
    assert cut(text) == expected


@pytest.mark.parametrize("case", CASES)
def test_tokens_may_be_cut_anyhow(case: str) -> None:
    """A token may go on behind a mark; that much more is in the step."""
    text, expected = CASES[case]
    ends = [len("".join(part for part, _ in expected[:n])) for n in range(1, len(expected) + 1)]
    for size in (1, 2, 3, 4):
        steps = ask(SoloDecoder(Pieces(text, size), Source.TARGET))
        assert text_of(steps) == text
        assert_consistent(steps)
        cuts = {step.span[1] for step in steps}
        assert cuts == {min(-(-end // size) * size, len(text)) for end in ends}


@pytest.mark.parametrize("max_step_tokens", [1, 2, 3, 4, 6, 9])
@pytest.mark.parametrize("case", CASES)
def test_a_step_limit_within_a_mark_hides_no_section(case: str, max_step_tokens: int) -> None:
    text, _ = CASES[case]
    steps = ask(solo(text, max_tokens=max_step_tokens))
    assert text_of(steps) == text
    assert_consistent(steps)
    for step in steps:
        lead = len(step.text) - len(step.text.lstrip())
        if (inside := _section_at(text, step.span[0] + lead)) is not None:
            assert step.phase is inside.phase, step.text


def _section_at(text: str, at: int) -> Section | None:
    """The section that a place of a text is in, marks looked for one after the other."""
    tracker = SectionTracker(ALL)
    tracker.add(text[:at])
    return tracker.inside


def assert_consistent(steps: Sequence[Step]) -> None:
    answer = text_of(steps)
    assert [answer[slice(*step.span)] for step in steps] == [step.text for step in steps]
    assert all(a.span[1] == b.span[0] for a, b in pairwise(steps))
    assert [step.finish_reason is None for step in steps] == [True] * (len(steps) - 1) + [False]


@pytest.mark.parametrize("case", CASES)
def test_a_tracker_is_the_same_however_text_arrives(case: str) -> None:
    text, _ = CASES[case]
    for memory, size in product((0, 3, 50), (1, 2, 3, 5, 8, 100)):
        tracker = SectionTracker(ALL, memory=memory)
        for start in range(0, len(text), size):
            tracker.add(text[start : start + size])
        whole = SectionTracker(ALL, memory=memory)
        whole.add(text)
        assert (tracker.inside, tracker.seen, tracker.tail) == (
            whole.inside,
            whole.seen,
            whole.tail,
        )
        assert len(tracker.tail) >= min(memory, len(text))


def test_an_answer_may_begin_in_a_section() -> None:
    opened = {"opened": THINK}
    assert cut("a\n\nb</think>c", **opened) == [("a\n\n", R), ("b</think>", R), ("c", A)]
    assert cut("a", **opened) == [("a", R)]
    assert cut("</think>a", **opened) == [("</think>", R), ("a", A)]
    assert cut("<call>a</think>b", **opened) == [("<call>a</think>", R), ("b", A)]
    assert cut('1}\n\n"', opened=BARE) == [('1}\n\n"', T)]


def test_equal_marks_open_and_close_in_turn() -> None:
    maths = Section("$$", "$$", R)
    assert cut("$$a$$b$$c$$d", [maths]) == [("$$a$$", R), ("b$$", A), ("c$$", R), ("d", A)]


def test_without_sections_the_last_step_is_the_answer() -> None:
    assert cut("<think>a\n\nb</think>c\n\nd", []) == [
        ("<think>a\n\n", R), ("b</think>c\n\n", R), ("d", A)
    ]  # fmt: skip


# --- stop strings

STOPS = ["</call>", "call>", "ink>a", ">{1}<", "l>\n\nD", "</think", "n\n", "think></"]


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("case", CASES)
def test_stop_strings_cut_the_same_with_and_without_sections(case: str, stop: str) -> None:
    text, _ = CASES[case]
    for size in (1, 3):
        plain, marked = (
            ask(SoloDecoder(Pieces(text, size), Source.TARGET), sections, stop=(stop,))
            for sections in ((), ALL)
        )
        assert text_of(marked) == text_of(plain) == text.partition(stop)[0]
        assert marked[-1].finish_reason == plain[-1].finish_reason == "stop"
        written = [sum(step.answer_tokens for step in steps) for steps in (plain, marked)]
        assert written[0] == written[1], "writing stops with the stop string"


# --- every decoder


def specguard(
    draft: str, target: str, logprob: float = -0.01, *, vocabulary: str = "bytes", **settings: Any
) -> SpecGuardDecoder:
    return SpecGuardDecoder(
        ToyEngine(writes(draft, logprob), vocabulary=vocabulary),
        ToyEngine(writes(target)),
        EnsembleVerifier(BOUNDS, confidence_weight=1, threshold=0.5),
        num_candidates=2,
        **settings,
    )


DECODERS: dict[str, Callable[[str], Decoder]] = {
    "draft": lambda text: SoloDecoder(ToyEngine(writes(text)), Source.DRAFT),
    "accepted": lambda text: specguard(text, text),
    "rejected": lambda text: specguard(text, text, -9.0),
    "as text": lambda text: specguard(text, text, vocabulary="other"),
    "target reads": lambda text: specguard(text, text, verify_with="target"),
    "chain": lambda text: SpeculativeDecoder(ToyEngine(writes(text)), ToyEngine(writes(text))),
    "tree": lambda text: SpeculativeDecoder(
        ToyEngine(writes(text)), ToyEngine(writes(text)), Speculation((2, 2))
    ),
}


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("case", CASES)
def test_every_decoder_cuts_alike(case: str, decoder: str) -> None:
    text, expected = CASES[case]
    assert [(step.text, step.phase) for step in ask(DECODERS[decoder](text))] == expected


def random_marks(seed: int) -> Policy:
    """Writes letters, marks and blank lines in a random order, decided by the last two."""
    words = [b"a", b"\n\n", *(mark.encode() for s in ALL for mark in (s.opening, s.closing))]
    words = [word for word in words if word]

    def policy(tokens: tuple[int, ...]) -> FloatArray:
        answer = bytes(answer_of(tokens))
        state = seed
        while answer:
            state = (state * 1103515245 + 12345) % 2**31
            word = words[(state >> 16) % len(words)]
            if len(answer) < len(word):
                return one_hot(word[len(answer)], -0.3)
            answer = answer[len(word) :]
        state = (state * 1103515245 + 12345) % 2**31
        return one_hot(words[(state >> 16) % len(words)][0], -0.3)

    return policy


@pytest.mark.parametrize("seed", range(12))
def test_sections_never_change_what_one_model_writes(seed: int) -> None:
    for max_step_tokens in (3, 256):
        shape = StepShape(max_tokens=max_step_tokens)
        plain, marked = (
            ask(
                SoloDecoder(ToyEngine(random_marks(seed)), Source.TARGET, shape),
                sections,
                max_tokens=120,
            )
            for sections in ((), ALL)
        )
        assert text_of(plain) == text_of(marked)
        assert_consistent(marked)


# --- models on servers


@pytest.fixture
def served() -> Iterator[Callable[..., Any]]:
    pytest.importorskip("httpx")
    from contextlib import ExitStack, closing

    from specguard_adapters.openai import OpenAIEngine
    from tests.scripted_server import ScriptedServer, scripts, serve

    with ExitStack() as stack:

        def start(text: str, **script: Any) -> OpenAIEngine:
            server = stack.enter_context(serve(ScriptedServer(scripts(text), **script)))
            plain: dict[str, Any] = {"context_length": 128} if script else {}
            if script:
                plain["chat_template"] = "{% for m in messages %}{{ m.content }}{% endfor %}A:"
            engine = OpenAIEngine("toy", base_url=server.url, **plain)
            return stack.enter_context(closing(engine))

        yield start


@pytest.mark.parametrize("dialect", ["vllm", "llama_cpp_python"])
@pytest.mark.parametrize("case", CASES)
def test_servers_cut_alike(case: str, dialect: str, served: Callable[..., Any]) -> None:
    text, expected = CASES[case]
    engine = served(text, **({} if dialect == "vllm" else {"dialect": dialect}))
    request = Request(
        Prompt(messages=[{"role": "user", "content": "q"}]), GREEDY, sections=ALL, max_tokens=60
    )
    steps = list(SoloDecoder(engine, Source.TARGET).decode(request))
    assert [(step.text, step.phase) for step in steps] == expected


# --- critical steps

AGENT = 'Hm.\n\nSo:<call>{"a": "\n\n"}</call>'


def critical(decoder: Decoder, **more: Any) -> list[Step]:
    return ask(decoder, critical_steps="target", **more)


LIMITS: list[dict[str, Any]] = [{}, {"stop": ("c", "2")}, {"max_tokens": 7}]


@pytest.mark.parametrize("vocabulary", ["bytes", "other"])
@pytest.mark.parametrize("verify_with", ["draft", "target"])
@pytest.mark.parametrize("case", CASES)
def test_no_critical_step_comes_from_the_draft(
    case: str, verify_with: Any, vocabulary: str
) -> None:
    text, _ = CASES[case]
    for limits, max_step_tokens in product(LIMITS, (1, 3, 256)):
        decoder = specguard(
            text,
            text,
            vocabulary=vocabulary,
            verify_with=verify_with,
            shape=StepShape(max_tokens=max_step_tokens),
        )
        steps = critical(decoder, **limits)
        plain = ask(decoder, **limits)
        assert text_of(steps) == text_of(plain)
        for step in steps:
            assert step.critical or step.phase is R
            assert step.critical == (step.source is Source.TARGET)
        assert not any(step.critical for step in plain)


@pytest.mark.parametrize("vocabulary", ["bytes", "other"])
def test_steps_that_fill_the_context_are_not_taken_for_answers_of_the_draft(
    vocabulary: str,
) -> None:
    for context in range(20, 40):
        draft = ToyEngine(writes("ab\n\n" * 20), vocabulary=vocabulary, context_length=context)
        target = ToyEngine(writes("ab\n\n" * 20), context_length=context)
        verifier = EnsembleVerifier(BOUNDS, confidence_weight=1, threshold=0.5)
        steps = critical(SpecGuardDecoder(draft, target, verifier), max_tokens=None)
        assert steps[-1].finish_reason == "length"
        assert all(step.phase is R for step in steps if step.source is Source.DRAFT)


def test_the_draft_is_not_asked_in_a_critical_section() -> None:
    steps = critical(specguard(AGENT, AGENT))
    assert [step.source for step in steps] == ["draft", "draft", "target"]
    last = steps[-1]
    assert (last.phase, last.critical, last.verdict) == (T, True, Verdict.UNVERIFIED)
    assert (last.num_candidates, last.candidates, last.tokens.drafted) == (0, (), 0)
    assert last.score is None
    metrics = Metrics.of(steps)
    assert (metrics.num_drafts, metrics.acceptance_rate) == (2, 1.0)
    assert metrics.steps_by_source == {"draft": 2, "target": 1}


def test_the_draft_is_not_asked_for_the_answer_that_follows_reasoning() -> None:
    text = "<think>a</think>b\n\nc"
    steps = critical(specguard(text, text))
    assert [(step.source, step.num_candidates) for step in steps] == [
        ("draft", 2), ("target", 0), ("target", 0)
    ]  # fmt: skip


def test_a_critical_step_that_was_drafted_is_told_of() -> None:
    (step,) = critical(specguard("<call>1</call>", "<call>2</call>"))
    assert (step.text, step.source, step.phase) == ("<call>2</call>", "target", T)
    assert (step.verdict, step.critical) == (Verdict.REJECTED, True)
    assert step.candidates == ("<call>1</call>",) * 2
    assert step.score == pytest.approx(0.998), "the verdict is not the verifier's, its figures are"


def test_the_targets_version_may_be_of_another_phase() -> None:
    first, last = critical(specguard("<call>1</call>", "No call.\n\nBye."))
    assert (first.text, first.phase, first.critical) == ("No call.\n\n", R, True)
    assert (last.text, last.phase, last.source) == ("Bye.", A, "target")


def test_one_model_as_draft_and_target_writes_critical_steps_once() -> None:
    engine = ToyEngine(writes(AGENT))
    verifier = EnsembleVerifier(BOUNDS, confidence_weight=1, threshold=0.5)
    steps = critical(SpecGuardDecoder(engine, engine, verifier))
    assert text_of(steps) == AGENT
    assert [step.source for step in steps] == ["draft", "draft", "target"]


@pytest.mark.parametrize("decoder", ["draft", "chain", "tree"])
def test_critical_steps_are_nothing_to_decoders_that_do_not_verify(decoder: str) -> None:
    steps = critical(DECODERS[decoder](AGENT))
    assert text_of(steps) == AGENT
    assert not any(step.critical for step in steps)
