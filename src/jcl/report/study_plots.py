"""Plots of the studies: similarity of views (Figure 3), tightness of the bound, and cost of a step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from jcl.console import pluralize
from jcl.core.registry import METHODS
from jcl.report import style
from jcl.studies.bound import BoundRow, GaussianCase, Normality, RunBounds
from jcl.studies.cost import BASELINE, CostReport, StepCost
from jcl.studies.distribution import ViewSpread, paired_shares

_DASHES = {"multi-key": "--", BASELINE: ":"}  # vanilla multi-key usually coincides with JCL
_POINTS: dict[str, Any] = {"linewidth": 1.9, "marker": "o", "markersize": 4.5, "markeredgecolor": style.PAPER}
_MAX_BINS = 80
_MAX_PANELS = 4  # in each direction
Values = NDArray[np.float64]


def add_legend(figure: Figure, entries: Sequence[tuple[str, Artist]], *, columns: int) -> None:
    """A legend below the title, at the left."""
    width, height = figure.get_size_inches()
    legend = figure.legend(
        [handle for _, handle in entries], [style.plain(name, 32) for name, _ in entries], loc="upper left",
        bbox_to_anchor=(0.22 / width, 1 - 0.7 / height), ncols=columns, frameon=False, borderaxespad=0, borderpad=0,
        handlelength=2.0, columnspacing=1.6, fontsize=style.SIZES["label"] + 0.5, labelcolor=style.INK,
    )  # fmt: skip
    for text in legend.get_texts():
        text.set_parse_math(False)


def _label(axes: Axes, x: str, y: str = "") -> None:
    axes.set_xlabel(x, color=style.MUTED, fontsize=style.SIZES["label"], labelpad=2)
    axes.set_ylabel(y, color=style.MUTED, fontsize=style.SIZES["label"], labelpad=2)


def _histogram(axes: Axes, values: Values, edges: Values, color: str) -> Values:
    """Draws and returns the percentage of values in each bin."""
    shares: Values = np.histogram(values, edges)[0] / len(values) * 100
    axes.stairs(shares, edges, fill=True, facecolor=to_rgba(color, 0.27), linewidth=0)
    axes.stairs(shares, edges, color=color, linewidth=1.5)
    return shares


def plot_spreads(spreads: Mapping[str, ViewSpread], path: Path, *, subtitle: str = "") -> Path:
    """Histograms of similarity and variance of each image's views, as a PNG 1500 pixels wide."""
    figure = style.new_figure(10, 4.3)
    left, right = figure.subplots(1, 2)
    figure.subplots_adjust(left=0.06, right=0.975, top=0.7, bottom=0.13, wspace=0.16)
    similarity = {name: spread.similarity.numpy() for name, spread in spreads.items()}
    variance = {name: spread.variance.numpy() for name, spread in spreads.items()}
    _draw_spreads(left, similarity, "Similarity of an image's views", "mean cosine similarity of all pairs of views")
    _draw_spreads(right, variance, "Variance of an image's views", "mean variance of a coordinate of the unit feature")
    title = "Similarity of the views of an image"
    if len(spreads) == 2:
        (name, first), (other_name, other) = spreads.items()
        share, _ = paired_shares(first, other)
        names = f"{style.plain(name, 24)} than {style.plain(other_name, 24)}"
        title = f"Views are more similar to {names} on {share:.0f} % of images"
    style.write_title(figure, title, style.plain(subtitle, 150))
    return style.save(figure, path)


def _draw_spreads(axes: Axes, values: Mapping[str, Values], title: str, label: str) -> None:
    edges = _bin_edges(list(values.values()))
    peaks = []
    for (name, own), color in zip(values.items(), style.colours_for(list(values)), strict=True):
        peaks.append((float(np.median(own)), float(_histogram(axes, own, edges, color).max()), name, color))
    highest = max(peak for _, peak, _, _ in peaks)
    for number, (median, _, name, color) in enumerate(sorted(peaks)):
        # Names are on the outer side of their medians, the outermost lowest, so that no line crosses a name.
        at_left = number < len(peaks) / 2
        level = highest * (1.06 + 0.09 * (number if at_left else len(peaks) - 1 - number))
        axes.plot([median, median], [0, level], color=color, linewidth=1.2, linestyle="--")
        axes.annotate(
            style.plain(name, 24), (median, level), (-4 if at_left else 4, 0), textcoords="offset points",
            ha="right" if at_left else "left", va="top", color=style.INK, fontsize=style.SIZES["label"],
            fontweight="bold", parse_math=False,
        )  # fmt: skip
    medians = ", ".join(f"{median:.4g} ({style.plain(name, 14)})" for median, _, name, _ in peaks)
    style.format_axes(axes, title, f"medians {medians}")
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(0, highest * (1.1 + 0.09 * math.ceil(len(peaks) / 2)))
    axes.xaxis.set_major_locator(MaxNLocator(7))
    _label(axes, label, "% of images")


def _bin_edges(values: Sequence[Values]) -> Values:
    low, high = float(min(own.min() for own in values)), float(max(own.max() for own in values))
    if math.isclose(low, high, rel_tol=1e-9, abs_tol=1e-12):
        margin = max(abs(low) * 1e-3, 1e-6)
        low, high = low - margin, high + margin
    bins = min(_MAX_BINS, max(12, round(1.5 * math.sqrt(min(len(own) for own in values)))))
    return np.linspace(low, high, bins + 1)


def plot_gaussian_bound(results: Sequence[tuple[GaussianCase, BoundRow]], path: Path, *, subtitle: str) -> Path:
    """Bounds minus Eq. 4 over the spread of the keys: one panel per dimension (rows) and temperature (columns)."""
    all_dimensions = sorted({case.dimension for case, _ in results})
    all_temperatures = sorted({case.temperature for case, _ in results})
    dimensions, temperatures = all_dimensions[:_MAX_PANELS], all_temperatures[:_MAX_PANELS]
    width, height = 0.9 + 4.5 * max(len(temperatures), 2), 1.25 + 2.75 * len(dimensions)
    figure = style.new_figure(width, height)
    panels = figure.subplots(len(dimensions), len(temperatures), squeeze=False)
    figure.subplots_adjust(
        left=0.72 / width, right=1 - 0.2 / width, top=1 - 1.5 / height, bottom=0.5 / height, hspace=0.45, wspace=0.17
    )
    for axes, key in zip(panels.flat, itertools.product(dimensions, temperatures), strict=True):
        rows = {case.spread: row for case, row in results if (case.dimension, case.temperature) == key}
        _draw_gaps(axes, dict(sorted(rows.items())))
        losses = [row.infinite for row in rows.values()]
        style.format_axes(
            axes, f"d = {key[0]}, temperature {key[1]:g}", f"Eq. 4 from {min(losses):.3g} to {max(losses):.3g}"
        )
        _label(axes, "spread of the keys" if key[0] == dimensions[-1] else "", "above Eq. 4")
    scales = list(results[0][1].closed)
    errors = Line2D([], [], color=style.FAINT, linewidth=8)
    _bound_legend(figure, scales, "Eq. 4, two standard errors", errors, style.INK)
    for count, name in ((len(all_dimensions), "dimensions"), (len(all_temperatures), "temperatures")):
        if count > _MAX_PANELS:
            subtitle += f"; showing the {_MAX_PANELS} lowest of {count} {name}"
    scale = 1.0 if 1.0 in scales else min(scales)
    most = max(row.gap(scale) for _, row in results)
    title = f"For Gaussian keys, Eq. 8 at scale {scale:g} is at most {most:.2g} above Eq. 4"
    style.write_title(figure, title, style.plain(subtitle, 150))
    return style.save(figure, path)


def _draw_gaps(axes: Axes, rows: Mapping[float, BoundRow]) -> None:
    """Gaps over the spread, on a log scale if all are positive; the sampling error of Eq. 4 is shaded."""
    spreads, found = list(rows), list(rows.values())
    for scale, color in _scale_colors(list(found[0].closed)):
        axes.plot(spreads, [row.gap(scale) for row in found], color=color, clip_on=False, **_POINTS)
    axes.plot(spreads, [row.jensen - row.infinite for row in found], color=style.INK, linewidth=1.6, linestyle=":")
    gaps = [row.gap(scale) for row in found for scale in row.closed]
    noise = [2 * row.infinite_error for row in found]
    if min(gaps) > 0:
        axes.set_yscale("log")
        axes.set_ylim(min([*gaps, *noise]) / 2, max([*gaps, *noise]) * 2)
        axes.fill_between(spreads, axes.get_ylim()[0], noise, color=style.FAINT, linewidth=0, zorder=0)
    else:  # scales below 1
        axes.axhline(0, color=style.MUTED, linewidth=1)
        axes.fill_between(spreads, [-value for value in noise], noise, color=style.FAINT, linewidth=0, zorder=0)
    axes.xaxis.set_major_locator(MaxNLocator(6))


def _scale_colors(scales: Sequence[float]) -> list[tuple[float, str]]:
    return list(zip(scales, itertools.cycle(style.PALETTE), strict=False))


def _bound_legend(figure: Figure, scales: Sequence[float], name: str, infinite: Artist, jensen: str) -> None:
    entries: list[tuple[str, Artist]] = [(name, infinite)]
    entries.append(("Eq. 7, Jensen", Line2D([], [], color=jensen, linewidth=1.8, linestyle=":")))
    entries += [
        (f"Eq. 8, scale {each:g}", Line2D([], [], color=color, lw=2.4)) for each, color in _scale_colors(scales)
    ]
    add_legend(figure, entries, columns=8)


def plot_training_bound(bounds: RunBounds, path: Path, *, name: str) -> Path:
    """The losses of a run's keys, the share of non-Gaussian images, and the skewness at the last checkpoint."""
    steps, rows = [each.step for each in bounds.steps], [each.row for each in bounds.steps]
    rejected, reference = [each.normality.rejected() for each in bounds.steps], bounds.reference
    figure = style.new_figure(13, 4.5)
    losses, shares, skewness = figure.subplots(1, 3)
    figure.subplots_adjust(left=0.05, right=0.985, top=0.66, bottom=0.125, wspace=0.19)
    gaps = ", ".join(f"{rows[-1].gap(scale):+.3g} (scale {scale:g})" for scale in list(rows[-1].closed)[:3])
    style.format_axes(losses, "Loss of the run's keys", f"Eq. 8 minus Eq. 4 at the end: {gaps}")
    style.format_axes(shares, "Images with non-Gaussian keys", f"{rejected[-1]:.1f} % at the end, tested at 5 %")
    _draw_losses(losses, steps, rows)
    shares.plot(steps, rejected, color=style.RED, clip_on=False, **_POINTS)
    shares.axhline(reference.rejected(), color=style.MUTED, linewidth=1.1, linestyle="--")
    shares.annotate(
        f"Gaussian samples: {reference.rejected():.1f} %", (1, reference.rejected()), (0, 3), ha="right",
        xycoords=("axes fraction", "data"), textcoords="offset points", color=style.MUTED,
        fontsize=style.SIZES["small"],
    )  # fmt: skip
    shares.set_ylim(0, 105)
    for axes, label in ((losses, "loss"), (shares, "% of images")):
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        _label(axes, "training step", label)
    _draw_skewness(skewness, bounds.steps[-1].normality, reference)
    line = Line2D([], [], color=style.INK, lw=2.4)
    _bound_legend(figure, list(rows[0].closed), "Eq. 4, infinitely many keys", line, style.MUTED)
    gap = f"At the end Jensen's bound is {rows[-1].jensen - rows[-1].infinite:.2g} above Eq. 4"
    title = f"{gap}, and {rejected[-1]:.0f} % of images have non-Gaussian keys"
    subtitle = f"{style.plain(name, 60)}: {bounds.keys} views of each of {pluralize(bounds.images, 'image')} as keys"
    style.write_title(figure, title, subtitle)
    return style.save(figure, path)


def _draw_losses(axes: Axes, steps: Sequence[int], rows: Sequence[BoundRow]) -> None:
    for scale, color in _scale_colors(list(rows[0].closed)):
        axes.plot(steps, [row.closed[scale] for row in rows], color=color, clip_on=False, **_POINTS)
    jensen = [row.jensen for row in rows]
    axes.plot(steps, jensen, color=style.MUTED, linewidth=1.6, linestyle=":", marker=".", zorder=4)
    infinite = np.array([row.infinite for row in rows])
    error = 2 * np.array([row.infinite_error for row in rows])
    axes.fill_between(steps, infinite - error, infinite + error, color=style.INK, alpha=0.2, linewidth=0)
    axes.plot(steps, infinite, color=style.INK, clip_on=False, **_POINTS)
    axes.margins(y=0.08)


def _draw_skewness(axes: Axes, test: Normality, reference: Normality) -> None:
    own, gaussian = test.skewness.numpy(), reference.skewness.numpy()
    edges = np.linspace(min(own.min(), gaussian.min()), max(own.max(), gaussian.max()), 41)
    _histogram(axes, gaussian, edges, style.MUTED)
    _histogram(axes, own, edges, style.RED)
    style.format_axes(axes, "Skewness at the last checkpoint", f"median {np.median(own):+.2f}; gray: Gaussian samples")
    axes.xaxis.set_major_locator(MaxNLocator(6))
    _label(axes, "skewness of q·k over the views of an image", "% of images")


def plot_cost(report: CostReport, path: Path) -> Path:
    """Memory and time of a step over the number of keys, as a PNG 1500 pixels wide; crosses could not be measured."""
    figure = style.new_figure(10, 4.6)
    memory, taken = figure.subplots(1, 2)
    figure.subplots_adjust(left=0.07, right=0.975, top=0.645, bottom=0.12, wspace=0.17)
    costs = [cell.cost for cell in report.cells if cell.cost is not None]
    gib = max((cost.bytes for cost in costs), default=0) >= 2**30
    seconds = max((cost.milliseconds for cost in costs), default=0) >= 10_000
    _draw_cost(memory, report, lambda cost: cost.bytes / (2**30 if gib else 2**20))
    _draw_cost(taken, report, lambda cost: cost.milliseconds / (1000 if seconds else 1))
    style.format_axes(memory, "Memory", f"peak of a step in {'GiB' if gib else 'MiB'}")
    style.format_axes(taken, "Time", f"{'seconds' if seconds else 'milliseconds'} per step")
    methods = dict.fromkeys(cell.method for cell in report.cells)
    entries = [(METHODS[method].title, Line2D([], [], linewidth=2.2, **_look(method))) for method in methods]
    if len(costs) < len(report.cells):
        entries.append(
            ("out of memory or killed", Line2D([], [], color=style.INK, marker="x", linestyle="", markersize=6))
        )
    add_legend(figure, entries, columns=5)
    title = style.plain(f"Cost of more keys: {report.describe()}", 85)
    style.write_title(figure, title, style.plain(report.finding(), 140))
    return style.save(figure, path)


def _look(method: str) -> dict[str, Any]:
    return {"color": METHODS[method].colour, "linestyle": _DASHES.get(method, "-")}


def _draw_cost(axes: Axes, report: CostReport, value: Callable[[StepCost], float]) -> None:
    top = max((value(cell.cost) for cell in report.cells if cell.cost is not None), default=1.0)
    for method in dict.fromkeys(cell.method for cell in report.cells):
        look, measured = _look(method), report.measured(method)
        if method == BASELINE:
            for _, cost in measured:
                axes.axhline(value(cost), linewidth=1.4, **look)
            continue
        axes.plot([keys for keys, _ in measured], [value(cost) for _, cost in measured], **(_POINTS | look))
        missing = [cell.keys for cell in report.cells if cell.method == method and cell.cost is None]
        axes.plot(missing, [top * 1.08] * len(missing), "x", color=look["color"], markersize=6, markeredgewidth=1.6)
    keys = sorted({cell.keys for cell in report.cells})
    margin = 0.04 * max(keys[-1] - keys[0], 1)
    axes.set_xticks(keys, [str(number) for number in keys])
    axes.set_xlim(keys[0] - margin, keys[-1] + margin)
    axes.set_ylim(0, top * 1.15)
    _label(axes, "keys per image, M")
