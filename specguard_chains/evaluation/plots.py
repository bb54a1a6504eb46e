"""The plots of a report: what a run has to show, and a reason where it has nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, floor, log2
from typing import TYPE_CHECKING

from specguard_chains.evaluation.figures import PARTS, Figures
from specguard_chains.evaluation.step_plots import acceptance_by_position, signals
from specguard_chains.evaluation.summary import Run
from specguard_chains.evaluation.svg import (
    INK,
    MUTED,
    PAPER,
    SERIES,
    LegendEntry,
    Look,
    Plot,
    drawn,
    percent,
    short,
    standalone,
    variable,
)
from specguard_chains.evaluation.wording import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PART_COLOURS = dict(
    zip((*PARTS, "other"), (SERIES[n] for n in (0, 2, 3, 1, 7)), strict=True),
)
LEGEND_COLUMNS = 3


def plots(run: Run, figures: Figures) -> list[Plot]:
    """Return all plots of a run.

    Args:
        run: Its results.
        figures: Its summary.

    Raises:
        EvaluationError: matplotlib is missing.
    """
    looks = _looks(run)
    return [
        accuracy_and_time(looks, figures),
        acceptance_by_position(looks, run),
        signals(run),
        time_split(figures),
    ]


def frontier(run: Run, figures: Figures) -> str | None:
    """Return accuracy against time as a file that stands alone; None if there are no times."""
    svg = accuracy_and_time(_looks(run), figures, named=True).svg
    return None if svg is None else standalone(svg)


def _looks(run: Run) -> dict[str, Look]:
    return {arm: Look(number, arm) for number, arm in enumerate(run.arms, start=1)}


def accuracy_and_time(looks: Mapping[str, Look], figures: Figures, *, named: bool = False) -> Plot:
    """Return what an arm's accuracy costs, in time of the target.

    Args:
        looks: Of the arms.
        figures: The summary.
        named: Draw the legend too, for a file that stands alone.
    """
    name, title = "accuracy", "Accuracy against time"
    shown = {
        data: {arm: row for arm, row in part["decoders"].items() if row["time_ratio"]}
        for data, part in figures["data"].items()
    }
    shown = {data: rows for data, rows in shown.items() if rows}
    if not shown:
        reason = "has a time" if figures["target"] else "took part"
        return Plot(name, title, f"Left out: there are no time ratios, as no target {reason}.")

    def draw(figure: Figure) -> None:
        for axes, (data, rows) in zip(_panels(figure, len(shown)), shown.items(), strict=True):
            axes.set_title(short(data))
            _draw_trade(axes, rows, looks, figures["target"])
        if named:
            _name_arms(figure, used)

    caption = (
        "Further up is more often right, further left is faster; half the time is as far from the "
        "target's as double. Lines are 95 % intervals: of the share of right answers (Wilson), and "
        "of the ratio of times over the same problems (bootstrap). Dashed: the target alone."
    )
    used = [look for arm, look in looks.items() if any(arm in rows for rows in shown.values())]
    lines = ceil(len(used) / LEGEND_COLUMNS) if named else 0
    height = 300 * ((len(shown) + 1) // 2) + 24 * lines
    svg = drawn(name, f"{title}; the figures are in the tables", height, draw)
    return Plot(name, title, caption, svg, tuple(look.entry() for look in used))


def _name_arms(figure: Figure, looks: Sequence[Look]) -> None:
    from matplotlib.lines import Line2D

    marks = [Line2D([], [], color=look.colour, marker=look.mark, linestyle="") for look in looks]
    names = [f"{look.number} {short(look.label)}" for look in looks]
    figure.legend(marks, names, loc="outside lower center", ncols=LEGEND_COLUMNS)


def _draw_trade(
    axes: Axes, rows: Mapping[str, Figures], looks: Mapping[str, Look], target: str
) -> None:
    if target in rows:
        axes.axhline(rows[target]["accuracy"], color=MUTED, linestyle="--", linewidth=0.8)
        axes.axvline(1, color=MUTED, linestyle="--", linewidth=0.8)
    for arm, row in rows.items():
        look, x, y = looks[arm], row["time_ratio"], row["accuracy"]
        axes.errorbar(
            [x],
            [y],
            xerr=_reach(x, row["time_ratio_interval"]),
            yerr=_reach(y, row["accuracy_interval"]),
            color=look.colour,
            marker=look.mark,
            markersize=7,
            elinewidth=1.2,
        )
        axes.annotate(
            str(look.number), (x, y), xytext=(6, 5), textcoords="offset points", color=look.colour
        )
    _halves_and_doubles(axes)
    axes.set_ylim(-0.02, 1.04)
    axes.yaxis.set_major_formatter(percent)
    axes.set_xlabel("time, as a ratio to the target's")
    axes.set_ylabel("right")


def _halves_and_doubles(axes: Axes) -> None:
    """Draw ratios so that half is as far from one as double."""
    axes.set_xscale("log", base=2)
    low, high = (log2(end) for end in axes.get_xlim())
    low, high = min(low, -1.2), max(high, 1.2)
    axes.set_xlim(2**low, 2**high)
    ticks = [2.0**power for power in range(ceil(low), floor(high) + 1)]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])


def time_split(figures: Figures) -> Plot:
    """Return what each arm spends its time on."""
    name, title = "split", "Where the time goes"
    rows = {arm: row for arm, row in figures["decoders"].items() if row["seconds"] is not None}
    if not rows:
        return Plot(name, title, "Left out: no problem was answered.")

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for place, (arm, row) in enumerate(rows.items()):
            _draw_split(axes, place, row)
            axes.annotate(
                *(short(arm), (0, place - 0.28)),
                xytext=(1, 3),
                textcoords="offset points",
            )
        axes.set_ylim(len(rows) - 0.5, -0.75)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("seconds a problem")
        axes.margins(x=0.12)
        axes.set_xlim(left=0)

    caption = (
        "Mean wall time of an answered problem, over all data sets. Verify is what reading and "
        "judging drafted steps takes beyond writing them; select is comparing candidates; other is "
        "what is not recorded for a step, such as preparing the prompt."
    )
    sizes = {row["n"] for row in rows.values()}
    if len(sizes) > 1:
        caption += " The arms have not attempted the same number of problems."
    svg = drawn(name, f"{title}; the figures are in the tables", 60 + 46 * len(rows), draw)
    legend = (LegendEntry("■", variable(c), part) for part, c in PART_COLOURS.items())
    return Plot(name, title, caption, svg, tuple(legend))


def _draw_split(axes: Axes, place: int, row: Figures) -> None:
    left = 0.0
    for part, colour in PART_COLOURS.items():
        width = max(row["seconds_by"][part], 0.0)
        axes.barh([place], [width], left=left, height=0.5, color=colour, edgecolor=PAPER)
        left += width
    axes.annotate(
        *(number(row["seconds"]), (left, place)),
        xytext=(5, -4),
        textcoords="offset points",
        color=INK,
    )


def _panels(figure: Figure, n: int) -> list[Axes]:
    """Return n axes, two in a row if there are several."""
    columns = min(n, 2)
    grid = figure.subplots(-(-n // columns), columns, squeeze=False).ravel()
    for unused in grid[n:]:
        unused.set_axis_off()
    return list(grid[:n])


def _reach(value: float, interval: Sequence[float] | None) -> list[list[float]] | None:
    """Return an interval as matplotlib wants it: how far it reaches to both sides."""
    if interval is None:
        return None
    return [[max(value - interval[0], 0.0)], [max(interval[1] - value, 0.0)]]
