"""Drawings for a page: SVG without fonts, dates or links, in colours that the page defines.

matplotlib draws in marker colours, which become the page's CSS variables, so that one drawing suits
light and dark. Equal drawings give equal text.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from io import StringIO
from typing import TYPE_CHECKING, Any

from specguard_chains.errors import EvaluationError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, MUTED, GRID, PAPER = "#fe0000", "#fe0001", "#fe0002", "#fe0003"
SERIES = tuple(f"#fe001{number}" for number in range(8))
"""Colours of what is to be told apart."""
VARIABLES = {
    **{INK: "--ink", MUTED: "--muted", GRID: "--grid", PAPER: "--paper"},
    **{colour: f"--series-{number}" for number, colour in enumerate(SERIES)},
}
WHITE = "#ffffff"
ON_WHITE = (
    *("#1c2430", "#5b6675", "#dfe4ea", WHITE),
    *("#0b66c3", "#c2410c", "#0f7b5f", "#9d3fa8", "#946200", "#007c98", "#b3225a", "#5c6470"),
)
"""Colours of a drawing that stands alone, in the order of `VARIABLES`."""
MARKS = {"o": "●", "s": "■", "^": "▲", "D": "◆", "v": "▼"}
"""What they look like in a text, by matplotlib's names."""
LONGEST_LABEL = 80
WIDTH = 680
"""Of a drawing, in px."""
POINTS_PER_INCH = 72

MISSING = 'the plots of a report need matplotlib: pip install "specguard_chains[bench]"'
NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
STYLE: dict[str, Any] = {
    "axes.edgecolor": MUTED,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.labelcolor": INK,
    "axes.labelsize": 11,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib; decides what fits
    "font.size": 11,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "savefig.facecolor": "none",
    "svg.fonttype": "none",
    "text.color": INK,
    "text.parse_math": False,  # labels are the user's
    "xtick.color": MUTED,
    "xtick.labelcolor": INK,
    "xtick.labelsize": 10,
    "ytick.color": MUTED,
    "ytick.labelcolor": INK,
    "ytick.labelsize": 10,
}


@dataclass(frozen=True, slots=True)
class LegendEntry:
    """What a mark stands for."""

    mark: str
    colour: str
    """A CSS value."""
    label: str


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot with its words, or the reason why there is none."""

    name: str
    title: str
    caption: str
    svg: str | None = None
    legend: tuple[LegendEntry, ...] = ()


@dataclass(frozen=True, slots=True)
class Look:
    """How an arm is drawn, in all plots alike."""

    number: int
    label: str

    @property
    def colour(self) -> str:
        """One of a few: numbers and marks tell arms apart too."""
        return SERIES[(self.number - 1) % len(SERIES)]

    @property
    def mark(self) -> str:
        """As matplotlib calls it."""
        return list(MARKS)[(self.number - 1) % len(MARKS)]

    def entry(self) -> LegendEntry:
        """Return its line in a legend."""
        mark = f"{MARKS[self.mark]} {self.number}"
        return LegendEntry(mark, variable(self.colour), self.label)


def variable(colour: str) -> str:
    """Return what the page calls a colour."""
    return f"var({VARIABLES[colour]})"


def short(label: str) -> str:
    """Return a label that fits into a drawing."""
    label = " ".join(label.split())
    return label if len(label) <= LONGEST_LABEL else f"{label[: LONGEST_LABEL - 1]}…"


def percent(share: float, _place: object) -> str:
    """Return how matplotlib is to write a share on an axis."""
    return f"{100 * share:.0f} %"


def drawn(name: str, label: str, height: int, draw: Callable[[Figure], None]) -> str:
    """Return a drawing as an SVG element.

    Args:
        name: Begins every id in it; the page has other drawings.
        label: What it shows, for those who do not see it.
        height: In px.
        draw: Draws on an empty figure.

    Raises:
        EvaluationError: matplotlib is missing.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise EvaluationError(MISSING) from error
    text = StringIO()
    with matplotlib.rc_context(), warnings.catch_warnings():
        # The page's fonts have what this one lacks.
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        matplotlib.rcdefaults()  # whatever the user's are
        matplotlib.rcParams.update(STYLE | {"svg.hashsalt": name})
        size = (WIDTH / POINTS_PER_INCH, height / POINTS_PER_INCH)
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        figure.savefig(text, format="svg", metadata=NO_METADATA)
    return inline(text.getvalue(), name, label)


def inline(svg: str, name: str, label: str) -> str:
    """Return matplotlib's SVG as an element of a page that stands alone."""
    body = svg[svg.index(">", svg.index("<svg")) + 1 : svg.rindex("</svg>")]
    box = re.search(r'viewBox="([^"]*)"', svg)
    assert box is not None
    body = re.sub(r"<style.*?</style>|<metadata.*?</metadata>|<!--.*?-->", "", body, flags=re.S)
    body = re.sub(r"font-family: [^;\"]*; ", "", body)  # the page has its own
    body = body.replace("xlink:href=", "href=")
    body = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", body)
    body = re.sub("#fe00[01][0-9]", lambda found: variable(found[0]), body)
    root = f'<svg class="plot" viewBox="{box[1]}" role="img" aria-label="{escape(label)}">'
    body = re.sub(r"\s*\n\s*", " ", body)
    return f"{root}{body.strip()}</svg>"


def standalone(svg: str) -> str:
    """Return an element of a page as a file, with colours that programs without CSS know too."""
    for name, colour in zip(VARIABLES.values(), ON_WHITE, strict=True):
        svg = svg.replace(f"var({name})", colour)
    head, rest = svg.split(">", 1)
    ground = f'<rect width="100%" height="100%" fill="{WHITE}"/>'
    return f'{head} xmlns="http://www.w3.org/2000/svg" font-family="sans-serif">{ground}{rest}\n'
