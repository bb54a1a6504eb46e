"""The plots of a report that look into answers: their steps, by position and by signal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from specguard_chains.evaluation.results import Result
from specguard_chains.evaluation.summary import Run
from specguard_chains.evaluation.svg import (
    MUTED,
    SERIES,
    LegendEntry,
    Look,
    Plot,
    drawn,
    percent,
    short,
    variable,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ENOUGH_STEPS = 10
"""Judged steps at a position from which their share is drawn."""
BINS = 24
TAILS = (1, 99)
"""Percentiles at which a distribution is cut; what is outside is drawn at the ends."""
SIGNALS = ("score", "confidence", "grounding")
RIGHT, WRONG = SERIES[0], SERIES[1]

Sample = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Values in right and in wrong answers."""


def acceptance_by_position(looks: Mapping[str, Look], run: Run) -> Plot:
    """Return how often steps are accepted as an answer goes on."""
    name, title = "positions", "Acceptance by position of the step"
    every = {arm: list(_shares(results.values())) for arm, results in run.by_arm().items()}
    shares = {arm: points for arm, points in every.items() if points}
    if not shares:
        return Plot(
            *(name, title),
            f"Left out: at no position have {ENOUGH_STEPS} steps of an arm been judged.",
        )

    def draw(figure: Figure) -> None:
        from matplotlib.ticker import MaxNLocator

        axes = figure.subplots()
        for arm, points in shares.items():
            look, (x, y) = looks[arm], zip(*points, strict=True)
            axes.plot(x, y, color=look.colour, marker=look.mark, markersize=5, linewidth=1.4)
            axes.annotate(
                *(str(look.number), points[-1]),
                xytext=(7, -3),
                textcoords="offset points",
                color=look.colour,
            )
        axes.set_ylim(-0.02, 1.04)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_formatter(percent)
        axes.set_xlabel("position of the step in the answer")
        axes.set_ylabel("accepted")

    caption = (
        "The accepted share of the judged steps at each position, over all data sets, where at "
        f"least {ENOUGH_STEPS} were judged. Late positions come from long answers only."
    )
    svg = drawn(name, title, 300, draw)
    return Plot(name, title, caption, svg, tuple(looks[arm].entry() for arm in shares))


def _shares(results: Iterable[Result]) -> Iterator[tuple[int, float]]:
    """Yield positions and the accepted shares of their steps."""
    verdicts: defaultdict[int, list[bool]] = defaultdict(list)
    for result in results:
        for position, step in enumerate(result.steps, start=1):
            if step.judged:
                verdicts[position].append(step.accepted)
    for position in sorted(verdicts):
        if len(verdicts[position]) >= ENOUGH_STEPS:
            yield position, float(np.mean(verdicts[position]))


def signals(run: Run) -> Plot:
    """Return how signals are distributed over steps in right and in wrong answers."""
    name, title = "signals", "Signals of drafted steps in right and in wrong answers"
    samples = {
        arm: {signal: _split(results.values(), signal) for signal in SIGNALS}
        for arm, results in run.by_arm().items()
        if run.controlled(arm) is None
    }
    samples = {arm: found for arm, found in samples.items() if any(map(_size, found.values()))}
    if not samples:
        return Plot(name, title, "Left out: no arm has judged a drafted step by a signal.")

    def draw(figure: Figure) -> None:
        grid = figure.subplots(len(samples), len(SIGNALS), squeeze=False, sharex="col")
        edges = {
            signal: _edges([found[signal] for found in samples.values()]) for signal in SIGNALS
        }
        for row, (arm, found) in zip(grid, samples.items(), strict=True):
            for axes, signal in zip(row, SIGNALS, strict=True):
                _draw_distributions(axes, found[signal], edges[signal])
            row[0].set_title(short(arm), pad=14)
        for axes, signal in zip(grid[-1], SIGNALS, strict=True):
            axes.set_xlabel(signal)

    caption = (
        "Of the judged steps, rejected ones too, whose text is not in the answer. Both areas of a "
        "panel are equally large, whatever the number of steps (given on top: right, wrong). For a "
        "step that was rejected early, signals are upper bounds. Values beyond the 1st and 99th "
        "percentile are drawn at the ends. Whether an answer is right says little of a single step."
    )
    svg = drawn(name, title, 40 + 130 * len(samples), draw)
    legend = (
        LegendEntry("■", variable(RIGHT), "in answers that were right"),
        LegendEntry("□", variable(WRONG), "in answers that were wrong"),
    )
    return Plot(name, title, caption, svg, legend)


def _split(results: Iterable[Result], signal: str) -> Sample:
    def values(right: bool) -> NDArray[np.float64]:
        steps = (step for result in results if result.right == right for step in result.steps)
        found = (getattr(step, signal) for step in steps if step.judged)
        return np.array([value for value in found if value is not None], dtype=np.float64)

    return values(True), values(False)


def _size(sample: Sample) -> int:
    return sum(part.size for part in sample)


def _edges(samples: Sequence[Sample]) -> NDArray[np.float64]:
    """Return the edges of the bins of a signal, for all arms."""
    values = np.concatenate([part for sample in samples for part in sample])
    if not values.size:
        return np.linspace(0, 1, BINS + 1)
    low, high = np.percentile(values, TAILS)
    margin = 0.5 * (low == high)  # all values are equal
    return np.linspace(low - margin, high + margin, BINS + 1)


def _draw_distributions(axes: Axes, sample: Sample, edges: NDArray[np.float64]) -> None:
    axes.set_yticks([])
    axes.grid(visible=False)
    if not _size(sample):
        axes.text(0.5, 0.5, "none", transform=axes.transAxes, color=MUTED, ha="center")
        return
    looks: tuple[dict[str, Any], ...] = (
        {"histtype": "stepfilled", "color": RIGHT, "alpha": 0.35},
        {"histtype": "step", "color": WRONG, "linewidth": 1.4},
    )
    for values, look in zip(sample, looks, strict=True):
        if values.size:
            axes.hist(np.clip(values, edges[0], edges[-1]), bins=list(edges), density=True, **look)
    counts = f"{sample[0].size}, {sample[1].size}"
    axes.text(*(1, 1.02, counts), transform=axes.transAxes, color=MUTED, ha="right", fontsize=9)
