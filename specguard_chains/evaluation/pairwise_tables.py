"""Tables of a report that have each arm beside every other one."""

from __future__ import annotations

from specguard_chains.evaluation.figures import Figures
from specguard_chains.evaluation.tables import Table, Write, time_ratio
from specguard_chains.evaluation.wording import NONE, between, points

TIME = (
    "Time beside other arms",
    "Sum of the seconds of the row's arm over that of the column's, over problems that both have "
    "answered within half an hour. Below 1 the row's is faster.",
)
RIGHT = (
    "Right answers beside other arms",
    "By how many percentage points more problems the row's arm has right than the column's, with "
    "Tango's 95 % score interval of paired shares. Not corrected for the number of comparisons.",
)


def pairwise_tables(pairwise: Figures) -> list[Table]:
    """Return a table of times and one of right answers; none for two arms or fewer.

    Args:
        pairwise: Each arm beside every other one, as the summary has it.
    """
    if len(pairwise) < 3:
        return []
    return [_square(TIME[0], pairwise, time_ratio), _square(RIGHT[0], pairwise, _difference)]


def meanings() -> list[tuple[str, str]]:
    """Return what the tables mean."""
    return [TIME, RIGHT]


def _square(title: str, pairwise: Figures, write: Write) -> Table:
    rows = (
        (arm, *(write(others[other]) if other in others else NONE for other in pairwise))
        for arm, others in pairwise.items()
    )
    return Table(title, ("arm", *pairwise), tuple(rows))


def _difference(row: Figures) -> str:
    return f"{points(row['difference'])}{between(row['difference_interval'], points)}"
