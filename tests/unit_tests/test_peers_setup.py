"""Public reports about wrappers of local models: how they are set up."""

from __future__ import annotations

from typing import Any

import pytest

from specguard_chains import ChatSpecGuard, ConfigurationError, engines
from specguard_chains.models import PAIRS
from tests.toy_engine import ToyEngine, scripted_policy


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("word", ["model", "pair"])
def test_peers_079_a_models_name_is_all_that_a_model_needs(
    name: str, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []

    def load(model: Any, settings: Any, progress: Any) -> ToyEngine:
        loaded.append(model.name)
        return ToyEngine(scripted_policy("Hello!"))

    monkeypatch.setattr(engines, "load", load)
    model = ChatSpecGuard(**{word: name}, decoder="target")
    assert model.model.startswith(name)
    assert not loaded, "weights are loaded when they are needed"
    assert model.invoke("Hi").text == "Hello!"
    assert loaded == [PAIRS[name].target.name]


def test_peers_079_nothing_at_all_need_be_given() -> None:
    assert ChatSpecGuard().model in PAIRS


@pytest.mark.parametrize("wrong", ["smollm2-135", "gpt-4o", ""])
def test_peers_079_a_name_that_nobody_knows_comes_with_those_that_exist(wrong: str) -> None:
    with pytest.raises(ConfigurationError, match=r"smollm2-135m"):
        ChatSpecGuard(model=wrong).invoke("Hi")


def test_peers_079_a_parameter_that_does_not_exist_is_refused_with_advice() -> None:
    with pytest.raises(ConfigurationError, match=r"'temprature'.*temperature"):
        ChatSpecGuard(temprature=0)
