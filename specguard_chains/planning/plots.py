"""The chart of what pairs of other cost ratios would gain, as a drawing that stands alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from specguard_chains.evaluation.svg import MUTED, Look, drawn, short, standalone
from specguard_chains.planning.plan import Plan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "Time against the target's, by how much dearer a token of the target is"


def write_plot(plan: Plan, path: Path) -> None:
    """Write the chart of a plan to an SVG file.

    Raises:
        EvaluationError: matplotlib is missing.
    """
    svg = drawn("ratios", TITLE, 420, lambda figure: _draw(figure, plan))
    path.write_text(standalone(svg), encoding="utf-8")


def _draw(figure: Figure, plan: Plan) -> None:
    axes = figure.subplots()
    shown = [row.setting for row in plan.rows if row.setting.method != "target"]
    ratios = [each.ratio for each in plan.at_ratios]
    for number, setting in enumerate(shown, start=1):
        look = Look(number, setting.label)
        times = [each.by_setting[setting.label] for each in plan.at_ratios]
        axes.plot(ratios, times, color=look.colour, marker=look.mark, label=short(setting.label))
    axes.axhline(1, color=MUTED, linestyle="--", linewidth=0.8)
    axes.axvline(plan.costs.ratio, color=MUTED, linestyle=":", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xticks(ratios, [f"1:{ratio:.3g}" for ratio in ratios])
    axes.set_xticks([], minor=True)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds a token, draft to target; dotted: this pair")
    axes.set_ylabel("time, as a ratio to the target's")
    axes.set_title(TITLE)
    axes.legend(loc="upper right")
