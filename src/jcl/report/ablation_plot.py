"""Accuracy against the values of a setting: curves, a heat map of two settings, or one panel per setting."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from jcl.console import join_words, pluralize
from jcl.report import style
from jcl.runs.json_object import format_value, is_number
from jcl.studies.ablation import Point
from jcl.studies.cells import describe, distinct_values, short_name

MAX_CURVES: Final = len(style.PALETTE)  # more combinations are drawn as a heat map
_METRICS: Final = {"linear_top1": "Linear probe", "knn_top1": "kNN"}
_LABELS: Final = {
    "method.num_keys": "number of keys M'",
    "method.covariance_scale": "covariance scale λ",
    "method.temperature": "temperature τ",
    "train.lr": "learning rate",
}
_OFFSET: Final = 0.017  # between curves with error bars, as a fraction of the axis
_LEAST_SPAN: Final = 5.0  # percent on the accuracy axis, so that small differences look small
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
    count = f"{min(seeds)} to {max(seeds)} seeds" if min(seeds) < max(seeds) else pluralize(max(seeds), "seed")
    parts = [f"top-1 in percent on {style.plain(data, 24)}" if data else "top-1 in percent"]
    parts.append(count if max(seeds) == 1 else f"mean of {count}")
    center = center if len(names) > 1 else None
    if center is None and len(curves) > MAX_CURVES:
        figure = _draw_heat_maps(curves, names[0])
    else:
        figure = _draw_curves(curves, names) if center is None else draw_each_alone(points, center)
        parts.append(f"bars: {'95 % binomial interval' if max(seeds) == 1 else 'std of the seeds'}")
    if chance is not None:
        parts.append(f"chance {chance:.1f} %")
    if failed := sum(point.failed for point in points):
        parts.append(f"{pluralize(failed, 'cell')} failed")
    title = f"Accuracy against {join_words([_label(name) for name in names])}"
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


def _draw_curves(curves: Mapping[str, Sequence[Point]], names: Sequence[str]) -> Figure:
    """One panel per metric, with a curve for each combination of the further settings."""
    rows = math.ceil(len(curves) / 4) if len(names) > 1 else 0
    figure, panels = style.new_panels(10, 4.1 + 0.22 * rows, header=1.15 + 0.22 * rows)
    points = [point for curve in curves.values() for point in curve]
    for axes, (metric, title) in zip(panels, _METRICS.items(), strict=True):
        style.format_axes(axes, title, _best_text(points, metric))
        _draw_panel(axes, names[0], [(metric, curve) for curve in curves.values()])
    if len(names) > 1:
        style.add_legend(figure, {name: _handle(number) for number, name in enumerate(curves)}, columns=4)
    return figure


def draw_each_alone(points: Sequence[Point], center: Mapping[str, Any]) -> Figure:
    """One panel per setting: both metrics over its values, with the other settings at the center."""
    columns = 2 if len(center) in (2, 4) else 3
    rows = math.ceil(len(center) / columns)
    figure, panels = style.new_panels(10, 0.95 + 3.2 * rows, rows=rows, columns=columns)
    for axes in panels[len(center) :]:
        axes.set_visible(False)
    for axes, name in zip(panels, center, strict=False):
        line = [p for p in points if all(p.values[other] == v for other, v in center.items() if other != name)]
        best = {title: _best(line, metric) for metric, title in _METRICS.items()}
        found = [f"{title.split()[0]} at {format_value(each.values[name])}" for title, each in best.items() if each]
        subtitle = style.plain(f"best: {', '.join(found)}" if found else "", 46)
        style.format_axes(axes, style.plain(_label(name), 32), subtitle)
        values = _draw_panel(axes, name, [(metric, line) for metric in _METRICS])
        if center[name] in values:
            axes.axvline(values.index(center[name]), color=style.MUTED, linewidth=0.9, linestyle=":", zorder=1)
    entries = {title: _handle(number) for number, title in enumerate(_METRICS.values())}
    entries["value in the other panels"] = Line2D([], [], color=style.MUTED, linewidth=1.2, linestyle=":")
    style.add_legend(figure, entries, columns=4)
    return figure


def _draw_panel(axes: Axes, name: str, curves: Sequence[tuple[str, Sequence[Point]]]) -> list[Any]:
    """Curves over the values of a setting, shifted so that error bars do not overlap; returns the values."""
    values = distinct_values(point.values[name] for _, curve in curves for point in curve)
    shift = min(_OFFSET, 2 * _OFFSET / len(curves)) * len(values)
    for number, (metric, curve) in enumerate(curves):
        color, offset = style.PALETTE[number], shift * (number - (len(curves) - 1) / 2)
        measured = [(values.index(point.values[name]) + offset, point) for point in curve if point.each(metric)]
        measured.sort(key=lambda pair: pair[0])
        x, means = [at for at, _ in measured], [point.mean(metric) or 0.0 for _, point in measured]
        bars = [each for _, point in measured if (each := point.estimate(metric, deviations=1.0)) is not None]
        lengths = [[each.value - each.low for each in bars], [each.high - each.value for each in bars]]
        axes.errorbar(x, means, yerr=lengths, fmt="none", ecolor=color, elinewidth=1.2, capsize=3, zorder=2.5)
        seeds = [(at, value) for at, point in measured for value in point.each(metric) if len(point.results) > 1]
        axes.scatter([at for at, _ in seeds], [value for _, value in seeds], 14, color, alpha=0.4, linewidth=0)
        axes.plot(
            x, means, color=color, linewidth=1.9, linestyle="-" if all(map(is_number, values)) else "none", marker="o",
            markersize=6.5, zorder=3, markeredgecolor=style.PAPER, markeredgewidth=1.0, clip_on=False,
        )  # fmt: skip
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axes.margins(y=0.12)
    low, high = axes.get_ylim()
    if high - low < _LEAST_SPAN:
        low = min(max(0.0, (low + high - _LEAST_SPAN) / 2), 100 - _LEAST_SPAN)
        axes.set_ylim(low, low + _LEAST_SPAN)
    limit = max(6, 60 // len(values))
    labels = [style.plain(format_value(value), limit) for value in values]
    axes.set_xticks(range(len(values)), labels, parse_math=False)
    axes.set_xlim(-0.5, len(values) - 0.5)
    style.label_axes(axes, style.plain(_label(name), 60))
    return values


def _handle(number: int) -> Line2D:
    return Line2D([], [], color=style.PALETTE[number], linewidth=2.4)


def _draw_heat_maps(curves: Mapping[str, Sequence[Point]], name: str) -> Figure:
    """One map per metric: the first setting's values as columns, one row for each of the `curves`."""
    points = [point for curve in curves.values() for point in curve]
    columns = distinct_values(point.values[name] for point in points)
    figure, panels = style.new_panels(10, 1.75 + 0.3 * len(curves), header=1.15)
    figure.subplots_adjust(left=0.045 + 0.0058 * min(28, max(map(len, curves))), wspace=0.05)
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
        labels = [style.plain(format_value(value), 8) for value in columns]
        axes.set_xticks(range(len(columns)), labels, parse_math=False)
        axes.set_yticks(range(len(curves)), [style.plain(text, 28) for text in curves], parse_math=False)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        style.label_axes(axes, _label(name))
    panels[1].tick_params(labelleft=False)
    return figure
