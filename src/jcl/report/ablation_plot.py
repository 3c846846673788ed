"""Accuracy against the values of settings: one panel per metric, or one for each setting that is varied alone."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from jcl.console import join_words, pluralize
from jcl.report import style
from jcl.runs.json_object import format_value, is_number
from jcl.studies.ablation import Point
from jcl.studies.cells import describe, distinct_values, short_name

_METRICS: Final = {"linear_top1": "Linear probe", "knn_top1": "kNN"}
_LABELS: Final = {
    "method.num_keys": "number of keys M'",
    "method.covariance_scale": "covariance scale λ",
    "method.temperature": "temperature τ",
    "train.lr": "learning rate",
}
_OFFSET: Final = 0.017  # between curves with error bars, as a fraction of the axis
_LEAST_SPAN: Final = 5.0  # percent on the accuracy axis, so that small differences look small


def plot_ablation(
    points: Sequence[Point],
    path: Path,
    *,
    data: str = "",
    chance: float | None = None,
    center: Mapping[str, Any] | None = None,
) -> Path:
    """Plot top-1 accuracy of linear probe and kNN against the first setting's values, as a PNG 1500 pixels wide.

    Further settings make one curve per combination. With a `center`, each setting has its own panel, in which the
    others are at the center. Points are means over seeds, bars one standard deviation or, of one seed, the binomial
    95 % interval.
    """
    names = list(points[0].values)
    seeds = [len(point.results) for point in points if point.results]
    count = f"{min(seeds)} to {max(seeds)} seeds" if min(seeds) < max(seeds) else pluralize(max(seeds), "seed")
    parts = [f"top-1 in percent on {style.plain(data, 24)}" if data else "top-1 in percent"]
    parts.append(count if max(seeds) == 1 else f"mean of {count}")
    bars = ["std of the seeds"] * (max(seeds) > 1) + ["95 % binomial interval of one seed"] * (min(seeds) == 1)
    parts.append(f"bars: {', '.join(bars)}")
    if chance is not None:
        parts.append(f"chance {chance:.1f} %")
    if failed := sum(point.failed for point in points):
        parts.append(f"{pluralize(failed, 'cell')} failed")
    figure = draw_curves(points) if center is None or len(names) == 1 else draw_each_alone(points, center)
    title = f"Accuracy against {join_words([_label(name) for name in names])}"
    style.write_title(figure, style.plain(title, 90), style.plain("; ".join(parts), 140))
    return style.save(figure, path, follow_links=False)


def _label(name: str) -> str:
    return _LABELS.get(name, short_name(name).replace("_", " "))


def _best(points: Sequence[Point], metric: str) -> Point | None:
    measured = [point for point in points if point.mean(metric) is not None]
    return max(measured, key=lambda point: point.mean(metric) or 0.0, default=None)


def draw_curves(points: Sequence[Point]) -> Figure:
    """One panel per metric, with a curve for each combination of the further settings."""
    name, *others = points[0].values
    curves: dict[str, list[Point]] = {}
    for point in points:
        curves.setdefault(describe({other: point.values[other] for other in others}), []).append(point)
    rows = math.ceil(len(curves) / 4) if others else 0
    figure, panels = style.new_panels(10, 4.1 + 0.22 * rows, header=1.15 + 0.22 * rows)
    for axes, (metric, title) in zip(panels, _METRICS.items(), strict=True):
        best = _best(points, metric)
        found = "" if best is None else f"best at {describe(best.values)}: {best.mean(metric):.2f} %"
        style.format_axes(axes, title, style.plain(found, 70))
        _draw_panel(axes, name, {label: (metric, curve) for label, curve in curves.items()})
    if others:
        style.add_legend(figure, columns=4)
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
        values = _draw_panel(axes, name, {title: (metric, line) for metric, title in _METRICS.items()})
        look: dict[str, Any] = {"color": style.MUTED, "linewidth": 0.9, "linestyle": ":", "zorder": 1}
        axes.axvline(values.index(center[name]), label="value in the other panels", **look)
    style.add_legend(figure, columns=4)
    return figure


def _bar(point: Point, metric: str) -> tuple[float, float]:
    """The lengths below and above the point: a standard deviation of the seeds or, of one seed, the 95 % interval."""
    if (spread := point.spread(metric)) is not None:
        return spread, spread
    found = point.estimate(metric)
    return (0.0, 0.0) if found is None else (found.value - found.low, found.high - found.value)


def _draw_panel(axes: Axes, name: str, curves: Mapping[str, tuple[str, Sequence[Point]]]) -> list[Any]:
    """Curves over the values of a setting, shifted so that error bars do not overlap; returns the values."""
    values = distinct_values(point.values[name] for _, curve in curves.values() for point in curve)
    shift = min(_OFFSET, 2 * _OFFSET / len(curves)) * len(values)
    shades = colormaps["viridis"]  # for more curves than the palette has colors
    many = [to_hex(shades(number / len(curves))) for number in range(len(curves))]
    colors = style.PALETTE if len(curves) <= len(style.PALETTE) else many
    for number, (label, (metric, curve)) in enumerate(curves.items()):
        color = colors[number]
        offset = shift * (number - (len(curves) - 1) / 2)
        measured = [(values.index(point.values[name]) + offset, point) for point in curve if point.each(metric)]
        measured.sort(key=lambda pair: pair[0])
        x, means = [at for at, _ in measured], [point.mean(metric) or 0.0 for _, point in measured]
        bars = [_bar(point, metric) for _, point in measured]
        lengths = [[low for low, _ in bars], [high for _, high in bars]]
        axes.errorbar(x, means, yerr=lengths, fmt="none", ecolor=color, elinewidth=1.2, capsize=3, zorder=2.5)
        seeds = [(at, value) for at, point in measured for value in point.each(metric) if len(point.results) > 1]
        axes.scatter([at for at, _ in seeds], [value for _, value in seeds], 14, color, alpha=0.4, linewidth=0)
        axes.plot(
            x, means, color=color, linewidth=1.9, linestyle="-" if all(map(is_number, values)) else "none", marker="o",
            label=label, markersize=6.5, zorder=3, markeredgecolor=style.PAPER, markeredgewidth=1.0, clip_on=False,
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
