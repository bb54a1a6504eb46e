"""Verified steps, metrics and downloads on a terminal, for people.

A step comes here as the plain values of its event (`Step.to_dict`), so that the command line and
a LangChain callback handler show the same thing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Column
from rich.text import Text

from specguard_chains.callbacks import EVENT
from specguard_chains.models import Progress as ProgressCallback

WIDE = 96
"""Columns from which signals are named in full."""

_SIGNALS = {"confidence": "conf", "grounding": "ground", "value": "value"}
_STYLES = {"draft": "green", "target": "yellow"}
# A model may write any byte; a terminal would obey some of them.
_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


class ConsoleStepHandler(BaseCallbackHandler):
    """Prints each verified step when it is settled.

    Use it as `llm.invoke(question, {"callbacks": [ConsoleStepHandler()]})`.
    """

    run_inline = True  # in the order of the steps

    def __init__(self, console: Console | None = None) -> None:
        """Print to a console; None is the process's standard error."""
        self.console = console or Console(stderr=True)

    def on_custom_event(self, name: str, data: Any, **kwargs: Any) -> None:
        """Print a step."""
        if name == EVENT:
            print_step(self.console, data)


def print_step(console: Console, step: Mapping[str, Any]) -> None:
    """Print a step: one line about it, then its text."""
    _flow(console, step_facts(step, console))
    print_text(console, str(step["text"]).strip("\n"))
    console.print()


def print_text(console: Console, text: str) -> None:
    """Print a model's text as it is; only a terminal gets its lines wrapped."""
    if text := text.translate(_CONTROLS):
        console.print(Text(text), soft_wrap=not console.is_terminal)


def step_facts(step: Mapping[str, Any], console: Console) -> list[Text]:
    """Return who wrote a step, the verdict, its score and signals, and its time."""
    source, verdict = str(step["source"]), str(step["verdict"])
    style = _STYLES.get(source, "")
    facts = [Text(f"[{step['number']}] {source}", f"bold {style}")]
    if step.get("critical"):
        facts.append(Text("critical: the target's to write", style))
    if step.get("paused"):
        facts.append(Text("not drafted for now", style))
    if verdict != "unverified":
        facts.append(Text("accepted" if verdict == "accepted" else "draft rejected", style))
        facts.append(Text(_score(step, ascii_only=console.options.ascii_only)))
        for name, short in _SIGNALS.items():
            if step.get(name) is not None:
                label = name if console.width >= WIDE else short
                facts.append(Text(f"{label} {step[name]:.2f}"))
    facts.append(Text(f"{sum(step['seconds'].values()):.1f} s", "dim"))
    return facts


def print_metrics(console: Console, metrics: Mapping[str, Any], output_tokens: int) -> None:
    """Print what a request has cost: steps and speed, then who took how long and read how much.

    Args:
        console: Where to.
        metrics: As `Metrics.to_dict` gives them.
        output_tokens: Tokens of the answer.
    """
    parts = ("draft", "verify", "select", "target")
    seconds = {part: metrics[f"{part}_seconds"] for part in parts}
    total = sum(seconds.values())
    steps = [f"{n} by {who}" for who, n in metrics["steps_by_source"].items() if n]
    facts = [f"{_count(metrics['num_steps'], 'step')}: {', '.join(steps)}" if steps else "no steps"]
    if metrics["acceptance_rate"] is not None:
        facts.append(f"{metrics['acceptance_rate']:.0%} accepted")
    facts.append(f"{_count(output_tokens, 'token')} in {total:.1f} s")
    if total > 0:
        facts.append(f"{output_tokens / total:.1f} tokens/s")
    _flow(console, [Text(fact, "bold") for fact in facts])

    details = [f"{part} {spent:.1f} s" for part, spent in seconds.items() if spent > 0]
    for who in ("draft", "target"):
        read, reused = metrics[f"{who}_tokens_read"], metrics[f"{who}_tokens_reused"]
        if read or reused:
            details.append(f"{who} read {read} tokens, reused {reused}")
    if metrics.get("calibrated") is False:
        details.append("scores not calibrated")
    _flow(console, [Text(detail, "dim") for detail in details])


@contextmanager
def fetch_progress(console: Console) -> Iterator[ProgressCallback]:
    """Give a callback that shows downloads and checks as bars; nothing to do shows nothing."""
    bars = Progress(
        TextColumn(
            "{task.description}",
            markup=False,
            table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1),
        ),
        BarColumn(bar_width=16),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(compact=True),
        console=console,
        expand=True,
    )
    tasks: dict[str, TaskID] = {}

    def show(done: int, total: int, label: str, /) -> None:
        size = total or None  # a bar without an end
        if label not in tasks:
            bars.start()
            # Bytes of an earlier run count as done, but not for the rate.
            tasks[label] = bars.add_task(label, total=size, completed=done)
        bars.update(tasks[label], completed=done, total=size)

    try:
        yield show
    finally:
        if tasks:
            bars.stop()


def _score(step: Mapping[str, Any], *, ascii_only: bool) -> str:
    """Return the score against its threshold; of an early rejection only a bound is known."""
    at_least, at_most = (">=", "<=") if ascii_only else ("≥", "≤")
    bound = at_most if step["rejected_early"] else ""
    relation = at_least if step["verdict"] == "accepted" else "<"
    if step["score"] is None or step["threshold"] is None:
        return "no score"
    return f"score {bound}{step['score']:.2f} {relation} {step['threshold']:.2f}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _flow(console: Console, facts: Sequence[Text], gap: str = "  ") -> None:
    """Print facts side by side, on a new line where the terminal is too narrow."""
    line = Text()
    for fact in facts:
        if line and line.cell_len + len(gap) + fact.cell_len > console.width:
            console.print(line, soft_wrap=True)
            line = Text("    ")
        elif line:
            line.append(gap)
        line.append_text(fact)
    if line:
        console.print(line, soft_wrap=True)
