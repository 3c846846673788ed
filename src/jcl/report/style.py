"""Colors, fonts and axes shared by all figures.

Figures are built without pyplot, so there is no global state and they can be drawn in any thread. Names of runs,
classes and files go through `plain`, and math parsing is off, so a `$` in a file name is a dollar sign.
"""

import io
import itertools
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

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

# The color-blind safe palette of Okabe and Ito, without yellow, which is hard to see on white.
PALETTE: Final = (BLUE, ORANGE, GREEN, "#cc79a7", "#56b4e9", RED)

_BASELINE_COLORS: Final = {"random-encoder": "#9aa5b1", "raw-pixels": "#c5ccd3"}  # shades of gray

SIZES: Final = {"title": 13.0, "panel": 10.5, "label": 8.5, "small": 7.5, "tiny": 6.0}


def colors_for(names: Sequence[str]) -> list[str]:
    """A color for each name: the same for a method in every figure, or else the next unused one."""
    keys = [name.strip().lower().replace(" ", "-") for name in names]
    known = [METHODS[key].color if key in METHODS else _BASELINE_COLORS.get(key) for key in keys]
    unused = itertools.cycle([color for color in PALETTE if color not in known] or PALETTE)
    return [color or next(unused) for color in known]


def plain(text: str, limit: int = 40) -> str:
    """Text on one line, shortened in the middle if too long."""
    line = "".join(char for char in " ".join(text.split()) if char.isprintable())
    if len(line) <= limit:
        return line
    head = (limit - 1) // 2
    return f"{line[:head]}…{line[len(line) - (limit - 1 - head) :]}"


def new_figure(width: float, height: float) -> Figure:
    """An empty white figure, in inches; its size in pixels is that times DPI."""
    return Figure(figsize=(width, height), dpi=DPI, facecolor=PAPER)


def new_panels(
    width: float, height: float, *, rows: int = 1, columns: int = 2, header: float = 1.5
) -> tuple[Figure, list[Axes]]:
    """A figure with panels below a header for titles and legend, all in inches."""
    figure = new_figure(width, height)
    panels = figure.subplots(rows, columns, squeeze=False)
    figure.subplots_adjust(
        left=0.66 / width,
        right=1 - 0.22 / width,
        top=1 - header / height,
        bottom=0.58 / height,
        wspace=0.16,
        hspace=0.5,
    )
    return figure, list(panels.flat)


def format_axes(axes: Axes, title: str, subtitle: str = "") -> None:
    """Format a panel: light grid, two spines, a bold title on the left with a subtitle below."""
    axes.set_facecolor(PAPER)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set(color=MUTED, linewidth=0.8)
    axes.grid(visible=True, axis="y", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, labelsize=SIZES["label"], length=3, width=0.8)
    write(axes, title, (0, 1), (0, 20), size="panel", fontweight="bold", xycoords="axes fraction")
    write(axes, subtitle, (0, 1), (0, 7), color=MUTED, xycoords="axes fraction")


def write(
    axes: Axes, text: str, at: tuple[float, float], offset: tuple[float, float], *, size: str = "label", **look: Any
) -> None:
    """Write text at an offset in points from a position."""
    usual: dict[str, Any] = {"color": INK, "fontsize": SIZES[size], "textcoords": "offset points", "parse_math": False}
    axes.annotate(text, at, offset, **(usual | look))


def label_box(color: str, opacity: float) -> dict[str, Any]:
    """A box behind text on an image."""
    return {"boxstyle": "square,pad=0.15", "facecolor": color, "alpha": opacity, "linewidth": 0}


def label_axes(axes: Axes, x: str, y: str = "") -> None:
    look: dict[str, Any] = {"color": MUTED, "fontsize": SIZES["label"], "labelpad": 2, "parse_math": False}
    axes.set_xlabel(x, **look)
    axes.set_ylabel(y, **look)


def add_legend(figure: Figure, *, columns: int) -> None:
    """A legend of what is labeled in the panels, below the title, at the left."""
    width, height = figure.get_size_inches()
    labeled = [zip(*axes.get_legend_handles_labels(), strict=True) for axes in figure.axes]
    entries = {name: handle for panel in labeled for handle, name in panel}
    legend = figure.legend(
        list(entries.values()), [plain(name, 32) for name in entries], loc="upper left",
        bbox_to_anchor=(0.22 / width, 1 - 0.7 / height), ncols=columns, frameon=False, borderaxespad=0, borderpad=0,
        handlelength=2.0, columnspacing=1.6, fontsize=SIZES["label"] + 0.5, labelcolor=INK,
    )  # fmt: skip
    for text in legend.get_texts():
        text.set_parse_math(False)


def write_title(figure: Figure, title: str, subtitle: str = "") -> None:
    """A title in the upper left corner, at a fixed distance from the edges."""
    width, height = figure.get_size_inches()
    left = 0.22 / width
    figure.text(left, 1 - 0.34 / height, title, color=INK, fontsize=SIZES["title"], fontweight="bold", parse_math=False)
    figure.text(left, 1 - 0.56 / height, subtitle, color=MUTED, fontsize=SIZES["label"] + 0.5, parse_math=False)


def save(figure: Figure, path: Path, *, follow_links: bool = True) -> Path:
    """Write a PNG atomically; equal figures give equal files."""
    picture = io.BytesIO()
    with warnings.catch_warnings(action="ignore"):  # about characters that the font lacks
        figure.savefig(picture, format="png", dpi=DPI, facecolor=PAPER, metadata={"Software": None})
    write_atomically(path, picture.getvalue(), follow_links=follow_links)
    return path
