"""The benchmark of agents goes on with results of its own settings alone."""

from __future__ import annotations

import json
import sys
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PATH = Path(__file__).parents[2] / "benchmarks" / "agent.py"


class Model:
    """Stands in for a chat model that need not be loaded."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def invoke(self, *_: Any, **__: Any) -> None:
        pass


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = util.spec_from_file_location("benchmark_agent", PATH)
    assert spec and spec.loader
    module = util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "benchmark_agent", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ChatSpecGuard", Model)
    module.ran = []  # type: ignore[attr-defined]

    def run(model: Model, decoder: str, settings: dict[str, Any], task: str) -> Any:
        module.ran.append((task, decoder, model.options["temperature"]))
        sources = {"draft": 1, "target": 0}
        return module.Outcome(
            *(task, decoder, settings, True, 37.0, None, 1, [], 1, 1, 1, sources, sources),
            **{"input_tokens": 9, "output_tokens": 5, "seconds": 2.0},
        )

    monkeypatch.setattr(module, "run", run)
    return module


def main(agent: ModuleType, monkeypatch: pytest.MonkeyPatch, out: Path, *more: str) -> list[Any]:
    """Return what was run: tasks, decoders, temperatures."""
    agent.ran.clear()
    flags = ["--decoder", "target", "--limit", "2", "--out", str(out), *more]
    monkeypatch.setattr(sys, "argv", ["agent.py", *flags])
    agent.main()
    return list(agent.ran)


def test_results_of_other_settings_are_neither_taken_nor_reported(
    agent: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "agent.jsonl"
    out.write_text('{"task": "of an older form", "decoder": "target"}\n')
    first, second = list(agent.TASKS)[:2]
    assert main(agent, monkeypatch, out) == [(task, "target", 0.0) for task in (first, second)]
    assert "has 1 results of other settings, which are left out" in capsys.readouterr().out
    assert main(agent, monkeypatch, out) == []
    assert "| target | 2/2" in capsys.readouterr().out
    warm = main(agent, monkeypatch, out, "--temperature", "0.7", "--limit", "1")
    assert warm == [(first, "target", 0.7)]
    said = capsys.readouterr().out
    assert "has 3 results of other settings, which are left out" in said
    assert "| target | 1/1" in said
    for other in (["--strategy", "tool"], ["--max-tokens", "9"], ["--verify-with", "draft"]):
        assert len(main(agent, monkeypatch, out, *other)) == 2, other


def test_a_run_that_was_killed_while_it_wrote_goes_on(
    agent: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "agent.jsonl"
    assert len(main(agent, monkeypatch, out)) == 2
    whole, torn = out.read_text().splitlines()
    out.write_text(f"{whole}\n{torn[:40]}")
    assert [task for task, *_ in main(agent, monkeypatch, out)] == [list(agent.TASKS)[1]]
    assert [json.loads(line)["task"] for line in out.read_text().splitlines()] == list(agent.TASKS)[
        :2
    ]
