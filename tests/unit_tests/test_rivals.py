"""Verifiers to compare with: each decides by what its method looks at, and by nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specguard_chains import ChatSpecGuard
from specguard_chains.decoding.baselines import SoloDecoder
from specguard_chains.decoding.boundaries import Ending, StepShape
from specguard_chains.decoding.calibration import Bounds, Calibration
from specguard_chains.decoding.constraint import Constraint
from specguard_chains.decoding.decoder import Decoder, Request
from specguard_chains.decoding.engine import Candidate, Capabilities, Prompt, Reading
from specguard_chains.decoding.rewards import TextReward, ValueHead
from specguard_chains.decoding.rivals import (
    BLOCK,
    JUDGE_INSTRUCTION,
    AcceptAll,
    LengthVerifier,
    RandomVerifier,
    RewardVerifier,
    TargetJudge,
)
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.decoding.selection import Selector
from specguard_chains.decoding.specguard import SpecGuardDecoder
from specguard_chains.decoding.steps import Source, Step, Verdict
from specguard_chains.decoding.verification import EnsembleVerifier, Situation, Verifier
from specguard_chains.errors import ConfigurationError, ContextOverflowError, EngineError
from tests.toy_engine import (
    ANSWER,
    END,
    VOCABULARY,
    FloatArray,
    Policy,
    ToyEngine,
    hidden_state,
    one_hot,
    random_policy,
    scripted_policy,
)
from tests.unit_tests import toy_chat

GREEDY = Sampling(temperature=0)
WARM = Sampling(temperature=1, top_p=1)
SEEDS = range(12)
DRAFTED = ("One a.\n\n", "Two b.\n\n", "Three c.")
WRITTEN = ("Uno a.\n\n", "Dos b.\n\n", "Tres c.")
QUESTION = f"<user>{JUDGE_INSTRUCTION}"
UNREAD = Reading(np.zeros(0, dtype=np.float32))


def drafting() -> ToyEngine:
    return ToyEngine(scripted_policy(*DRAFTED), name="draft")


def rewriting(**settings: Any) -> ToyEngine:
    return ToyEngine(scripted_policy(*WRITTEN), name="target", **settings)


def toy(seed: int, **settings: Any) -> ToyEngine:
    return ToyEngine(random_policy(seed), **settings)


def decoder(
    verifier: Verifier, draft: ToyEngine | None = None, target: ToyEngine | None = None, **more: Any
) -> SpecGuardDecoder:
    more = {"num_candidates": 1} | more
    return SpecGuardDecoder(draft or drafting(), target or rewriting(), verifier, **more)


def request(seed: int = 0, sampling: Sampling = GREEDY, **more: Any) -> Request:
    prompt = Prompt(messages=[{"role": "user", "content": f"question {seed}"}])
    return Request(prompt, sampling, seed=seed, **({"max_tokens": 200} | more))


def text_of(decoder: Decoder, request: Request) -> str:
    return "".join(step.text for step in decoder.decode(request))


def solo_text(seed: int, source: Source, request: Request) -> str:
    return text_of(SoloDecoder(toy(seed), source), request)


# --- reward-guided decoding


def rewards(*values: float) -> tuple[TextReward, list[tuple[Any, list[str]]]]:
    """A reward model that gives the steps these rewards in turn, and what it was shown."""
    given, seen = iter(values), []

    def model(messages: Sequence[Mapping[str, Any]], steps: Sequence[str]) -> float:
        seen.append((messages, list(steps)))
        return next(given)

    return TextReward(model), seen


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("reward", [0.0, 0.3, 0.69999, 0.7, 1.0])
def test_a_step_is_accepted_from_the_threshold_on(reward: float, threshold: float) -> None:
    verifier = RewardVerifier(rewards(reward)[0], threshold)
    step = next(decoder(verifier).decode(request()))
    accepted = reward >= threshold
    assert step.verdict is (Verdict.ACCEPTED if accepted else Verdict.REJECTED)
    assert step.text == (DRAFTED if accepted else WRITTEN)[0]
    assert (step.score, step.value, step.threshold) == (reward, reward, threshold)


def test_the_reward_model_reads_the_question_and_all_steps_so_far() -> None:
    model, seen = rewards(0.9, 0.1, 0.8)
    asked = request()
    steps = list(decoder(RewardVerifier(model)).decode(asked))
    assert [step.text for step in steps] == [DRAFTED[0], WRITTEN[1], DRAFTED[2]]
    assert [messages for messages, _ in seen] == [asked.prompt.messages] * 3
    assert [texts for _, texts in seen] == [
        [DRAFTED[0]],
        [DRAFTED[0], DRAFTED[1]],
        [DRAFTED[0], WRITTEN[1], DRAFTED[2]],
    ]


def test_after_a_rejection_the_target_writes_from_the_context() -> None:
    seen: list[str] = []
    write = scripted_policy(*WRITTEN)

    def policy(tokens: tuple[int, ...]) -> FloatArray:
        seen.append(bytes(t for t in tokens if t < END).decode())
        return write(tokens)

    verifier = RewardVerifier(rewards(0.9, 0.1, 0.8)[0])
    list(decoder(verifier, target=ToyEngine(policy)).decode(request()))
    assert max(seen, key=len) == f"<user>question 0{DRAFTED[0]}{WRITTEN[1]}"
    assert not any(DRAFTED[1].strip() in text for text in seen)


@pytest.mark.parametrize("seed", SEEDS)
def test_extreme_rewards_leave_one_models_text(seed: int) -> None:
    for value, writer in ((1.0, Source.DRAFT), (0.0, Source.TARGET)):
        rating = RewardVerifier(TextReward(lambda messages, steps, value=value: value))
        text = text_of(decoder(rating, toy(1), toy(2)), request(seed))
        assert text == solo_text(1 if value else 2, writer, request(seed))


@pytest.mark.parametrize("interleaved", [False, True])
def test_one_requests_rejections_do_not_influence_another(interleaved: bool) -> None:
    """RSD's own code gives up on drafting, for the whole batch, after some rejections in a row."""

    def model(messages: Sequence[Mapping[str, Any]], steps: Sequence[str]) -> float:
        return 0.0 if messages[0]["content"] == "question 0" else 1.0

    def endless(text: str) -> ToyEngine:
        return ToyEngine(scripted_policy(text, end=False))

    shared = decoder(RewardVerifier(TextReward(model)), endless("d.\n\n"), endless("t.\n\n"))
    hopeless, fine = (shared.decode(request(seed)) for seed in (0, 1))
    if interleaved:
        pairs = list(zip(hopeless, fine, strict=True))
        rejected, accepted = [one for one, _ in pairs], [other for _, other in pairs]
    else:
        rejected, accepted = list(hopeless), list(fine)
    assert len(rejected) == len(accepted) == 50
    assert {(step.verdict, step.text) for step in rejected} == {(Verdict.REJECTED, "t.\n\n")}
    assert {(step.verdict, step.text) for step in accepted} == {(Verdict.ACCEPTED, "d.\n\n")}
    assert all(step.tokens.drafted == 4 for step in (*rejected, *accepted)), "drafting goes on"


def test_a_value_head_rates_by_the_drafts_hidden_state_at_the_steps_end() -> None:
    head = ValueHead(draft="draft", layer=0, weights=(1.0, -2.0, 0.5, 0.0), bias=0.25)
    draft = drafting()
    step = next(decoder(RewardVerifier(head), draft).decode(request()))
    tokens = (*draft.encode(request().prompt), *DRAFTED[0].encode())
    state = hidden_state(tokens, layer=0)
    logit = float(state @ np.array([1.0, -2.0, 0.5, 0.0])) + 0.25
    assert step.value == pytest.approx(1 / (1 + np.exp(-logit)), abs=1e-5)
    assert (step.verdict is Verdict.ACCEPTED) == (step.value >= 0.7)


def test_the_target_of_a_value_head_needs_no_hidden_states() -> None:
    head = ValueHead(draft="toy", layer=0, weights=(1.0,) * 4, bias=0.0)
    with_one = decoder(RewardVerifier(head), toy(1), toy(2, states=False, attention=False))
    assert list(with_one.decode(request()))


# --- rewards that cannot be


@pytest.mark.parametrize("reward", [float("nan"), -0.1, 1.5, float("inf"), None, "high"])
def test_what_is_no_reward_is_refused(reward: Any) -> None:
    def my_model(messages: Any, steps: Any) -> Any:
        return reward

    rating = decoder(RewardVerifier(TextReward(my_model)))
    with pytest.raises(ConfigurationError, match=r"my_model must return a number from 0 to 1"):
        list(rating.decode(request()))


def test_a_reward_model_that_reads_messages_refuses_bare_text() -> None:
    class Model:
        name = "some-model"

        def __call__(self, messages: Any, steps: Any) -> float:
            return 1.0

    bare = replace(request(), prompt=Prompt(text="question"))
    for model, name in ((Model(), "some-model"), (lambda messages, steps: 1.0, "lambda")):
        rating = decoder(RewardVerifier(TextReward(model)))
        with pytest.raises(ConfigurationError, match=rf"{name}.* needs messages"):
            list(rating.decode(bare))


@pytest.mark.parametrize("name", ["rsd", "rsd-majority", "draft-best-of-n"])
def test_a_reward_function_may_ask_a_model_of_this_process(name: str) -> None:
    judge = toy_chat.scripted("0.9")

    def ask(messages: Any, steps: Any) -> float:
        return float(judge.invoke("How good is it?").text)

    model = chat(name, reward_model=ask, timeout=20)
    assert model.invoke("question").text


def test_a_reward_function_cannot_ask_the_model_that_it_rates() -> None:
    asked = chat("rsd", timeout=20)

    def ask_itself(messages: Any, steps: Any) -> float:
        return float(ChatSpecGuard(decoder="target", target=asked.draft).invoke("?").text or 0)

    with pytest.raises(ConfigurationError, match="itself"):
        asked.invoke("question", reward_model=ask_itself)


def chat(name: str, **options: Any) -> ChatSpecGuard:
    pair = {"draft": ToyEngine(random_policy(1), name="d"), "target": toy(2, name="t")}
    return ChatSpecGuard(decoder=name, max_tokens=40, seed=3, **pair, **options)


# --- SpecReason


def judging(
    digit: Callable[[str], int], policy: Policy | None = None, **settings: Any
) -> tuple[ToyEngine, list[str]]:
    """A target that answers the question about a step with a digit, and what it was asked."""
    write = policy or scripted_policy(*WRITTEN)
    asked: list[str] = []

    def next_token(tokens: tuple[int, ...]) -> FloatArray:
        if tokens.count(ANSWER) == 1:
            return write(tokens)
        text = bytes(t for t in tokens if t < END).decode(errors="replace")
        if tokens[-1] == ANSWER:
            assert END not in tokens
            asked.append(text)
        return one_hot(ord(str(digit(text.removesuffix(QUESTION)))))

    return ToyEngine(next_token, name="target", **settings), asked


def judged(target: ToyEngine, draft: ToyEngine | None = None, **more: Any) -> SpecGuardDecoder:
    return decoder(TargetJudge(target, **more), draft, target)


@pytest.mark.parametrize("digit", range(10))
def test_a_step_is_accepted_from_7_on(digit: int) -> None:
    target, _ = judging(lambda text: digit)
    step = next(judged(target).decode(request()))
    assert step.verdict is (Verdict.ACCEPTED if digit >= 7 else Verdict.REJECTED)
    assert step.text == (DRAFTED if digit >= 7 else WRITTEN)[0]
    assert step.score == pytest.approx(digit / 9)


@pytest.mark.parametrize(("threshold", "least"), [(0.0, 0), (0.5, 5), (0.9, 9), (1.0, 9)])
def test_the_threshold_is_a_share_of_nine(threshold: float, least: int) -> None:
    for digit in range(10):
        target, _ = judging(lambda text, digit=digit: digit)
        step = next(judged(target, threshold=threshold).decode(request()))
        assert (step.verdict is Verdict.ACCEPTED) == (digit >= least)


def test_the_digit_is_read_after_the_step_and_the_question() -> None:
    target, asked = judging(lambda text: 2 if text.endswith(DRAFTED[1]) else 8)
    steps = list(judged(target).decode(request()))
    assert [step.text for step in steps] == [DRAFTED[0], WRITTEN[1], DRAFTED[2]]
    start = "<user>question 0"
    assert asked == [
        f"{start}{DRAFTED[0]}{QUESTION}",
        f"{start}{DRAFTED[0]}{DRAFTED[1]}{QUESTION}",
        f"{start}{DRAFTED[0]}{WRITTEN[1]}{DRAFTED[2]}{QUESTION}",
    ]


def test_only_digits_count() -> None:
    row = one_hot(ord("x"))
    row[ord("8")] = 3.0
    row[ord("3")] = 2.0

    def policy(tokens: tuple[int, ...]) -> FloatArray:
        return row if tokens.count(ANSWER) > 1 else scripted_policy(*WRITTEN)(tokens)

    step = next(judged(ToyEngine(policy)).decode(request()))
    assert step.score == pytest.approx(8 / 9)


@pytest.mark.parametrize("vocabulary", ["bytes", "other"])
@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("seed", SEEDS)
def test_asking_leaves_the_targets_sequence_as_it_was(
    seed: int, sampling: Sampling, vocabulary: str
) -> None:
    """Nothing accepted is the target's own text, everything accepted is the draft's."""
    asked = request(seed, sampling)
    for digit, writer in ((0, 2), (9, 1)):
        target, _ = judging(lambda text, digit=digit: digit, random_policy(2))
        text = text_of(judged(target, toy(1, vocabulary=vocabulary)), asked)
        assert text == solo_text(writer, Source.DRAFT if digit else Source.TARGET, asked)


def mixed(text: str) -> int:
    return 9 if len(text) % 2 else 0


@pytest.mark.parametrize("seed", SEEDS)
def test_judging_by_reading_equals_judging_without(seed: int) -> None:
    """The same verdicts by a verifier that does not touch the target give the same answer."""

    class Oracle(AcceptAll):
        def judge(self, candidate: Candidate, reading: Reading, situation: Situation) -> Any:
            prompt = target.encode(situation.request.prompt)
            text = bytes(prompt[:-1]).decode() + "".join(situation.steps) + candidate.text
            accepted = super().judge(candidate, reading, situation)
            return accepted if mixed(text) else replace(accepted, verdict=Verdict.REJECTED)

    target, _ = judging(mixed, random_policy(2))
    ours = list(judged(target, toy(1)).decode(request(seed)))
    expected = list(decoder(Oracle(), toy(1), toy(2)).decode(request(seed)))
    assert [(s.text, s.verdict) for s in ours] == [(s.text, s.verdict) for s in expected]


def test_both_verdicts_occur_and_one_model_can_judge_itself() -> None:
    verdicts = set()
    for seed in SEEDS:
        both, _ = judging(mixed, random_policy(2))
        steps = list(judged(both, both).decode(request(seed)))
        verdicts |= {step.verdict for step in steps}
        assert "".join(s.text for s in steps) == solo_text(2, Source.TARGET, request(seed))
    assert verdicts == {Verdict.ACCEPTED, Verdict.REJECTED}


def test_what_the_target_has_read_of_an_accepted_step_it_does_not_read_again() -> None:
    long = ("a" * (2 * BLOCK + 3) + ".\n\n", "b.\n\n", "c" * BLOCK + ".\n\n", "d.")
    target, asked = judging(lambda text: 9)
    steps = list(judged(target, ToyEngine(scripted_policy(*long))).decode(request()))
    assert len(steps) == len(asked) == 4
    prompt = len(target.encode(request().prompt))
    question = len(QUESTION) + 1
    again = len(steps) - 1  # the last token of each step, together with the next one
    expected = prompt + sum(map(len, long)) + 4 * question + again
    assert target.computed_tokens == expected
    assert sum(step.tokens.target_read for step in steps) == expected
    assert sum(step.tokens.regenerated for step in steps) == 0
    blocks = [-(-(len(step) + question) // BLOCK) for step in long]
    assert target.forward_passes == 1 + sum(blocks)


def test_a_rejected_step_costs_no_second_reading_of_the_context() -> None:
    target, asked = judging(lambda text: 0)
    steps = list(replace(judged(target), salvage=False).decode(request()))
    prompt, question = len(target.encode(request().prompt)), len(QUESTION) + 1
    read = sum(step.tokens.target_read for step in steps)
    assert read == prompt + sum(map(len, DRAFTED)) + len(asked) * question
    assert sum(step.tokens.regenerated for step in steps) == sum(map(len, WRITTEN)) + 1


def test_a_step_that_leaves_no_room_for_the_question_is_rejected() -> None:
    prompt = len(rewriting().encode(request().prompt))
    fits = prompt + sum(map(len, DRAFTED)) + len(QUESTION) + 2
    for room, verdicts in ((0, "accepted"), (-1, "rejected")):
        target, asked = judging(lambda text: 9, context_length=fits + room)
        steps = list(judged(target).decode(request(max_tokens=None)))
        assert [step.verdict for step in steps] == ["accepted", "accepted", verdicts]
        assert len(asked) == 3 + room
        assert steps[-1].finish_reason == "stop"
    assert steps[-1].score is None


def test_a_tiny_context_ends_the_answer_as_it_does_elsewhere() -> None:
    prompt = len(rewriting().encode(request().prompt))
    target, asked = judging(lambda text: 9, context_length=prompt + 10)
    steps = list(judged(target).decode(request(max_tokens=None)))
    assert steps[-1].finish_reason == "length"
    assert not asked
    with pytest.raises(ContextOverflowError):
        list(judged(target).decode(request(max_tokens=11)))


def test_a_grammar_forbids_the_question() -> None:
    target, _ = judging(lambda text: 9)
    held = request(constraint=Constraint.regex("[a-z ]+"))
    with pytest.raises(ConfigurationError, match=r"grammar.*decoder='specguard'"):
        list(judged(target).decode(held))
    assert list(judged(target).decode(request()))


def test_a_target_that_shows_no_logits_cannot_judge() -> None:
    target, _ = judging(lambda text: 9)
    target.capabilities = replace(target.capabilities, logits=False)
    with pytest.raises(ConfigurationError, match=r"logits, which target does not"):
        TargetJudge(target)


def test_a_faulty_model_judges_nothing() -> None:
    faulty = np.full(VOCABULARY, np.nan, dtype=np.float32)

    def policy(tokens: tuple[int, ...]) -> FloatArray:
        return faulty if tokens.count(ANSWER) > 1 else scripted_policy(*WRITTEN)(tokens)

    with pytest.raises(EngineError, match="not finite"):
        list(judged(ToyEngine(policy)).decode(request()))


def test_passages_are_read_by_the_draft_all_the_same() -> None:
    prompt = Prompt(messages=[{"role": "user", "content": "about a cat"}], passages=("a cat",))
    asked = replace(request(), prompt=prompt)
    target, _ = judging(mixed, random_policy(2))
    assert all(len(step.passages) == 1 for step in judged(target, toy(1)).decode(asked))
    both, _ = judging(mixed, random_policy(2))
    assert all(len(step.passages) == 1 for step in judged(both, both).decode(asked))


# --- controls


def situation(seed: int, number: int) -> Situation:
    return Situation(request(seed), number, (), draft=None, target=None, tokens_left=9)


def candidate(tokens: int) -> Candidate:
    return Candidate((1,) * tokens, "a" * tokens, UNREAD, Ending.BOUNDARY, "bytes")


def accepts(verifier: Verifier, seed: int, number: int, tokens: int = 3) -> bool:
    judgement = verifier.judge(candidate(tokens), UNREAD, situation(seed, number))
    assert judgement.score is not None
    assert judgement.threshold is not None
    accepted = judgement.verdict is Verdict.ACCEPTED
    assert accepted == (judgement.score >= judgement.threshold)
    return accepted


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.83, 1.0])
def test_a_share_of_the_steps_is_accepted_at_random(rate: float) -> None:
    verifier = RandomVerifier(rate)
    by_number = [accepts(verifier, 1, number) for number in range(1, 2001)]
    by_request = [accepts(verifier, seed, 1) for seed in range(2000)]
    for said in (by_number, by_request):
        assert np.mean(said) == pytest.approx(rate, abs=4 * np.sqrt(rate * (1 - rate) / 2000))
        if 0 < rate < 1:  # one does not tell of the next
            assert abs(np.corrcoef(said[:-1], said[1:])[0, 1]) < 0.1


def test_chance_knows_the_seed_and_the_steps_number_alone() -> None:
    verifier = RandomVerifier(0.5)
    places = [(seed, number) for seed in range(8) for number in range(1, 9)]
    first = [accepts(verifier, *place) for place in places]
    again = [accepts(verifier, *place, tokens=9) for place in reversed(places)]
    assert first == again[::-1]
    rows = [tuple(first[8 * seed : 8 * seed + 8]) for seed in range(8)]
    assert len(set(rows)) == 8, "every request has chances of its own"


def test_a_higher_rate_accepts_what_a_lower_one_does() -> None:
    for number in range(1, 100):
        said = [accepts(RandomVerifier(rate), 5, number) for rate in (0, 0.2, 0.5, 0.9, 1)]
        assert said == sorted(said)


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_a_request_at_random_is_the_same_whatever_came_before(sampling: Sampling) -> None:
    shared = decoder(RandomVerifier(0.5), toy(1), toy(2))
    alone = {
        seed: list(decoder(RandomVerifier(0.5), toy(1), toy(2)).decode(request(seed, sampling)))
        for seed in (3, 4, 5)
    }
    for seed in (5, 3, 4, 3):
        steps = list(shared.decode(request(seed, sampling)))
        assert [(s.text, s.source) for s in steps] == [(s.text, s.source) for s in alone[seed]]


@pytest.mark.parametrize("seed", SEEDS)
def test_extreme_controls_leave_one_models_text(seed: int) -> None:
    ends: list[tuple[Verifier, int]] = [
        (RandomVerifier(1.0), 1),
        (RandomVerifier(0.0), 2),
        (LengthVerifier(10**6), 1),
        (LengthVerifier(0), 2),
        (AcceptAll(), 1),
    ]
    for verifier, writer in ends:
        text = text_of(decoder(verifier, toy(1), toy(2)), request(seed))
        assert text == solo_text(writer, Source.DRAFT, request(seed))


@pytest.mark.parametrize("limit", [0, 6, 7, 8, 9])
def test_steps_of_at_most_so_many_tokens_are_accepted(limit: int) -> None:
    for step in decoder(LengthVerifier(limit)).decode(request()):
        length = step.tokens.drafted  # the end token counts
        assert (step.verdict is Verdict.ACCEPTED) == (length <= limit)
        assert (step.score, step.threshold) == (-length, -limit)
    assert accepts(LengthVerifier(3), 0, 1, tokens=3)
    assert not accepts(LengthVerifier(3), 0, 1, tokens=4)


def test_the_selection_alone_takes_one_of_the_candidates() -> None:
    def first_vowels(texts: list[str]) -> Any:
        return np.array([[text.count("a") + 1.0, len(text)] for text in texts], dtype=np.float32)

    choosing = Selector(first_vowels)
    selecting = decoder(AcceptAll(), toy(1), toy(2), num_candidates=4, select=choosing)
    chosen = set()
    for seed in SEEDS:
        for step in selecting.decode(request(seed, WARM)):
            assert (step.source, step.verdict) == (Source.DRAFT, Verdict.ACCEPTED)
            assert step.chosen == choosing(list(step.candidates))
            assert step.num_candidates == 4
            assert step.tokens.target_read == step.tokens.regenerated == 0
            chosen.add(step.chosen)
    assert len(chosen) > 1


# --- what all of them have in common


def every_verifier(target: ToyEngine) -> Iterator[Verifier]:
    yield AcceptAll()
    yield RandomVerifier(0.5)
    yield LengthVerifier(4)
    yield RewardVerifier(TextReward(lambda messages, steps: 0.9 if len(steps[-1]) % 2 else 0.1))
    yield RewardVerifier(ValueHead(draft="toy", layer=1, weights=(1.0,) * 4, bias=0.3))
    yield TargetJudge(target)


def consistent(steps: Sequence[Step]) -> None:
    for step in steps:
        assert step.tokens.kept <= step.answer_tokens
        assert (step.tokens.kept > 0) == (step.source is Source.DRAFT)
        accepted = step.verdict is Verdict.ACCEPTED
        assert accepted == (step.source is Source.DRAFT)
        assert step.confidence is not None
        assert not step.rejected_early
        assert Step.from_dict(step.to_dict()) == step


@pytest.mark.parametrize("which", range(6))
@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_the_same_request_again_gives_the_same_steps(which: int, sampling: Sampling) -> None:
    verdicts = set()
    for seed in SEEDS:
        runs = []
        for shared in (True, False):
            target, _ = judging(mixed, random_policy(2))
            deciding = decoder(
                [*every_verifier(target)][which], toy(1), target, shape=StepShape(max_tokens=17)
            )
            if shared:
                list(deciding.decode(request(seed + 100, sampling)))
            runs.append(list(deciding.decode(request(seed, sampling))))
            consistent(runs[-1])
        assert [(s.text, s.verdict) for s in runs[0]] == [(s.text, s.verdict) for s in runs[1]]
        verdicts |= {step.verdict for step in runs[0]}
    assert verdicts == ({Verdict.ACCEPTED} | ({Verdict.REJECTED} if which else set()))


def test_no_confidence_is_told_where_none_was_read() -> None:
    judgement = LengthVerifier(5).judge(candidate(3), UNREAD, situation(0, 1))
    assert judgement.confidence is None


# --- drafts that give no log-probs, as some servers do


class Silent(ToyEngine):
    """Gives text and nothing else."""

    def __init__(self, policy: Policy, **settings: Any) -> None:
        super().__init__(policy, attention=False, states=False, **settings)
        self.capabilities = Capabilities(logprobs=False, scoring=False, max_candidates=4)

    def open(self, *args: Any, **settings: Any) -> Any:
        session = super().open(*args, **settings)
        sample = session.sample

        def unread(*args: Any, watch: Any = None, **settings: Any) -> list[Candidate]:
            return [replace(one, reading=UNREAD) for one in sample(*args, **settings)]

        session.sample = unread
        return session


@pytest.mark.parametrize("name", ["rsd", "rsd-majority", "specreason"])
@pytest.mark.parametrize("vocabulary", ["bytes", "a server's"])
def test_methods_that_rate_the_text_take_a_draft_without_log_probs(
    name: str, vocabulary: str
) -> None:
    def rate(messages: Any, steps: Sequence[str]) -> float:
        return len(steps[-1]) % 2

    texts = []
    for kind in (ToyEngine, Silent):
        target, _ = judging(mixed, random_policy(2))
        model = ChatSpecGuard(
            draft=kind(random_policy(1), vocabulary=vocabulary),
            target=target,
            decoder=name,
            reward_model=rate,
            num_candidates=1,
            max_tokens=60,
            max_step_tokens=17,
            seed=1,
        )
        answer = model.invoke("question")
        texts.append(answer.text)
        assert answer.response_metadata["specguard"]["confidence_from"] is None
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", ["selector", "random", "length"])
def test_controls_take_a_draft_without_log_probs(name: str) -> None:
    expected, told = (
        ChatSpecGuard(
            draft=kind(random_policy(1)),
            target=toy(2),
            decoder=name,
            max_accepted_tokens=6,
            max_tokens=60,
            seed=1,
        ).invoke("question")
        for kind in (ToyEngine, Silent)
    )
    assert told.text == expected.text
    assert {step["confidence"] for step in told.additional_kwargs["specguard_steps"]} == {None}


def test_what_judges_confidence_still_refuses_such_a_draft() -> None:
    bounds = Calibration(confidence=Bounds(low=-3, high=0), grounding=Bounds(low=0, high=1))
    silent = Silent(random_policy(1))
    for weight in (0.01, 1.0):
        verifier = EnsembleVerifier(bounds, confidence_weight=weight)
        assert verifier.needs_confidence
        with pytest.raises(ConfigurationError, match="no log-probs, which confidence needs"):
            decoder(verifier, silent, toy(2))
    by_grounding = EnsembleVerifier(bounds, confidence_weight=0.0, threshold=0.8)
    assert not by_grounding.needs_confidence
    told, expected = (
        list(decoder(by_grounding, draft, toy(2), grounding_from="target").decode(request()))
        for draft in (silent, toy(1))
    )
    assert [(s.text, s.verdict, s.score) for s in told] == [
        (s.text, s.verdict, s.score) for s in expected
    ]
    assert {step.verdict for step in told} == {Verdict.ACCEPTED, Verdict.REJECTED}
    assert {step.confidence for step in told} == {None}
    assert all(step.grounding is not None for step in told)


@pytest.mark.parametrize("which", range(6))
def test_none_of_them_needs_log_probs(which: int) -> None:
    target, _ = judging(mixed, random_policy(2))
    assert not [*every_verifier(target)][which].needs_confidence
    head = ValueHead(draft="toy", layer=1, weights=(1.0,) * 4, bias=0.3)
    bounds = Calibration(confidence=Bounds(low=-3, high=0), grounding=Bounds(low=0, high=1))
    assert not EnsembleVerifier(bounds, value_head=head, value_weight=1.0).needs_confidence
    assert EnsembleVerifier(bounds, value_head=head, value_weight=0.9).needs_confidence
