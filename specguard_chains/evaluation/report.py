"""The report of a run, to read: report.md with a plot, and report.html with all plots in it.

Neither holds any text of the problems or answers. Equal results give equal files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from specguard_chains.evaluation.caveats import caveats
from specguard_chains.evaluation.command import command_of
from specguard_chains.evaluation.figures import Figures
from specguard_chains.evaluation.pairwise_tables import meanings as pairwise_meanings
from specguard_chains.evaluation.pairwise_tables import pairwise_tables
from specguard_chains.evaluation.plots import frontier, plots
from specguard_chains.evaluation.summary import Run, summary_of
from specguard_chains.evaluation.svg import Plot
from specguard_chains.evaluation.tables import Table, cost_tables, meanings, results_tables
from specguard_chains.evaluation.whole_files import replace_file
from specguard_chains.evaluation.wording import without_folders

MARKDOWN, HTML, FRONTIER = "report.md", "report.html", "accuracy.svg"
MARKUP = re.compile(r"[\\`*\[\]|#~$&]|<(?! )|(?<!\w)_|_(?!\w)")
"""What Markdown may not show as it stands."""


@dataclass(frozen=True, slots=True)
class Section:
    """The tables of a data set, or of all."""

    title: str
    results: list[Table]
    costs: list[Table]


@dataclass(frozen=True, slots=True)
class Report:
    """What both files show."""

    facts: list[tuple[str, str]]
    """What ran, by name."""
    command: str | None
    arms: Table
    sections: list[Section]
    plots: list[Plot]
    meanings: dict[str, list[tuple[str, str]]]
    caveats: list[str]


def write(folder: Path) -> None:
    """Write the reports of a run, which may be going on.

    Raises:
        EvaluationError: There are no results, they are damaged, or matplotlib is missing.
    """
    run = Run.read(folder)
    figures = summary_of(run)
    report = report_of(run, figures)
    if (plot := frontier(run, figures)) is not None:
        replace_file(folder / FRONTIER, plot)
    for name in (MARKDOWN, HTML):
        text = (
            _templates(html=name == HTML)
            .get_template(f"{name}.j2")
            .render(report=report, frontier=FRONTIER)
        )
        replace_file(folder / name, text)


def report_of(run: Run, figures: Figures) -> Report:
    """Return what there is to say about a run.

    Args:
        run: Its results.
        figures: Its summary.
    """
    counts = {
        name: max(row["n"] for row in part["decoders"].values())
        for name, part in figures["data"].items()
    }
    parts = {name: part["decoders"] for name, part in figures["data"].items()}
    if len(parts) > 1:
        parts["All data sets"] = figures["decoders"]
    sections = [
        Section(name, results_tables(rows, run.target), cost_tables(rows))
        for name, rows in parts.items()
    ]
    sections[-1].results.extend(pairwise_tables(figures["pairwise"]))
    return Report(
        facts=list(_facts(run, counts)),
        command=command_of(run.settings, counts),
        arms=_arms(run),
        sections=sections,
        plots=plots(run, figures),
        meanings=meanings() | {"Beside other arms": pairwise_meanings()},
        caveats=caveats(run, figures),
    )


def _facts(run: Run, counts: dict[str, int]) -> Iterator[tuple[str, str]]:
    """Yield the settings of all arms, and the machine."""
    settings = run.settings
    for name in ("pair", "draft", "target"):
        if (value := getattr(settings, name)) is not None:
            yield name, without_folders(value)
    yield "data", ", ".join(f"{name} ({n} problems)" for name, n in counts.items())
    if settings.only != "all":
        yield "of these data", f"the problems at {settings.only} places, counted from 0"
    limit = f"at most {settings.max_tokens}" if settings.max_tokens else "no limit"
    yield "tokens of an answer", limit
    yield "seed", str(settings.seed)
    yield "threads", str(settings.n_threads or "as many as the machine has cores")
    yield "software", f"specguard_chains {settings.version}, Python {settings.python}"
    if sources := dict.fromkeys(each.sources for each in settings.invocations if each.sources):
        yield "digest of its sources", ", ".join(sources)
    yield "machine", settings.platform
    if cpus := dict.fromkeys(each.cpu for each in settings.invocations if each.cpu):
        yield "processor", ", ".join(cpus)
    yield "started", settings.started


def _arms(run: Run) -> Table:
    """Return the settings of the arms."""
    rows, settings = [], run.settings.told_today()
    for arm in run.arms:
        own = dict(settings.arms.get(arm, {}))
        decoder, controlled = own.pop("decoder", run.decoder(arm)), own.pop("controls", None)
        if controlled is not None:
            decoder = f"{decoder}, matched to {controlled}"
        changed = ", ".join(f"{name} = {_shown(value)}" for name, value in own.items())
        rows.append((arm, str(decoder), changed or "defaults"))
    return Table("Arms", ("arm", "decoder", "settings other than the defaults"), tuple(rows))


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return without_folders(text.replace("\n", r"\n"))


@cache
def _templates(*, html: bool) -> Environment:
    environment = Environment(
        loader=PackageLoader("specguard_chains.evaluation"),
        autoescape=html,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["markdown"] = _markdown
    return environment


def _markdown(text: str) -> str:
    """Return a text that Markdown shows as it is, also in a table."""
    text = " ".join(text.split())
    return MARKUP.sub(lambda mark: f"&#{ord(mark[0])};", text)
