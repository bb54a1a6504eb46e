"""Stored beginnings of prompts on llama.cpp: exactly what would have been computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specguard_adapters.llama_cpp import LlamaCppEngine
from specguard_chains.decoding.boundaries import Boundary
from specguard_chains.decoding.engine import Candidate, Prompt
from specguard_chains.decoding.grounding import GroundingSpec
from specguard_chains.decoding.local_engine import LocalEngine
from specguard_chains.decoding.sampling import Sampling
from tests.integration_tests.conftest import write_long_rope, write_tiny

pytestmark = pytest.mark.integration

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}answer:"
SYSTEM = "the cat in the hat and the rat in the inn are thin, then there is a hen. " * 6
SPEC = GroundingSpec(layers=3)
Make = Callable[..., LlamaCppEngine]


def ask(text: str, system: str = SYSTEM) -> Prompt:
    return Prompt(
        messages=[{"role": "system", "content": system}, {"role": "user", "content": text}]
    )


@pytest.fixture(params=[0, 16], ids=["full", "windowed"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    extra = {"tokenizer.chat_template": TEMPLATE}
    return write_tiny(tmp_path / "tiny.gguf", window=request.param, extra=extra)


@pytest.fixture
def make(model: Path, tmp_path: Path) -> Iterator[Make]:
    engines: list[LlamaCppEngine] = []

    def make(**settings: Any) -> LlamaCppEngine:
        usual = {"n_ctx": 512, "n_threads": 1, "n_batch": 64, "n_ubatch": 32, "candidate_tokens": 8}
        engines.append(
            LlamaCppEngine(model, **{**usual, "prompt_cache": tmp_path / "prompts", **settings})
        )
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def step(
    engine: LocalEngine, text: str, grounding: GroundingSpec | None, system: str = SYSTEM
) -> tuple[Candidate, int]:
    """Return what the second step of an answer is, and how many tokens were not computed."""
    k = engine.capabilities.max_candidates
    with closing(engine.open(ask(text, system), grounding=grounding)) as session:
        sampling = Sampling(temperature=1.0)
        session.accept(session.sample(k, Boundary(max_tokens=6), sampling, seed=(1,))[-1])
        found = session.sample(k, Boundary(max_tokens=6), sampling, seed=(2,))[-1]
    assert engine._heads is not None
    engine._heads.files.flush()
    return found, session.counters.reused


def assert_same(one: Candidate, other: Candidate) -> None:
    assert one.tokens == other.tokens
    assert np.array_equal(one.reading.logprobs, other.reading.logprobs)
    if one.reading.grounding is not None:
        assert other.reading.grounding is not None
        assert np.array_equal(one.reading.grounding, other.reading.grounding)


@pytest.mark.parametrize("max_parallel", [1, 3])
@pytest.mark.parametrize("max_candidates", [1, 3])
@pytest.mark.parametrize("attention", [True, False])
def test_a_later_engine_goes_on_to_the_bit(
    make: Make, tmp_path: Path, attention: bool, max_candidates: int, max_parallel: int
) -> None:
    settings: dict[str, Any] = {
        "attention": attention,
        "max_candidates": max_candidates,
        "max_parallel": max_parallel,
    }
    grounding = SPEC if attention else None
    step(make(**settings), "why is the hen thin", grounding)
    (stored,) = (tmp_path / "prompts").iterdir()
    length = int(stored.name.split("-")[1])
    assert length % 32 == 0
    assert length >= 256
    found, reused = step(make(**settings), "is there a rat", grounding)
    fresh, none = step(
        make(**settings, prompt_cache=tmp_path / "others"), "is there a rat", grounding
    )
    assert (reused, none) == (length, 0)
    assert_same(found, fresh)


def test_a_state_from_scattered_cells_grounds_alike(make: Make, tmp_path: Path) -> None:
    """Among parallel requests a prompt's cells lie in any order."""
    settings: dict[str, Any] = {"attention": True, "max_parallel": 3, "kv_type": "f32"}
    first = make(**settings)
    others = [first.open(Prompt(text=f"{n} then there is a hen"), grounding=SPEC) for n in range(3)]
    for other in others:
        other.sample(2, Boundary(max_tokens=9), Sampling(temperature=1.0), seed=(1,))
    others[0].close()
    first.clear()
    step(first, "why is the hen thin", SPEC)
    for other in others[1:]:
        other.close()
    found, reused = step(make(**settings), "is there a rat", SPEC)
    fresh, _ = step(make(**settings, prompt_cache=tmp_path / "others"), "is there a rat", SPEC)
    assert reused >= 256
    assert found.tokens == fresh.tokens
    assert np.allclose(found.reading.logprobs, fresh.reading.logprobs, atol=1e-5)
    assert found.reading.grounding is not None
    assert fresh.reading.grounding is not None
    assert np.allclose(found.reading.grounding, fresh.reading.grounding, atol=1e-5)


def test_a_context_in_use_is_loaded_into_only_without_grounding(make: Make) -> None:
    for grounding in (SPEC, None):
        settings: dict[str, Any] = {"attention": True, "max_parallel": 3, "kv_type": "f32"}
        fresh, _ = step(make(**settings), "is there a rat", grounding)
        engine = make(**settings)
        step(engine, "is there a hen", grounding)
        engine.clear()
        with closing(engine.open(Prompt(text="a hen is there"), grounding=grounding)) as other:
            other.sample(1, Boundary(max_tokens=3), Sampling(temperature=0), seed=(1,))
            found, reused = step(engine, "is there a rat", grounding)
        assert (reused > 0) == (grounding is None)
        assert found.tokens == fresh.tokens
        assert np.allclose(found.reading.logprobs, fresh.reading.logprobs, atol=1e-5)


def test_what_others_hold_is_kept_where_nothing_can_be_loaded(make: Make) -> None:
    settings: dict[str, Any] = {"attention": True, "max_parallel": 3, "kv_type": "f32"}
    fresh, _ = step(make(**settings), "is there a rat", SPEC)
    engine = make(**settings)
    with closing(engine.open(ask("is there a hen", SYSTEM[:150]), grounding=SPEC)) as other:
        other.sample(1, Boundary(max_tokens=3), Sampling(temperature=0), seed=(1,))
        found, reused = step(engine, "is there a rat", SPEC)
    assert 64 <= reused < 256
    assert found.tokens == fresh.tokens
    assert np.allclose(found.reading.logprobs, fresh.reading.logprobs, atol=1e-5)


def test_contexts_that_turn_positions_by_other_factors_have_files_of_their_own(
    tmp_path: Path,
) -> None:
    """llama.cpp chooses the factors by the size of the context."""
    path = write_long_rope(tmp_path / "long.gguf", extra={"tokenizer.chat_template": TEMPLATE})
    sizes: list[dict[str, Any]] = [
        {"n_ctx": 500},
        {"n_ctx": 510, "candidate_tokens": 3},
        {"n_ctx": 500, "max_parallel": 2},
    ]

    def found(prompts: Path, **size: Any) -> tuple[Candidate, int]:
        usual = {"n_threads": 1, "n_batch": 64, "n_ubatch": 32, "max_candidates": 2}
        settings = {**usual, "candidate_tokens": 2, **size}
        with closing(LlamaCppEngine(path, prompt_cache=prompts, **settings)) as engine:
            return step(engine, "is there a rat", None)

    short, *longs = (found(tmp_path / f"{n}", **size) for n, size in enumerate(sizes))
    common = tmp_path / "common"
    assert [found(common, **size)[1] > 0 for size in sizes] == [False, False, True]
    assert not np.allclose(short[0].reading.logprobs[:2], longs[0][0].reading.logprobs[:2])
    assert_same(found(common, **sizes[0])[0], short[0])
    for (expected, _), size in zip(longs, sizes[1:], strict=True):
        assert_same(found(common, **size)[0], expected)


def test_what_was_loaded_can_be_rolled_back(make: Make, tmp_path: Path) -> None:
    """Also where llama.cpp saves only what a sliding window sees of its end."""
    system = SYSTEM[:200] + "but there is no hen. " * 9
    fresh, _ = step(make(prompt_cache=tmp_path / "others"), "is there a rat", None, system)
    step(make(), "why is the hen thin", None)
    engine = make()
    step(engine, "is there a hen", None)
    found, reused = step(engine, "is there a rat", None, system)
    assert 0 < reused < 256
    assert_same(found, fresh)


def test_another_setting_or_a_changed_file_is_another_model(
    make: Make, model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "prompts"
    step(make(), "why is the hen thin", None)
    for number, settings in enumerate(
        ({"kv_type": "f32"}, {"repack": False}, {"n_ubatch": 64}, {"attention": True}), 2
    ):
        _, reused = step(make(**settings), "is there a rat", None)
        assert reused == 0
        assert len(list(folder.iterdir())) == number
    write_tiny(
        model,
        window=16 if "windowed" in str(model) else 0,
        seed=21,
        extra={"tokenizer.chat_template": TEMPLATE},
    )
    assert step(make(), "is there a rat", None)[1] == 0
