"""Curves over the values of a setting: two panels for two accuracies, or a panel for each setting."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from jcl.report import style
from jcl.report.ablation_words import ACCURACIES, axis_label, highest, highest_of_each, panel_title
from jcl.report.places import HALF_A_FIGURE, AxisPositions
from jcl.studies.ablation import Point

_ASIDE: Final = 0.017  # between curves whose bars would cover each other, as a share of the axis
_DOTTED: Final = (0, (2, 3))


def draw_curves(curves: dict[str, list[Point]], names: Sequence[str], several: bool) -> Figure:
    """A panel for each accuracy; `curves` are the points by the values of the settings but the first, in words."""
    rows = math.ceil(len(curves) / 4) if len(names) > 1 else 0
    height = 4.1 + 0.22 * rows
    figure = style.new_figure(10, height)
    panels = figure.subplots(1, 2)
    top = 1 - (1.15 + 0.22 * rows) / height
    figure.subplots_adjust(left=0.055, right=0.975, top=top, bottom=0.62 / height, wspace=0.14)
    points = [point for curve in curves.values() for point in curve]
    places = AxisPositions([point.values[names[0]] for point in points])
    for axes, (accuracy, title) in zip(panels, ACCURACIES, strict=True):
        for number, curve in enumerate(curves.values()):
            _draw_curve(axes, curve, accuracy, names[0], places, _look(number, len(curves), several))
        _dress(axes, title, highest(points, accuracy))
        places.dress(axes, axis_label(names[0]))
    if len(names) > 1:
        _legend(figure, [(name, _curve_handle(number)) for number, name in enumerate(curves)], height)
    return figure


def draw_each_alone(points: Sequence[Point], centre: Mapping[str, Any], several: bool) -> Figure:
    """A panel for each setting: the linear probe and kNN over its values, the other settings at the centre."""
    abreast = {2: 2, 4: 2}.get(len(centre), 3)
    rows = math.ceil(len(centre) / abreast)
    height = 0.95 + 3.2 * rows
    figure = style.new_figure(10, height)
    grid = figure.subplots(rows, abreast, squeeze=False)
    bottom, top = 0.58 / height, 1 - 1.42 / height
    figure.subplots_adjust(left=0.05, right=0.985, top=top, bottom=bottom, wspace=0.17, hspace=0.52)
    for axes in grid.flat[len(centre) :]:
        axes.set_visible(False)
    for axes, name in zip(grid.flat, centre, strict=False):
        line = [point for point in points if on_line(point, centre, name)]
        places = AxisPositions([point.values[name] for point in line], HALF_A_FIGURE * 2 / abreast)
        line.sort(key=lambda point: places.of(point.values[name]))
        for number, (accuracy, _) in enumerate(ACCURACIES):
            _draw_curve(axes, line, accuracy, name, places, _look(number, len(ACCURACIES), several))
        _dress(axes, panel_title(name), highest_of_each(line, name))
        if centre[name] in [point.values[name] for point in line]:
            axes.axvline(places.of(centre[name]), color=style.MUTED, linewidth=0.9, linestyle=_DOTTED, zorder=1)
        places.dress(axes, axis_label(name))
    entries = [(title, _curve_handle(number)) for number, (_, title) in enumerate(ACCURACIES)]
    dotted = Line2D([], [], color=style.MUTED, linewidth=1.2, linestyle=_DOTTED)
    _legend(figure, [*entries, ("its value in the other panels", dotted)], height)
    return figure


def on_line(point: Point, centre: Mapping[str, Any], name: str) -> bool:
    """Whether a point differs from the centre in nothing but one setting."""
    return all(point.values[other] == value for other, value in centre.items() if other != name)


@dataclass(frozen=True)
class _Look:
    """A curve's colour, and by what share of the axis it and, beside it, its single seeds stand aside; 0: without."""

    colour: str
    aside: float
    seeds_aside: float


def _look(number: int, curves: int, several: bool) -> _Look:
    """Of one of so many curves in a panel; without several seeds there are no bars that could cover each other."""
    step = min(_ASIDE, 2 * _ASIDE / curves) if several else 0.0
    return _Look(style.PALETTE[number], step * (number - (curves - 1) / 2), step)


def _draw_curve(
    axes: Axes, curve: Sequence[Point], accuracy: str, name: str, places: AxisPositions, look: _Look
) -> None:
    measured = [point for point in curve if point.mean(accuracy) is not None]
    where = [places.of(point.values[name]) + look.aside * places.width for point in measured]
    means = [point.mean(accuracy) or 0.0 for point in measured]
    if look.seeds_aside:
        spreads = [point.spread(accuracy) or 0.0 for point in measured]
        axes.errorbar(
            where, means, yerr=spreads, fmt="none", ecolor=look.colour, elinewidth=1.2, capsize=3, capthick=1.2,
            zorder=2.5,
        )  # fmt: skip
        for place, point in zip(where, measured, strict=True):
            seeds = point.each(accuracy)
            beside = [place + look.seeds_aside * places.width] * len(seeds)
            axes.plot(beside, seeds, "o", color=look.colour, alpha=0.4, markersize=3.6, markeredgewidth=0)
    axes.plot(
        where, means, color=look.colour, linewidth=1.9, linestyle="-" if places.ordered else "none", marker="o",
        markersize=6.5, zorder=3, markeredgecolor=style.PAPER, markeredgewidth=1.0, clip_on=False,
    )  # fmt: skip


def _dress(axes: Axes, title: str, finding: str) -> None:
    style.dress(axes, title, finding)
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axes.margins(y=0.12)


def _curve_handle(number: int) -> Line2D:
    return Line2D([], [], color=style.PALETTE[number], linewidth=2.4)


def _legend(figure: Figure, entries: Sequence[tuple[str, Line2D]], height: float) -> None:
    legend = figure.legend(
        [handle for _, handle in entries], [f"entry {number}" for number in range(len(entries))], loc="upper left",
        bbox_to_anchor=(0.022, 1 - 0.68 / height), ncols=4, borderaxespad=0, borderpad=0, handlelength=1.8,
        fontsize=style.SIZES["label"] + 0.5, labelcolor=style.INK, frameon=False,
    )  # fmt: skip
    # Written afterwards, since a label that begins with an underscore would be taken as a wish to be hidden.
    for text, (name, _) in zip(legend.get_texts(), entries, strict=True):
        text.set_parse_math(False)
        text.set_text(style.plain(name, 32))
