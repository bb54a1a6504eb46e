"""Value heads and reward models: files, whose they are, and what they need of the draft."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specguard_chains import adapters, engines, rewards, value_heads
from specguard_chains.assembly import assemble
from specguard_chains.decoding.baselines import SoloDecoder
from specguard_chains.decoding.boundaries import Ending
from specguard_chains.decoding.calibration import Bounds, Calibration
from specguard_chains.decoding.decoder import Decoder, Request
from specguard_chains.decoding.engine import Candidate, Prompt, Reading
from specguard_chains.decoding.grounding import GroundingSpec
from specguard_chains.decoding.rewards import ValueHead
from specguard_chains.decoding.rivals import AcceptAll, RewardVerifier
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.decoding.specguard import SpecGuardDecoder
from specguard_chains.decoding.steps import Source, Step, Verdict
from specguard_chains.decoding.verification import EnsembleVerifier
from specguard_chains.decoding.voting import VotingDecoder, best_confidence, best_value
from specguard_chains.errors import (
    CalibrationError,
    ConfigurationError,
    EngineError,
    StatesUnavailableError,
)
from specguard_chains.loaded import Loaded
from specguard_chains.models import find_pair
from specguard_chains.options import SpecGuardOptions
from specguard_chains.rewards import reward
from tests.toy_engine import ToyEngine, random_policy

BOUNDS = Calibration(confidence=Bounds(low=-3.0, high=0.0), grounding=Bounds(low=0.0, high=1.0))
GREEDY = Sampling(temperature=0)
WARM = Sampling(temperature=1, top_p=1)
SEEDS = range(12)
NEUTRAL = (0.0,) * 4
HEAD = ValueHead(draft="d", layer=1, weights=(1.0, -1.0, 0.5, 0.0), bias=0.5)
ALWAYS = ValueHead(draft="d", layer=1, weights=NEUTRAL, bias=60.0)
NEVER = ValueHead(draft="d", layer=1, weights=NEUTRAL, bias=-60.0)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECGUARD_CACHE", str(tmp_path / "cache"))


def draft(**settings: Any) -> ToyEngine:
    return ToyEngine(random_policy(1), **({"name": "d"} | settings))


def target(**settings: Any) -> ToyEngine:
    return ToyEngine(random_policy(2), **({"name": "t"} | settings))


def options(**given: Any) -> SpecGuardOptions:
    return SpecGuardOptions(**({"draft": draft(), "target": target(), "seed": 1} | given))


def request(seed: int = 0, sampling: Sampling = GREEDY) -> Request:
    return Request(Prompt(text=f"question {seed}"), sampling, seed=seed, max_tokens=120)


def guard(verifier: Any, **more: Any) -> SpecGuardDecoder:
    return SpecGuardDecoder(draft(), target(), verifier, **({"num_candidates": 1} | more))


def told(steps: list[Step]) -> list[tuple[Any, ...]]:
    return [(s.text, s.source, s.verdict, s.score, s.confidence, s.grounding) for s in steps]


def text_of(decoder: Decoder, asked: Request) -> str:
    return "".join(step.text for step in decoder.decode(asked))


# --- a head's value


def reading(state: Any) -> Reading:
    return Reading(np.float32([-0.1]), state=None if state is None else np.float32(state))


def test_a_value_is_a_logistic_regression_on_the_state() -> None:
    for state in np.random.default_rng(0).normal(size=(20, 4)):
        expected = 1 / (1 + np.exp(-(state @ HEAD.weights + HEAD.bias)))
        assert HEAD.value(reading(state)) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("size", [1e3, 1e20, 1e38])
def test_a_value_stays_one_however_large_the_state(size: float) -> None:
    for sign in (1, -1):
        value = HEAD.value(reading([sign * size, 0, 0, 0]))
        assert value == pytest.approx(1.0 if sign > 0 else 0.0)


@pytest.mark.parametrize("state", [None, [1.0, 2.0, 3.0], [1.0] * 5, [[1.0, 2.0, 3.0, 4.0]]])
def test_another_models_state_is_refused(state: Any) -> None:
    with pytest.raises(StatesUnavailableError, match=r"head of d needs a hidden state of 4 numb"):
        HEAD.value(reading(state))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_state_that_is_not_finite_is_no_reading(bad: float) -> None:
    with pytest.raises(EngineError, match="not finite"):
        reading([0.0, bad, 0.0, 0.0])


# --- files


def test_a_head_survives_its_file(tmp_path: Path) -> None:
    head = HEAD.model_copy(update={"training": {"data": ["x"], "auroc": [0.8, 0.7, 0.9]}})
    head.save(tmp_path / "head.json")
    assert ValueHead.load(tmp_path / "head.json") == head


GOOD = json.loads(HEAD.model_dump_json())


@pytest.mark.parametrize(
    "content",
    [
        "",
        "no json",
        "[]",
        "null",
        json.dumps({k: v for k, v in GOOD.items() if k != "bias"}),
        json.dumps({**GOOD, "weights": []}),
        json.dumps({**GOOD, "weights": [1.0, "x"]}),
        json.dumps({**GOOD, "weights": [1.0, float("nan")]}),
        json.dumps({**GOOD, "weights": [1.0, None]}),
        json.dumps({**GOOD, "bias": float("inf")}),
        json.dumps({**GOOD, "bias": 1}).replace('"bias": 1', '"bias": 1e999'),
        json.dumps({**GOOD, "layer": -1}),
        json.dumps({**GOOD, "layer": 1.5}),
        json.dumps({**GOOD, "more": 1}),
        json.dumps(GOOD)[:-5],
        b"\xff\xfe{}",
    ],
    ids=range(16),
)
def test_a_faulty_file_is_named(content: str | bytes, tmp_path: Path) -> None:
    path = tmp_path / "head.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CalibrationError, match=r"(?s)head\.json.*train-reward"):
        ValueHead.load(path)
    with pytest.raises(CalibrationError, match=r"head\.json"):
        assemble(options(decoder="rsd", reward_model=str(path)))


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    for name in ("nowhere.json", "folder.json"):
        with pytest.raises(CalibrationError, match=name):
            assemble(options(decoder="rsd", reward_model=tmp_path / name))


def test_ones_own_head_is_found_by_the_drafts_name() -> None:
    assert value_heads.find("d") is None
    for name in ("d", "some/model"):
        head = HEAD.model_copy(update={"draft": name})
        path = value_heads.own_folder() / value_heads.file_name(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        head.save(path)
        assert value_heads.find(name) == head
    decoder = assemble(options(decoder="rsd"))
    assert isinstance(decoder, SpecGuardDecoder)
    assert isinstance(decoder.verifier, RewardVerifier)
    assert decoder.verifier.reward == HEAD
    assert decoder.verifier.threshold == 0.7


def test_every_head_of_the_package_can_be_read() -> None:
    names = [path.stem for path in Path(value_heads.__file__).parent.glob("*.json")]
    for name in names:
        head = value_heads.find(name)
        assert head is not None
        assert head.draft == name


# --- whose head it is


@pytest.mark.parametrize("decoder", ["rsd", "specguard", "draft-best-of-n", "target-best-of-n"])
def test_another_models_head_is_refused(decoder: str, tmp_path: Path) -> None:
    other = HEAD.model_copy(update={"draft": "other"})
    other.save(tmp_path / "head.json")
    folder = value_heads.own_folder()
    folder.mkdir(parents=True)
    for name in ("d", "t"):
        other.save(folder / value_heads.file_name(name))
    writer = "t" if decoder == "target-best-of-n" else "d"
    for named in (other, tmp_path / "head.json", str(tmp_path / "head.json"), None):
        with pytest.raises(ConfigurationError, match=rf"is of other, .* by {writer}"):
            assemble(options(decoder=decoder, reward_model=named, value_weight=0.5))


def test_a_head_of_another_width_is_refused_and_the_engine_goes_on() -> None:
    engine = draft()
    wide = ValueHead(draft="d", layer=1, weights=(1.0,) * 5, bias=0.0)
    for decoder in ("rsd", "draft-best-of-n", "specguard"):
        given = options(draft=engine, decoder=decoder, reward_model=wide, value_weight=0.5)
        with pytest.raises(StatesUnavailableError, match=r"5 numbers.* one of 4 numbers"):
            list(assemble(given).decode(request(sampling=WARM)))
    assert text_of(SoloDecoder(engine, Source.DRAFT), request())


@pytest.mark.parametrize("layer", [2, 3, 99])
def test_a_layer_without_hidden_states_is_refused_and_the_engine_goes_on(layer: int) -> None:
    engine = draft()
    expected = text_of(SoloDecoder(engine, Source.DRAFT), request())
    head = HEAD.model_copy(update={"layer": layer})
    decoder = assemble(options(draft=engine, decoder="rsd", reward_model=head))
    with pytest.raises(StatesUnavailableError, match=rf"layer {layer} of d .*from 0 to 1"):
        list(decoder.decode(request()))
    again = list(SoloDecoder(engine, Source.DRAFT).decode(request()))
    assert "".join(step.text for step in again) == expected
    assert again[0].tokens.draft_reused, "the cache of the prompt is still there"


def test_a_draft_without_hidden_states_is_refused() -> None:
    engine = draft(states=False)
    for decoder in ("rsd", "specguard"):
        given = options(draft=engine, decoder=decoder, reward_model=HEAD, value_weight=0.5)
        with pytest.raises(StatesUnavailableError, match=r"d does not give.*states=True"):
            list(assemble(given).decode(request()))


# --- what the options name


def test_without_a_head_there_is_no_rsd() -> None:
    for given in ({"decoder": "rsd"}, {"decoder": "rsd-majority"}, {"value_weight": 0.1}):
        with pytest.raises(ConfigurationError, match=r"no value head of d is known.*train-reward"):
            assemble(options(**given))


def test_a_reward_model_that_reads_text_is_no_third_signal() -> None:
    with pytest.raises(ConfigurationError, match=r"value_weight needs a value head"):
        assemble(options(value_weight=0.1, reward_model=lambda messages, steps: 1.0))


def test_what_is_no_reward_model_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"reward_model must be .* not int"):
        assemble(options(decoder="rsd", reward_model=3))


def test_without_weight_no_head_is_looked_for() -> None:
    wrong = HEAD.model_copy(update={"draft": "other"})
    assert isinstance(assemble(options(reward_model=wrong)), SpecGuardDecoder)
    assert reward(options(), "d") is None


def test_best_of_n_goes_by_value_or_else_by_confidence(caplog: pytest.LogCaptureFixture) -> None:
    def function(messages: Any, steps: Any) -> float:
        return 0.5

    for name in ("draft", "target"):
        writer = HEAD.model_copy(update={"draft": name[0]})
        for model, choose in (
            (None, best_confidence),
            (function, best_value),
            (writer, best_value),
        ):
            caplog.clear()
            with caplog.at_level(logging.WARNING):
                vote = assemble(options(decoder=f"{name}-best-of-n", reward_model=model))
            assert isinstance(vote, VotingDecoder)
            assert vote.choose is choose
            assert isinstance(vote.decoder, SoloDecoder)
            assert vote.decoder.source == Source(name)
            assert ("least confident step" in caplog.text) == (model is None)


@pytest.mark.parametrize("name", ["draft", "target"])
def test_best_of_n_asks_a_reward_model_once_for_each_answer(name: str) -> None:
    asked: list[int] = []

    def function(messages: Any, steps: Any) -> float:
        asked.append(len(steps))
        return 0.5

    prompt = Prompt(messages=[{"role": "user", "content": "question"}])
    decoder = f"{name}-best-of-n"
    by_text = assemble(options(decoder=decoder, reward_model=function, num_samples=3))
    steps = list(by_text.decode(replace(request(sampling=WARM), prompt=prompt)))
    assert asked[0] == len(steps) > 1, "the first of equal answers"
    assert len(asked) == 3
    assert [step.value is None for step in steps] == [True] * (len(steps) - 1) + [False]
    head = HEAD.model_copy(update={"draft": name[0]})
    by_head = assemble(options(decoder=decoder, reward_model=head, num_samples=3))
    assert all(step.value is not None for step in by_head.decode(request(sampling=WARM)))


def test_without_log_probs_there_is_no_best_of_n_by_confidence() -> None:
    engine = draft()
    engine.capabilities = replace(engine.capabilities, logprobs=False)
    with pytest.raises(ConfigurationError, match=r"d gives no log-probs.*name a reward_model"):
        assemble(options(draft=engine, decoder="draft-best-of-n"))
    by_text = options(draft=engine, decoder="draft-best-of-n", reward_model=lambda m, s: 1.0)
    assert isinstance(assemble(by_text), VotingDecoder)


# --- which models show hidden states


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Loads toy engines from any path and records their settings."""
    settings: list[dict[str, Any]] = []

    def load(path: Path, **given: Any) -> ToyEngine:
        settings.append({"path": Path(path).stem, **given})
        return ToyEngine(random_policy(1), name=Path(path).stem)

    monkeypatch.setitem(vars(adapters), "LlamaCppEngine", load)
    monkeypatch.setattr(engines, "resolve", lambda model, progress: Path(f"{model}"))
    monkeypatch.setattr(engines, "_engines", {})
    return settings


def files(**given: Any) -> SpecGuardOptions:
    return SpecGuardOptions(**({"draft": "d.gguf", "target": "t.gguf"} | given))


def text_model(messages: Any, steps: Any) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"d": False, "t": False}),
        ({"value_weight": 0.5, "reward_model": HEAD}, {"d": True, "t": False}),
        ({"decoder": "rsd", "reward_model": HEAD}, {"d": True, "t": False}),
        ({"decoder": "rsd-majority", "reward_model": HEAD}, {"d": True, "t": False}),
        ({"decoder": "rsd", "reward_model": text_model}, {"d": False, "t": False}),
        ({"decoder": "draft-best-of-n"}, {"d": False}),  # no head is known: by confidence
        ({"decoder": "target-best-of-n"}, {"t": False}),
        ({"decoder": "draft-best-of-n", "reward_model": HEAD}, {"d": True}),
        ({"decoder": "draft-best-of-n", "reward_model": text_model}, {"d": False}),
        ({"decoder": "draft-best-of-n", "reward_model": "org/prm"}, {"d": False}),
        ({"decoder": "target", "value_weight": 0.5, "reward_model": HEAD}, {"t": False}),
        ({"decoder": "specreason"}, {"d": False, "t": False}),
        ({"decoder": "target"}, {"t": False}),
    ],
)
def test_only_who_is_rated_shows_hidden_states(
    given: dict[str, Any],
    expected: dict[str, bool],
    loaded: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rewards, "_models", Loaded(lambda name: text_model))
    assemble(files(**given))
    assert {settings["path"]: settings["states"] for settings in loaded} == expected


def test_a_known_head_is_read_where_none_is_named(loaded: list[dict[str, Any]]) -> None:
    value_heads.own_folder().mkdir(parents=True)
    HEAD.save(value_heads.own_folder() / value_heads.file_name("d"))
    for given, expected in (
        ({"decoder": "draft-best-of-n"}, {"d": True}),
        ({"decoder": "draft-best-of-n", "draft": "folder/../d.gguf"}, {"d": True}),
        ({"decoder": "target-best-of-n"}, {"t": False}),
        ({"decoder": "rsd"}, {"d": True, "t": False}),
        ({"value_weight": 0.5}, {"d": True, "t": False}),
        ({}, {"d": False, "t": False}),
    ):
        loaded.clear()
        engines.unload()
        assemble(files(**given))
        assert {settings["path"]: settings["states"] for settings in loaded} == expected, given


def test_the_default_drafts_head_is_read(loaded: list[dict[str, Any]]) -> None:
    pair = find_pair(SpecGuardOptions().pair)
    assert value_heads.find(engines.name_of(pair.draft)) is not None
    for decoder, states in (("draft-best-of-n", True), ("target-best-of-n", False)):
        loaded.clear()
        engines.unload()
        assemble(SpecGuardOptions(decoder=decoder))
        assert [settings["states"] for settings in loaded] == [states]


def test_an_engines_name_is_known_before_it_is_loaded(tmp_path: Path) -> None:
    pair = find_pair(SpecGuardOptions().pair)
    (tmp_path / "Some-1.5B").mkdir()
    for model, name in (
        ("a/b/m-1.5b.q4.gguf", "m-1.5b.q4"),
        (Path("m.gguf"), "m"),
        ("hf://a/m-1.5b.gguf", "m-1.5b"),
        ("org/Some-1.5B", "Some-1.5B"),
        ("hf://org/Some-1.5B", "Some-1.5B"),
        (tmp_path / "Some-1.5B", "Some-1.5B"),
        (pair.draft, Path(pair.draft.file).stem),
        (pair.draft.name, Path(pair.draft.file).stem),
    ):
        assert engines.name_of(model) == name


@pytest.mark.parametrize("given", [{"value_weight": 0.5}, {"decoder": "rsd"}])
def test_one_file_in_both_roles_is_one_engine(
    given: dict[str, Any], loaded: list[dict[str, Any]]
) -> None:
    decoder = assemble(files(target="d.gguf", reward_model=HEAD, **given))
    assert len(decoder.engines) == len(loaded) == 1
    assert loaded[0]["states"]


# --- the third signal


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_head_without_weight_changes_nothing(seed: int, k: int, sampling: Sampling) -> None:
    settings: dict[str, Any] = {"confidence_weight": 0.4, "threshold": 0.5}
    plain = guard(EnsembleVerifier(BOUNDS, **settings), num_candidates=k)
    with_head = guard(EnsembleVerifier(BOUNDS, value_head=HEAD, **settings), num_candidates=k)
    ours = list(with_head.decode(request(seed, sampling)))
    assert told(ours) == told(list(plain.decode(request(seed, sampling))))
    assert {step.value for step in ours} == {None}


@pytest.mark.parametrize("threshold", [0.01, 0.7, 1.0])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_head_with_all_the_weight_leaves_one_models_text(seed: int, threshold: float) -> None:
    for head, writer in ((ALWAYS, draft()), (NEVER, target())):
        verifier = EnsembleVerifier(BOUNDS, 0.3, threshold, head, value_weight=1.0)
        assert not verifier.needs_grounding
        steps = list(guard(verifier).decode(request(seed)))
        expected = text_of(SoloDecoder(writer, Source.DRAFT), request(seed))
        assert "".join(step.text for step in steps) == expected
        accepted = head is ALWAYS
        assert {step.verdict is Verdict.ACCEPTED for step in steps} == {accepted}
        for step in steps:
            assert step.value == step.score == pytest.approx(float(accepted))


@pytest.mark.parametrize("weight", [0.2, 0.5, 0.9, 1.0])
def test_the_value_is_weighed_against_the_two_others(weight: float) -> None:
    plain = EnsembleVerifier(BOUNDS, 0.4)
    weighed = EnsembleVerifier(BOUNDS, 0.4, value_head=HEAD, value_weight=weight)
    for confidence, grounding, value in ((-1.0, 0.5, 0.2), (-3.0, 0.0, 1.0), (0.0, 1.0, 0.0)):
        mixed = plain.score(confidence, grounding)
        expected = weight * value + (1 - weight) * mixed
        assert weighed.score(confidence, grounding, value) == pytest.approx(expected)
        best = weighed.score(confidence, grounding)
        assert best >= weighed.score(confidence, grounding, value), "not known yet is the best"


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("weight", [0.3, 0.6, 1.0])
@pytest.mark.parametrize("k", [1, 4])
def test_early_rejection_changes_no_text(k: int, weight: float, sampling: Sampling) -> None:
    verifier = EnsembleVerifier(BOUNDS, 0.5, 0.8, HEAD, weight)
    seen: list[Step] = []
    for seed in SEEDS:
        with_it, without = (
            list(
                guard(verifier, num_candidates=k, early_rejection=early).decode(
                    request(seed, sampling)
                )
            )
            for early in (True, False)
        )
        assert [(s.text, s.verdict) for s in with_it] == [(s.text, s.verdict) for s in without]
        for step, other in zip(with_it, without, strict=True):
            assert other.value is not None
            assert (step.value is None) == step.rejected_early
            if step.rejected_early:
                assert step.score is not None
                assert k > 1 or step.score >= (other.score or 0) - 1e-6
                assert step.score < 0.8
            else:
                assert step.value == pytest.approx(other.value, abs=1e-5)
        drafted = [sum(s.tokens.drafted for s in steps) for steps in (with_it, without)]
        assert drafted[0] <= drafted[1]
        seen += with_it
    assert {step.verdict for step in seen} == {Verdict.ACCEPTED, Verdict.REJECTED}
    if weight != 0.6:
        assert any(step.rejected_early for step in seen) == (weight < 1)


@pytest.mark.parametrize("verify_with", ["draft", "target"])
@pytest.mark.parametrize("shared", [True, False])
def test_the_state_is_the_drafts_whoever_verifies(shared: bool, verify_with: Any) -> None:
    one = draft()
    verifier = EnsembleVerifier(BOUNDS, 0.5, 0.0, HEAD, 0.5)
    decoder = SpecGuardDecoder(
        one, one if shared else target(states=False), verifier, 1, verify_with=verify_with
    )
    expected = SoloDecoder(draft(), Source.DRAFT, scorer=RewardVerifier(HEAD))
    for seed in SEEDS:
        values = [step.value for step in decoder.decode(request(seed))]
        assert values == [
            pytest.approx(step.value, abs=1e-6) for step in expected.decode(request(seed))
        ]


@pytest.mark.parametrize("weight", [-0.1, 1.1, float("nan")])
def test_a_weight_lies_between_0_and_1(weight: float) -> None:
    with pytest.raises(ConfigurationError, match=r"value_weight must lie in \[0, 1\]"):
        EnsembleVerifier(BOUNDS, value_head=HEAD, value_weight=weight)


def test_a_weight_needs_a_head() -> None:
    with pytest.raises(ConfigurationError, match=r"value_weight=0.5 needs a value head"):
        EnsembleVerifier(BOUNDS, value_weight=0.5)


def test_a_reading_without_a_state_is_an_error_but_after_early_rejection() -> None:
    verifier = EnsembleVerifier(BOUNDS, 1.0, 0.0, HEAD, 0.5)
    nowhere: Any = None
    for ending in (Ending.BOUNDARY, Ending.REJECTED_EARLY):
        candidate = Candidate((1,), "a", reading(None), ending, "bytes")
        if ending is Ending.BOUNDARY:
            with pytest.raises(StatesUnavailableError):
                verifier.judge(candidate, reading(None), nowhere)
        else:
            judgement = verifier.judge(candidate, reading(None), nowhere)
            assert judgement.verdict is Verdict.REJECTED
            assert judgement.value is None


def test_hidden_states_change_no_answer() -> None:
    spec = GroundingSpec()
    for seed in SEEDS:
        plain = SoloDecoder(draft(), Source.DRAFT, grounding=spec, scorer=AcceptAll())
        scored = SoloDecoder(draft(), Source.DRAFT, grounding=spec, scorer=RewardVerifier(HEAD))
        ours, expected = (list(d.decode(request(seed, WARM))) for d in (scored, plain))
        assert [(s.text, s.confidence, s.grounding) for s in ours] == [
            (s.text, s.confidence, s.grounding) for s in expected
        ]
        assert [s.tokens for s in ours] == [s.tokens for s in expected]
