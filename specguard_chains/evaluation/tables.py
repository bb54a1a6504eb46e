"""The tables of a report, in words and rounded figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from specguard_chains.evaluation.figures import PARTS, Figures
from specguard_chains.evaluation.statistics import FEWEST
from specguard_chains.evaluation.wording import (
    NONE,
    between,
    chance,
    number,
    percent,
    points,
    ratio,
)

Rows = Mapping[str, Figures]
"""Figures by arm."""
Write = Callable[[Figures], str]


@dataclass(frozen=True, slots=True)
class Column:
    """A figure of an arm."""

    title: str
    meaning: str
    """What it is, for those who have not read the code."""
    write: Write


@dataclass(frozen=True, slots=True)
class Table:
    """A table as it is shown; the first cell of a row is its head. A cell may have two lines."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def time_ratio(row: Figures) -> str:
    """Return the ratio and its interval, or what tells that there is none."""
    if row["time_ratio"] is None:
        return NONE
    interval = between(row["time_ratio_interval"], ratio) or f"\n({NONE})"
    return f"{ratio(row['time_ratio'])}{interval}"


RESULTS = (
    Column(
        "right",
        "Right answers of attempted problems. A problem that ended in an error is a wrong answer.",
        lambda row: f"{row['correct']}/{row['n']}",
    ),
    Column(
        "accuracy",
        "Their share, with its 95 % Wilson interval.",
        lambda row: f"{percent(row['accuracy'])}{between(row['accuracy_interval'], percent)}",
    ),
    Column(
        "to target",
        "By how many percentage points more problems are right than with the target alone, over "
        "those that both have attempted, with Tango's 95 % score interval of paired shares.",
        lambda row: (
            f"{points(row['difference_to_target'])}{between(row['difference_interval'], points)}"
        ),
    ),
    Column(
        "p",
        "How likely a difference at least this large is if both are right equally often: McNemar's "
        "exact test, two-sided, not corrected for the number of comparisons.",
        lambda row: chance(row["mcnemar_p"]),
    ),
    Column(
        "s a problem",
        "Mean wall time of an answered problem, from an empty prompt cache.",
        lambda row: number(row["seconds"]),
    ),
    Column(
        "time ratio",
        "Sum of the seconds over that of the target, over problems that both have answered within "
        f"half an hour, with a 95 % bootstrap interval over problems if there are {FEWEST} or "
        "more. Below 1 is faster than the target.",
        time_ratio,
    ),
    Column(
        "steps kept",
        "Accepted of judged steps.",
        lambda row: percent(row["acceptance_by_step"]),
    ),
    Column(
        "draft's tokens",
        "The draft's share of the answers' tokens.",
        lambda row: percent(row["acceptance_by_token"]),
    ),
)

PAIRED = (
    Column("problems", "Problems that both have attempted.", lambda row: str(row["pairs"])),
    Column(
        "only this arm",
        "Problems that this arm has right and the target has not.",
        lambda row: str(row["only_right"]),
    ),
    Column(
        "only target",
        "Problems that the target has right and this arm has not.",
        lambda row: str(row["only_target_right"]),
    ),
    RESULTS[3],
    Column(
        "timed",
        "Problems that both have answered within half an hour, whose times are compared.",
        lambda row: str(row["timed_pairs"]),
    ),
)

CONTROLS = (
    Column(
        "controlled arm",
        "The arm that the control is matched to.",
        lambda row: row["control"]["of"],
    ),
    Column(
        "problems",
        "Problems that both have attempted; all figures of the row are over these.",
        lambda row: str(row["control"]["n"]),
    ),
    Column(
        "steps kept",
        "Accepted of judged steps of the control.",
        lambda row: percent(row["control"]["acceptance_by_step"]),
    ),
    Column(
        "that arm's",
        "The same of the arm that it controls. The two are to be equal.",
        lambda row: percent(row["control"]["acceptance_of_controlled"]),
    ),
    Column(
        "gain",
        "By how many percentage points the controlled arm is more often right than its control: "
        "what its signal is worth. With Tango's 95 % score interval of paired shares.",
        lambda row: (
            f"{points(row['control']['gain'])}{between(row['control']['gain_interval'], points)}"
        ),
    ),
    Column(
        "p",
        "McNemar's exact test that both are right equally often.",
        lambda row: chance(row["control"]["mcnemar_p"]),
    ),
)


def _spent(part: str) -> Write:
    return lambda row: number(row["seconds_by"][part])


def _tokens(kind: str) -> Write:
    return lambda row: str(row["tokens"][kind])


def _count(name: str) -> Write:
    return lambda row: str(row[name])


TIME = (
    RESULTS[4],
    *(
        Column(part, meaning, _spent(part))
        for part, meaning in zip(
            (*PARTS, "other"),
            (
                "Of these seconds, those in which the draft wrote or read.",
                "Reading and judging drafted steps beyond that.",
                "Comparing candidates.",
                "Those in which the target wrote or read.",
                "What is not recorded for a step, such as preparing the prompt.",
            ),
            strict=True,
        )
    ),
    Column(
        "ms a token", "Wall time per token of the answers.", lambda r: number(r["ms_per_token"])
    ),
    Column(
        "MB",
        "Most memory held while the arm worked, by all arms together.",
        lambda r: f"{r['peak_rss_mb']:.0f}",
    ),
)

WORK = (
    Column("tokens", "Mean length of an answer.", lambda row: number(row["answer_tokens"])),
    Column("steps", "Mean number of its steps.", lambda row: number(row["steps"])),
    Column("judged", "Drafted steps that were judged, in all.", _count("judged_steps")),
    Column("accepted", "Of these, the accepted ones.", _count("accepted_steps")),
    Column(
        "early",
        "Rejected before they were complete, as they could not pass any more.",
        _count("early_rejections"),
    ),
    Column("drafted", "Tokens that the draft wrote, over all candidates.", _tokens("drafted")),
    Column("kept", "Of these, the ones in answers.", _tokens("kept")),
    Column(
        "regenerated", "Tokens that the target wrote, over all candidates.", _tokens("regenerated")
    ),
    Column("cut", "Answers that ended at the limit of tokens.", _count("cut_by_length")),
    Column(
        "undecided",
        "Answers whose comparison with the right one took too long; they count as wrong.",
        _count("checker_timeouts"),
    ),
    Column("errors", "Problems that ended in an error.", _count("errors")),
)


def results_tables(rows: Rows, target: str | None) -> list[Table]:
    """Return what came out on a data set, against the target and against controls."""
    rows = beside(rows)
    others = {arm: row for arm, row in rows.items() if arm != target and row["pairs"]}
    controls = {arm: row for arm, row in rows.items() if row["control"]}
    return [
        _table("Results", RESULTS, rows),
        *([_table("Problem by problem against the target", PAIRED, others)] if others else []),
        *([_table("Controls beside what they control", CONTROLS, controls)] if controls else []),
    ]


def cost_tables(rows: Rows) -> list[Table]:
    """Return what it took."""
    rows = beside(rows)
    return [_table("Time", TIME, rows), _table("Work", WORK, rows)]


def meanings() -> dict[str, list[tuple[str, str]]]:
    """Return what the columns of each table mean."""
    groups = {"Results": RESULTS, "Problem by problem": PAIRED, "Controls": CONTROLS}
    groups |= {"Time": TIME, "Work": WORK}
    told: dict[str, list[tuple[str, str]]] = {}
    seen: set[Column] = set()
    for title, columns in groups.items():
        told[title] = [(c.title, c.meaning) for c in columns if c not in seen]
        seen |= set(columns)
    return told


def beside(rows: Rows) -> dict[str, Figures]:
    """Return rows in their order, but controls after the arm that they control."""
    ordered: dict[str, Figures] = {}
    for arm, row in rows.items():
        if row["control"] is None:
            ordered[arm] = row
            ordered |= {a: r for a, r in rows.items() if r["control"] and r["control"]["of"] == arm}
    return ordered


def _table(title: str, columns: Iterable[Column], rows: Rows) -> Table:
    columns = tuple(columns)
    return Table(
        title,
        ("arm", *(column.title for column in columns)),
        tuple((arm, *(column.write(row) for column in columns)) for arm, row in rows.items()),
    )
