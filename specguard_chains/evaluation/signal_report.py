"""The table of signals as files: signals.json for programs, signals.md for people."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specguard_chains.evaluation.recordings import Recording
from specguard_chains.evaluation.records import ProblemKey
from specguard_chains.evaluation.signal_table import LabelledStep, Row, table
from specguard_chains.evaluation.signals import ReadSignals
from specguard_chains.evaluation.statistics import Estimate
from specguard_chains.evaluation.threshold_table import ThresholdRow
from specguard_chains.evaluation.wording import percent

COMBINATIONS: tuple[tuple[str, ...], ...] = (
    ("draft.confidence_min", "draft.grounding_sparse_min"),
    ("draft.confidence_min", "draft.grounding_sparse_min", "draft.value"),
    ("draft.confidence_min", "draft.entropy_mean", "length"),
    ("draft.confidence_min", "draft.value"),
    ("draft.confidence_min", "agreement_last"),
    ("draft.confidence_min", "agreement_last", "draft.value"),
    ("draft.confidence_min", "target.confidence_mean"),
    ("draft.confidence_min", "target.confidence_min"),
    ("target.confidence_min", "target.grounding_sparse_min"),
)
"""Fitted together, where all of them were read."""
THRESHOLD_HEADER = (
    "| threshold | nats | kept, even half | good | bad caught | kept, odd half | good "
    "| bad caught |\n|---|---|---|---|---|---|---|---|"
)
HEADER = "| signal | even half | odd half | 95 % interval | over length |\n|---|---|---|---|---|"


def combinations(steps: Sequence[LabelledStep]) -> list[tuple[str, ...]]:
    """Return which signals are fitted together: the named ones, each model's, and all."""
    known = set(steps[0].signals) if steps else set()
    chosen = [names for names in COMBINATIONS if known >= set(names)]
    for model in ("draft", "target"):
        own = tuple(sorted(name for name in known if name.startswith(f"{model}.")))
        chosen += [own] if len(own) > 1 else []
    return [*chosen, tuple(sorted(known))]


def whole_answers(
    recordings: Sequence[Recording],
    signals: Sequence[ReadSignals],
    places: Mapping[ProblemKey, int],
) -> list[LabelledStep]:
    """Return the draft's own answers as if each was one step: its lowest signals, its outcome.

    See `signals.labelled`.
    """
    by_problem = {recording.key: recording for recording in recordings}
    answers = []
    for read in signals:
        recording = by_problem[read.key]
        steps = [step for step in read.own_steps if step]
        if not steps:
            continue
        lowest = {name: min(step[name] for step in steps) for name in steps[0]}
        lowest["length"] = -float(len(recording.own.tokens))
        answers.append(
            LabelledStep(read.problem, read.data, places[read.key], recording.own_right, lowest)
        )
    return answers


def cells(row: Row) -> tuple[str, ...]:
    """Return a row's figures in words."""
    n = row.name.count(" + ") + 1
    whose = "" if "length" in row.name else f" of the {row.name.partition('.')[0]}"
    name = row.name if n < 5 else f"all {n} signals{whose}"
    over = row.over_length
    return (
        name + (" (fitted)" if row.fitted else ""),
        "–" if row.even is None else f"{row.even:.3f}",
        "–" if row.odd is None else f"{row.odd.value:.3f}",
        _interval(row.odd),
        "–" if over is None else f"{over.value:+.3f} {_interval(over)}",
    )


def write(
    folder: Path,
    rows: Sequence[Row],
    steps: Sequence[LabelledStep],
    answers: Sequence[LabelledStep],
    recordings: Sequence[Recording],
    thresholds: Sequence[ThresholdRow] = (),
) -> None:
    """Write signals.json and signals.md.

    Args:
        folder: Where.
        rows: The table of the steps.
        steps: Drafted ones.
        answers: Whole answers of the draft, each as one step.
        recordings: Of all problems.
        thresholds: What thresholds of the default signal keep.
    """
    of_answers = table(answers) if answers else []
    facts = _facts(steps, recordings)
    plain = {
        "facts": facts,
        "steps": [asdict(row) for row in rows],
        "answers": [asdict(row) for row in of_answers],
        "thresholds": [asdict(row) for row in thresholds],
    }
    (folder / "signals.json").write_text(
        json.dumps(plain, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8"
    )
    (folder / "signals.md").write_text(
        _page(facts, rows, of_answers, len(answers), thresholds), encoding="utf-8"
    )


def _facts(steps: Sequence[LabelledStep], recordings: Sequence[Recording]) -> dict[str, Any]:
    return {
        "data": sorted({recording.data for recording in recordings}),
        "problems": len(recordings),
        "solved_by_target": sum(recording.solvable for recording in recordings),
        "solved_by_draft": sum(recording.own_right for recording in recordings),
        "solved_by_oracle": sum(recording.right for recording in recordings if recording.solvable),
        "steps": len(steps),
        "good_steps": sum(step.good for step in steps),
    }


def _page(
    facts: dict[str, Any],
    rows: Sequence[Row],
    of_answers: Sequence[Row],
    answers: int,
    thresholds: Sequence[ThresholdRow],
) -> str:
    parts = [
        "# What the signals are worth",
        f"{facts['problems']} problems ({', '.join(facts['data'])}): the target alone solves "
        f"{facts['solved_by_target']}, the draft alone {facts['solved_by_draft']}. On those that "
        f"the target solves the draft wrote {facts['steps']} steps, each behind good ones; "
        f"{facts['good_steps']} of them are good: the target, going on greedily, still reaches the "
        "right answer.",
        "AUROC of each signal, the higher value meaning good; 0.5 knows nothing. Intervals (95 %) "
        "draw whole problems. The even half has the problems at even places of their files, as "
        "`--only even` of `specguard bench` takes them: choose by it, and report the odd one. "
        "Combinations "
        "(*fitted*) are judged on the odd half as fitted on all of the even half, and on the even "
        "half by cross-validation over its problems. *Over length* is what a signal together with "
        "the step's length adds to the length alone, on the odd half.",
        "\n".join([HEADER, *(f"| {' | '.join(cells(row))} |" for row in rows)]),
    ]
    if thresholds:
        parts += [
            "## Thresholds",
            "Steps kept where the target's lowest token log-probability decides, by the pair's "
            "bounds: how many of all, how many of these are good, and how many of the bad ones "
            "are caught.",
            "\n".join([THRESHOLD_HEADER, *(f"| {' | '.join(_kept(r))} |" for r in thresholds)]),
        ]
    if of_answers:
        parts += [
            "## Whole answers",
            f"The cheaper label: is the draft's own greedy answer right ({answers} answers)? A "
            "signal of an answer is the lowest of its steps'.",
            "\n".join([HEADER, *(f"| {' | '.join(cells(row))} |" for row in of_answers)]),
        ]
    return "\n\n".join(parts) + "\n"


def _kept(row: ThresholdRow) -> list[str]:
    found = [f"{row.threshold:g}", f"{row.nats:.2f}".replace("-", "−")]
    for half in (row.even, row.odd):
        found += [percent(half.share), percent(half.good_share)]
        found.append(f"{half.bad - half.bad_kept} of {half.bad}")
    return found


def _interval(estimate: Estimate | None) -> str:
    if estimate is None or estimate.interval is None:
        return "–"
    low, high = estimate.interval
    return f"({low:.3f} to {high:.3f})"
