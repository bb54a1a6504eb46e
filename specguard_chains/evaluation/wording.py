"""Figures in the words of a report."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

NONE = "–"
"""What stands for a figure that does not exist."""
FOLDERS = re.compile(r"(?<![^\s=,])~?(?:/[^/\s,:=][^/,:=]*)*/(?=[^/\s,:=])")


def percent(share: float | None) -> str:
    """Return a share such as 62.5 %."""
    return NONE if share is None else f"{100 * share:.1f} %"


def points(difference: float | None) -> str:
    """Return a difference of shares in percentage points, such as −2.5."""
    return NONE if difference is None else _signed(100 * difference)


def ratio(value: float | None) -> str:
    """Return a ratio such as 0.83."""
    return NONE if value is None else f"{value:.2f}"


def number(value: float | None) -> str:
    """Return an amount to three digits, or to all of those before the point."""
    if value is None:
        return NONE
    if abs(value) < 0.005:
        return "0"
    decimals = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{decimals}f}".replace("-", "−")


def chance(p: float | None) -> str:
    """Return a p-value."""
    if p is None:
        return NONE
    return "< 0.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def between(interval: Sequence[float] | None, write: Callable[[float], str]) -> str:
    """Return an interval to stand below its figure, nothing if there is none."""
    if interval is None:
        return ""
    low, high = (write(end).removesuffix(" %") for end in interval)
    return f"\n({low} to {high})"


def _signed(value: float) -> str:
    text = f"{value:+.1f}"
    return "0.0" if float(text) == 0 else text.replace("-", "−")


def listed(names: Sequence[str]) -> str:
    """Return names as a sentence lists them."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def without_folders(text: str) -> str:
    """Return a setting whose absolute paths are cut to their last part: nobody else has them."""
    return FOLDERS.sub("", text)
