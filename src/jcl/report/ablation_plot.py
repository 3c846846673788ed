"""Accuracy against the values of a setting: a curve, several, a map of all combinations of two, or a panel for each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from jcl.report import style
from jcl.report.places import Places
from jcl.studies.ablation import Point, is_number
from jcl.studies.cells import described, short_name
from jcl.train.json_object import written

MOST_CURVES: Final = len(style.PALETTE)
"""More would not be told apart and become a map."""
_PANELS: Final = (("linear_top1", "Linear probe"), ("knn_top1", "kNN"))
_PANELS_ABREAST: Final = 3
_ASIDE: Final = 0.017  # between curves whose bars would cover each other, as a share of the axis
_SYMBOLS: Final = {
    "method.num_keys": "number of keys M'",
    "method.covariance_scale": "covariance scale λ",
    "method.temperature": "temperature τ",
}
_SHADES: Final = LinearSegmentedColormap.from_list("shades", ["#eef4f9", "#7fb4d6", style.BLUE, "#003e63"])


def plot_ablation(
    points: Sequence[Point],
    path: Path,
    *,
    data: str = "",
    chance: float | None = None,
    centre: Mapping[str, Any] | None = None,
) -> Path:
    """Top-1 of the linear probe and of kNN against the first setting's values, as a PNG 1500 pixels wide.

    Further settings make a curve for each of their combinations, or rows of a map where these are many. With the
    values of a `centre`, each setting has a panel of its own, in which the others are at the centre. Points show
    the mean over seeds, bars one standard deviation, dots the single seeds.
    """
    names = list(points[0].values)
    curves = _curves(points, names)
    seeds = [len(point.results) for point in points if point.results]
    labels = [axis_label(name) for name in names]
    title = f"Accuracy against {' and '.join([', '.join(labels[:-1]), labels[-1]] if labels[1:] else labels)}"
    as_map = centre is None and len(curves) > MOST_CURVES
    if centre is not None and len(names) > 1:
        figure = _draw_each_alone(points, centre, several=max(seeds) > 1)
    else:
        figure = _draw_maps(curves, names) if as_map else _draw_curves(curves, names, several=max(seeds) > 1)
    about = [
        f"top-1 in percent on {style.plain(data, 30)}" if data else "top-1 in percent",
        _about_seeds(seeds, as_map),
    ]
    about += ["dotted: the value in the other panels"] if centre is not None else []
    about += [f"guessing: {chance:.1f} %"] if chance is not None else []
    failed = sum(point.failed for point in points)
    about += [f"{failed} {'cell' if failed == 1 else 'cells'} failed"] if failed else []
    style.write_title(figure, style.plain(title, 90), "; ".join(about))
    return style.save(figure, path)


def axis_label(name: str) -> str:
    return _SYMBOLS.get(name, short_name(name).replace("_", " "))


def _beginning(text: str) -> str:
    """As a title begins; the letters behind, which may be symbols, stay."""
    return text[:1].upper() + text[1:]


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
    places = Places([point.values[names[0]] for curve in curves.values() for point in curve])
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


def _draw_curve(axes: Axes, curve: Sequence[Point], figure: str, name: str, places: Places, look: _Look) -> None:
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


def _draw_each_alone(points: Sequence[Point], centre: Mapping[str, Any], several: bool) -> Figure:
    """A panel for each setting: the linear probe and kNN over its values, the other settings at the centre."""
    rows = math.ceil(len(centre) / _PANELS_ABREAST)
    height = 0.95 + 3.2 * rows
    figure = style.new_figure(10, height)
    grid = figure.subplots(rows, _PANELS_ABREAST, squeeze=False)
    bottom, top = 0.58 / height, 1 - 1.42 / height
    figure.subplots_adjust(left=0.05, right=0.985, top=top, bottom=bottom, wspace=0.17, hspace=0.52)
    for axes in grid.flat[len(centre) :]:
        axes.set_visible(False)
    for axes, name in zip(grid.flat, centre, strict=False):
        line = [point for point in points if on_line(point, centre, name)]
        places = Places([point.values[name] for point in line])
        line.sort(key=lambda point: places.of(point.values[name]))
        for number, (figure_name, _) in enumerate(_PANELS):
            step = _ASIDE if several else 0.0
            _draw_curve(
                axes, line, figure_name, name, places, _Look(style.PALETTE[number], step * (number - 0.5), step)
            )
        style.dress(axes, style.plain(_beginning(axis_label(name)), 32), _highest_of_each(line, name))
        axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
        axes.margins(y=0.12)
        if centre[name] in [point.values[name] for point in line]:
            axes.axvline(places.of(centre[name]), color=style.MUTED, linewidth=0.9, linestyle=(0, (2, 3)), zorder=1)
        places.dress(axes, axis_label(name))
    _legend(figure, [title for _, title in _PANELS], height)
    return figure


def on_line(point: Point, centre: Mapping[str, Any], name: str) -> bool:
    """Whether a point differs from the centre in nothing but one setting."""
    return all(point.values[other] == value for other, value in centre.items() if other != name)


def _highest_of_each(line: Sequence[Point], name: str) -> str:
    """Where each of the curves has its highest point, in words."""
    found = []
    for figure, title in _PANELS:
        measured = [point for point in line if point.mean(figure) is not None]
        if measured:
            highest = max(measured, key=lambda point: point.mean(figure) or 0.0)
            found.append(f"{title.split()[0]} {highest.mean(figure):.2f} at {written(highest.values[name])}")
    return style.plain(f"highest: {', '.join(found)}", 50) if found else "not measured"


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
