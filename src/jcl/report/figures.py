"""Figures as PNG files: bars that compare methods, images with their nearest neighbors or their views."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jcl.report import style
from jcl.report.contents import ExampleViews, NamedImage, NeighbourRow

_CELL = 1.02  # inches
_MAX_VIEWS = 12  # of an image in a picture


def plot_comparison(scores: Mapping[str, float], path: Path, *, title: str, subtitle: str, chance: float) -> Path:
    """A bar for each score in percent, in the order given, and a dashed line at `chance`."""
    height = 1.15 + 0.46 * len(scores)
    figure = style.new_figure(8, height)
    axes = figure.add_axes((0.19, 0.42 / height, 0.75, 0.46 * len(scores) / height))
    lengths = list(scores.values())
    axes.barh(range(len(scores)), lengths, height=0.66, color=style.colors_for(list(scores)), linewidth=0)
    for row, value in enumerate(lengths):
        style.write(axes, f"{value:.1f} %", (value, row), (5, 0), size="panel", va="center_baseline", fontweight="bold")
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
    tiles = []
    for row in rows:
        found = zip(row.neighbours, row.similarities, strict=False)
        others = [_Tile(image, *_verdict(row.query.label, image.label), f"{value:.2f}") for image, value in found]
        tiles.append([_Tile(row.query, style.INK), *others])
    headings = ["query", *map(str, range(1, max(map(len, tiles))))]
    return _draw_tiles(tiles, headings, path, title, "left: the query; then its nearest neighbors, nearest first")


def draw_views(examples: ExampleViews, names: Sequence[str], path: Path, *, title: str) -> Path:
    """Each image beside its views, which have these names; at most the first 12 views."""
    tiles = [
        [_Tile(image, style.INK), *(_Tile(NamedImage(view, image.name), style.MUTED) for view in views[:_MAX_VIEWS])]
        for image, views in examples
    ]
    subtitle = "left: the image; then what the network sees of it in one step"
    return _draw_tiles(tiles, ["image", *names[:_MAX_VIEWS]], path, title, subtitle)


class _Tile(NamedTuple):
    """An image in a frame of this color, a mark before its label, and a text in its corner."""

    image: NamedImage
    color: str
    mark: str = ""
    corner: str = ""


def _draw_tiles(
    rows: Sequence[Sequence[_Tile]], headings: Sequence[str], path: Path, title: str, subtitle: str
) -> Path:
    """Rows of images with their labels below and headings above; small images keep their pixels."""
    width = max(0.44 + _CELL * len(headings), 5.6)
    height = 1.2 + (_CELL + 0.17) * len(rows)
    figure = style.new_figure(width, height)
    style.write_title(figure, style.plain(title, 60), subtitle)
    edges = {"left": 0.22 / width, "right": 1 - 0.22 / width, "top": 1 - 0.98 / height, "bottom": 0.22 / height}
    panels = figure.subplots(len(rows), len(headings), squeeze=False, gridspec_kw=edges | {"hspace": 0.3})
    for axes, heading in zip(panels[0], headings, strict=True):
        axes.set_title(heading, color=style.MUTED, fontsize=style.SIZES["label"], pad=5)
    for axes in panels.flat:
        axes.set(xticks=[], yticks=[], frame_on=False, anchor="N")
    for own_panels, tiles in zip(panels, rows, strict=True):
        for axes, (image, color, mark, corner) in zip(own_panels, tiles, strict=False):
            pixels = image.pixels.permute(1, 2, 0).cpu().numpy()
            axes.imshow(pixels, interpolation="nearest" if pixels.shape[1] <= 64 else "auto")
            axes.set_frame_on(True)
            axes.spines[:].set(color=color, linewidth=2.2)
            look: dict[str, Any] = {"ha": "center", "color": color, "xycoords": "axes fraction"}
            text = mark + style.plain(image.label or "", 20)
            size = style.SIZES["small"] * min(1.0, 15 / max(len(text), 1))
            style.write(axes, text, (0.5, 0), (0, -9.5), fontsize=size, **look)
            if corner:
                look |= {"ha": "right", "color": style.PAPER, "bbox": style.label_box(style.INK, 0.72)}
                style.write(axes, corner, (1, 0), (-4, 4.5), size="tiny", **look)
    return style.save(figure, path)


def _verdict(own: str | None, other: str | None) -> tuple[str, str]:
    if own is None or other is None:
        return style.MUTED, ""
    return (style.GREEN, "✓ ") if own == other else (style.RED, "✗ ")
