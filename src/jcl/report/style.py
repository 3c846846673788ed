"""One look for all figures: colours that colour-blind readers tell apart, quiet axes, titles that speak.

Figures are built from matplotlib's objects, never through pyplot, so nothing here reads or leaves global state, and
figures can be drawn in any thread. Text from outside (names of runs, classes and files) goes through `plain`, and
every text is drawn with formula parsing off, so a `$` in a file name is a dollar sign.
"""

import functools
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font

from jcl.core.registry import METHODS
from jcl.runs.atomic import write_atomically

DPI: Final = 150

INK: Final = "#1f2933"
MUTED: Final = "#6b7785"
FAINT: Final = "#e4e7eb"
PAPER: Final = "#ffffff"
BLUE: Final = "#0072b2"
ORANGE: Final = "#e69f00"
GREEN: Final = "#009e73"
RED: Final = "#d55e00"

# Okabe and Ito's palette, without the yellow that vanishes on white.
PALETTE: Final = (BLUE, ORANGE, GREEN, "#cc79a7", "#56b4e9", RED)

# What has not learned anything is grey.
_BASELINE_COLOURS: Final = {
    "random": "#9aa5b1",
    "random-encoder": "#9aa5b1",
    "pixels": "#c5ccd3",
    "raw-pixels": "#c5ccd3",
}

SIZES: Final = {"title": 13.0, "panel": 10.5, "label": 8.5, "small": 7.5}


def colours_for(names: Sequence[str]) -> list[str]:
    """A colour for each name: the method's own where the name is a method's, otherwise the next unused one."""
    known = [_own_colour(name.strip().lower().replace(" ", "-")) for name in names]
    free = [colour for colour in PALETTE if colour not in known] or list(PALETTE)
    unknown = iter(range(len(names)))
    return [colour or free[next(unknown) % len(free)] for colour in known]


def _own_colour(name: str) -> str | None:
    """The same method has the same colour in every figure."""
    return METHODS[name].colour if name in METHODS else _BASELINE_COLOURS.get(name)


def plain(text: str, limit: int = 40) -> str:
    """Text on one line, cut in the middle where it is too long, with a box for each letter that the font lacks."""
    line = "".join(letter for letter in " ".join(text.split()) if letter.isprintable())
    line = "".join(letter if ord(letter) in _letters() else "□" for letter in line)
    if len(line) <= limit:
        return line
    head = (limit - 1) // 2
    return f"{line[:head]}…{line[len(line) - (limit - 1 - head) :]}"


@functools.cache
def _letters() -> frozenset[int]:
    """The letters of the font that matplotlib uses here; it would warn at each other one."""
    return frozenset(get_font(findfont(FontProperties())).get_charmap())


def new_figure(width: float, height: float) -> Figure:
    """An empty white figure of this many inches; nothing is trimmed on saving, so its pixels are inches times DPI."""
    figure = Figure(figsize=(width, height), dpi=DPI, facecolor=PAPER)
    FigureCanvasAgg(figure)
    return figure


def dress(axes: Axes, title: str, subtitle: str = "") -> None:
    """Give a panel the common look: light grid, two spines, a bold title at the left with a muted line below it."""
    axes.set_facecolor(PAPER)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(MUTED)
        axes.spines[side].set_linewidth(0.8)
    axes.grid(visible=True, axis="y", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, labelsize=SIZES["label"], length=3, width=0.8)
    axes.annotate(
        title, (0, 1), (0, 20), xycoords="axes fraction", textcoords="offset points", color=INK, parse_math=False,
        fontsize=SIZES["panel"], fontweight="bold", va="baseline",
    )  # fmt: skip
    axes.annotate(
        subtitle, (0, 1), (0, 7), xycoords="axes fraction", textcoords="offset points", color=MUTED, parse_math=False,
        fontsize=SIZES["label"], va="baseline",
    )  # fmt: skip


def write_title(figure: Figure, title: str, subtitle: str = "") -> None:
    """A title at the upper left corner, a fixed distance from the edges whatever the figure's size."""
    width, height = figure.get_size_inches()
    left = 0.22 / width
    figure.text(left, 1 - 0.34 / height, title, color=INK, fontsize=SIZES["title"], fontweight="bold", parse_math=False)
    figure.text(left, 1 - 0.56 / height, subtitle, color=MUTED, fontsize=SIZES["label"] + 0.5, parse_math=False)


def save(figure: Figure, path: Path) -> Path:
    """Write a PNG in one step, making its folder; equal figures give equal files."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=DPI, facecolor=PAPER, metadata={"Software": None})
    write_atomically(path, picture.getvalue())
    return path
