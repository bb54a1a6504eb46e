"""From options to decoders, with engines that need no weights."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specguard_chains import ChatSpecGuard, SpecGuardLLM, adapters, calibrations, engines
from specguard_chains.assembly import assemble, unload
from specguard_chains.calibrations.fitting import fit, read_questions
from specguard_chains.decoding.baselines import SoloDecoder
from specguard_chains.decoding.calibration import Bounds, Calibration
from specguard_chains.decoding.grounding import GroundingSpec
from specguard_chains.decoding.pacing import Patience
from specguard_chains.decoding.selection import HashedNgrams
from specguard_chains.decoding.specguard import SpecGuardDecoder
from specguard_chains.decoding.steps import Source
from specguard_chains.decoding.verification import EnsembleVerifier
from specguard_chains.errors import CalibrationError, ConfigurationError, ModelNotFoundError
from specguard_chains.options import SpecGuardOptions
from tests.paper import PAPER
from tests.toy_engine import ToyEngine, random_policy, scripted_policy

BOUNDS = Calibration(confidence=Bounds(low=-3, high=0), grounding=Bounds(low=0, high=1))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECGUARD_CACHE", str(tmp_path / "cache"))
    calibrations._warn_once.cache_clear()


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Loads toy engines from any path and records their settings."""
    settings: list[dict[str, Any]] = []

    def load(path: Path, **given: Any) -> ToyEngine:
        settings.append({"path": path, **given})
        return ToyEngine(random_policy(1), name=Path(path).stem)

    monkeypatch.setitem(vars(adapters), "LlamaCppEngine", load)
    monkeypatch.setattr(engines, "resolve", lambda model, progress: Path(f"{model}"))
    monkeypatch.setattr(engines, "_engines", {})
    return settings


def options(**given: Any) -> SpecGuardOptions:
    return SpecGuardOptions(**({"draft": "d.gguf", "target": "t.gguf"} | given))


def toy_pair() -> dict[str, ToyEngine]:
    return {
        "draft": ToyEngine(random_policy(1), name="d"),
        "target": ToyEngine(random_policy(2), name="t"),
    }


def test_engines_given_are_used_as_they_are() -> None:
    pair = toy_pair()
    decoder = assemble(options(**pair, threshold=0.25, confidence_weight=0.5, num_candidates=3))
    assert isinstance(decoder, SpecGuardDecoder)
    assert decoder.engines == (pair["draft"], pair["target"])
    assert decoder.num_candidates == 3
    assert isinstance(decoder.verifier, EnsembleVerifier)
    assert decoder.verifier.threshold == 0.25
    assert decoder.verifier.confidence_weight == 0.5


@pytest.mark.parametrize("role", ["draft", "target"])
def test_a_model_alone_loads_only_itself(role: str, loaded: list[dict[str, Any]]) -> None:
    decoder = assemble(options(decoder=role))
    assert isinstance(decoder, SoloDecoder)
    assert decoder.source == Source(role)
    assert [settings["path"] for settings in loaded] == [Path(f"{role[0]}.gguf").absolute()]


def test_a_file_is_loaded_once_in_a_process(loaded: list[dict[str, Any]]) -> None:
    first = assemble(options())
    assert assemble(options(threshold=0.1)).engines == first.engines
    assert assemble(options(decoder="target")).engines[0] is first.engines[1]
    assert len(loaded) == 2
    unload()
    assert assemble(options()).engines != first.engines


def test_only_the_model_that_is_read_gives_attention(loaded: list[dict[str, Any]]) -> None:
    assemble(options(**PAPER))
    assert [settings["attention"] for settings in loaded] == [True, False]
    assemble(options(**PAPER | {"verify_with": "target"}))
    assert [settings["attention"] for settings in loaded[2:]] == [False, True]
    assemble(options(**PAPER | {"confidence_weight": 1}))
    assert [settings["attention"] for settings in loaded[4:]] == []  # both are loaded without


def test_by_default_no_attention_is_read(loaded: list[dict[str, Any]]) -> None:
    decoder = assemble(options())
    assert isinstance(decoder, SpecGuardDecoder)
    assert not decoder.verifier.needs_grounding
    assert decoder.verify_with == "target"
    assert [settings["attention"] for settings in loaded] == [False, False]


def test_one_file_in_both_roles_is_one_engine(loaded: list[dict[str, Any]]) -> None:
    decoder = assemble(options(target="d.gguf", **PAPER | {"verify_with": "target"}))
    assert len(decoder.engines) == len(loaded) == 1
    assert loaded[0]["attention"]


@pytest.mark.parametrize("spelled", [Path("d.gguf"), "./d.gguf", "{here}/d.gguf"], ids=str)
def test_one_file_is_one_engine_however_it_is_spelled(
    spelled: Any, loaded: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d.gguf").touch()
    target = spelled.format(here=tmp_path) if isinstance(spelled, str) else spelled
    decoder = assemble(options(target=target, verify_with="target"))
    assert len(decoder.engines) == len(loaded) == 1


def test_greedy_decoding_uses_the_same_engines(loaded: list[dict[str, Any]]) -> None:
    sampling = assemble(options(num_candidates=8))
    greedy = assemble(options(num_candidates=8, decoder="specguard-greedy"))
    assert isinstance(greedy, SpecGuardDecoder)
    assert greedy.num_candidates == 1
    assert greedy.engines == sampling.engines


def test_a_model_goes_on_after_unloading(loaded: list[dict[str, Any]]) -> None:
    model = ChatSpecGuard(draft="d.gguf", target="t.gguf", seed=1, max_tokens=20)
    first = model.invoke("question").text
    unload()
    assert model.invoke("question").text == first
    assert len(loaded) == 4


def test_what_is_no_model_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"draft must be a model's name.*not int"):
        assemble(options(draft=3))


def test_an_unknown_pair_and_a_missing_file_are_named() -> None:
    with pytest.raises(ConfigurationError, match=r"qwen3"):
        assemble(SpecGuardOptions(pair="qwen3"))
    with pytest.raises(ModelNotFoundError, match=r"nowhere\.gguf"):
        assemble(options(draft="nowhere.gguf"))


def test_more_candidates_than_an_engine_has_room_for() -> None:
    with pytest.raises(ConfigurationError, match=r"num_candidates=64 .*toy"):
        engine = ToyEngine(random_policy(1))
        engine.capabilities = type(engine.capabilities)(attention=True, max_candidates=2)
        assemble(options(draft=engine, target=engine, num_candidates=64))


def test_a_pair_without_bounds_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        decoder = assemble(options(**toy_pair()))
    assert "specguard calibrate" in caplog.text
    assert isinstance(decoder, SpecGuardDecoder)
    assert isinstance(decoder.verifier, EnsembleVerifier)
    assert decoder.verifier.calibration.source == "fallback"


def test_ones_own_bounds_are_found_by_models_and_signals() -> None:
    folder = calibrations.own_folder()
    folder.mkdir(parents=True)
    BOUNDS.save(folder / calibrations.file_name("d", "t", "draft", GroundingSpec()))
    for given, expected in (
        ({}, "calibrated"),
        ({"grounding": "dense"}, "fallback"),
        ({"verify_with": "target"}, "fallback"),
    ):
        decoder = assemble(options(**toy_pair(), **PAPER | given))
        assert isinstance(decoder, SpecGuardDecoder)
        assert isinstance(decoder.verifier, EnsembleVerifier)
        assert decoder.verifier.calibration.source == expected


def test_a_calibration_file_can_be_named(tmp_path: Path) -> None:
    BOUNDS.save(tmp_path / "bounds.json")
    decoder = assemble(options(**toy_pair(), calibration=str(tmp_path / "bounds.json")))
    assert isinstance(decoder, SpecGuardDecoder)
    assert isinstance(decoder.verifier, EnsembleVerifier)
    assert decoder.verifier.calibration == BOUNDS
    with pytest.raises(CalibrationError, match=r"missing\.json"):
        assemble(options(**toy_pair(), calibration=str(tmp_path / "missing.json")))


def test_an_encoder_can_be_a_function() -> None:
    def constant(texts: list[str]) -> Any:
        return np.ones((len(texts), 2), dtype=np.float32)

    for given, expected in ((None, HashedNgrams), (constant, type(constant))):
        decoder = assemble(options(**toy_pair(), encoder=given))
        assert isinstance(decoder, SpecGuardDecoder)
        assert isinstance(decoder.select.encoder, expected)
    with pytest.raises(ConfigurationError, match="encoder must be"):
        assemble(options(**toy_pair(), encoder=3))


def test_bounds_are_fitted_to_the_drafts_own_steps() -> None:
    draft = ToyEngine(scripted_policy("one\n\n", "two\n\n", "three", logprobs=[-0.5, -1.0, -1.5]))
    decoder = assemble(options(draft=draft, target=ToyEngine(random_policy(2)), **PAPER))
    assert isinstance(decoder, SpecGuardDecoder)
    seen = []
    fitted = fit(decoder, ["q", "r"], on_step=lambda problem, step: seen.append(problem))
    assert seen == [0, 0, 0, 1, 1, 1]
    assert (fitted.problems, fitted.steps) == (2, 6)
    assert fitted.confidence.low == pytest.approx(-1.5, abs=0.01)
    assert fitted.confidence.high == pytest.approx(-0.5, abs=0.03)
    assert fitted.source == "calibrated"


def test_without_problems_there_are_no_bounds() -> None:
    decoder = assemble(options(**toy_pair()))
    assert isinstance(decoder, SpecGuardDecoder)
    with pytest.raises(CalibrationError, match="at least one problem"):
        fit(decoder, [])


def test_questions_are_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(f'{{"question": "q{i}"}}\n' for i in range(5)), encoding="utf-8")
    assert read_questions(path) == {1: "q0", 2: "q1", 3: "q2", 4: "q3", 5: "q4"}
    assert read_questions(path, limit=2, skip=1) == {2: "q1", 3: "q2"}
    for bad in ("no json\n", '{"answer": 1}\n', "3\n"):
        path.write_text(bad, encoding="utf-8")
        with pytest.raises(CalibrationError, match="problems"):
            read_questions(path)


@pytest.mark.parametrize(
    ("given", "one_first", "margin"),
    [
        ({}, True, 0.1),
        ({"doubt_margin": 0.3}, True, 0.3),
        ({"doubt_margin": 0}, True, 0.0),
        ({"doubt_margin": 1}, False, 0.0),
        ({"num_candidates": 1}, False, 0.0),
        ({"temperature": 0}, False, 0.0),
        ({"decoder": "specguard-greedy"}, False, 0.0),
        ({"target_confidence": -0.5}, False, 0.1),
        ({"target_confidence": -0.5, "decoder": "specguard-greedy"}, False, 0.1),
    ],
    ids=str,
)
def test_there_is_doubt_only_where_it_changes_something(
    given: dict[str, Any], one_first: bool, margin: float
) -> None:
    """Else early rejection would go on drafting what is nearer to the threshold than the margin."""
    decoder = assemble(options(**toy_pair(), **given))
    assert isinstance(decoder, SpecGuardDecoder)
    assert isinstance(decoder.verifier, EnsembleVerifier)
    assert decoder.one_first == one_first
    assert decoder.verifier.doubt_margin == margin
    assert decoder.target_confidence == given.get("target_confidence")


@pytest.mark.parametrize("decoder", ["specguard", "specguard-greedy"])
def test_greedy_decoders_reject_early_at_the_threshold_itself(decoder: str) -> None:
    assembled = assemble(options(**toy_pair(), decoder=decoder, temperature=0, threshold=0.5))
    assert isinstance(assembled, SpecGuardDecoder)
    assert isinstance(assembled.verifier, EnsembleVerifier)
    bounds = assembled.verifier.calibration.confidence
    middle = (bounds.low + bounds.high) / 2
    assert assembled.verifier.can_accept(middle + 1e-3, None)
    assert not assembled.verifier.can_accept(middle - 1e-3, None)


@pytest.mark.parametrize(
    ("given", "drafts", "rewrites"),
    [
        ({}, 4, 1),
        ({"num_candidates": 3, "num_target_candidates": 2}, 3, 2),
        ({"num_target_candidates": 8, "temperature": 0}, 1, 1),
        ({"decoder": "rsd", "num_target_candidates": 8}, 1, 1),
        ({"decoder": "selector", "num_target_candidates": 8}, 4, 8),
    ],
    ids=str,
)
def test_each_model_has_its_own_number_of_candidates(
    given: dict[str, Any], drafts: int, rewrites: int
) -> None:
    decoder = assemble(options(**toy_pair(), reward_model=lambda *_: 1.0, **given))
    assert isinstance(decoder, SpecGuardDecoder)
    assert (decoder.num_candidates, decoder.num_target_candidates) == (drafts, rewrites)


def test_room_is_reserved_for_the_candidates_of_either_model(loaded: list[dict[str, Any]]) -> None:
    assemble(options(num_candidates=2, num_target_candidates=6))
    assert [settings["max_candidates"] for settings in loaded] == [6, 6]


@pytest.mark.parametrize(
    ("decoder", "usual"),
    [
        ("specguard", Patience(1, 4)),
        ("specguard-greedy", Patience(1, 4)),
        *((name, None) for name in ("rsd", "specreason", "selector", "random", "length")),
    ],
)
def test_only_specguard_pauses_unless_patience_is_given(
    decoder: str, usual: Patience | None
) -> None:
    """The methods to compare with are those that were published."""

    def pacing(**given: Any) -> Patience | None:
        chosen = options(**toy_pair(), decoder=decoder, reward_model=lambda *_: 1.0, **given)
        assembled = assemble(chosen)
        assert isinstance(assembled, SpecGuardDecoder)
        return assembled.patience

    assert pacing() == usual
    assert pacing(pause_steps=7) == (usual and Patience(1, 7))
    assert pacing(patience=0) is None
    assert pacing(hand_back=8) is None  # the draft is to go on at once
    for rejections in (1, 3):
        assert pacing(patience=rejections, hand_back=8) == Patience(rejections, 4)
        assert pacing(patience=rejections, pause_steps=2) == Patience(rejections, 2)


@pytest.mark.parametrize("name", ["target", "draft", "rsd", "selector", "random", "length"])
def test_passages_are_read_in_the_form_that_is_asked_for_whatever_decides(name: str) -> None:
    """Those that judge by no attention read it where a prompt has passages."""
    asked = {"grounding": "dense", "grounding_layers": 2, "confidence_weight": 0.3}
    assembled = assemble(
        options(
            **toy_pair(), decoder=name, reward_model=lambda *_: 1.0, verify_with="target", **asked
        )
    )
    form = GroundingSpec.named("dense", layers=2)
    if isinstance(assembled, SoloDecoder):
        assert (assembled.grounding, assembled.passage_grounding) == (None, form)
        return
    assert isinstance(assembled, SpecGuardDecoder)
    assert (assembled.grounding, assembled.reader) == (form, "target")


@pytest.mark.parametrize("decoder", ["rsd", "selector", "random", "length"])
def test_hand_back_is_no_option_of_specguard_alone(decoder: str) -> None:
    chosen = options(**toy_pair(), decoder=decoder, reward_model=lambda *_: 1.0, hand_back=8)
    assembled = assemble(chosen)
    assert isinstance(assembled, SpecGuardDecoder)
    assert assembled.hand_back == 8


def test_hand_back_needs_one_vocabulary() -> None:
    pair = toy_pair() | {"draft": ToyEngine(random_policy(1), vocabulary="other")}
    with pytest.raises(ConfigurationError, match="hand_back=8 counts tokens, and toy and t do not"):
        assemble(options(**pair, hand_back=8))


def test_what_is_copied_from_the_prompt_is_no_tree() -> None:
    with pytest.raises(ConfigurationError, match="a chain, not a tree of widths"):
        assemble(
            options(
                **toy_pair(),
                confidence_weight=1,
                speculate_rewrites=True,
                speculate_with="prompt",
                speculative_tree=[2, 2],
            )
        )


def test_a_hook_that_cannot_be_called_is_refused_before_a_model_is_loaded(
    loaded: list[dict[str, Any]],
) -> None:
    for ask in (
        ChatSpecGuard(draft="d.gguf", target="t.gguf").invoke,
        SpecGuardLLM(draft="d.gguf", target="t.gguf").invoke,
    ):
        with pytest.raises(ConfigurationError, match="review must be a function or a Runnable"):
            ask("question", review="keep")
    assert not loaded


def test_counting_tokens_loads_what_counts_and_keeps_the_decoder(
    loaded: list[dict[str, Any]],
) -> None:
    model = ChatSpecGuard(draft="d.gguf", target="t.gguf", temperature=0.5)
    assert model.get_num_tokens("a question") > model.get_num_tokens("a")
    assert [settings["path"].name for settings in loaded] == ["t.gguf"]
    decoder = model._assembled.decoder(model)
    assert model.bind(temperature=0.1).get_num_tokens("more") > 0
    assert model._assembled.decoder(model) is decoder


def test_threads_that_come_first_together_have_one_decoder() -> None:
    """It may keep an account of its answers."""
    model = ChatSpecGuard(**toy_pair())
    with ThreadPoolExecutor(8) as pool:
        decoders = list(pool.map(lambda _: id(model._assembled.decoder(model)), range(8)))
    assert len(set(decoders)) == 1
