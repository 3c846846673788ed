"""All combinations of two settings' values as grids of shades with the accuracies in them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from jcl.report import style
from jcl.report.ablation_words import ACCURACIES, axis_label, highest
from jcl.runs.json_object import written
from jcl.studies.ablation import Point, is_number

Table = np.ndarray[Any, np.dtype[np.float64]]

_SHADES: Final = LinearSegmentedColormap.from_list("shades", ["#eef4f9", "#7fb4d6", style.BLUE, "#003e63"])


def draw_maps(curves: dict[str, list[Point]], names: Sequence[str]) -> Figure:
    """A map for each accuracy: the first setting's values abreast, a row for each of the `curves`."""
    points = [point for curve in curves.values() for point in curve]
    columns: list[Any] = []
    for point in points:  # lists cannot be hashed
        columns += [point.values[names[0]]] if point.values[names[0]] not in columns else []
    if all(is_number(value) for value in columns):
        columns.sort()
    height = 1.75 + 0.3 * len(curves)
    figure = style.new_figure(10, height)
    panels = figure.subplots(1, 2)
    left = 0.045 + 0.0058 * min(28, max(map(len, curves)))
    figure.subplots_adjust(left=left, right=0.985, top=1 - 1.15 / height, bottom=0.6 / height, wspace=0.05)
    for axes, (accuracy, title) in zip(panels, ACCURACIES, strict=True):
        _draw_map(axes, _table(curves, columns, names[0], accuracy))
        style.dress(axes, title, highest(points, accuracy))
        _dress(axes, columns, list(curves), axis_label(names[0]))
    panels[1].tick_params(labelleft=False)
    return figure


def _table(curves: dict[str, list[Point]], columns: Sequence[Any], name: str, accuracy: str) -> Table:
    """The means, (rows, columns); not a number where there is none."""
    table = np.full((len(curves), len(columns)), np.nan)
    for row, curve in enumerate(curves.values()):
        for point in curve:
            mean = point.mean(accuracy)
            table[row, columns.index(point.values[name])] = np.nan if mean is None else mean
    return table


def _draw_map(axes: Axes, table: Table) -> None:
    low, high = (float(np.nanmin(table)), float(np.nanmax(table))) if np.isfinite(table).any() else (0.0, 1.0)
    axes.imshow(np.ma.masked_invalid(table), cmap=_SHADES, vmin=low, vmax=max(high, low + 1e-9), aspect="auto")
    size = min(style.SIZES["label"], 52 / table.shape[1])
    for (row, column), value in np.ndenumerate(table):
        bright = (value - low) / max(high - low, 1e-9) > 0.5
        text = f"{value:.1f}" if math.isfinite(value) else "–"
        colour = style.PAPER if bright else style.INK
        axes.text(column, row, text, ha="center", va="center_baseline", color=colour, fontsize=size)


def _dress(axes: Axes, columns: Sequence[Any], rows: Sequence[str], label: str) -> None:
    axes.grid(visible=False)
    axes.set_xticks(range(len(columns)), [style.plain(written(value), 8) for value in columns], parse_math=False)
    axes.set_yticks(range(len(rows)), [style.plain(text, 28) for text in rows], parse_math=False)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_xlabel(label, color=style.MUTED, fontsize=style.SIZES["label"] + 0.5, parse_math=False)
