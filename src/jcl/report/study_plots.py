"""Plots of the studies: similarity of views (Figure 3), tightness of the bound, and cost of a step."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from jcl.console import pluralize
from jcl.core.registry import METHODS
from jcl.report import style
from jcl.studies.bound import BoundRow, GaussianCase, Normality, RunBounds
from jcl.studies.cost import BASELINE, CostReport, StepCost
from jcl.studies.distribution import ViewSpread, share_more_similar

_DASHES = {"multi-key": "--", BASELINE: ":"}  # multi-key usually coincides with JCL
_POINTS: dict[str, Any] = {"linewidth": 1.9, "marker": "o", "markersize": 4.5, "markeredgecolor": style.PAPER}
_MAX_BINS = 80
Values = NDArray[np.float64]


def _histogram(axes: Axes, values: Values, edges: Values, color: str, label: str = "") -> None:
    """The percentage of values in each bin."""
    shares = np.histogram(values, edges)[0] / len(values) * 100
    axes.stairs(shares, edges, fill=True, facecolor=to_rgba(color, 0.27), linewidth=0)
    axes.stairs(shares, edges, color=color, linewidth=1.5, label=label)


def plot_spreads(spreads: Mapping[str, ViewSpread], path: Path, *, subtitle: str = "") -> Path:
    """Histograms of similarity and variance of each image's views, as a PNG 1500 pixels wide."""
    figure, (left, right) = style.new_panels(10, 4.5)
    # Rounded, because differences as small as rounding errors cannot be divided into bins.
    similarity = {name: spread.similarity.numpy().round(12) for name, spread in spreads.items()}
    variance = {name: spread.variance.numpy().round(12) for name, spread in spreads.items()}
    _draw_spreads(left, similarity, "Similarity of an image's views", "mean cosine similarity of all pairs of views")
    _draw_spreads(right, variance, "Variance of an image's views", "mean variance of a coordinate of the unit feature")
    style.add_legend(figure, columns=5)
    title = "Similarity of the views of an image"
    if len(spreads) == 2:
        (name, first), (other_name, other) = spreads.items()
        share = share_more_similar(first, other)
        names = f"{style.plain(name, 24)} than {style.plain(other_name, 24)}"
        title = f"Views are more similar with {names} on {share:.0f} % of images"
    style.write_title(figure, title, style.plain(subtitle, 150))
    return style.save(figure, path)


def _draw_spreads(axes: Axes, values: Mapping[str, Values], title: str, label: str) -> None:
    """A histogram and a dashed median for each name."""
    bins = min(_MAX_BINS, max(12, round(1.5 * math.sqrt(min(map(len, values.values()))))))
    edges = np.histogram_bin_edges(np.concatenate(list(values.values())), bins)
    for (name, own), color in zip(values.items(), style.colors_for(list(values)), strict=True):
        _histogram(axes, own, edges, color, name.lstrip("_"))  # matplotlib hides labels that start with _
        axes.axvline(float(np.median(own)), color=color, linewidth=1.2, linestyle="--")
    style.format_axes(axes, title, f"medians {', '.join(f'{np.median(own):.4g}' for own in values.values())}")
    axes.set_xlim(edges[0], edges[-1])
    axes.xaxis.set_major_locator(MaxNLocator(7))
    style.label_axes(axes, label, "% of images")


def plot_gaussian_bound(results: Sequence[tuple[GaussianCase, BoundRow]], path: Path, *, subtitle: str) -> Path:
    """Bounds minus Eq. 4 over the spread of the keys: one panel per dimension (rows) and temperature (columns)."""
    dimensions = sorted({case.dimension for case, _ in results})
    temperatures = sorted({case.temperature for case, _ in results})
    width, height = 0.9 + 4.5 * max(len(temperatures), 2), 1.25 + 2.75 * len(dimensions)
    figure, panels = style.new_panels(width, height, rows=len(dimensions), columns=len(temperatures))
    for axes, key in zip(panels, itertools.product(dimensions, temperatures), strict=True):
        rows = {case.spread: row for case, row in results if (case.dimension, case.temperature) == key}
        _draw_gaps(axes, dict(sorted(rows.items())))
        losses = [row.infinite for row in rows.values()]
        range_of_losses = f"Eq. 4 from {min(losses):.3g} to {max(losses):.3g}"
        style.format_axes(axes, f"d = {key[0]}, temperature {key[1]:g}", range_of_losses)
        style.label_axes(axes, "spread of the keys" if key[0] == dimensions[-1] else "", "above Eq. 4")
    style.add_legend(figure, columns=8)
    scales = list(results[0][1].closed)
    scale = 1.0 if 1.0 in scales else min(scales)
    most = max(row.gap(scale) for _, row in results)
    title = f"For Gaussian keys, Eq. 8 at scale {scale:g} is at most {most:.2g} above Eq. 4"
    style.write_title(figure, title, style.plain(subtitle, 150))
    return style.save(figure, path)


def _draw_gaps(axes: Axes, rows: Mapping[float, BoundRow]) -> None:
    """Gaps over the spread, on a log scale if all are positive; the sampling error of Eq. 4 is shaded."""
    spreads, found = list(rows), list(rows.values())
    for scale, color in _scale_colors(list(found[0].closed)):
        gaps_of_scale = [row.gap(scale) for row in found]
        axes.plot(spreads, gaps_of_scale, color=color, clip_on=False, label=f"Eq. 8, scale {scale:g}", **_POINTS)
    jensen = [row.jensen - row.infinite for row in found]
    axes.plot(spreads, jensen, color=style.INK, linewidth=1.6, linestyle=":", label="Eq. 7, Jensen")
    gaps = [row.gap(scale) for row in found for scale in row.closed]
    noise = [2 * row.infinite_error for row in found]
    look: dict[str, Any] = {"color": style.FAINT, "linewidth": 0, "zorder": 0, "label": "Eq. 4, two standard errors"}
    if min(gaps) > 0:
        axes.set_yscale("log")
        axes.set_ylim(min([*gaps, *noise]) / 2, max([*gaps, *noise]) * 2)
        axes.fill_between(spreads, axes.get_ylim()[0], noise, **look)
    else:  # scales below 1
        axes.axhline(0, color=style.MUTED, linewidth=1)
        axes.fill_between(spreads, [-value for value in noise], noise, **look)
    axes.xaxis.set_major_locator(MaxNLocator(6))


def _scale_colors(scales: Sequence[float]) -> list[tuple[float, str]]:
    return list(zip(scales, itertools.cycle(style.PALETTE), strict=False))


def plot_training_bound(bounds: RunBounds, path: Path, *, name: str) -> Path:
    """The losses of a run's keys, the share of non-Gaussian images, and the skewness at the last checkpoint."""
    steps, rows = [each.step for each in bounds.steps], [each.row for each in bounds.steps]
    rejected, reference = [each.normality.rejected() for each in bounds.steps], bounds.reference
    figure, (losses, shares, skewness) = style.new_panels(13, 4.5, columns=3)
    gaps = ", ".join(f"{rows[-1].gap(scale):+.3g} (scale {scale:g})" for scale in list(rows[-1].closed)[:3])
    style.format_axes(losses, "Loss of the run's keys", f"Eq. 8 minus Eq. 4 at the end: {gaps}")
    style.format_axes(shares, "Images with non-Gaussian keys", f"{rejected[-1]:.1f} % at the end, tested at 5 %")
    _draw_losses(losses, steps, rows)
    shares.plot(steps, rejected, color=style.RED, clip_on=False, **_POINTS)
    shares.axhline(reference.rejected(), color=style.MUTED, linewidth=1.1, linestyle="--")
    look = {"ha": "right", "xycoords": ("axes fraction", "data"), "color": style.MUTED}
    text, level = f"Gaussian samples: {reference.rejected():.1f} %", reference.rejected()
    style.write(shares, text, (1, level), (0, 3), size="small", **look)
    shares.set_ylim(0, 105)
    for axes, label in ((losses, "loss"), (shares, "% of images")):
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        style.label_axes(axes, "training step", label)
    _draw_skewness(skewness, bounds.steps[-1].normality, reference)
    style.add_legend(figure, columns=8)
    gap = f"At the end Jensen's bound is {rows[-1].jensen - rows[-1].infinite:.2g} above Eq. 4"
    title = f"{gap}, and {rejected[-1]:.0f} % of images have non-Gaussian keys"
    subtitle = f"{style.plain(name, 60)}: {bounds.keys} views of each of {pluralize(bounds.images, 'image')} as keys"
    style.write_title(figure, title, subtitle)
    return style.save(figure, path)


def _draw_losses(axes: Axes, steps: Sequence[int], rows: Sequence[BoundRow]) -> None:
    for scale, color in _scale_colors(list(rows[0].closed)):
        closed = [row.closed[scale] for row in rows]
        axes.plot(steps, closed, color=color, clip_on=False, label=f"Eq. 8, scale {scale:g}", **_POINTS)
    look: dict[str, Any] = {"color": style.MUTED, "linewidth": 1.6, "linestyle": ":", "marker": ".", "zorder": 4}
    axes.plot(steps, [row.jensen for row in rows], label="Eq. 7, Jensen", **look)
    infinite = np.array([row.infinite for row in rows])
    error = 2 * np.array([row.infinite_error for row in rows])
    axes.fill_between(steps, infinite - error, infinite + error, color=style.INK, alpha=0.2, linewidth=0)
    axes.plot(steps, infinite, color=style.INK, clip_on=False, label="Eq. 4, infinitely many keys", **_POINTS)
    axes.margins(y=0.08)


def _draw_skewness(axes: Axes, test: Normality, reference: Normality) -> None:
    own, gaussian = test.skewness.numpy(), reference.skewness.numpy()
    edges = np.linspace(min(own.min(), gaussian.min()), max(own.max(), gaussian.max()), 41)
    _histogram(axes, gaussian, edges, style.MUTED)
    _histogram(axes, own, edges, style.RED)
    style.format_axes(axes, "Skewness at the last checkpoint", f"median {np.median(own):+.2f}; gray: Gaussian samples")
    axes.xaxis.set_major_locator(MaxNLocator(6))
    style.label_axes(axes, "skewness of q·k over the views of an image", "% of images")


def plot_cost(report: CostReport, path: Path) -> Path:
    """Memory and time of a step over the number of keys, as a PNG 1500 pixels wide. A cross: not measured."""
    figure, (memory, taken) = style.new_panels(10, 4.6)
    costs = [cell.cost for cell in report.cells if cell.cost is not None]
    gib = max((cost.bytes for cost in costs), default=0) >= 2**30
    seconds = max((cost.milliseconds for cost in costs), default=0) >= 10_000
    _draw_cost(memory, report, lambda cost: cost.bytes / (2**30 if gib else 2**20))
    _draw_cost(taken, report, lambda cost: cost.milliseconds / (1000 if seconds else 1))
    style.format_axes(memory, "Memory", f"peak of a step in {'GiB' if gib else 'MiB'}")
    style.format_axes(taken, "Time", f"{'seconds' if seconds else 'milliseconds'} per step")
    style.add_legend(figure, columns=5)
    title = style.plain(f"Cost of more keys: {report.describe()}", 85)
    style.write_title(figure, title, style.plain(report.finding(), 140))
    return style.save(figure, path)


def _draw_cost(axes: Axes, report: CostReport, value: Callable[[StepCost], float]) -> None:
    top = max((value(cell.cost) for cell in report.cells if cell.cost is not None), default=1.0)
    for method in dict.fromkeys(cell.method for cell in report.cells):
        look: dict[str, Any] = {"color": METHODS[method].color, "linestyle": _DASHES.get(method, "-")}
        look["label"], measured = METHODS[method].title, report.measured(method)
        if method == BASELINE:
            for _, cost in measured:
                axes.axhline(value(cost), linewidth=1.4, **look)
            continue
        axes.plot([keys for keys, _ in measured], [value(cost) for _, cost in measured], **(_POINTS | look))
    missing = [cell for cell in report.cells if cell.cost is None]
    colors = [METHODS[cell.method].color or style.INK for cell in missing]
    if missing:
        places = [cell.keys for cell in missing], [top * 1.08] * len(missing)
        axes.scatter(*places, c=colors, marker="x", label="out of memory or killed")
    keys = sorted({cell.keys for cell in report.cells})
    margin = 0.04 * max(keys[-1] - keys[0], 1)
    axes.set_xticks(keys, [str(number) for number in keys])
    axes.set_xlim(keys[0] - margin, keys[-1] + margin)
    axes.set_ylim(0, top * 1.15)
    style.label_axes(axes, "keys per image, M")
