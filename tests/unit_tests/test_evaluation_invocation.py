"""What is recorded of a command and its machine, and what of it is published."""

from __future__ import annotations

import json
import shlex
import shutil
from importlib.resources import files
from pathlib import Path

import pytest

from specguard_chains.evaluation import invocation
from specguard_chains.evaluation.invocation import Invocation, cpu_model, digest_of_sources
from specguard_chains.evaluation.report import report_of
from specguard_chains.evaluation.summary import Run, summarise, summary_of
from tests.unit_tests.toy_results import ARMS, four_problems, settings, write


def of(
    command: str | None = "specguard bench",
    cpu: str | None = "Toy CPU",
    sources: str | None = None,
) -> Invocation:
    return Invocation(command, cpu, "0.1.0", "3.11.7", "Linux-6.1-x86_64", sources)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The home folder, and the current one within it."""
    here = tmp_path / "me" / "project"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(here.parent))
    return here.parent, here


def test_the_processor_is_named_as_the_system_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "cpuinfo"
    monkeypatch.setattr(invocation, "CPU_INFO", told)
    told.write_text("processor\t: 0\nmodel name\t: Toy CPU @ 2 GHz\nmodel name\t: other\n")
    assert cpu_model() == "Toy CPU @ 2 GHz"
    told.write_text("processor\t: 0\nCPU implementer\t: 0x41\n")
    monkeypatch.setattr("platform.processor", lambda: "arm")
    assert cpu_model() == "arm"
    told.unlink()
    monkeypatch.setattr("platform.processor", lambda: "")
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert cpu_model() == "aarch64"


def test_a_command_is_told_as_it_was_run_less_the_users_folders(places: tuple[Path, Path]) -> None:
    home, here = places
    words = ["bench", "--data", "a b.jsonl", "--data", f"{here}/d/x.jsonl", f"--out={home}/runs/1"]
    arms = f"target:target={home}/t.gguf,other=draft:draft={here}/d.gguf,draft:draft={home}y/d.gguf"
    told = Invocation.here([f"{home}/bin/specguard", *words, "--decoders", arms]).command
    assert told is not None
    assert shlex.split(told) == [
        *("specguard", "bench", "--data", "a b.jsonl", "--data", "./d/x.jsonl"),
        *("--out=~/runs/1", "--decoders"),
        f"target:target=~/t.gguf,other=draft:draft=./d.gguf,draft:draft={home}y/d.gguf",
    ]


def test_what_is_published_has_no_folders_of_this_machine() -> None:
    command = "specguard bench --data '/data of/mine/x.jsonl' --data d/y.jsonl --out=/runs/1"
    assert of(command).public()["command"] == (
        "specguard bench --data x.jsonl --data d/y.jsonl --out=1"
    )
    assert of(None).public()["command"] is None


def test_a_summary_has_the_commands_and_machines(tmp_path: Path) -> None:
    run = settings(ARMS, invocations=(of("specguard bench --data /a/b/toy.jsonl"),))
    figures = summarise(write(tmp_path, run, four_problems()))
    (told,) = figures["settings"]["invocations"]
    assert told["command"] == "specguard bench --data toy.jsonl"
    assert told["cpu"] == "Toy CPU"
    assert "/a/b" not in json.dumps(figures)


def of_run(folder: Path, *invocations: Invocation) -> tuple[dict[str, str], str]:
    """Return the facts and the caveats of a run's report."""
    run = Run.read(write(folder, settings(ARMS, invocations=invocations), four_problems()))
    report = report_of(run, summary_of(run))
    return dict(report.facts), " ".join(report.caveats)


def test_a_report_tells_of_machines_that_were_changed(tmp_path: Path) -> None:
    facts, caveats = of_run(tmp_path / "one", of("a"), of("b"))
    assert facts["processor"] == "Toy CPU"
    assert "Times are those of one machine; on others, ratios differ too." in caveats
    facts, caveats = of_run(tmp_path / "two", of(cpu=None), of(), of(cpu="Other CPU"))
    assert facts["processor"] == "Toy CPU, Other CPU"
    assert (
        "come from different machines or software: an unknown processor with Linux-6.1-" in caveats
    )
    assert "; Toy CPU with " in caveats and "; Other CPU with " in caveats
    assert "those of one machine" not in caveats


def test_sources_are_told_apart_by_name_and_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def digest() -> str:
        digest_of_sources.cache_clear()
        return digest_of_sources()

    code = tmp_path / "code"
    code.mkdir()
    (code / "one.py").write_text("x = 1\n")
    monkeypatch.setattr(invocation, "files", lambda package: code)
    first = digest()
    assert len(first) == 12 and int(first, 16) >= 0
    (code / "notes.txt").write_text("no code")
    assert digest() == first
    (code / "one.py").write_text("x = 2\n")
    second = digest()
    shutil.move(code / "one.py", code / "two.py")
    assert len({first, second, digest()}) == 3
    digest_of_sources.cache_clear()


def test_what_runs_now_has_the_digest_of_both_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(invocation, "files", lambda package: read.append(package) or files(package))
    digest_of_sources.cache_clear()
    assert Invocation.here().sources == Invocation.here().sources == digest_of_sources()
    assert read == ["specguard_chains", "specguard_adapters"]


def test_a_report_tells_of_code_that_was_changed(tmp_path: Path) -> None:
    facts, caveats = of_run(tmp_path / "one", of("a", sources="0123"), of("b", sources="0123"))
    assert facts["digest of its sources"] == "0123"
    assert "different code" not in caveats
    facts, caveats = of_run(tmp_path / "two", of(), of(sources="0123"), of(sources="4567"))
    assert facts["digest of its sources"] == "0123, 4567"
    assert "different code of specguard_chains (digests of its sources: unknown, 0123 and 4567" in (
        caveats
    )
    assert "those of one machine" in caveats
    facts, caveats = of_run(tmp_path / "older", of())
    assert "digest of its sources" not in facts
    assert "different code" not in caveats
