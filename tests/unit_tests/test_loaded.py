"""Models that the process loads by name: once, and freed when it is told to."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from specguard_adapters import sentence
from specguard_chains import ChatSpecGuard, adapters, assembly, rewards
from specguard_chains.assembly import assemble, unload
from specguard_chains.decoding.arrays import FloatArray
from specguard_chains.decoding.decoder import Decoder, Request
from specguard_chains.decoding.engine import Prompt
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.errors import EngineError
from specguard_chains.loaded import Loaded
from specguard_chains.options import SpecGuardOptions
from tests.toy_engine import ToyEngine, random_policy


class Model:
    """Counts its copies, and refuses to answer when it is closed."""

    made: ClassVar[list[Model]]

    def __init__(self, name: str) -> None:
        self.name = name
        self.closed = False
        self.made.append(self)

    def close(self) -> None:
        self.closed = True

    def _require_open(self) -> None:
        if self.closed:
            raise EngineError(f"{self.name} is closed")


class Rates(Model):
    made: ClassVar[list[Model]] = []

    def __call__(self, messages: Any, steps: Sequence[str]) -> float:
        self._require_open()
        return len(steps[-1]) % 3 / 2


class Embeds(Model):
    made: ClassVar[list[Model]] = []

    def __call__(self, texts: Sequence[str]) -> FloatArray:
        self._require_open()
        return np.eye(len(texts), dtype=np.float32)


@pytest.fixture(autouse=True)
def models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPECGUARD_CACHE", str(tmp_path))
    for name, kind in (("ProcessRewardModel", Rates), ("SentenceEncoder", Embeds)):
        monkeypatch.setattr(kind, "made", [])
        monkeypatch.setitem(vars(adapters), name, kind)
    monkeypatch.setattr(rewards, "_models", Loaded(rewards._load))
    monkeypatch.setattr(assembly, "_encoders", Loaded(assembly._load_encoder))


def options(**given: Any) -> SpecGuardOptions:
    pair = {"draft": ToyEngine(random_policy(1)), "target": ToyEngine(random_policy(2))}
    return SpecGuardOptions(**(pair | given))


def answer(decoder: Decoder) -> str:
    prompt = Prompt(messages=[{"role": "user", "content": "?"}])
    request = Request(prompt, Sampling(temperature=1), max_tokens=40)
    return "".join(step.text for step in decoder.decode(request))


BY_NAME: list[tuple[type[Model], dict[str, Any]]] = [
    (Rates, {"decoder": "rsd", "reward_model": "some/prm"}),
    (Embeds, {"decoder": "selector", "encoder": "some/encoder"}),
]


@pytest.mark.parametrize(("kind", "given"), BY_NAME, ids=["reward model", "encoder"])
def test_unloading_frees_what_was_loaded_by_name(kind: type[Model], given: dict[str, Any]) -> None:
    decoder = assemble(options(**given))
    text = answer(decoder)
    answer(assemble(options(**given)))
    assert [model.closed for model in kind.made] == [False], "loaded once for all that name it"
    unload()
    assert [model.closed for model in kind.made] == [True]
    with pytest.raises(EngineError, match="is closed"):
        answer(decoder)
    assert answer(assemble(options(**given))) == text
    assert [model.closed for model in kind.made] == [True, False]


@pytest.mark.parametrize(("kind", "given"), BY_NAME, ids=["reward model", "encoder"])
def test_a_chat_model_goes_on_after_unloading(kind: type[Model], given: dict[str, Any]) -> None:
    chat = ChatSpecGuard(**dict(options(seed=1, max_tokens=40, **given)))
    text = chat.invoke("question").text
    unload()
    assert chat.invoke("question").text == text
    assert [model.closed for model in kind.made] == [True, False]


@pytest.mark.parametrize("kind", [Rates, Embeds])
def test_what_the_user_has_loaded_stays(kind: type[Model]) -> None:
    own = kind("own")
    name = "reward_model" if kind is Rates else "encoder"
    decoder = assemble(options(decoder="rsd" if kind is Rates else "selector", **{name: own}))
    unload()
    assert answer(decoder)
    assert not own.closed


def test_requests_that_come_together_load_a_model_once() -> None:
    started = threading.Event()

    def load(name: str) -> Rates:
        started.set()
        time.sleep(0.05)
        return Rates(name)

    loaded = Loaded(load)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(loaded.get, ["m"] * 4))
    assert started.is_set()
    assert len(Rates.made) == 1
    assert all(model is found[0] for model in found)
    assert loaded.peek("m") is found[0]
    assert loaded.peek("other") is None


def test_a_model_that_cannot_be_loaded_can_be_tried_again() -> None:
    paths = iter([EngineError("no memory"), None])

    def load(name: str) -> Rates:
        if (error := next(paths)) is not None:
            raise error
        return Rates(name)

    loaded = Loaded(load)
    with pytest.raises(EngineError, match="no memory"):
        loaded.get("m")
    assert loaded.get("m").name == "m"


def test_a_closed_sentence_encoder_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        def encode(self, texts: list[str], **_: Any) -> Any:
            return [[1.0, 0.0]] * len(texts)

    monkeypatch.setattr(sentence, "_load", lambda model, device: Library())
    encoder = sentence.SentenceEncoder("some/encoder")
    assert encoder(["text"]).shape == (1, 2)
    encoder.close()
    with pytest.raises(EngineError, match="some/encoder is closed; load it again"):
        encoder(["text"])
