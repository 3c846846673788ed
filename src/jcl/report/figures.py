"""Figures as PNG files: bars that compare methods, images with their nearest neighbors or their views."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jcl.report import style
from jcl.report.contents import ExampleViews, NamedImage, NeighbourRow

_CELL, _GAP, _CAPTION = 0.92, 0.1, 0.17  # inches
_MARGIN, _TOP, _BOTTOM = 0.22, 0.98, 0.2
_MAX_VIEWS = 12  # of an image in a picture

Box = tuple[float, float, float, float]  # left, bottom, width and height, as fractions of a figure


def plot_comparison(scores: Mapping[str, float], path: Path, *, title: str, subtitle: str, chance: float) -> Path:
    """A bar for each score in percent, in the order given, and a dashed line at `chance`."""
    height = 1.15 + 0.46 * len(scores)
    figure = style.new_figure(8, height)
    axes = figure.add_axes((0.19, 0.42 / height, 0.75, 0.46 * len(scores) / height))
    lengths = [value if math.isfinite(value) else 0.0 for value in scores.values()]
    axes.barh(range(len(scores)), lengths, height=0.66, color=style.colours_for(list(scores)), linewidth=0)
    for row, (length, value) in enumerate(zip(lengths, scores.values(), strict=True)):
        text = f"{value:.1f} %" if math.isfinite(value) else "not measured"
        style.write(axes, text, (length, row), (5, 0), size="panel", va="center_baseline", fontweight="bold")
    axes.set_yticks(range(len(scores)), [style.plain(name, 22) for name in scores], parse_math=False)
    axes.set_ylim(len(scores) - 0.5, -0.5)
    axes.set_xlim(0, max([*lengths, 1.0]) * 1.12)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.spines["left"].set_color(style.MUTED)
    axes.grid(visible=True, axis="x", color=style.FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(axis="x", colors=style.MUTED, labelsize=style.SIZES["label"], length=0)
    axes.tick_params(axis="y", colors=style.INK, labelsize=style.SIZES["panel"] - 0.5, length=0)
    axes.axvline(chance, color=style.INK, linewidth=1, linestyle=(0, (4, 3)))
    style.write_title(figure, style.plain(title, 90), style.plain(f"{subtitle}; dashed: chance, {chance:.1f} %", 120))
    return style.save(figure, path)


def draw_neighbours(rows: Sequence[NeighbourRow], path: Path, *, title: str = "Nearest neighbors") -> Path:
    """Each query beside its neighbors, nearest first: framed in green with the query's label, in red with others."""
    columns = max(len(row.neighbours) for row in rows)
    captioned = any(image.label for row in rows for image in (row.query, *row.neighbours))
    figure, cells = _grid(["query", *map(str, range(1, columns + 1))], len(rows), captioned=captioned)
    style.write_title(figure, style.plain(title, 60), "left: the query; then its nearest neighbors, nearest first")
    for row, panels in zip(rows, cells, strict=True):
        for column, (image, box) in enumerate(zip((row.query, *row.neighbours), panels, strict=False)):
            color, mark = (style.INK, "") if column == 0 else _verdict(row.query.label, image.label)
            axes = figure.add_axes(box)
            _show(axes, image, color, mark)
            if column > 0:
                similarity, frame = f"{row.similarities[column - 1]:.2f}", style.label_box(style.INK, 0.72)
                look = {"color": style.PAPER, "ha": "right", "bbox": frame, "xycoords": "axes fraction"}
                style.write(axes, similarity, (1, 0), (-4, 4.5), size="tiny", **look)
    return style.save(figure, path)


def draw_views(examples: ExampleViews, names: Sequence[str], path: Path, *, title: str) -> Path:
    """Each image beside its views, which have these names; at most the first 12 views."""
    names = names[:_MAX_VIEWS]
    captioned = any(image.label for image in examples.images)
    figure, cells = _grid(["image", *names], len(examples.images), captioned=captioned)
    style.write_title(figure, style.plain(title, 60), "left: the image; then what the network sees of it in one step")
    for image, views, panels in zip(examples.images, examples.views, cells, strict=True):
        shown = [image, *(NamedImage(view, image.name, None) for view in views[: len(names)])]
        for each, box in zip(shown, panels, strict=True):
            _show(figure.add_axes(box), each, style.INK if each is image else style.MUTED, "")
    return style.save(figure, path)


def _grid(headings: Sequence[str], rows: int, *, captioned: bool) -> tuple[Figure, list[list[Box]]]:
    """A figure for rows of images, the first column apart from the others, and the place of each image."""
    pitch = _CELL + _GAP + (_CAPTION if captioned else 0)
    width = max(2 * _MARGIN + len(headings) * (_CELL + _GAP) + 2 * _GAP, 5.6)
    height = _TOP + rows * pitch + _BOTTOM
    figure = style.new_figure(width, height)
    lefts = [_MARGIN + column * (_CELL + _GAP) + (2 * _GAP if column else 0) for column in range(len(headings))]
    for left, heading in zip(lefts, headings, strict=True):
        figure.text(
            (left + _CELL / 2) / width, 1 - (_TOP - 0.09) / height, heading, ha="center", color=style.MUTED,
            fontsize=style.SIZES["label"],
        )  # fmt: skip
    bottoms = [height - _TOP - row * pitch - _CELL for row in range(rows)]
    size = (_CELL / width, _CELL / height)
    return figure, [[(left / width, bottom / height, *size) for left in lefts] for bottom in bottoms]


def _show(axes: Axes, image: NamedImage, color: str, mark: str) -> None:
    """An image in a frame, with its label below; small images keep their pixels."""
    pixels = image.pixels.permute(1, 2, 0).cpu().numpy()
    axes.imshow(pixels, interpolation="nearest" if pixels.shape[1] <= 64 else "auto")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set(color=color, linewidth=2.2)
    text = mark + style.plain(image.label or "", 20)
    size = style.SIZES["small"] * min(1.0, 15 / max(len(text), 1))
    style.write(axes, text, (0.5, 0), (0, -9.5), xycoords="axes fraction", ha="center", color=color, fontsize=size)


def _verdict(own: str | None, other: str | None) -> tuple[str, str]:
    if own is None or other is None:
        return style.MUTED, ""
    return (style.GREEN, "✓ ") if own == other else (style.RED, "✗ ")
