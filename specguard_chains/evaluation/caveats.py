"""What a reader of a report must know before believing its figures."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from specguard_chains.evaluation.figures import Figures, timed_apart
from specguard_chains.evaluation.judging import by_fallback
from specguard_chains.evaluation.settings import RunSettings
from specguard_chains.evaluation.statistics import wilson_interval
from specguard_chains.evaluation.summary import Run
from specguard_chains.evaluation.tables import Rows
from specguard_chains.evaluation.wording import between, listed, percent, points

MISMATCH = 0.05
"""Difference of acceptance rates from which a control is not matched."""


def caveats(run: Run, figures: Figures) -> list[str]:
    """Return what limits the figures of a run, each a sentence or more."""
    return list(
        chain(
            _size(figures),
            _unfinished(run, figures),
            _pooled(run, figures),
            _comparisons(figures),
            _bounds(run),
            _controls(figures),
            _failures(run, figures),
            _machines(run.settings),
            _sources(run.settings),
            _turns(run),
            _memory(),
        )
    )


def _size(figures: Figures) -> Iterator[str]:
    for name, part in figures["data"].items():
        n = max(row["n"] for row in part["decoders"].values())
        low, high = wilson_interval(n // 2, n) or (0.0, 1.0)
        yield (
            f"{name} has {n} {'problem' if n == 1 else 'problems'} here: an accuracy near one half "
            f"has a 95 % interval about {100 * (high - low):.0f} points wide. Comparisons over the "
            "same problems are sharper, the more so the more the arms agree."
        )


def _unfinished(run: Run, figures: Figures) -> Iterator[str]:
    for name, part in figures["data"].items():
        rows: Rows = part["decoders"]
        most = max(row["n"] for row in rows.values())
        behind = [f"{arm} ({row['n']})" for arm, row in rows.items() if row["n"] < most]
        if behind:
            yield (
                f"On {name}, not every arm has attempted all {most} problems: {listed(behind)}. "
                "Accuracies and times over different problems cannot be compared; the comparisons "
                "with the target are over problems that both have."
            )
        if absent := [arm for arm in run.arms if arm not in rows]:
            yield f"On {name} there are no results of {listed(absent)}."
    if missing := [name for name in run.settings.data if name not in run.data]:
        yield f"There are no results yet on {listed(missing)}."
    if absent := [arm for arm in run.settings.arms if arm not in run.arms]:
        yield f"There are no results yet of {listed(absent)}."


def _pooled(run: Run, figures: Figures) -> Iterator[str]:
    if len(figures["data"]) == 1:
        return
    attempted = {arm: len(own) for arm, own in run.by_arm().items()}
    rows: Rows = figures["decoders"]
    common, most = max(row["n"] for row in rows.values()), max(attempted.values())
    if common < most:
        yield (
            f"The figures of all data sets are over the {common} problems that each of their arms "
            f"has attempted, of {most}."
        )
    if left_out := [f"{arm} ({n})" for arm, n in attempted.items() if arm not in rows]:
        yield (
            f"The figures of all data sets leave out {listed(left_out)}: too few problems have "
            "been attempted by these and by the others."
        )


def _comparisons(figures: Figures) -> Iterator[str]:
    if figures["target"] is None:
        yield "No target took part, so that nothing is compared with it."
    tests = max(
        sum(row["mcnemar_p"] is not None for row in part["decoders"].values())
        for part in figures["data"].values()
    )
    if tests > 1:
        yield (
            f"There are {tests} comparisons with the target on each data set; p-values and "
            "intervals are not corrected for that, so that some will look clear by chance."
        )


def _bounds(run: Run) -> Iterator[str]:
    arms = [arm for arm in run.arms if by_fallback(run.settings.judged_by.get(arm, {}))]
    if arms:
        yield (
            f"No bounds of the signals were known for {listed(arms)}: scores by the wide fallback "
            "bounds say little, and so does a threshold. `specguard calibrate` draws bounds for a "
            "pair."
        )


def _controls(figures: Figures) -> Iterator[str]:
    """Yield where controls are not matched, and what the figures over all problems do not show."""
    parts = {f"On {name}, ": part["decoders"] for name, part in figures["data"].items()}
    if len(parts) == 1:
        yield from _mismatches("", figures["decoders"])
    else:
        for where, rows in (parts | {"On all data sets, ": figures["decoders"]}).items():
            yield from _mismatches(where, rows)
    for arm, row in figures["decoders"].items():
        if (control := row["control"]) is None:
            continue
        interval = control["gain_interval"]
        if interval is None or interval[0] <= 0:
            gain = f"{points(control['gain'])} points {between(interval, points).strip()}".strip()
            yield f"{control['of']} is not shown to be more often right than {arm}: {gain}."


def _mismatches(where: str, rows: Rows) -> Iterator[str]:
    for arm, row in rows.items():
        if (control := row["control"]) is None:
            continue
        own, other = control["acceptance_by_step"], control["acceptance_of_controlled"]
        if own is not None and other is not None and abs(own - other) > MISMATCH:
            yield (
                f"{where}{arm} accepts {percent(own)} of the steps and {control['of']} "
                f"{percent(other)}: the control is not matched well."
            )


def _failures(run: Run, figures: Figures) -> Iterator[str]:
    max_tokens = run.settings.max_tokens
    limit = f"the limit of {max_tokens} tokens" if max_tokens else "the limit of tokens"
    parts = [part["decoders"] for part in figures["data"].values()]
    counted = {
        "errors": "Problems ended in an error, count as wrong, and are in no figure of time:",
        "cut_by_length": f"Answers were cut at {limit}, mostly before the result:",
        "checker_timeouts": "Answers could not be compared in time and count as wrong:",
    }
    for name, words in counted.items():
        counts = {
            arm: [sum(rows[arm][key] for rows in parts if arm in rows) for key in (name, "n")]
            for arm in run.arms
        }
        found = [f"{arm} {times} of {n}" for arm, (times, n) in counts.items() if times]
        if found:
            yield f"{words} {listed(found)}."


def _machines(settings: RunSettings) -> Iterator[str]:
    machines = list(dict.fromkeys(each.machine for each in settings.invocations))
    if len(machines) > 1:
        yield (
            f"Parts of this run come from different machines or software: {'; '.join(machines)}. "
            "Times of these are mixed here, and texts may differ in near-ties."
        )
    else:
        yield "Times are those of one machine; on others, ratios differ too."


def _sources(settings: RunSettings) -> Iterator[str]:
    sources = dict.fromkeys(each.sources or "unknown" for each in settings.invocations)
    if len(sources) > 1:
        yield (
            "Parts of this run come from different code of specguard_chains (digests of its "
            f"sources: {listed(list(sources))}), which may write other texts and take other times "
            "with the same settings."
        )


def _turns(run: Run) -> Iterator[str]:
    turns = (
        "The arms took turns on each problem, so that other work on the machine has hit all of "
        "them, if not all alike"
    )
    by_arm = run.by_arm()
    beside = run.target or run.arms[0]
    apart = []
    for arm, own in by_arm.items():
        times, answered = timed_apart(own, by_arm[beside])
        if times:
            apart.append(f"{arm} on {times} of {answered} problems")
    if not apart:
        yield f"{turns}."
        return
    yield (
        f"{turns}, but not always: apart from {beside} was {listed(apart)}, when the machine may "
        "have been faster or slower. These are in no time ratio, but in the seconds a problem."
    )


def _memory() -> Iterator[str]:
    yield (
        "Memory is that of the process, which holds the models of all arms; what one arm needs by "
        "itself is less."
    )
