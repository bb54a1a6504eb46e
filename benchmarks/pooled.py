"""One table of several runs of `specguard bench`, each over other problems.

    python benchmarks/pooled.py docs/evidence/bench-25-44 docs/evidence/bench-45-60 \\
        --arms target,draft,default,no-pause,random,length --plot frontier.svg

reads problems.csv of each folder. Right answers are counted over the problems on which every arm
has a result. Times are compared within a run only, and where its problems.csv tells when each
answer began, on the problems on which an arm and the target took turns.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from specguard_chains.evaluation.figures import RESAMPLES, TURN_S, discordant
from specguard_chains.evaluation.paired_shares import difference_interval
from specguard_chains.evaluation.plots import accuracy_and_time
from specguard_chains.evaluation.statistics import (
    Estimate,
    mcnemar_p,
    ratio_of_sums,
    wilson_interval,
)
from specguard_chains.evaluation.svg import Look, standalone

Problem = tuple[str, str]
Row = dict[str, str]
Arms = dict[str, dict[Problem, Row]]


def read(folders: list[Path], wanted: list[str]) -> Arms:
    """Return the rows of all runs by arm and problem, of some arms or of all."""
    arms: Arms = defaultdict(dict)
    for folder in folders:
        with (folder / "problems.csv").open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                key = row["data"], row["problem"]
                if wanted and row["arm"] not in wanted:
                    continue
                if key in arms[row["arm"]]:
                    raise SystemExit(f"{folder}: {row['arm']} has solved {key[1]} twice")
                arms[row["arm"]][key] = row | {"run": str(folder)}
    if missing := set(wanted) - arms.keys():
        raise SystemExit(f"there is no arm {', '.join(sorted(missing))}")
    common = set.intersection(*(set(rows) for rows in arms.values()))
    if not common:
        raise SystemExit("there is no problem on which every arm has a result")
    return {arm: {key: rows[key] for key in sorted(common)} for arm, rows in arms.items()}


def rights(rows: dict[Problem, Row]) -> list[bool]:
    return [row["right"] == "1" for row in rows.values()]


def total(rows: dict[Problem, Row], column: str) -> int:
    return sum(int(row[column]) for row in rows.values())


def share(part: int, whole: int, interval: tuple[float, float] | None) -> str:
    ends = "" if interval is None else f" ({100 * interval[0]:.0f} to {100 * interval[1]:.0f})"
    return f"{100 * part / whole:.0f}{ends}" if whole else "–"


def against(rows: dict[Problem, Row], other: dict[Problem, Row]) -> str:
    """Return the difference to another arm in points, with its interval and p."""
    one, two = rights(rows), rights(other)
    wins, losses = discordant(one, two)
    return (
        f"{share(wins - losses, len(one), difference_interval(wins, losses, len(one)))}, "
        f"p = {mcnemar_p(one, two):.2g}"
    )


def time_ratio(rows: dict[Problem, Row], other: dict[Problem, Row]) -> tuple[Estimate | None, int]:
    """Return the ratio of two arms' seconds where they took turns, and on how many problems."""
    pairs = [(rows[key], other[key]) for key in rows if in_turns(rows[key], other[key])]
    seconds = [[float(row["seconds"]) for row in column] for column in zip(*pairs, strict=True)]
    return ratio_of_sums(*seconds, resamples=RESAMPLES) if pairs else None, len(pairs)


def times(rows: dict[Problem, Row], other: dict[Problem, Row]) -> str:
    """Return that ratio with its interval."""
    found, n = time_ratio(rows, other)
    if found is None:
        return "–"
    interval = "" if found.interval is None else " ({:.2f} to {:.2f})".format(*found.interval)
    return f"{found.value:.2f}{interval} on {n}"


def in_turns(one: Row, other: Row) -> bool:
    began = [row.get("started") for row in (one, other)]
    answered = one["error"] == other["error"] == "0"
    if not (answered and one["run"] == other["run"] and all(began)):
        return False
    return abs(float(one["started"]) - float(other["started"])) < TURN_S


def table(arms: Arms, target: str) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    alone = arms[target]
    sets = sorted({data for data, _ in alone})
    counts = {data: sum(key[0] == data for key in alone) for data in sets}
    by_set = [f"{data}, of {counts[data]}" for data in sets]
    figures = ("%", "points to target", "time to target's", "kept %")
    columns = ["arm", *by_set, f"of {len(alone)}", *figures]
    yield "| " + " | ".join(columns) + " |"
    yield "|---" * len(columns) + "|"
    for arm, rows in arms.items():
        right = rights(rows)
        each = [sum(r["right"] == "1" for k, r in rows.items() if k[0] == data) for data in sets]
        n, correct = len(right), sum(right)
        kept, judged = (total(rows, f"{which}_steps") for which in ("accepted", "judged"))
        itself = arm == target
        cells = (
            arm,
            *each,
            correct,
            share(correct, n, wilson_interval(correct, n)),
            "" if itself else against(rows, alone),
            "1" if itself else times(rows, alone),
            share(kept, judged, None),
        )
        yield "| " + " | ".join(map(str, cells)) + " |"


def pairs(arms: Arms) -> Iterator[str]:
    """Yield each arm beside every other one."""
    yield "| arm | beside | points | time ratio |"
    yield "|---|---|---|---|"
    for arm, rows in arms.items():
        for other, theirs in arms.items():
            if arm != other:
                yield f"| {arm} | {other} | {against(rows, theirs)} | {times(rows, theirs)} |"


def frontier(arms: Arms, target: str) -> str:
    """Return accuracy against time as an SVG."""
    shown, timed = {}, set()
    for arm, rows in arms.items():
        right, (ratio, n) = rights(rows), time_ratio(rows, arms[target])
        if ratio is not None:
            timed |= {n} if arm != target else set()
            shown[arm] = {
                "accuracy": sum(right) / len(right),
                "accuracy_interval": wilson_interval(sum(right), len(right)),
                "time_ratio": ratio.value,
                "time_ratio_interval": None if arm == target else ratio.interval,
            }
    looks = {arm: Look(number, arm) for number, arm in enumerate(arms, start=1)}
    n = len(arms[target])
    times_of = "" if timed <= {n} else f", times of {' or '.join(map(str, sorted(timed)))}"
    figures = {"target": target, "data": {f"{n} problems{times_of}": {"decoders": shown}}}
    plot = accuracy_and_time(looks, figures, named=True)
    if plot.svg is None:
        raise SystemExit(plot.caption)
    return standalone(plot.svg)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path, metavar="folder")
    parser.add_argument("--arms", default="", help="with commas in between; all by default")
    parser.add_argument("--target", default="target", help="the arm that others are compared with")
    parser.add_argument("--pairs", action="store_true", help="each arm beside every other one, too")
    parser.add_argument("--plot", type=Path, help="where to draw accuracy against time, as SVG")
    given = parser.parse_args()
    arms = read(given.folders, given.arms.split(",") if given.arms else [])
    if given.target not in arms:
        raise SystemExit(f"there is no arm {given.target!r}; there are {', '.join(arms)}")
    print("\n".join(table(arms, given.target)))
    if given.pairs:
        print("\n" + "\n".join(pairs(arms)))
    if given.plot is not None:
        given.plot.write_text(frontier(arms, given.target), encoding="utf-8")


if __name__ == "__main__":
    main()
