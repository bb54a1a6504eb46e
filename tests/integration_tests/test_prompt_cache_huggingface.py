"""Stored beginnings of prompts on transformers: exactly what would have been computed."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("llama_cpp")

from specguard_adapters.huggingface import HuggingFaceEngine
from specguard_adapters.huggingface.cache import HuggingFaceCache
from specguard_chains.decoding.engine import Candidate
from specguard_chains.errors import ConfigurationError
from tests.integration_tests.conftest import transformer
from tests.integration_tests.test_prompt_cache import SPEC, TEMPLATE, assert_same, step

pytestmark = pytest.mark.integration


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A tiny Llama as `save_pretrained` writes it."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    model, tokenizer = transformer(folder)
    tokenizer.chat_template = TEMPLATE
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("attention", [True, False])
def test_transformers_goes_on_to_the_bit(
    saved: Path, tmp_path: Path, attention: bool, dtype: str
) -> None:
    def answered(text: str, folder: str) -> tuple[Candidate, int]:
        settings: dict[str, Any] = {"n_ctx": 512, "n_batch": 64, "n_threads": 1, "dtype": dtype}
        engine = HuggingFaceEngine(
            saved, attention=attention, prompt_cache=tmp_path / folder, **settings
        )
        with closing(engine):
            return step(engine, text, SPEC if attention else None)

    answered("why is the hen thin", "prompts")
    (stored,) = (tmp_path / "prompts").iterdir()
    found, reused = answered("is there a rat", "prompts")
    fresh, none = answered("is there a rat", "others")
    assert (reused, none) == (int(stored.name.split("-")[1]), 0)
    assert_same(found, fresh)


def test_transformers_must_know_the_models_name(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    with pytest.raises(ConfigurationError, match="this one was given loaded"):
        HuggingFaceEngine(*transformer(folder), n_ctx=512, prompt_cache=tmp_path / "prompts")


@pytest.mark.parametrize("heads", [1, 2])
def test_what_is_stored_does_not_change_with_the_cells(heads: int) -> None:
    import torch

    model: Any = SimpleNamespace(n_layer=1, dtype=torch.float32, device=torch.device("cpu"))
    cache = HuggingFaceCache(model, cells=16, max_candidates=1, attention_layers=0, n_batch=8)
    (layer,) = cache._cells.layers
    layer.update(torch.ones(1, heads, 8, 4), torch.ones(1, heads, 8, 4))
    state = cache.export(4)
    layer.keys[:] = layer.values[:] = 2  # by the next request, while the file is being written
    assert {float(value) for name in state for value in state[name].view("float32").flat} == {1.0}
