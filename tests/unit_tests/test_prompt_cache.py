"""Beginnings of prompts that outlive the process: files, and sessions that begin with them."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specguard_chains import ChatSpecGuard
from specguard_chains.assembly import assemble
from specguard_chains.decoding import prompt_files
from specguard_chains.decoding.boundaries import Boundary
from specguard_chains.decoding.engine import Candidate, Prompt
from specguard_chains.decoding.grounding import GroundingSpec
from specguard_chains.decoding.prompt_files import PromptFiles
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.errors import ConfigurationError, EngineError
from specguard_chains.options import SpecGuardOptions
from tests.toy_engine import BLOCK, ToyCache, ToyEngine, random_policy

SYSTEM = "You are a careful assistant. " * 20
HEAD = len("<system>") + len(SYSTEM) + len("<user>")
STORED = HEAD - HEAD % BLOCK
SPEC = GroundingSpec()
Make = Callable[..., ToyEngine]


def ask(text: str, system: str = SYSTEM, **settings: Any) -> Prompt:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    return Prompt(messages=messages, **settings)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes engines as one process after the other would."""
    engines: list[ToyEngine] = []

    def make(**settings: Any) -> ToyEngine:
        engines.append(ToyEngine(random_policy(1), **{"prompt_cache": tmp_path, **settings}))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def step(
    engine: ToyEngine, prompt: Prompt, grounding: GroundingSpec | None = SPEC
) -> tuple[Candidate, int]:
    """Return a step, and how many tokens were computed for it."""
    before = engine.computed_tokens
    with closing(engine.open(prompt, grounding=grounding)) as session:
        found = session.sample(
            2, Boundary(max_tokens=6), Sampling(temperature=1, top_p=1), seed=(1,)
        )[0]
        session.accept(found)
    assert engine._heads is not None
    engine._heads.files.flush()
    return found, engine.computed_tokens - before


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def same(one: Candidate, other: Candidate) -> bool:
    readings = [(c.reading.logprobs, c.reading.grounding) for c in (one, other)]
    return one.tokens == other.tokens and all(
        np.array_equal(mine, yours) for mine, yours in zip(*readings, strict=True)
    )


@pytest.mark.parametrize("max_parallel", [1, 3])
@pytest.mark.parametrize("grounding", [SPEC, None])
def test_a_later_process_begins_with_what_an_earlier_one_has_computed(
    make: Make, tmp_path: Path, grounding: GroundingSpec | None, max_parallel: int
) -> None:
    fresh, whole = step(
        make(max_parallel=max_parallel, name="other"),
        ask("How?"),
        grounding,
    )
    first = make(max_parallel=max_parallel)
    step(first, ask("Why?"), grounding)
    assert len(files(tmp_path)) == 2
    later = make(max_parallel=max_parallel)
    found, computed = step(later, ask("How?"), grounding)
    assert found.tokens == fresh.tokens
    assert same(found, fresh)
    assert computed == whole - STORED


def test_what_is_reused_is_counted(make: Make) -> None:
    step(make(), ask("Why?"))
    with closing(make().open(ask("How?"), grounding=SPEC)) as session:
        session.sample(1, Boundary(max_tokens=2), Sampling(temperature=0), seed=(1,))
        assert session.counters.reused == STORED
        assert session.counters.read == session.length - STORED


@pytest.mark.parametrize(
    "prompt",
    [
        ask("Why?", "Be short."),
        Prompt(messages=[{"role": "user", "content": SYSTEM}]),
        Prompt(text=SYSTEM),
    ],
    ids=["short", "no system message", "text"],
)
def test_what_is_short_or_one_prompts_own_is_not_kept(
    make: Make, tmp_path: Path, prompt: Prompt
) -> None:
    step(make(), prompt)
    assert files(tmp_path) == []


def test_other_forms_models_and_prompts_have_other_files(make: Make, tmp_path: Path) -> None:
    step(make(), ask("Why?"))
    cases: list[tuple[dict[str, Any], Prompt, GroundingSpec | None]] = [
        ({"name": "other"}, ask("Why?"), SPEC),
        ({}, ask("Why?"), None),
        ({}, ask("Why?"), GroundingSpec.named("dense")),
        ({}, ask("Why?", "x" + SYSTEM), SPEC),
    ]
    for number, (settings, prompt, grounding) in enumerate(cases, 2):
        engine = make(**settings)
        _, computed = step(engine, prompt, grounding)
        assert computed > STORED
        assert len(files(tmp_path)) == number


def test_a_longer_list_goes_on_where_a_stored_one_ends(make: Make, tmp_path: Path) -> None:
    step(make(), ask("Why?"))
    longer = ask("Why?", SYSTEM + "And brief. " * 20)
    fresh, whole = step(make(name="other"), longer)
    found, computed = step(make(), longer)
    assert same(found, fresh)
    assert computed == whole - STORED
    assert len(files(tmp_path)) == 3


def test_it_is_computed_in_whole_blocks_after_a_prompt_that_begins_alike(
    make: Make, tmp_path: Path
) -> None:
    fresh, whole = step(make(name="other"), ask("Why?"))
    engine = make()
    step(engine, ask("Why?", SYSTEM[:100] + "!"))
    found, computed = step(engine, ask("Why?"))
    assert found.tokens == fresh.tokens
    assert np.array_equal(found.reading.logprobs, fresh.reading.logprobs)
    assert computed == whole - BLOCK  # of 108 tokens in common
    assert len(files(tmp_path)) == 2


def test_turns_of_a_conversation_write_nothing_more(make: Make, tmp_path: Path) -> None:
    engine = make()
    messages: list[dict[str, str]] = [{"role": "system", "content": SYSTEM}]
    for n in range(3):
        messages += [{"role": "user", "content": f"{n}?"}]
        _, computed = step(engine, Prompt(messages=messages))
        assert n == 0 or computed < BLOCK
        messages += [{"role": "assistant", "content": "Yes."}]
    assert len(files(tmp_path)) == 1


def test_passages_are_not_part_of_it(make: Make) -> None:
    passage = "The sea is deep."
    prompt = ask("Why?", SYSTEM + passage, passages=(passage,))
    fresh, _ = step(make(name="other"), prompt)
    step(make(), ask("Why?"))
    found, computed = step(make(), prompt)
    assert same(found, fresh)
    assert np.array_equal(found.reading.passages, fresh.reading.passages)  # type: ignore[arg-type]
    assert computed < STORED


def empty(path: Path) -> None:
    path.write_bytes(b"")


def tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(data)


def of_another(path: Path) -> None:
    content = dict(np.load(path))
    content["identity"] = np.array("another model")
    with path.open("wb") as file:
        np.savez(file, **content)


def of_other_tokens(path: Path) -> None:
    content = dict(np.load(path))
    content["tokens"] = content["tokens"] + 1
    with path.open("wb") as file:
        np.savez(file, **content)


@pytest.mark.parametrize("spoil", [empty, tear, flip, of_another, of_other_tokens])
def test_a_bad_file_is_ignored_and_written_anew(
    make: Make,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    spoil: Callable[[Path], None],
) -> None:
    fresh, whole = step(make(), ask("How?"))
    (path,) = tmp_path.iterdir()
    good = path.read_bytes()
    spoil(path)
    with caplog.at_level(logging.WARNING):
        found, computed = step(make(), ask("How?"))
    assert same(found, fresh)
    assert computed == whole
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "written anew" in caplog.text
    assert len(path.read_bytes()) == len(good)
    assert step(make(), ask("How?"))[1] == whole - STORED


def test_a_state_that_has_no_place_is_computed(make: Make, monkeypatch: Any) -> None:
    fresh, whole = step(make(), ask("How?"))
    monkeypatch.setattr(ToyCache, "restore", lambda *_: False)
    found, computed = step(make(), ask("How?"))
    assert same(found, fresh)
    assert computed == whole


def test_what_is_held_is_kept_where_nothing_can_be_loaded(make: Make, monkeypatch: Any) -> None:
    fresh, whole = step(make(), ask("How?"))
    monkeypatch.setattr(ToyCache, "restorable", False)
    monkeypatch.setattr(ToyCache, "restore", lambda *_: False)
    engine = make()
    step(engine, ask("Why?", SYSTEM[:150]))
    found, computed = step(engine, ask("How?"))
    held = len("<system>") + 150
    assert found.tokens == fresh.tokens
    assert np.array_equal(found.reading.logprobs, fresh.reading.logprobs)
    assert computed == whole - (held - held % BLOCK)


@pytest.mark.parametrize("error", [EngineError, MemoryError, RuntimeError])
def test_what_cannot_be_exported_is_logged(
    make: Make,
    tmp_path: Path,
    monkeypatch: Any,
    caplog: pytest.LogCaptureFixture,
    error: type[Exception],
) -> None:
    def fail(*_: Any) -> None:
        raise error("no memory")

    monkeypatch.setattr(ToyCache, "export", fail)
    step(make(), ask("How?"))
    assert "not kept: no memory" in caplog.text
    assert files(tmp_path) == []


def test_the_folder_is_bounded_and_loses_what_was_used_least_recently(
    make: Make, tmp_path: Path
) -> None:
    of_others = tmp_path / "notes.npz"
    of_others.write_bytes(bytes(100_000))
    step(make(), ask("Why?", "a" + SYSTEM))
    (one,) = tmp_path.glob("*.prompt")
    gib = 2.5 * one.stat().st_size / 2**30
    step(make(), ask("Why?", "b" + SYSTEM))
    (other,) = set(tmp_path.glob("*.prompt")) - {one}
    for path, used in ((one, 1_000), (other, 2_000)):
        os.utime(path, (used, used))
    step(make(), ask("Why?", "a" + SYSTEM))  # so that it is used last
    step(make(prompt_cache_gib=gib), ask("Why?", "c" + SYSTEM))
    left = set(tmp_path.glob("*.prompt"))
    assert len(left) == 2
    assert one in left
    assert other not in left
    assert of_others.exists()


def test_prompts_that_somebody_keeps_there_are_not_removed(tmp_path: Path) -> None:
    of_others = tmp_path / "greeting.prompt"
    of_others.write_bytes(bytes(2_000))
    os.utime(of_others, (1_000, 1_000))
    store = PromptFiles(tmp_path, 2_000, {})
    for token in (1, 2):
        store.save([token], None, {"x": np.zeros(100)})
        store.flush()
    assert of_others.exists()
    assert len(files(tmp_path)) == 2


def test_a_thread_that_cannot_be_started_fails_no_answer(
    make: Make, tmp_path: Path, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Refused(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    step(make(), ask("Why?", "Be short."))  # so that the thread that computes runs
    monkeypatch.setattr(threading, "Thread", Refused)
    step(make(), ask("Why?"))
    assert "not kept: can't start new thread" in caplog.text
    assert files(tmp_path) == []


def test_what_is_larger_than_the_folder_may_be_is_not_kept(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    step(make(prompt_cache_gib=1e-6), ask("Why?"))
    assert files(tmp_path) == []
    assert "prompt_cache_gib" in caplog.text


def test_what_a_killed_process_has_left_goes(tmp_path: Path) -> None:
    old, new = tmp_path / f"a{prompt_files.UNFINISHED}", tmp_path / f"b{prompt_files.UNFINISHED}"
    for path in (old, new):
        path.write_bytes(b"")
    os.utime(old, (1_000, 1_000))
    store = PromptFiles(tmp_path, 2**20, {})
    store.save([1, 2], None, {"x": np.zeros(3)})
    store.flush()
    assert not old.exists()
    assert new.exists()
    stored = store.load([1, 2, 3], None, least=1, most=2)
    assert stored is not None
    assert stored.length == 2
    assert np.array_equal(stored.state["x"], np.zeros(3))


def test_a_full_disk_is_logged(
    make: Make, tmp_path: Path, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    step(make(), ask("Why?"))
    assert "No space left" in caplog.text
    assert files(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_refused(make: Make, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"prompt_cache='.*file' cannot be used"):
        make(prompt_cache=tmp_path / "file")
    with pytest.raises(ConfigurationError, match="prompt_cache_gib must be more than 0"):
        make(prompt_cache_gib=0)


def test_a_session_can_be_closed_after_its_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Closing(ToyEngine):
        def encode(self, prompt: Prompt) -> list[int]:
            if self._closed:
                raise EngineError("the engine is closed")
            return super().encode(prompt)

    engine = Closing(random_policy(1), prompt_cache=tmp_path)
    session = engine.open(ask("Why?"))
    session.sample(1, Boundary(max_tokens=2), Sampling(temperature=0), seed=(1,))
    engine.close()
    session.close()
    assert "not kept: the engine is closed" in caplog.text
    assert files(tmp_path) == []


def test_a_template_that_refuses_a_lone_question_keeps_nothing(make: Make, tmp_path: Path) -> None:
    class Picky(ToyEngine):
        def encode(self, prompt: Prompt) -> list[int]:
            if len(prompt.messages) < 3:
                raise ConfigurationError("too few")
            return super().encode(prompt)

    engine = Picky(random_policy(1), prompt_cache=tmp_path)
    more = [*ask("Why?").messages, {"role": "assistant", "content": "So."}]
    step(engine, Prompt(messages=more))
    assert files(tmp_path) == []


def test_servers_have_a_cache_of_their_own() -> None:
    url = "openai://127.0.0.1:1/model"
    with pytest.raises(ConfigurationError, match=r"prompt_cache=.* a server caches prompts itself"):
        assemble(SpecGuardOptions(draft=url, target=url, prompt_cache="folder"))


def test_it_changes_no_answer_and_so_not_what_answers_are_cached_by() -> None:
    plain = ChatSpecGuard()._get_llm_string()
    assert ChatSpecGuard(prompt_cache="folder", prompt_cache_gib=1)._get_llm_string() == plain
