"""Sheets of images: the views a network is trained on, and the neighbours its features find."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from jcl.report import style

CELL = 0.92  # inches, the side of one picture
_GAP = 0.1
_LEFT, _RIGHT, _TOP, _BOTTOM = 0.22, 0.22, 0.98, 0.2


def view_names(queries: int, keys: int) -> list[str]:
    """What the views of an image are called, in the order in which they are shown."""
    names = ["query"] if queries == 1 else [f"query {number}" for number in range(1, queries + 1)]
    return [*names, *(f"key {number}" for number in range(1, keys + 1))]


def draw_neighbours(
    queries: Sequence[Tensor],
    neighbours: Sequence[Sequence[Tensor]],
    path: Path,
    *,
    query_labels: Sequence[str | None] | None = None,
    neighbour_labels: Sequence[Sequence[str | None]] | None = None,
    similarities: Sequence[Sequence[float]] | None = None,
    title: str = "Nearest neighbours",
    subtitle: str = "left: the query; then the most similar images of the bank, nearest first",
) -> Path:
    """A row per query (3, h, w): the image, then its neighbours, nearest first; all uint8.

    With labels, a neighbour's frame is green with a tick where its label is the query's, else vermilion with a cross.
    """
    count = max(len(row) for row in neighbours)
    sheet = _Sheet(len(queries), count + 1, title, subtitle, caption=0.17 if query_labels else 0)
    for row, (query, found) in enumerate(zip(queries, neighbours, strict=True)):
        own = query_labels[row] if query_labels else None
        axes = sheet.cell(row, 0)
        _show(axes, query, frame=style.INK)
        _caption(axes, style.plain(own or "", 22), style.INK)
        for column, image in enumerate(found):
            other = neighbour_labels[row][column] if neighbour_labels else None
            colour, mark = _verdict(own, other)
            axes = sheet.cell(row, column + 1)
            _show(axes, image, frame=colour)
            _caption(axes, f"{mark}{style.plain(other or '', 20)}", colour)
            if similarities:
                _badge(axes, f"{similarities[row][column]:.2f}")
    sheet.head(0, "query")
    for column in range(1, count + 1):
        sheet.head(column, f"{column}")
    return style.save(sheet.figure, path)


class _Sheet:
    """A grid of equal cells under a title, with a wider gap after the first column."""

    def __init__(self, rows: int, columns: int, title: str, subtitle: str, *, caption: float) -> None:
        self._pitch = CELL + _GAP + caption
        self.width = max(_LEFT + columns * (CELL + _GAP) + 2 * _GAP + _RIGHT, 5.6)
        self.height = _TOP + rows * self._pitch + _BOTTOM
        self.figure: Figure = style.new_figure(self.width, self.height)
        style.write_title(self.figure, style.plain(title, 60), style.plain(subtitle, 90))

    def cell(self, row: int, column: int) -> Axes:
        top = _TOP + row * self._pitch
        bottom = self.height - top - CELL
        return self.figure.add_axes(
            (self._left(column) / self.width, bottom / self.height, CELL / self.width, CELL / self.height)
        )

    def head(self, column: int, text: str) -> None:
        centre = (self._left(column) + CELL / 2) / self.width
        self.figure.text(
            centre, 1 - (_TOP - 0.09) / self.height, text, ha="center", color=style.MUTED,
            fontsize=style.SIZES["label"],
        )  # fmt: skip

    def _left(self, column: int) -> float:
        return _LEFT + column * (CELL + _GAP) + (2 * _GAP if column else 0)


def _show(axes: Axes, image: Tensor, frame: str | None = None) -> None:
    """An image (3, h, w) of uint8, its pixels shown as they are where it is small."""
    axes.imshow(image.permute(1, 2, 0).cpu().numpy(), interpolation="nearest" if image.shape[-1] <= 64 else "auto")
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(frame is not None)
        spine.set_color(frame or style.PAPER)
        spine.set_linewidth(2.2)


def _caption(axes: Axes, text: str, colour: str) -> None:
    """A line below the picture, in smaller letters where it would reach into the next one."""
    size = style.SIZES["small"] * min(1.0, 15 / max(len(text), 1))
    axes.annotate(
        text, (0.5, 0), (0, -9.5), xycoords="axes fraction", textcoords="offset points", ha="center",
        fontsize=size, color=colour, parse_math=False,
    )  # fmt: skip


def _badge(axes: Axes, text: str) -> None:
    """A small figure in the picture's lower right corner, readable on any picture."""
    axes.annotate(
        text, (1, 0), (-4, 4.5), xycoords="axes fraction", textcoords="offset points", ha="right",
        fontsize=style.SIZES["small"] - 1, color=style.PAPER,
        bbox={"boxstyle": "round,pad=0.2", "facecolor": style.INK, "alpha": 0.72, "linewidth": 0},
    )  # fmt: skip


def _verdict(own: str | None, other: str | None) -> tuple[str, str]:
    """Colour and mark of a neighbour; neither right nor wrong where a label is missing."""
    if own is None or other is None:
        return style.MUTED, ""
    return (style.GREEN, "✓ ") if own == other else (style.RED, "✗ ")
