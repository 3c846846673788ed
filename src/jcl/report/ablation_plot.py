"""Accuracy against the values of a setting: a curve, several of them, or a map of all combinations of two."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from jcl.report import style
from jcl.studies.ablation import Point, is_number
from jcl.studies.cells import described, short_name, written

MOST_CURVES: Final = len(style.PALETTE)
"""More would not be told apart and become a map."""
_PANELS: Final = (("linear_top1", "Linear probe"), ("knn_top1", "kNN"))
_LEAST_GAP: Final = 0.045  # between neighbouring values, as a share of the axis; with less their labels touch
_ASIDE: Final = 0.017  # between curves whose bars would cover each other, as a share of the axis
_SYMBOLS: Final = {
    "method.num_keys": "number of keys M'",
    "method.covariance_scale": "covariance scale λ",
    "method.temperature": "temperature τ",
}
_SHADES: Final = LinearSegmentedColormap.from_list("shades", ["#eef4f9", "#7fb4d6", style.BLUE, "#003e63"])


def plot_ablation(points: Sequence[Point], path: Path, *, data: str = "", chance: float | None = None) -> Path:
    """Top-1 of the linear probe and of kNN against the first setting's values, as a PNG 1500 pixels wide.

    Further settings make a curve for each of their combinations, or rows of a map where these are many. Points show
    the mean over seeds, bars one standard deviation, dots the single seeds.
    """
    names = list(points[0].values)
    curves = _curves(points, names)
    seeds = [len(point.results) for point in points if point.results]
    labels = [axis_label(name) for name in names]
    title = f"Accuracy against {' and '.join([', '.join(labels[:-1]), labels[-1]] if labels[1:] else labels)}"
    as_map = len(curves) > MOST_CURVES
    figure = _draw_maps(curves, names) if as_map else _draw_curves(curves, names, several=max(seeds) > 1)
    about = [
        f"top-1 in percent on {style.plain(data, 30)}" if data else "top-1 in percent",
        _about_seeds(seeds, as_map),
    ]
    about += [f"guessing: {chance:.1f} %"] if chance is not None else []
    failed = sum(point.failed for point in points)
    about += [f"{failed} {'cell' if failed == 1 else 'cells'} failed"] if failed else []
    style.write_title(figure, style.plain(title, 90), "; ".join(about))
    return style.save(figure, path)


def axis_label(name: str) -> str:
    return _SYMBOLS.get(name, short_name(name).replace("_", " "))


def _curves(points: Sequence[Point], names: Sequence[str]) -> dict[str, list[Point]]:
    """The points by what their settings but the first are, in words."""
    curves: dict[str, list[Point]] = {}
    for point in points:
        further = {name: point.values[name] for name in names[1:]}
        curves.setdefault(described(further), []).append(point)
    return curves


def _about_seeds(seeds: Sequence[int], as_map: bool) -> str:
    least, most = min(seeds), max(seeds)
    if most == 1:
        return "one seed"
    count = f"{most} seeds" if least == most else f"{least} to {most} seeds"
    return f"mean of {count}" + ("" if as_map else ", bars: one standard deviation, small dots: single seeds")


def _draw_curves(curves: dict[str, list[Point]], names: Sequence[str], several: bool) -> Figure:
    rows = math.ceil(len(curves) / 4) if len(names) > 1 else 0
    height = 4.1 + 0.22 * rows
    figure = style.new_figure(10, height)
    panels = figure.subplots(1, 2)
    top = 1 - (1.15 + 0.22 * rows) / height
    figure.subplots_adjust(left=0.055, right=0.975, top=top, bottom=0.62 / height, wspace=0.14)
    places = _Places([point.values[names[0]] for curve in curves.values() for point in curve])
    for axes, (figure_name, panel_title) in zip(panels, _PANELS, strict=True):
        for number, curve in enumerate(curves.values()):
            step = min(_ASIDE, 2 * _ASIDE / len(curves)) if several else 0.0
            look = _Look(style.PALETTE[number], step * (number - (len(curves) - 1) / 2), step)
            _draw_curve(axes, curve, figure_name, names[0], places, look)
        style.dress(axes, panel_title, _highest([point for curve in curves.values() for point in curve], figure_name))
        axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
        axes.margins(y=0.12)
        places.dress(axes, axis_label(names[0]))
    if len(names) > 1:
        _legend(figure, list(curves), height)
    return figure


@dataclass(frozen=True)
class _Look:
    """A curve's colour, and by what share of the axis it and, beside it, its single seeds stand aside; 0: without."""

    colour: str
    aside: float
    seeds_aside: float


def _draw_curve(axes: Axes, curve: Sequence[Point], figure: str, name: str, places: _Places, look: _Look) -> None:
    measured = [point for point in curve if point.mean(figure) is not None]
    where = [places.of(point.values[name]) + look.aside * places.width for point in measured]
    means = [point.mean(figure) or 0.0 for point in measured]
    if look.seeds_aside:
        spreads = [point.spread(figure) or 0.0 for point in measured]
        axes.errorbar(
            where, means, yerr=spreads, fmt="none", ecolor=look.colour, elinewidth=1.2, capsize=3, capthick=1.2,
            zorder=2.5,
        )  # fmt: skip
        for place, point in zip(where, measured, strict=True):
            seeds = point.each(figure)
            beside = [place + look.seeds_aside * places.width] * len(seeds)
            axes.plot(beside, seeds, "o", color=look.colour, alpha=0.4, markersize=3.6, markeredgewidth=0)
    axes.plot(
        where, means, color=look.colour, linewidth=1.9, linestyle="-" if places.ordered else "none", marker="o",
        markersize=6.5, zorder=3, markeredgecolor=style.PAPER, markeredgewidth=1.0, clip_on=False,
    )  # fmt: skip


def _highest(points: Sequence[Point], figure: str) -> str:
    """Where the panel has its highest point, in words."""
    measured = [point for point in points if point.mean(figure) is not None]
    if not measured:
        return "not measured"
    highest = max(measured, key=lambda point: point.mean(figure) or 0.0)
    return style.plain(f"highest at {described(highest.values)}: {highest.mean(figure):.2f} %", 70)


class _Places:
    """Where values lie on an axis: to scale, or on a logarithmic one, or evenly where neither tells them apart."""

    def __init__(self, values: Sequence[Any]) -> None:
        distinct: list[Any] = []
        for value in values:
            if value not in distinct:
                distinct.append(value)
        self.ordered = all(is_number(value) for value in distinct)
        self._values = sorted(distinct) if self.ordered else distinct
        self.even, self.logarithmic = False, False
        if self.ordered and _told_apart(self._values):
            return
        self.logarithmic = self.ordered and min(self._values) > 0 and _told_apart(list(map(math.log, self._values)))
        self.even = not self.logarithmic

    def of(self, value: Any) -> float:
        if self.even:
            return float(self._values.index(value))
        return math.log(value) if self.logarithmic else float(value)

    @property
    def width(self) -> float:
        """Of the axis, with room at its ends."""
        marks = [self.of(value) for value in self._values]
        return max(marks) - min(marks) + 2 * self._room

    @property
    def _room(self) -> float:
        span = self.of(self._values[-1]) - self.of(self._values[0])
        return 0.05 * span if self.ordered and span > 0 else 0.5

    def dress(self, axes: Axes, label: str) -> None:
        """Tick the values themselves."""
        marks = [self.of(value) for value in self._values]
        axes.xaxis.set_major_locator(FixedLocator(marks))
        axes.xaxis.set_minor_locator(NullLocator())
        limit = max(6, 60 // len(marks))
        axes.set_xticklabels([style.plain(written(value), limit) for value in self._values], parse_math=False)
        axes.set_xlim(min(marks) - self._room, max(marks) + self._room)
        scale = ", logarithmic" if self.logarithmic else ", evenly spaced" if self.even and self.ordered else ""
        text = style.plain(f"{label}{scale}", 60)
        axes.set_xlabel(text, color=style.MUTED, fontsize=style.SIZES["label"] + 0.5, labelpad=4, parse_math=False)


def _told_apart(places: Sequence[float]) -> bool:
    if len(places) < 2:
        return True
    gaps = np.diff(np.asarray(places, dtype=np.float64))
    return bool(gaps.min() >= _LEAST_GAP * (places[-1] - places[0]))


def _legend(figure: Figure, names: Sequence[str], height: float) -> None:
    handles = [Line2D([], [], color=colour, linewidth=2.4) for colour in style.PALETTE[: len(names)]]
    legend = figure.legend(
        handles, [f"curve {number}" for number in range(len(names))], loc="upper left", frameon=False,
        bbox_to_anchor=(0.022, 1 - 0.68 / height), ncols=4, borderaxespad=0, borderpad=0, handlelength=1.8,
        fontsize=style.SIZES["label"] + 0.5, labelcolor=style.INK,
    )  # fmt: skip
    # Written afterwards, since a label that begins with an underscore would be taken as a wish to be hidden.
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set_parse_math(False)
        text.set_text(style.plain(name, 32))


def _draw_maps(curves: dict[str, list[Point]], names: Sequence[str]) -> Figure:
    """Both figures of all combinations, each as a grid of shades with the numbers in it."""
    columns: list[Any] = []
    for curve in curves.values():
        columns += [point.values[names[0]] for point in curve if point.values[names[0]] not in columns]
    if all(is_number(value) for value in columns):
        columns.sort()
    height = 1.75 + 0.3 * len(curves)
    figure = style.new_figure(10, height)
    panels = figure.subplots(1, 2)
    left = 0.045 + 0.0058 * min(28, max(map(len, curves)))
    figure.subplots_adjust(left=left, right=0.985, top=1 - 1.15 / height, bottom=0.6 / height, wspace=0.05)
    for axes, (figure_name, panel_title) in zip(panels, _PANELS, strict=True):
        table = np.full((len(curves), len(columns)), np.nan)
        for row, curve in enumerate(curves.values()):
            for point in curve:
                mean = point.mean(figure_name)
                table[row, columns.index(point.values[names[0]])] = np.nan if mean is None else mean
        _draw_map(axes, table)
        style.dress(axes, panel_title, _highest([point for curve in curves.values() for point in curve], figure_name))
        axes.grid(visible=False)
        axes.set_xticks(range(len(columns)), [style.plain(written(value), 8) for value in columns], parse_math=False)
        axes.set_yticks(range(len(curves)), [style.plain(text, 28) for text in curves], parse_math=False)
        axes.tick_params(length=0)
        for spine in axes.spines.values():
            spine.set_visible(False)
        axes.set_xlabel(axis_label(names[0]), color=style.MUTED, fontsize=style.SIZES["label"] + 0.5, parse_math=False)
    panels[1].tick_params(labelleft=False)
    return figure


def _draw_map(axes: Axes, table: np.ndarray[Any, np.dtype[np.float64]]) -> None:
    low, high = (float(np.nanmin(table)), float(np.nanmax(table))) if np.isfinite(table).any() else (0.0, 1.0)
    axes.imshow(np.ma.masked_invalid(table), cmap=_SHADES, vmin=low, vmax=max(high, low + 1e-9), aspect="auto")
    size = min(style.SIZES["label"], 52 / table.shape[1])
    for (row, column), value in np.ndenumerate(table):
        bright = (value - low) / max(high - low, 1e-9) > 0.5
        text = f"{value:.1f}" if math.isfinite(value) else "–"
        colour = style.PAPER if bright else style.INK
        axes.text(column, row, text, ha="center", va="center_baseline", color=colour, fontsize=size)
