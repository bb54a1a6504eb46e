"""Any engine in any role: how models are named, and whose signals are judged."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from specguard_chains import ChatSpecGuard, adapters, background, calibrations, engines
from specguard_chains.assembly import assemble
from specguard_chains.calibrations.fitting import fit
from specguard_chains.decoding import compute_thread
from specguard_chains.decoding.boundaries import Boundary
from specguard_chains.decoding.calibration import Bounds, Calibration
from specguard_chains.decoding.decoder import Request
from specguard_chains.decoding.engine import Capabilities, Prompt
from specguard_chains.decoding.grounding import GroundingSpec
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.decoding.specguard import SpecGuardDecoder
from specguard_chains.decoding.speculation import Speculation
from specguard_chains.decoding.speculative import SpeculativeDecoder
from specguard_chains.decoding.steps import Source, Step, Verdict
from specguard_chains.decoding.verification import EnsembleVerifier
from specguard_chains.engines import kind_of
from specguard_chains.errors import ConfigurationError
from specguard_chains.options import SpecGuardOptions
from tests.paper import PAPER
from tests.toy_engine import ANSWER, ToyEngine, random_policy, scripted_policy

CALIBRATION = Calibration(
    confidence=Bounds(low=-3.0, high=0.0), grounding=Bounds(low=0.0, high=1.0)
)
REQUEST = Request(Prompt(text="question"), Sampling(temperature=0), max_tokens=80)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECGUARD_CACHE", str(tmp_path / "cache"))
    calibrations._warn_once.cache_clear()


# --- names of models


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("model.gguf", "llama.cpp"),
        ("folder/model.gguf", "llama.cpp"),
        (Path("folder/model.gguf"), "llama.cpp"),
        ("smollm2-135m-instruct", "llama.cpp"),
        ("/absolute/path/model", "llama.cpp"),
        ("Qwen/Qwen2.5-0.5B-Instruct", "transformers"),
        ("hf://gpt2", "transformers"),
        ("hf://folder/model.gguf", "transformers"),
        ("openai://127.0.0.1:8000/large", "openai"),
        ("openais://models.example/org/large", "openai"),
    ],
)
def test_a_models_name_says_which_engine_runs_it(model: Any, kind: str) -> None:
    assert kind_of(model) == kind


def test_what_lies_on_the_disk_is_no_name_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    assert kind_of("org/model") == "transformers"
    (tmp_path / "org" / "model").write_bytes(b"GGUF")
    assert kind_of("org/model") == "llama.cpp"
    assert kind_of("org") == "transformers"
    assert kind_of(tmp_path / "org") == "transformers"


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Engines of every kind are toys; what they are loaded with is recorded."""
    seen: list[dict[str, Any]] = []

    def loader(kind: str) -> Any:
        def load(name: object, **given: Any) -> ToyEngine:
            seen.append({"kind": kind, "name": str(name), **given})
            local = kind != "OpenAIEngine"
            return ToyEngine(random_policy(1), attention=local and given["attention"])

        return load

    for kind in ("LlamaCppEngine", "HuggingFaceEngine", "OpenAIEngine"):
        monkeypatch.setitem(vars(adapters), kind, loader(kind))
    server = type("Server", (), {"from_url": staticmethod(loader("OpenAIEngine"))})
    monkeypatch.setitem(vars(adapters), "OpenAIEngine", server)
    monkeypatch.setattr(engines, "resolve", lambda model, progress: Path(f"{model}"))
    monkeypatch.setattr(engines, "_engines", {})
    return seen


URL = "openai://127.0.0.1:8000/large"


def test_engines_get_what_concerns_them(loaded: list[dict[str, Any]]) -> None:
    assemble(
        SpecGuardOptions(
            draft="org/small",
            target=URL,
            api_key=SecretStr("sesame"),
            n_threads=3,
            max_retries=7,
            **PAPER,
        )
    )
    draft, target = loaded
    assert (draft["kind"], draft["name"]) == ("HuggingFaceEngine", "org/small")
    assert draft["attention"]
    assert (draft["n_ctx"], draft["n_threads"]) == (4096, 3)
    assert "n_gpu_layers" not in draft
    assert target == {
        "kind": "OpenAIEngine",
        "name": URL,
        "context_length": None,
        "max_candidates": 4,
        "api_key": SecretStr("sesame"),
        "max_retries": 7,
        "max_parallel": 1,
    }


def test_a_context_length_that_is_asked_for_holds_for_servers_too(
    loaded: list[dict[str, Any]],
) -> None:
    assemble(SpecGuardOptions(draft="small.gguf", target=URL, n_ctx=512))
    assert [settings.get("n_ctx", settings.get("context_length")) for settings in loaded] == [
        512
    ] * 2


def test_attention_is_asked_of_a_model_that_can_show_it(loaded: list[dict[str, Any]]) -> None:
    for draft, target, verify_with, readers in (
        ("small.gguf", URL, "target", ["small.gguf"]),
        (URL, "large.gguf", "draft", ["large.gguf"]),
        (URL, URL + "r", "draft", []),
        ("small.gguf", "org/large", "draft", ["small.gguf"]),
        ("small.gguf", "org/large", "target", ["org/large"]),
    ):
        engines.unload()
        loaded.clear()
        paper = PAPER | {"verify_with": verify_with}
        assemble(SpecGuardOptions(draft=draft, target=target, **paper))
        asked = [settings["name"] for settings in loaded if settings.get("attention")]
        assert [name.removeprefix(f"{Path.cwd()}/") for name in asked] == readers


def test_room_for_a_tree_is_reserved(loaded: list[dict[str, Any]]) -> None:
    decoder = assemble(
        SpecGuardOptions(
            draft="a.gguf", target="b.gguf", decoder="speculative", speculative_tree=[3, 2, 1]
        )
    )
    assert isinstance(decoder, SpeculativeDecoder)
    assert decoder.speculation == Speculation((3, 2, 1))
    assert [settings["max_candidates"] for settings in loaded] == [6, 6]


# --- whose signals are judged


def toy(seed: int, *, attention: bool = True, **settings: Any) -> ToyEngine:
    return ToyEngine(random_policy(seed), attention=attention, **settings)


def decode(draft: ToyEngine, target: ToyEngine, **settings: Any) -> list[Step]:
    verifier = EnsembleVerifier(CALIBRATION, confidence_weight=0.5, threshold=0.6)
    settings = {"num_candidates": 2, "verifier": verifier} | settings
    return list(SpecGuardDecoder(draft, target, **settings).decode(REQUEST))


def test_grounding_can_come_from_the_other_model() -> None:
    """What another model reads of a step is what it would read of it alone."""
    draft, target = toy(1, attention=False), toy(2)
    steps = decode(draft, target, grounding_from="target", early_rejection=False)
    confident = decode(toy(1), toy(2), early_rejection=False)
    assert steps[0].candidates == confident[0].candidates
    assert steps[0].confidence == confident[0].confidence
    spec = SpecGuardDecoder(draft, target, EnsembleVerifier(CALIBRATION)).grounding
    drafted = draft.open(REQUEST.prompt).sample(
        2,
        boundary=Boundary(max_tokens=80),
        sampling=REQUEST.sampling,
        seed=(0, 1, False),
    )[steps[0].chosen]
    alone = toy(2).open(REQUEST.prompt, grounding=spec).read(drafted)
    assert steps[0].grounding == pytest.approx(alone.min_grounding, abs=1e-6)
    assert all(step.seconds.verify > 0 for step in steps)


def test_confidence_of_the_target_and_grounding_of_the_draft() -> None:
    pair, whole = (toy(1), toy(2, attention=False)), {"early_rejection": False}
    steps = decode(*pair, verify_with="target", grounding_from="draft", **whole)
    of_target = decode(toy(1), toy(2), verify_with="target", **whole)
    of_draft = decode(toy(1), toy(2), **whole)
    assert steps[0].confidence == of_target[0].confidence
    assert steps[0].grounding == of_draft[0].grounding


def test_a_step_that_is_rejected_early_is_not_read_by_the_other_model() -> None:
    draft = ToyEngine(scripted_policy("ab\n\n", logprobs=[-9.0]), attention=False)
    target = toy(2)
    steps = decode(draft, target, grounding_from="target")
    assert all(step.rejected_early and step.grounding is None for step in steps)
    read = sum(step.tokens.target_read for step in steps)
    assert read == len(target.encode(REQUEST.prompt)), "the prompt alone"


def test_grounding_crosses_vocabularies() -> None:
    draft, target = toy(1, attention=False, vocabulary="other"), toy(2)
    steps = decode(draft, target, grounding_from="target", early_rejection=False)
    same = decode(toy(1, attention=False), toy(2), grounding_from="target", early_rejection=False)
    assert [step.grounding for step in steps] == pytest.approx([step.grounding for step in same])


def test_without_any_attention_confidence_decides_and_the_metrics_say_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        model = ChatSpecGuard(
            draft=toy(1, attention=False),
            target=toy(2, attention=False),
            max_tokens=60,
            seed=1,
            **PAPER,
        )
        message = model.invoke("question")
    assert "confidence alone" in caplog.text
    metrics = message.response_metadata["specguard"]
    assert metrics["confidence_from"] == "draft"
    assert metrics["grounding_from"] is None
    assert metrics["confidence_weight"] == 1.0
    steps = message.additional_kwargs["specguard_steps"]
    assert {step["grounding"] for step in steps} == {None}
    assert {step["verdict"] for step in steps} <= {"accepted", "rejected"}


@pytest.mark.parametrize(
    ("attentive", "verify_with", "expected"),
    [
        ("both", "draft", "draft"),
        ("both", "target", "target"),
        ("target", "draft", "target"),
        ("draft", "target", "draft"),
    ],
)
def test_the_metrics_name_the_model_whose_attention_was_read(
    attentive: str, verify_with: Any, expected: str
) -> None:
    model = ChatSpecGuard(
        draft=toy(1, attention=attentive != "target"),
        target=toy(2, attention=attentive != "draft"),
        max_tokens=60,
        seed=1,
        **PAPER | {"verify_with": verify_with},
    )
    metrics = model.invoke("question").response_metadata["specguard"]
    assert metrics["confidence_from"] == verify_with
    assert metrics["grounding_from"] == expected
    assert metrics["confidence_weight"] == 0.3


def test_bounds_belong_to_whose_signals_they_are() -> None:
    draft, target = toy(1, attention=False, name="org/d"), toy(2, name="t")
    decoder = assemble(SpecGuardOptions(draft=draft, target=target, calibration=None, **PAPER))
    assert isinstance(decoder, SpecGuardDecoder)
    fitted = fit(decoder, ["q", "r", "s"], max_tokens=40)
    assert fitted.verify_with == "draft+target"
    name = calibrations.file_name("org/d", "t", "draft+target", decoder.grounding)
    assert "/" not in name
    calibrations.own_folder().mkdir(parents=True)
    fitted.save(calibrations.own_folder() / name)
    again = assemble(SpecGuardOptions(draft=draft, target=target, **PAPER))
    assert isinstance(again, SpecGuardDecoder)
    assert isinstance(again.verifier, EnsembleVerifier)
    assert again.verifier.calibration == fitted


def test_bounds_of_confidence_alone_are_none_of_grounding() -> None:
    draft, target = toy(1, attention=False), toy(2, attention=False)
    decoder = assemble(SpecGuardOptions(draft=draft, target=target, **PAPER))
    assert isinstance(decoder, SpecGuardDecoder)
    fitted = fit(decoder, ["q", "r", "s"], max_tokens=40)
    assert fitted.confidence.low < fitted.confidence.high
    assert fitted.verify_with == "draft-confidence"
    spec = decoder.grounding
    folder = calibrations.own_folder()
    folder.mkdir(parents=True)
    fitted.save(folder / calibrations.file_name("d", "t", "draft-confidence", spec))
    assert calibrations.find("d", "t", "draft", None, spec) == fitted
    assert calibrations.find("d", "t", "draft", "draft", spec).source == "fallback"


@pytest.mark.parametrize("kind", ["draft", "draft+target"])
def test_bounds_of_both_signals_serve_confidence_alone(kind: str) -> None:
    """Whoever the grounding beside it came from."""
    spec = GroundingSpec()
    folder = calibrations.own_folder()
    folder.mkdir(parents=True)
    CALIBRATION.save(folder / calibrations.file_name("d", "t", kind, spec))
    assert calibrations.find("d", "t", "draft", None, spec) == CALIBRATION
    assert calibrations.find("d", "t", "target", None, spec).source == "fallback"


def test_whoever_waits_for_a_server_holds_up_no_other_model() -> None:
    """A mixed request computes on the common thread, and waits on its own."""
    waiting, go_on = threading.Event(), threading.Event()
    server = toy(2, attention=False)
    server.capabilities = Capabilities(max_candidates=4)
    encode = server.encode

    def hang(prompt: Prompt) -> list[int]:
        waiting.set()
        assert go_on.wait(10)
        return encode(prompt)

    server.encode = hang  # type: ignore[method-assign]
    verifier = EnsembleVerifier(CALIBRATION, confidence_weight=1)
    steps = background.run(SpecGuardDecoder(toy(1), server, verifier), REQUEST)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(next, steps)
        assert waiting.wait(10)
        assert compute_thread.run(lambda: 3) == 3
        go_on.set()
        assert first.result(10).text
    steps.close()


def test_models_that_cannot_be_judged_are_refused() -> None:
    silent, blind = toy(1), toy(2)
    silent.capabilities = Capabilities(logprobs=False, max_candidates=4)
    blind.capabilities = Capabilities(scoring=False, max_candidates=4)
    verifier = EnsembleVerifier(CALIBRATION, confidence_weight=1)
    with pytest.raises(ConfigurationError, match=r"no log-probs.*verify_with='target'"):
        SpecGuardDecoder(silent, toy(2), verifier)
    with pytest.raises(ConfigurationError, match=r"cannot score.*verify_with='draft'"):
        SpecGuardDecoder(toy(1), blind, verifier, verify_with="target")
    SpecGuardDecoder(silent, toy(2), verifier, verify_with="target")
    SpecGuardDecoder(toy(1), blind, verifier)


# --- speculative decoding as a choice like any other


def test_speculative_decoding_is_a_decoder_like_any_other() -> None:
    pair = {"draft": toy(1), "target": toy(2)}
    settings: dict[str, Any] = {"temperature": 0, "max_tokens": 60, "seed": 1}
    message = ChatSpecGuard(**pair, decoder="speculative", **settings).invoke("question")
    assert (
        message.text == ChatSpecGuard(**pair, decoder="target", **settings).invoke("question").text
    )
    metrics = message.response_metadata["specguard"]
    assert metrics["acceptance_rate"] is None
    assert metrics["num_target_passes"] > 0
    assert metrics["mean_accepted_length"] >= 1
    steps = message.additional_kwargs["specguard_steps"]
    assert {step["source"] for step in steps} == {Source.TARGET}
    assert {step["verdict"] for step in steps} == {Verdict.UNVERIFIED}


class Wordy(ToyEngine):
    """Has two tokens for every byte of a text."""

    def encode_text(self, text: str) -> list[int]:
        return [token for byte in super().encode_text(text) for token in (byte, ANSWER)]


@pytest.mark.parametrize("judge", ["confidence", "grounding"])
def test_a_step_that_the_target_has_no_room_to_read_is_the_targets_to_write(judge: str) -> None:
    draft = ToyEngine(scripted_policy("a" * 40), context_length=60, attention=False)
    target = Wordy(scripted_policy("c" * 40), vocabulary="other", context_length=60)
    signals: dict[str, Any] = (
        {"verify_with": "target"} if judge == "confidence" else {"grounding_from": "target"}
    )
    decoder = SpecGuardDecoder(
        draft,
        target,
        EnsembleVerifier(CALIBRATION, confidence_weight=judge == "confidence", threshold=0),
        num_candidates=1,
        **signals,
    )
    (step,) = decoder.decode(Request(Prompt(text="question?"), Sampling(temperature=0)))
    assert (step.source, step.verdict, step.score) == (Source.TARGET, Verdict.REJECTED, None)
    assert step.text == "c" * 40
