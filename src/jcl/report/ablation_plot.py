"""Accuracy against the values of a setting: curves, a heat map of two settings, or one panel per setting."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from jcl.console import pluralize
from jcl.report import style
from jcl.report.study_plots import add_legend
from jcl.runs.json_object import format_value
from jcl.studies.ablation import Point
from jcl.studies.cells import are_numbers, describe, distinct_values, short_name

MAX_CURVES: Final = len(style.PALETTE)
"""More combinations are drawn as a heat map."""
_METRICS: Final = {"linear_top1": "Linear probe", "knn_top1": "kNN"}
_LABELS: Final = {
    "method.num_keys": "number of keys M'",
    "method.covariance_scale": "covariance scale λ",
    "method.temperature": "temperature τ",
    "train.lr": "learning rate",
}
_OFFSET: Final = 0.017  # between curves with error bars, as a fraction of the axis
_LEAST_SPAN: Final = 5.0  # percent on the accuracy axis, so that small differences look small
_PANEL_INCHES: Final = 8.6  # of all panels in a row
_LETTER_INCHES: Final = 0.072
_GAP_INCHES: Final = 0.08  # between tick labels
_MARGIN: Final = 0.05  # on both sides of an axis, as a fraction of its span
_COLORMAP: Final = LinearSegmentedColormap.from_list("shades", ["#eef4f9", "#7fb4d6", style.BLUE, "#003e63"])


def plot_ablation(
    points: Sequence[Point],
    path: Path,
    *,
    data: str = "",
    chance: float | None = None,
    center: Mapping[str, Any] | None = None,
) -> Path:
    """Plot top-1 accuracy of linear probe and kNN against the first setting's values, as a PNG 1500 pixels wide.

    Further settings make one curve per combination, or a heat map if there are many. With a `center`, each setting has
    its own panel, in which the others are at the center. Points are means over seeds, bars one standard deviation or,
    of one seed, the binomial 95 % interval.
    """
    names = list(points[0].values)
    curves: dict[str, list[Point]] = {}
    for point in points:
        curves.setdefault(describe({name: point.values[name] for name in names[1:]}), []).append(point)
    seeds = [len(point.results) for point in points if point.results]
    heat_map = False
    if center is not None and len(names) > 1:
        figure = draw_each_alone(points, center)
    elif heat_map := len(curves) > MAX_CURVES:
        figure = _draw_heat_maps(curves, names[0])
    else:
        figure = _draw_curves(curves, names)
    labels = [_label(name) for name in names]
    title = f"Accuracy against {' and '.join(filter(None, [', '.join(labels[:-1]), labels[-1]]))}"
    parts = [f"top-1 in percent on {style.plain(data, 24)}" if data else "top-1 in percent"]
    count = f"{min(seeds)} to {max(seeds)} seeds" if min(seeds) < max(seeds) else pluralize(max(seeds), "seed")
    bars = "95 % binomial interval" if max(seeds) == 1 else "std of the seeds"
    parts += [count if max(seeds) == 1 else f"mean of {count}", *([] if heat_map else [f"bars: {bars}"])]
    parts += [f"chance {chance:.1f} %"] if chance is not None else []
    failed = sum(point.failed for point in points)
    parts += [f"{pluralize(failed, 'cell')} failed"] if failed else []
    style.write_title(figure, style.plain(title, 90), style.plain("; ".join(parts), 140))
    return style.save(figure, path, follow_links=False)


def _label(name: str) -> str:
    return _LABELS.get(name, short_name(name).replace("_", " "))


def _best(points: Sequence[Point], metric: str) -> Point | None:
    measured = [point for point in points if point.mean(metric) is not None]
    return max(measured, key=lambda point: point.mean(metric) or 0.0, default=None)


def _best_text(points: Sequence[Point], metric: str) -> str:
    best = _best(points, metric)
    return "" if best is None else style.plain(f"best at {describe(best.values)}: {best.mean(metric):.2f} %", 70)


class AxisPositions:
    """Positions of values on an axis: linear or, if tick labels would overlap, logarithmic or evenly spaced."""

    def __init__(self, values: Sequence[Any], inches: float) -> None:
        self._values = distinct_values(values)
        self.ordered = are_numbers(self._values)
        self.scale = "even"
        if self.ordered and self._fits(self._values, inches):
            self.scale = "linear"
        elif self.ordered and min(self._values) > 0 and self._fits([math.log(each) for each in self._values], inches):
            self.scale = "log"
        positions = [self.of(value) for value in self._values]
        span = positions[-1] - positions[0]
        margin = _MARGIN * span if self.ordered and span > 0 else 0.5
        self._ticks, self._limits = positions, (min(positions) - margin, max(positions) + margin)
        self.width = self._limits[1] - self._limits[0]

    def of(self, value: Any) -> float:
        if self.scale == "even":
            return float(self._values.index(value))
        return math.log(value) if self.scale == "log" else float(value)

    def _fits(self, positions: Sequence[float], inches: float) -> bool:
        """Whether neighboring tick labels leave a gap."""
        if len(positions) < 2:
            return True
        scale = inches / ((1 + 2 * _MARGIN) * (positions[-1] - positions[0]))
        lengths = [len(format_value(value)) * _LETTER_INCHES for value in self._values]
        pairs = itertools.pairwise(zip(positions, lengths, strict=True))
        return all((b - a) * scale >= (one + two) / 2 + _GAP_INCHES for (a, one), (b, two) in pairs)

    def label_axis(self, axes: Axes, label: str) -> None:
        axes.xaxis.set_major_locator(FixedLocator(self._ticks))
        axes.xaxis.set_minor_locator(NullLocator())
        limit = max(6, 60 // len(self._ticks))
        axes.set_xticklabels([style.plain(format_value(value), limit) for value in self._values], parse_math=False)
        axes.set_xlim(*self._limits)
        note = {"log": ", log scale", "even": ", evenly spaced" if self.ordered else ""}.get(self.scale, "")
        _set_xlabel(axes, style.plain(f"{label}{note}", 60))


def _set_xlabel(axes: Axes, text: str) -> None:
    axes.set_xlabel(text, color=style.MUTED, fontsize=style.SIZES["label"] + 0.5, labelpad=4, parse_math=False)


def _draw_curves(curves: Mapping[str, Sequence[Point]], names: Sequence[str]) -> Figure:
    """One panel per metric, with a curve for each combination of the further settings."""
    rows = math.ceil(len(curves) / 4) if len(names) > 1 else 0
    height = 4.1 + 0.22 * rows
    figure = style.new_figure(10, height)
    panels = figure.subplots(1, 2)
    top = 1 - (1.15 + 0.22 * rows) / height
    figure.subplots_adjust(left=0.055, right=0.975, top=top, bottom=0.62 / height, wspace=0.14)
    points = [point for curve in curves.values() for point in curve]
    for axes, (metric, title) in zip(panels, _METRICS.items(), strict=True):
        style.format_axes(axes, title, _best_text(points, metric))
        _draw_panel(axes, names[0], [(metric, curve) for curve in curves.values()], _PANEL_INCHES / 2)
    if len(names) > 1:
        add_legend(figure, [(name, _handle(number)) for number, name in enumerate(curves)], columns=4)
    return figure


def draw_each_alone(points: Sequence[Point], center: Mapping[str, Any]) -> Figure:
    """One panel per setting: both metrics over its values, with the other settings at the center."""
    columns = 2 if len(center) in (2, 4) else 3
    rows = math.ceil(len(center) / columns)
    height = 0.95 + 3.2 * rows
    figure = style.new_figure(10, height)
    panels = figure.subplots(rows, columns, squeeze=False)
    bottom, top = 0.58 / height, 1 - 1.42 / height
    figure.subplots_adjust(left=0.05, right=0.985, top=top, bottom=bottom, wspace=0.17, hspace=0.52)
    for axes in panels.flat[len(center) :]:
        axes.set_visible(False)
    for axes, name in zip(panels.flat, center, strict=False):
        line = [p for p in points if all(p.values[other] == v for other, v in center.items() if other != name)]
        best = {title: _best(line, metric) for metric, title in _METRICS.items()}
        found = [f"{title.split()[0]} at {format_value(each.values[name])}" for title, each in best.items() if each]
        subtitle = style.plain(f"best: {', '.join(found)}" if found else "", 46)
        style.format_axes(axes, style.plain(_label(name), 32), subtitle)
        curves = [(metric, line) for metric in _METRICS]
        positions = _draw_panel(axes, name, curves, _PANEL_INCHES / columns)
        if center[name] in [point.values[name] for point in line]:
            axes.axvline(positions.of(center[name]), color=style.MUTED, linewidth=0.9, linestyle=":", zorder=1)
    entries = [(title, _handle(number)) for number, title in enumerate(_METRICS.values())]
    dotted = Line2D([], [], color=style.MUTED, linewidth=1.2, linestyle=":")
    add_legend(figure, [*entries, ("value in the other panels", dotted)], columns=4)
    return figure


def _draw_panel(axes: Axes, name: str, curves: Sequence[tuple[str, Sequence[Point]]], inches: float) -> AxisPositions:
    """Curves of metrics over the values of a setting, shifted so that their error bars do not overlap."""
    positions = AxisPositions([point.values[name] for _, curve in curves for point in curve], inches)
    shift = min(_OFFSET, 2 * _OFFSET / len(curves)) * positions.width
    for number, (metric, curve) in enumerate(curves):
        color, offset = style.PALETTE[number], shift * (number - (len(curves) - 1) / 2)
        measured = [(positions.of(point.values[name]) + offset, point) for point in curve if point.each(metric)]
        measured.sort(key=lambda pair: pair[0])
        x, means = [at for at, _ in measured], [point.mean(metric) or 0.0 for _, point in measured]
        bars = [each for _, point in measured if (each := point.estimate(metric, deviations=1.0)) is not None]
        lengths = [[each.value - each.low for each in bars], [each.high - each.value for each in bars]]
        axes.errorbar(x, means, yerr=lengths, fmt="none", ecolor=color, elinewidth=1.2, capsize=3, zorder=2.5)
        seeds = [(at, value) for at, point in measured for value in point.each(metric) if len(point.results) > 1]
        axes.scatter([at for at, _ in seeds], [value for _, value in seeds], 14, color, alpha=0.4, linewidth=0)
        axes.plot(
            x, means, color=color, linewidth=1.9, linestyle="-" if positions.ordered else "none", marker="o",
            markersize=6.5, zorder=3, markeredgecolor=style.PAPER, markeredgewidth=1.0, clip_on=False,
        )  # fmt: skip
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axes.margins(y=0.12)
    low, high = axes.get_ylim()
    if high - low < _LEAST_SPAN:
        low = min(max(0.0, (low + high - _LEAST_SPAN) / 2), 100 - _LEAST_SPAN)
        axes.set_ylim(low, low + _LEAST_SPAN)
    positions.label_axis(axes, _label(name))
    return positions


def _handle(number: int) -> Line2D:
    return Line2D([], [], color=style.PALETTE[number], linewidth=2.4)


def _draw_heat_maps(curves: Mapping[str, Sequence[Point]], name: str) -> Figure:
    """One map per metric: the first setting's values as columns, one row for each of the `curves`."""
    points = [point for curve in curves.values() for point in curve]
    columns = distinct_values(point.values[name] for point in points)
    height = 1.75 + 0.3 * len(curves)
    figure = style.new_figure(10, height)
    panels = figure.subplots(1, 2)
    left = 0.045 + 0.0058 * min(28, max(map(len, curves)))
    figure.subplots_adjust(left=left, right=0.985, top=1 - 1.15 / height, bottom=0.6 / height, wspace=0.05)
    for axes, (metric, title) in zip(panels, _METRICS.items(), strict=True):
        table = np.full((len(curves), len(columns)), np.nan)
        for row, curve in enumerate(curves.values()):
            for point in curve:
                table[row, columns.index(point.values[name])] = point.mean(metric)  # None becomes NaN
        low, high = (np.nanmin(table), np.nanmax(table)) if np.isfinite(table).any() else (0.0, 1.0)
        high = max(high, low + 1e-9)
        axes.imshow(np.ma.masked_invalid(table), cmap=_COLORMAP, vmin=low, vmax=high, aspect="auto")
        for (row, column), value in np.ndenumerate(table):
            axes.text(
                column, row, f"{value:.1f}" if math.isfinite(value) else "–", ha="center", va="center_baseline",
                color=style.PAPER if (value - low) / (high - low) > 0.5 else style.INK,
                fontsize=min(style.SIZES["label"], 52 / len(columns)),
            )  # fmt: skip
        style.format_axes(axes, title, _best_text(points, metric))
        axes.grid(visible=False)
        axes.set_xticks(
            range(len(columns)), [style.plain(format_value(value), 8) for value in columns], parse_math=False
        )
        axes.set_yticks(range(len(curves)), [style.plain(text, 28) for text in curves], parse_math=False)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        _set_xlabel(axes, _label(name))
    panels[1].tick_params(labelleft=False)
    return figure
