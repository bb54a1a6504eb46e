"""The command line on a real model, as its own process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from specguard_chains.decoding.calibration import Calibration
from specguard_chains.models import resolve_pair

pytestmark = pytest.mark.integration

COMMAND = [sys.executable, "-c", "from specguard_chains.cli import main; main()"]
PAIR = ["--pair", "smollm2-135m", "--n-ctx", "1024", "--n-threads", "2"]
PAPER = ["--verify-with", "draft", "--confidence-weight", "0.3", "--patience", "0"]
TIMEOUT_S = 300


@pytest.fixture(scope="module", autouse=True)
def models() -> None:
    resolve_pair("smollm2-135m")


def specguard(
    *arguments: str, input: str | None = None, code: int = 0
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*COMMAND, *arguments],
        input=input,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done


def events(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines()]


def ask(question: str, *flags: str) -> list[dict[str, Any]]:
    return events(specguard("ask", question, "--json", *PAIR, *flags).stdout)


def test_ask_streams_steps_and_a_result() -> None:
    *steps, last = ask("What is 3 + 4?", "--max-tokens", "24", "--seed", "1", *PAPER)
    assert last["text"] == "".join(step["text"] for step in steps) != ""
    assert last["usage"]["output_tokens"] <= 24
    assert last["metrics"]["draft_tokens_read"] > 0
    assert all(step["verdict"] in ("accepted", "rejected") for step in steps)
    assert all(0 <= step["score"] <= 1 for step in steps)
    assert all(step["grounding"] is not None for step in steps if not step["rejected_early"])


def test_the_same_seed_gives_the_same_answer() -> None:
    flags = ["--max-tokens", "16", "--seed", "5", "--temperature", "1", "--threshold", "0"]
    first, second = (ask("Name a colour.", *flags)[-1]["text"] for _ in range(2))
    assert first == second


def test_ask_for_people_is_headers_and_text() -> None:
    flags = ["--max-tokens", "8", "--decoder", "target", "--temperature", "0"]
    done = specguard("ask", "-", *PAIR, *flags, input="What is 3 + 4?")
    assert done.stdout.startswith("[1] target")
    assert "cut off here" in done.stdout
    assert "llama" not in done.stderr


def test_a_second_turn_reads_only_the_new_tokens() -> None:
    flags = ["--json", "--max-tokens", "16", "--decoder", "specguard-greedy", "--threshold", "0"]
    question = "Tell me in one long sentence about the history of the city of Rome, please."
    lines = f"{question}\nAnd?\n"
    first, second = (
        event
        for event in events(specguard("chat", *PAIR, *flags, input=lines).stdout)
        if event["event"] == "result"
    )
    read, reused = (second["metrics"][f"draft_tokens_{what}"] for what in ("read", "reused"))
    assert read + reused >= second["usage"]["input_tokens"]
    assert reused >= first["usage"]["input_tokens"]
    assert read < first["usage"]["input_tokens"]


def test_ctrl_c_ends_the_answer_at_once() -> None:
    flags = ["ask", "Write a very long story.", "--json", *PAIR, "--max-step-tokens", "8"]
    with subprocess.Popen([*COMMAND, *flags], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=60)
    last = events(rest)[-1]
    assert process.returncode == 130
    assert last["finish_reason"] == "interrupted"
    assert last["text"].startswith(first["text"])


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        (["--max-tokens", "5000"], "ContextOverflowError"),
        (["--draft", "missing.gguf"], "ModelNotFoundError"),
    ],
)
def test_bad_input_is_an_event(flags: Sequence[str], kind: str) -> None:
    done = specguard("ask", "q", "--json", *PAIR, *flags, code=1)
    assert events(done.stdout)[-1]["type"] == kind


def test_a_truncated_model_is_one_line(tmp_path: Path) -> None:
    whole = resolve_pair("smollm2-135m").draft
    broken = tmp_path / "broken.gguf"
    with whole.open("rb") as stream:
        broken.write_bytes(stream.read(1_000_000))
    done = specguard("ask", "q", "--decoder", "draft", "--draft", str(broken), code=1)
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1


def test_calibrated_bounds_are_used_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(resolve_pair("smollm2-135m").draft)
    monkeypatch.setenv("SPECGUARD_CACHE", str(tmp_path))
    data = tmp_path / "problems.jsonl"
    data.write_text('{"question": "What is 3 + 4?"}\n{"question": "What is 12 * 3?"}\n')
    pair = ["--draft", model, "--target", model, "--n-ctx", "1024", "--max-step-tokens", "8"]
    done = specguard("calibrate", "--data", str(data), *pair, "--max-tokens", "24")
    assert "no bounds" not in done.stderr
    (path,) = (tmp_path / "calibrations").iterdir()
    assert Calibration.load(path).problems == 2
    answered = specguard("ask", "What is 5 - 2?", "--json", *pair, "--max-tokens", "8")
    assert events(answered.stdout)[-1]["metrics"]["calibrated"] is True
    assert "no bounds" not in answered.stderr
