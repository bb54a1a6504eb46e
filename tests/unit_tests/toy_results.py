"""Results of evaluations that never took place, to write in a folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specguard_chains.evaluation.settings import RunSettings

STARTED = "2026-03-01T10:00:00+00:00"
SECRET = "Janet's ducks lay <b>16</b> eggs per day"
"""Stands in the texts of all results, and must be in no report."""


def step(
    verdict: str = "accepted", *, kept: int | None = None, drafted: int = 10, **more: Any
) -> dict[str, Any]:
    accepted = verdict == "accepted"
    values: dict[str, Any] = {
        "source": "draft" if accepted else "target",
        "verdict": verdict,
        "score": None,
        "confidence": None,
        "grounding": None,
        "threshold": None,
        "rejected_early": False,
        "num_candidates": 1,
        "answer_tokens": 10,
        "drafted": drafted,
        "kept": kept if kept is not None else drafted * accepted,
        "regenerated": 0 if accepted else 10,
        "seconds": {"draft": 1.0, "verify": 0.5, "target": 0.0},
        "phase": "reasoning",
    }
    return values | more


def unverified(source: str, **more: Any) -> dict[str, Any]:
    drafted, seconds = (10 if source == "draft" else 0), {"draft": 0.0, "verify": 0.0}
    seconds["target" if source == "target" else "draft"] = 2.0
    values = {"source": source, "drafted": drafted, "kept": drafted, "regenerated": 10 - drafted}
    return step("unverified", **values | {"seconds": seconds} | more)


def result(
    problem: int | str,
    arm: str,
    right: bool = True,
    *,
    steps: Sequence[Mapping[str, Any]] = (),
    data: str = "toy",
    **more: Any,
) -> dict[str, Any]:
    values: dict[str, Any] = {
        "problem": f"{data}/{problem}",
        "data": data,
        "arm": arm,
        "right": right,
        "extracted": SECRET,
        "timed_out": False,
        "seconds": 4.0,
        "tokens": 10 * len(steps),
        "finish_reason": "stop",
        "seed": 0,
        "metrics": {},
        "peak_rss_mb": 100.0,
        "steps": list(steps),
        "text": f"{SECRET}: the answer is 18.",
    }
    return values | more


def settings(
    arms: Mapping[str, Mapping[str, Any]], data: Sequence[str] = ("toy",), **more: Any
) -> RunSettings:
    values: dict[str, Any] = {
        "version": "0.1.0",
        "pair": "toy-pair",
        "draft": None,
        "target": None,
        "data": tuple(data),
        "seed": 0,
        "max_tokens": 600,
        "n_threads": 2,
        "arms": {label: dict(options) for label, options in arms.items()},
        "defaults": {"decoder": "specguard", "threshold": None, "temperature": 0.7},
        "python": "3.11.7",
        "platform": "Linux-6.1-x86_64",
        "started": STARTED,
    }
    return RunSettings(**values | more)


def write(folder: Path, run: RunSettings, results: Iterable[Mapping[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "settings.json").write_text(run.to_json())
    lines = (json.dumps(plain) + "\n" for plain in results)
    (folder / "results.jsonl").write_text("".join(lines))
    return folder


ARMS = {
    "target": {"decoder": "target", "temperature": 0.0},
    "draft": {"decoder": "draft", "temperature": 0.0},
    "ours": {"decoder": "specguard-greedy", "temperature": 0.0},
    "random@ours": {"decoder": "random", "temperature": 0.0, "controls": "ours"},
}


def four_problems() -> list[dict[str, Any]]:
    """The target is right on 0 and 1, the draft on 0, ours on 0, 1 and 2, its control on 1."""
    lines: list[dict[str, Any]] = []
    for i in range(4):
        lines += [
            result(i, "target", i < 2, seconds=10.0 + i, steps=[unverified("target")] * 2),
            result(i, "draft", i == 0, seconds=2.0, steps=[unverified("draft")] * 2),
            result(i, "ours", i < 3, seconds=6.0, steps=judged(i), peak_rss_mb=100.0 + i),
            result(
                *(i, "random@ours", i == 1),
                seconds=6.0,
                steps=[step(score=0.5), step("rejected", score=0.4)],
                controls="ours",
                acceptance_rate=0.5,
            ),
        ]
    return lines


def judged(i: int) -> list[dict[str, Any]]:
    """Two accepted steps and one that is rejected early, of which 4 tokens were drafted."""
    signals = {"score": 0.8 + i / 100, "confidence": -0.2, "grounding": 0.6, "threshold": 0.7}
    seconds = {"draft": 0.25, "verify": 0.25, "target": 2.0}
    return [
        step(**signals),
        step(**signals),
        step("rejected", drafted=4, rejected_early=True, seconds=seconds, **signals | {"score": 0}),
    ]
