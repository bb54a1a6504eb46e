"""Runs of toy models: what is recorded, in which order, and how an interrupted one goes on."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from shutil import copyfile
from typing import Any, ClassVar

import pytest

from specguard_chains import adapters, rewards
from specguard_chains.assembly import assemble
from specguard_chains.decoding.cache import common_prefix
from specguard_chains.decoding.decoder import Decoder, Request
from specguard_chains.decoding.engine import Engine
from specguard_chains.decoding.rewards import ValueHead
from specguard_chains.decoding.steps import Step
from specguard_chains.errors import (
    ConfigurationError,
    ContextOverflowError,
    EngineError,
    EvaluationError,
    ServerError,
    ServerTimeoutError,
    SpecGuardError,
)
from specguard_chains.evaluation import invocation, memory
from specguard_chains.evaluation.arms import parse_arms
from specguard_chains.evaluation.folder import open_run, read_results
from specguard_chains.evaluation.invocation import cpu_model
from specguard_chains.evaluation.problems import Problem
from specguard_chains.evaluation.results import Result
from specguard_chains.evaluation.runner import Runner
from specguard_chains.evaluation.settings import RunSettings
from specguard_chains.evaluation.tasks import Plan, turns
from specguard_chains.loaded import Loaded
from specguard_chains.options import SpecGuardOptions
from tests.toy_engine import ToyEngine, random_policy
from tests.unit_tests.toy_evaluation import (
    ARMS,
    ToyChecker,
    options,
    plan,
    problems,
    run,
    settings,
)

ROOT = Path(__file__).parents[2]
LABELS = ARMS.split(",")


def lines(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "results.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def timeless(results: list[Result]) -> dict[Any, Any]:
    """Everything but what no two runs have in common."""
    kept = {}
    for result in results:
        steps = tuple(replace(step, seconds={}) for step in result.steps)
        counts = {k: v for k, v in result.metrics.items() if not k.endswith("_seconds")}
        changes = {"steps": steps, "metrics": counts, "seconds": 0.0, "peak_rss_mb": 0.0}
        kept[result.key] = replace(result, started=None, **changes)
    return kept


# What is recorded


def test_every_arm_solves_every_problem_and_all_is_recorded(tmp_path: Path) -> None:
    results = run(tmp_path)
    assert {result.key for result in results} == {
        ("toy", f"toy/{i}", label) for i in range(3) for label in LABELS
    }
    line = next(line for line in lines(tmp_path) if line["arm"] == "specguard-greedy")
    assert set(line) == {
        *("problem", "data", "arm", "right", "extracted", "timed_out", "seconds", "tokens"),
        *("finish_reason", "seed", "metrics", "peak_rss_mb", "steps", "text", "started"),
        "problem_digest",
    }
    assert set(line["steps"][0]) == {
        *("source", "verdict", "score", "confidence", "grounding", "threshold", "rejected_early"),
        *("num_candidates", "answer_tokens", "drafted", "kept", "regenerated", "seconds", "phase"),
        *("value", "salvaged", "paused", "critical", "target_confidence"),
    }
    assert {"draft", "verify", "target"} <= set(line["steps"][0]["seconds"])
    assert line["metrics"]["num_steps"] == len(line["steps"])
    assert line["tokens"] == sum(step["answer_tokens"] for step in line["steps"])
    assert line["finish_reason"] in ("stop", "length")
    assert line["extracted"] == line["text"][-1:]
    assert line["peak_rss_mb"] > 10
    assert Result.from_dict(line).to_dict() == {**line, "steps": tuple(line["steps"])}


def test_what_a_step_is_worth_is_recorded(tmp_path: Path) -> None:
    given = options(reward_model=lambda messages, steps: len(steps) / 1000)
    arms = "rsd:threshold=0.002,target"
    results = run(tmp_path, 1, arms, given=given)
    values = {result.arm: [step.value for step in result.steps] for result in results}
    assert values["rsd:threshold=0.002"][:3] == [0.001, 0.002, 0.003]
    assert set(values["target"]) == {None}


def test_results_of_older_versions_can_still_be_read(tmp_path: Path) -> None:
    (result,) = run(tmp_path, 1, "target")
    line = result.to_dict()
    for step in line["steps"]:
        del step["value"]
    assert Result.from_dict(line) == result


def test_right_is_what_the_checker_says(tmp_path: Path) -> None:
    answers = {problem.id: problem.answer for problem in problems(6)}
    results = run(tmp_path, 6)
    assert {result.right for result in results} == {True, False}
    assert all(result.right == (answers[result.problem] in result.text) for result in results)


def test_all_arms_have_the_same_seed_and_each_problem_another(tmp_path: Path) -> None:
    seeds = {(result.problem, result.seed) for result in run(tmp_path / "a")}
    assert len(seeds) == len({seed for _, seed in seeds}) == 3
    other = {(r.problem, r.seed) for r in run(tmp_path / "b", given=options(seed=4))}
    assert not seeds & other


def test_the_settings_are_recorded(tmp_path: Path) -> None:
    run(tmp_path, 1, given=options(n_threads=2))
    told = json.loads((tmp_path / "settings.json").read_text())
    assert (told["draft"], told["target"]) == ("toy draft", "toy target")
    assert (told["data"], told["seed"], told["max_tokens"], told["n_threads"]) == (
        ["toy"],
        3,
        80,
        2,
    )
    shared = {
        "verify_with": "draft",
        "threshold": 0.76,
        "num_target_candidates": 2,
        "doubt_margin": 1.0,
        "patience": 0,
    }
    assert told["arms"]["specguard:num_candidates=2"] == shared | {"num_candidates": 2}
    assert told["arms"]["target"] == shared | {"decoder": "target", "temperature": 0.0}
    assert {"version", "pair", "python", "platform", "started"} <= set(told)
    (began,) = told["invocations"]
    assert began["command"] is None, "no command line began it"
    assert began["cpu"] == cpu_model() != ""
    assert all(began[name] == told[name] for name in ("version", "python", "platform"))


def test_settings_that_are_no_text_are_recorded_by_what_tells_them_apart() -> None:
    def rates(messages: Any, steps: Any) -> float:
        return 1.0

    def told(model: Any) -> Any:
        given = options(reward_model=model)
        return settings(given, parse_arms("rsd", given)).arms["rsd"]["reward_model"]

    assert told(rates).endswith("rates")
    assert told(Path("head.json")) == "head.json"
    heads = [ValueHead(draft="d", layer=1, weights=(0.5,), bias=bias) for bias in (0.0, 0.0, 1.0)]
    assert told(heads[0]) == told(heads[1]) != told(heads[2])
    assert len(told(heads[0])) < 30


# Fair turns


def test_the_arms_take_turns_and_another_one_begins_each_time(tmp_path: Path) -> None:
    results = run(tmp_path, 4)
    assert [result.problem for result in results] == [f"toy/{i}" for i in range(4) for _ in LABELS]
    firsts = [result.arm for result in results[:: len(LABELS)]]
    assert firsts == LABELS


def test_controls_come_after_what_they_go_by() -> None:
    listed = "length@x,random@x,target,x=specguard-greedy,draft"
    arms = parse_arms(listed, SpecGuardOptions())
    orders = [[arm.label for arm in turns(arms, index)] for index in range(5)]
    for order in orders:
        assert sorted(order) == sorted(arm.label for arm in arms)
        assert order.index("x") < min(order.index("length@x"), order.index("random@x"))
        assert order.index("draft") < order.index("length@x")
    assert len({order[0] for order in orders}) == 3
    assert orders[2] == ["target", "x", "draft", "length@x", "random@x"]


def test_no_arm_finds_the_prompt_read_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reused(results: list[Result]) -> int:
        names = ("draft_tokens_reused", "target_tokens_reused")
        return sum(result.metrics[name] for result in results for name in names)

    assert reused(run(tmp_path / "cleared")) == 0
    monkeypatch.setattr(ToyEngine, "clear", lambda engine: None)
    assert reused(run(tmp_path / "not cleared")) > 0


class Remembering:
    """A reward model that computes only what it has not read the time before."""

    made: ClassVar[list[str]] = []

    def __init__(self, name: str) -> None:
        Remembering.made.append(name)
        self.read = ""
        self.reused = 0
        self.calls = 0

    def __call__(self, messages: Any, steps: Sequence[str]) -> float:
        text = "".join([*(message["content"] for message in messages), *steps])
        if len(steps) == 1:  # an answer begins
            self.reused += common_prefix(list(map(ord, self.read)), list(map(ord, text)))
        self.calls += 1
        self.read = text
        return 0.5

    def clear(self) -> None:
        self.read = ""


@pytest.mark.parametrize("by_name", [True, False])
def test_no_arm_finds_the_text_rated_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_name: bool
) -> None:
    def reused(folder: str) -> int:
        monkeypatch.setattr(rewards, "_models", Loaded(rewards._load))
        model = "some/prm" if by_name else Remembering("given")
        run(tmp_path / folder, 2, "target,rsd,x=rsd", given=options(reward_model=model))
        used = rewards._models.peek("some/prm") if by_name else model
        assert isinstance(used, Remembering)
        assert used.calls > 4
        return used.reused

    monkeypatch.setitem(vars(adapters), "ProcessRewardModel", Remembering)
    assert reused("cleared") == 0
    monkeypatch.setattr(Remembering, "clear", lambda model: None)
    assert reused("not cleared") > 0


def test_an_arm_that_rates_nothing_loads_no_reward_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(vars(adapters), "ProcessRewardModel", Remembering)
    monkeypatch.setattr(Remembering, "made", [])
    given = options(reward_model="unused/prm")
    run(tmp_path, 1, "target,specguard-greedy", given=given)
    assert Remembering.made == []


def test_what_an_engine_does_at_first_is_in_nobodys_time(tmp_path: Path) -> None:
    class SlowToStart(ToyEngine):
        def count(self, tokens: int) -> None:
            if not self.computed_tokens:
                time.sleep(1.0)
            super().count(tokens)

    given = options(target=SlowToStart(random_policy(1, end=-2.0)))
    assert all(result.seconds < 1.0 for result in run(tmp_path, 1, given=given))


def test_an_engine_that_cannot_be_cleared_is_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Remote:
        """Passes everything on but `clear`."""

        def __init__(self, engine: ToyEngine) -> None:
            self._engine = engine

        def __getattr__(self, name: str) -> Any:
            if name == "clear":
                raise AttributeError(name)
            return getattr(self._engine, name)

    class Uncleared:
        def __init__(self, decoder: Decoder) -> None:
            self._decoder = decoder
            self.engines = tuple(remotes.setdefault(id(e), Remote(e)) for e in decoder.engines)

        def decode(self, request: Request) -> Iterator[Step]:
            return self._decoder.decode(request)

    remotes: dict[int, Any] = {}
    run(tmp_path, 2, "target,x=target", make=lambda given: Uncleared(assemble(given)))
    assert caplog.text.count("the prompt cache of toy target cannot be cleared") == 1


def test_the_peak_of_memory_is_the_arms_own() -> None:
    memory.reset_peak()
    before = memory.peak_rss_mb()
    held = bytearray(b"x") * 80_000_000
    assert memory.peak_rss_mb() > before + 70
    del held
    memory.reset_peak()
    assert memory.peak_rss_mb() < before + 40


def test_the_peak_is_the_systems_where_there_is_no_proc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "PROCESS", tmp_path / "none")
    memory.reset_peak()
    assert 10 < memory.peak_rss_mb() < 100_000


# Going on


def test_a_second_run_solves_nothing(tmp_path: Path) -> None:
    first = run(tmp_path)
    written = (tmp_path / "results.jsonl").read_bytes()

    def refuse(task: Any) -> None:
        raise AssertionError(task)

    assert run(tmp_path, on_begin=refuse) == first
    assert (tmp_path / "results.jsonl").read_bytes() == written


def test_more_problems_and_more_arms_are_added(tmp_path: Path) -> None:
    run(tmp_path / "grown", 2, "target")
    run(tmp_path / "grown", 2)
    began: list[Any] = []
    grown = run(tmp_path / "grown", 3, on_begin=began.append)
    assert {task.problem.id for task in began} == {"toy/2"}
    assert timeless(grown) == timeless(run(tmp_path / "at once", 3))
    told = json.loads((tmp_path / "grown" / "settings.json").read_text())
    assert set(told["arms"]) == set(LABELS)


@pytest.mark.parametrize("arm", ["target", "draft"])
@pytest.mark.parametrize(
    "change", [{"question": "how many?"}, {"answer": "f"}, {"choices": ("one", "two")}]
)
def test_results_of_another_problem_of_the_same_id_are_not_gone_on_with(
    tmp_path: Path, change: dict[str, Any], arm: str
) -> None:
    given = options()
    run(tmp_path, 2, "target", given=given)
    before = (tmp_path / "results.jsonl").read_bytes()
    first, second = problems(2)
    changed = replace(plan(given, 2, arm), data={"toy": [first, replace(second, **change)]})
    refused = pytest.raises(EvaluationError, match=r"results\.jsonl has .* problem 'toy/1' of toy")
    with open_run(tmp_path, settings(given, changed.arms)) as log, refused:
        Runner(changed, log, ToyChecker()).run()  # type: ignore[arg-type]
    assert (tmp_path / "results.jsonl").read_bytes() == before


def test_results_of_older_versions_do_not_tell_their_problem(tmp_path: Path) -> None:
    run(tmp_path, 1, "target")
    path = tmp_path / "results.jsonl"
    line = json.loads(path.read_text())
    del line["problem_digest"]
    path.write_text(json.dumps(line) + "\n")
    (result,) = run(tmp_path, 1, "target")
    assert result.problem_digest is None
    assert result.to_dict() == {**line, "steps": tuple(line["steps"])}


@pytest.mark.parametrize("torn", [b'{"problem": "toy/0", "da', b"\x00\x00\x00"])
def test_a_line_that_is_not_whole_is_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, torn: bytes
) -> None:
    first = run(tmp_path, 1)
    path = tmp_path / "results.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    assert read_results(tmp_path) == first  # a report can be made meanwhile
    with caplog.at_level(logging.WARNING):
        assert run(tmp_path, 1) == first
    assert "is not whole" in caplog.text
    assert path.read_bytes() == whole


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    run(tmp_path, 1, "target,draft")
    path = tmp_path / "results.jsonl"
    path.write_bytes(b'{"problem": 3}\n' + path.read_bytes())
    with pytest.raises(EvaluationError, match=r"line 1 of .*results\.jsonl is damaged"):
        run(tmp_path, 1, "target,draft")


def test_results_without_settings_are_not_gone_on_with(tmp_path: Path) -> None:
    run(tmp_path, 1, "target")
    (tmp_path / "settings.json").unlink()
    with pytest.raises(EvaluationError, match=r"no settings\.json that says how they came about"):
        run(tmp_path, 1, "target")
    (tmp_path / "settings.json").write_text("{}")
    with pytest.raises(EvaluationError, match="does not hold the settings of a run"):
        run(tmp_path, 1, "target")


def test_settings_of_a_command_that_came_to_nothing_bind_nobody(tmp_path: Path) -> None:
    with open_run(tmp_path, settings(options(), plan(options(), 1, "draft,wrong=target").arms)):
        pass
    run(tmp_path, 1, "target", given=options(seed=9))
    told = RunSettings.load(tmp_path / "settings.json")
    assert (list(told.arms), told.seed) == (["target"], 9)


def test_there_are_no_results_where_nothing_ran(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="has no results"):
        read_results(tmp_path)


def test_two_runs_cannot_write_to_one_folder(tmp_path: Path) -> None:
    given = options()
    told = settings(given, plan(given, 1).arms)
    refused = pytest.raises(EvaluationError, match="another run is writing to")
    with open_run(tmp_path, told), refused:
        run(tmp_path, 1, given=given)
    run(tmp_path, 1, given=given)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EvaluationError, match="file cannot be written"):
        run(tmp_path / "file", 1)


@pytest.mark.parametrize(
    ("changes", "arms", "messages"),
    [
        ({"seed": 4}, ARMS, ["seed is 4, there 3"]),
        ({"max_tokens": 50}, ARMS, ["max_tokens is 50, there 80"]),
        ({"n_threads": 1}, ARMS, ["n_threads is 1, there None"]),
        ({"pair": "other"}, ARMS, ["pair is 'other', there 'qwen2.5-coder-0.5b-1.5b'"]),
        (
            {"target": ToyEngine(random_policy(1), name="third"), "seed": 0},
            ARMS,
            ["target is 'third', there 'toy target'", "seed is 0, there 3"],
        ),
        ({}, "target:temperature=1,draft", []),
        ({}, "target=target:temperature=1", ["temperature of arm 'target' is 1.0, there 0.0"]),
        ({}, "target=draft", ["decoder of arm 'target' is 'draft', there 'target'"]),
        ({}, "target=target:max_tokens=9", ["max_tokens of arm 'target' is 9, there 80"]),
        ({"top_k": 2}, "target", ["top_k of arm 'target' is 2, there 0"]),
    ],
)
def test_results_of_other_settings_are_not_mixed(
    tmp_path: Path, changes: dict[str, Any], arms: str, messages: list[str]
) -> None:
    run(tmp_path, 1)
    before = (tmp_path / "settings.json").read_bytes()
    if not messages:
        run(tmp_path, 1, arms, given=options(**changes))
        return
    with pytest.raises(EvaluationError) as error:
        run(tmp_path, 1, arms, given=options(**changes))
    assert all(message in str(error.value) for message in messages)
    assert (tmp_path / "settings.json").read_bytes() == before


def test_a_default_that_has_changed_since_is_a_difference(tmp_path: Path) -> None:
    run(tmp_path, 1)
    path = tmp_path / "settings.json"
    told = json.loads(path.read_text())
    told["defaults"] |= {"num_candidates": 3, "gone": 1}
    del told["defaults"]["top_k"]
    path.write_text(json.dumps(told))
    with pytest.raises(EvaluationError, match="num_candidates of arm 'target' is 4, there 3"):
        run(tmp_path, 1)
    run(tmp_path, 1, given=options(num_candidates=3))


def begun_earlier(folder: Path, **defaults: Any) -> RunSettings:
    """Let a run's arms have had other defaults."""
    path = folder / "settings.json"
    told = json.loads(path.read_text())
    told["defaults"] |= defaults
    path.write_text(json.dumps(told))
    return RunSettings.load(path)


def test_an_arm_that_joins_an_older_run_keeps_its_own_settings(tmp_path: Path) -> None:
    """Beside a threshold of 0.7, which was the default, one of today's is no default."""
    given = options(threshold=None)
    run(tmp_path, 1, "target,ours=specguard-greedy", given=given)
    begun_earlier(tmp_path, threshold=0.7)
    for _ in range(2):  # the second time nothing differs
        run(tmp_path, 1, "target,new=specguard-greedy", given=given)
    told = RunSettings.load(tmp_path / "settings.json")
    assert told.defaults["threshold"] == 0.7
    assert told.arms["new"]["threshold"] is None
    assert "threshold" not in told.arms["ours"] | told.arms["target"]
    with pytest.raises(EvaluationError, match=r"threshold of arm 'ours' is 0\.8, there 0\.7"):
        run(tmp_path, 1, "ours=specguard-greedy", given=given)
    today = told.told_today().arms
    assert today["ours"]["threshold"] == 0.7
    assert "threshold" not in today["new"] | today["target"]


def test_another_version_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path, 1)
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": "0.0.1"}))
    run(tmp_path, 1)
    assert "was started with version 0.0.1 and goes on with" in caplog.text


def test_every_command_and_machine_that_adds_to_a_run_is_recorded_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def go_on(*arguments: str) -> list[tuple[str | None, str | None]]:
        given = options()
        told = RunSettings.of(given, plan(given, 1).arms, ["toy"], 3, arguments=arguments)
        with open_run(tmp_path, told):
            pass
        known = RunSettings.load(tmp_path / "settings.json").invocations
        return [(each.command, each.cpu) for each in known]

    monkeypatch.setattr(invocation, "cpu_model", lambda: "A")
    first = ("specguard bench --data x", "A")
    assert go_on("/usr/bin/specguard", "bench", "--data", "x") == [first]
    run(tmp_path / "other", 1)
    copyfile(tmp_path / "other" / "results.jsonl", tmp_path / "results.jsonl")
    caplog.clear()
    assert go_on("specguard", "bench", "--data", "x") == [first]
    assert not caplog.text
    monkeypatch.setattr(invocation, "cpu_model", lambda: "B")
    second = ("specguard bench --data 'x y'", "B")
    assert go_on("specguard", "bench", "--data", "x y") == [first, second]
    assert "was started with cpu A and goes on with B" in caplog.text


def test_a_folder_of_an_older_version_is_gone_on_with(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, 1)
    path = tmp_path / "settings.json"
    told = json.loads(path.read_text())
    (known,) = told.pop("invocations")
    assert known["sources"]
    assert told.pop("only") == "all"
    path.write_text(json.dumps(told))
    run(tmp_path, 1)
    assert not caplog.text
    assert json.loads(path.read_text())["invocations"] == [
        *(known | {"cpu": None, "sources": None}, known)
    ]


def test_an_invocation_of_an_older_version_has_no_digest(tmp_path: Path) -> None:
    run(tmp_path, 1)
    path = tmp_path / "settings.json"
    told = json.loads(path.read_text())
    (known,) = told["invocations"]
    del known["sources"]
    path.write_text(json.dumps(told))
    assert RunSettings.load(path).sources is None


def test_other_code_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(invocation, "digest_of_sources", lambda: "0123")
    run(tmp_path, 1, "target")
    monkeypatch.setattr(invocation, "digest_of_sources", lambda: "4567")
    run(tmp_path, 1, "target")
    assert "was started with sources 0123 and goes on with 4567" in caplog.text
    told = RunSettings.load(tmp_path / "settings.json").invocations
    assert [each.sources for each in told] == ["0123", "4567"]


def test_killed_in_the_middle_it_loses_only_what_was_in_flight(tmp_path: Path) -> None:
    module = "tests.unit_tests.toy_evaluation"
    command = [sys.executable, "-m", module, str(tmp_path / "killed"), "0.005"]
    path = tmp_path / "killed" / "results.jsonl"
    with subprocess.Popen(command, cwd=ROOT, env=os.environ) as process:
        deadline = time.monotonic() + 60
        while not path.exists() or path.read_bytes().count(b"\n") < 3:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    kept = read_results(tmp_path / "killed")
    assert 3 <= len(kept) < 12
    began: list[Any] = []
    resumed = run(tmp_path / "killed", on_begin=began.append)
    assert len(kept) + len(began) == 12
    assert resumed[: len(kept)] == kept
    assert timeless(resumed) == timeless(run(tmp_path / "whole"))


def test_ctrl_c_keeps_what_is_done(tmp_path: Path) -> None:
    def interrupt(task: Any) -> None:
        if task.problem.id == "toy/1":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, on_begin=interrupt)
    assert len(read_results(tmp_path)) == len(LABELS)
    assert timeless(run(tmp_path)) == timeless(run(tmp_path / "whole"))


def test_the_oracle_keeps_what_the_target_can_still_make_right(tmp_path: Path) -> None:
    results = run(tmp_path, 6, "target,oracle,random@oracle")
    steps = [step for result in results if result.arm == "oracle" for step in result.steps]
    assert {step.score for step in steps} == {0.0, 1.0}
    assert all(step.accepted == (step.score == 1.0) for step in steps)
    right = {
        arm: {result.problem for result in results if result.arm == arm and result.right}
        for arm in ("target", "oracle")
    }
    assert right["target"] <= right["oracle"]


# Errors


class Failing:
    """A decoder that fails after its first step."""

    def __init__(self, decoder: Decoder, error: Exception) -> None:
        self._decoder = decoder
        self._error = error

    @property
    def engines(self) -> tuple[Engine, ...]:
        return self._decoder.engines

    def decode(self, request: Request) -> Iterator[Step]:
        yield next(iter(self._decoder.decode(replace(request, stop_when=lambda step: False))))
        raise self._error


def failing(folder: Path, error: Exception) -> list[Result]:
    def make(given: SpecGuardOptions) -> Decoder:
        decoder = assemble(given)
        return Failing(decoder, error) if given.decoder == "draft" else decoder

    return run(folder, 2, make=make)


@pytest.mark.parametrize(
    "error", [ContextOverflowError("too long"), ServerTimeoutError("late"), EngineError("odd")]
)
def test_what_goes_wrong_with_a_problem_is_recorded_and_the_run_goes_on(
    tmp_path: Path, error: SpecGuardError
) -> None:
    results = failing(tmp_path, error)
    assert len(results) == 2 * len(LABELS)
    failed = [result for result in results if result.arm == "draft"]
    assert {result.error for result in failed} == {f"{type(error).__name__}: {error}"}
    for result in failed:
        assert not result.right
        assert result.finish_reason is None
        assert len(result.steps) == 1
        assert result.text
    assert all(result.error is None for result in results if result.arm != "draft")
    assert failing(tmp_path, AssertionError("solved again")) == results  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [ServerError("down"), ConfigurationError("no"), OSError("disk")])
def test_what_would_go_wrong_with_every_problem_ends_the_run(
    tmp_path: Path, error: Exception
) -> None:
    with pytest.raises(type(error)):
        failing(tmp_path, error)
    assert [result.arm for result in read_results(tmp_path)] == ["target"]


def test_a_prompt_that_is_too_long_is_such_an_error(tmp_path: Path) -> None:
    short = options(target=ToyEngine(random_policy(1, end=-2.0), name="short", context_length=150))
    long = Problem(id="toy/long", question="?" * 200, answer="a")
    todo = replace(plan(short, 2), data={"toy": [long, *problems(2)]})
    with open_run(tmp_path, settings(short, todo.arms)) as log:
        Runner(todo, log, ToyChecker()).run()  # type: ignore[arg-type]
    errors = {result.key: result.error for result in read_results(tmp_path)}
    assert "ContextOverflowError" in str(errors["toy", "toy/long", "target"])
    assert errors["toy", "toy/long", "draft"] is None
    assert len(errors) == 3 * len(LABELS)


def test_problems_have_ids_of_their_own() -> None:
    with pytest.raises(EvaluationError, match="toy has 2 problems with the id 'toy/0'"):
        Plan({"toy": [*problems(2), *problems(1)]}, ())


# Controls

CONTROLLED = "length@x,random@x,draft,x=specguard-greedy"


def test_controls_are_matched_to_what_is_recorded(tmp_path: Path) -> None:
    results = run(tmp_path, 12, CONTROLLED)
    by_arm = {
        label: [result for result in results if result.arm == label]
        for label in ("x", "random@x", "length@x")
    }
    judged = accepted = 0
    for controlled, random in zip(by_arm["x"], by_arm["random@x"], strict=True):
        judged += controlled.metrics["num_drafts"]
        accepted += controlled.metrics["num_accepted_steps"]
        assert random.acceptance_rate == accepted / judged
        assert random.controls == "x"
    assert 0 < accepted < judged
    for result in by_arm["length@x"]:
        assert result.max_accepted_tokens is not None
        for step in result.steps:
            within = step.drafted <= result.max_accepted_tokens
            assert step.accepted == within
    rates = {
        label: sum(r.metrics["num_accepted_steps"] for r in arm)
        / sum(r.metrics["num_drafts"] for r in arm)
        for label, arm in by_arm.items()
    }
    assert rates["length@x"] == pytest.approx(rates["x"], abs=0.1)
    assert rates["random@x"] == pytest.approx(rates["x"], abs=0.2)


def test_controls_do_not_depend_on_interruptions_or_on_what_came_first(tmp_path: Path) -> None:
    whole = timeless(run(tmp_path / "whole", 4, CONTROLLED))
    run(tmp_path / "grown", 2, CONTROLLED)
    assert timeless(run(tmp_path / "grown", 4, CONTROLLED)) == whole
    run(tmp_path / "later", 4, "x=specguard-greedy,draft")
    assert timeless(run(tmp_path / "later", 4, CONTROLLED)) == whole


def test_a_control_that_cannot_be_matched_is_no_attempt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It would count as wrong for what went wrong with the arm that it controls."""

    class Overflowing(Failing):
        def decode(self, request: Request) -> Iterator[Step]:
            if request.seed == first:
                raise self._error
            yield from self._decoder.decode(request)

    def make(given: SpecGuardOptions) -> Decoder:
        decoder = assemble(given)
        overflow = ContextOverflowError("too long")
        return Overflowing(decoder, overflow) if given.decoder == "specguard-greedy" else decoder

    listed = "x=specguard-greedy,random@x"
    todo = plan(options(), 1, listed)
    first = todo.seed_of(next(todo.tasks()))
    results = run(tmp_path, 2, listed, make=make)
    assert [(result.problem, result.arm) for result in results] == [
        *(("toy/0", "x"), ("toy/1", "x"), ("toy/1", "random@x"))
    ]
    assert results[0].error is not None
    assert results[2].error is None
    assert "toy/0 is left out: random@x cannot be matched: x has judged no step yet" in (
        caplog.text
    )
    began: list[Any] = []
    assert run(tmp_path, 2, listed, make=make, on_begin=began.append) == results
    assert began == []
