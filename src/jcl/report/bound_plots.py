"""How far the bound lies above what it bounds, for Gaussian keys and along the training of a run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from jcl.console import pluralize
from jcl.report import style
from jcl.studies.bound import BoundRow, GaussianCase
from jcl.studies.normality import Normality
from jcl.studies.run_bound import RunBounds

_SCALE_COLOURS = (style.BLUE, style.ORANGE, style.GREEN, "#cc79a7", "#56b4e9", style.RED)
_MOST_PANELS = 4  # in each direction


def plot_gaussian_bound(results: Sequence[tuple[GaussianCase, BoundRow]], path: Path, *, subtitle: str) -> Path:
    """How far the bounds lie above Eq. 4 over the keys' spread: panels by dimension (rows) and temperature."""
    all_dimensions = sorted({case.dimension for case, _ in results})
    all_temperatures = sorted({case.temperature for case, _ in results})
    dimensions, temperatures = all_dimensions[:_MOST_PANELS], all_temperatures[:_MOST_PANELS]
    width, height = 0.9 + 4.5 * max(len(temperatures), 2), 1.25 + 2.75 * len(dimensions)
    figure = style.new_figure(width, height)
    panels = figure.subplots(len(dimensions), len(temperatures), squeeze=False)
    figure.subplots_adjust(
        left=0.72 / width, right=1 - 0.2 / width, top=1 - 1.5 / height, bottom=0.5 / height, hspace=0.45, wspace=0.17
    )
    places = itertools.product(dimensions, temperatures)
    for axes, (dimension, temperature) in zip(panels.flat, places, strict=True):
        chosen = {
            case.spread: row
            for case, row in results
            if (case.dimension, case.temperature) == (dimension, temperature)
        }  # fmt: skip
        rows = dict(sorted(chosen.items()))
        _draw_gaps(axes, list(rows), list(rows.values()), f"d = {dimension}, temperature {temperature:g}")
        _label(axes, "spread of the keys" if dimension == dimensions[-1] else "", "above Eq. 4")
    _legend(figure, list(results[0][1].closed), "Eq. 4 within two standard errors")
    for count, name in ((len(all_dimensions), "dimensions"), (len(all_temperatures), "temperatures")):
        if count > _MOST_PANELS:
            subtitle += f"; drawn: the {_MOST_PANELS} lowest of {count} {name}"
    style.write_title(figure, _gaussian_finding(results), style.plain(subtitle, 150))
    return style.save(figure, path)


def _gaussian_finding(results: Sequence[tuple[GaussianCase, BoundRow]]) -> str:
    scales = list(results[0][1].closed)
    scale = 1.0 if 1.0 in scales else min(scales)
    most = max(row.gap(scale) for _, row in results)
    return f"For Gaussian keys Eq. 8 at scale {scale:g} lies at most {most:.2g} above the loss it stands for"


def _draw_gaps(axes: Axes, spreads: Sequence[float], rows: Sequence[BoundRow], title: str) -> None:
    """Gaps span many powers of ten; those within the sampling error of Eq. 4 lie in the shaded part."""
    for scale, colour in zip(rows[0].closed, itertools.cycle(_SCALE_COLOURS), strict=False):
        _points(axes, spreads, [row.gap(scale) for row in rows], colour)
    jensen = [row.jensen - row.infinite for row in rows]
    axes.plot(spreads, jensen, color=style.INK, linewidth=1.6, linestyle=(0, (1, 1)), zorder=4)
    gaps = [row.gap(scale) for row in rows for scale in row.closed]
    noise = [2 * row.infinite_error for row in rows]
    if min(gaps) > 0:
        axes.set_yscale("log")
        axes.set_ylim(min([*gaps, *noise]) / 2, max([*gaps, *noise]) * 2)
        axes.fill_between(spreads, axes.get_ylim()[0], noise, color=style.FAINT, linewidth=0, zorder=0)
    else:  # a scale below 1 gives gaps below zero
        axes.axhline(0, color=style.MUTED, linewidth=1)
        axes.fill_between(spreads, [-value for value in noise], noise, color=style.FAINT, linewidth=0, zorder=0)
    style.dress(
        axes, title, f"Eq. 4 from {min(row.infinite for row in rows):.3g} to {max(r.infinite for r in rows):.3g}"
    )
    axes.xaxis.set_major_locator(MaxNLocator(6))


def plot_training_bound(bounds: RunBounds, path: Path, *, name: str) -> Path:
    """The losses of real keys, how many images' keys are not Gaussian, and how skewed they are in the end."""
    steps, rows = [each.step for each in bounds.steps], [each.row for each in bounds.steps]
    tests, reference = [each.normality for each in bounds.steps], bounds.reference
    figure = style.new_figure(13, 4.5)
    losses, shares, skewness = figure.subplots(1, 3)
    figure.subplots_adjust(left=0.05, right=0.985, top=0.66, bottom=0.125, wspace=0.19)
    if len(steps) > 1:
        _draw_losses(losses, steps, rows, "Loss of the run's keys")
        _draw_shares(shares, steps, tests, reference)
    else:  # there is nothing to draw a line to
        _draw_losses_at_once(losses, rows[0])
        _draw_shares_at_once(shares, tests[0], reference)
    when = "training step" if len(steps) > 1 else f"at training step {steps[0]:,}"
    _label(losses, when, "loss")
    _label(shares, when, "% of images")
    _draw_skewness(skewness, tests[-1], reference)
    _label(skewness, "skewness of q·k over the views of an image", "% of images")
    _legend(figure, list(rows[0].closed), "Eq. 4, infinitely many keys")
    above, share = rows[-1].jensen - rows[-1].infinite, tests[-1].rejected()
    title = (
        f"In the end Jensen's bound lies {above:.2g} above Eq. 4, and {share:.0f} % of images' keys are not Gaussian"
    )
    subtitle = f"{style.plain(name, 60)}: {bounds.keys} views of each of {pluralize(bounds.images, 'image')} as keys"
    style.write_title(figure, title, subtitle)
    return style.save(figure, path)


def _draw_losses(axes: Axes, where: Sequence[float], rows: Sequence[BoundRow], title: str) -> None:
    """Eq. 4 with its error as a band, which is mostly too thin to be seen, and the bounds above it."""
    infinite = np.array([row.infinite for row in rows])
    error = 2 * np.array([row.infinite_error for row in rows])
    for scale, colour in zip(rows[0].closed, itertools.cycle(_SCALE_COLOURS), strict=False):
        closed = [row.closed[scale] for row in rows]
        _points(axes, where, closed, colour)
    axes.plot(where, [row.jensen for row in rows], color=style.MUTED, linewidth=1.6, linestyle=(0, (1, 1)), zorder=4)
    axes.fill_between(where, infinite - error, infinite + error, color=style.INK, alpha=0.2, linewidth=0)
    _points(axes, where, infinite.tolist(), style.INK)
    style.dress(axes, title, f"Eq. 8 in the end over Eq. 4: {_gaps(rows[-1])}")
    axes.margins(y=0.08)
    axes.xaxis.set_major_locator(MaxNLocator(6))


def _draw_losses_at_once(axes: Axes, row: BoundRow) -> None:
    """The losses of a single checkpoint, in the colours that their lines would have."""
    colours = [style.INK, style.MUTED, *itertools.islice(itertools.cycle(_SCALE_COLOURS), len(row.closed))]
    style.dress(axes, "Loss of the run's keys", f"Eq. 8 over Eq. 4: {_gaps(row)}")
    names = ["Eq. 4", "Eq. 7", *["Eq. 8"] * len(row.closed)]
    _bars(axes, names, [row.infinite, row.jensen, *row.closed.values()], colours, "{:.3f}")


def _draw_shares_at_once(axes: Axes, test: Normality, reference: Normality) -> None:
    style.dress(axes, "Keys that are not Gaussian", "tested at 5 %, beside draws that are Gaussian")
    shares = [test.rejected(), reference.rejected()]
    _bars(axes, ["the run's keys", "Gaussian draws"], shares, [style.RED, style.MUTED], "{:.1f} %")
    axes.set_ylim(0, 105)


def _bars(axes: Axes, names: Sequence[str], values: Sequence[float], colours: Sequence[str], form: str) -> None:
    bars = axes.bar(range(len(names)), values, width=0.6, color=colours)
    axes.set_xticks(range(len(names)), names)
    axes.bar_label(
        bars, [form.format(value) for value in values], padding=2, fontsize=style.SIZES["small"], color=style.INK
    )
    axes.margins(y=0.08)


def _gaps(row: BoundRow) -> str:
    return ", ".join(f"{row.gap(scale):+.3g} (scale {scale:g})" for scale in list(row.closed)[:3])


def _draw_shares(axes: Axes, steps: Sequence[int], tests: Sequence[Normality], reference: Normality) -> None:
    _points(axes, steps, [test.rejected() for test in tests], style.RED)
    expected = reference.rejected()
    axes.axhline(expected, color=style.MUTED, linewidth=1.1, linestyle=(0, (4, 3)))
    axes.annotate(
        f"Gaussian draws: {expected:.1f} %", (1, expected), (0, 3), xycoords=("axes fraction", "data"),
        textcoords="offset points", ha="right", color=style.MUTED, fontsize=style.SIZES["small"], parse_math=False,
    )  # fmt: skip
    style.dress(axes, "Keys that are not Gaussian", f"ends at {tests[-1].rejected():.1f} % of images, tested at 5 %")
    axes.set_ylim(0, 105)
    axes.xaxis.set_major_locator(MaxNLocator(6))


def _draw_skewness(axes: Axes, test: Normality, reference: Normality) -> None:
    own, gaussian = test.skewness.numpy(), reference.skewness.numpy()
    edges = np.linspace(min(own.min(), gaussian.min()), max(own.max(), gaussian.max()), 41)
    _histogram(axes, gaussian, edges, style.MUTED)
    _histogram(axes, own, edges, style.RED)
    style.dress(axes, "Skewness at the last checkpoint", f"median {np.median(own):+.2f}; grey: Gaussian draws")
    axes.xaxis.set_major_locator(MaxNLocator(6))


def _histogram(axes: Axes, values: NDArray[np.float64], edges: NDArray[np.float64], colour: str) -> None:
    shares = np.histogram(values, edges)[0] / len(values) * 100
    axes.stairs(shares, edges, fill=True, facecolor=to_rgba(colour, 0.25), linewidth=0)
    axes.stairs(shares, edges, color=colour, linewidth=1.4)


def _points(axes: Axes, where: Sequence[float], values: Sequence[float], colour: str) -> None:
    axes.plot(
        where, values, color=colour, linewidth=1.9, marker="o", markersize=4.5, markeredgecolor=style.PAPER,
        markeredgewidth=0.8, clip_on=False,
    )  # fmt: skip


def _label(axes: Axes, across: str, up: str) -> None:
    axes.set_xlabel(across, color=style.MUTED, fontsize=style.SIZES["label"], labelpad=2)
    axes.set_ylabel(up, color=style.MUTED, fontsize=style.SIZES["label"], labelpad=2)


def _legend(figure: Figure, scales: Sequence[float], infinite: str) -> None:
    shaded = "within" in infinite
    names = [infinite, "Eq. 7, Jensen"]
    handles = [
        Line2D([], [], color=style.FAINT if shaded else style.INK, linewidth=8 if shaded else 2.4),
        Line2D([], [], color=style.INK if shaded else style.MUTED, linewidth=1.8, linestyle=(0, (1, 1))),
    ]
    for scale, colour in zip(scales, itertools.cycle(_SCALE_COLOURS), strict=False):
        names.append(f"Eq. 8, scale {scale:g}")
        handles.append(Line2D([], [], color=colour, linewidth=2.4))
    width, height = figure.get_size_inches()
    figure.legend(
        handles, names, loc="upper left", frameon=False, bbox_to_anchor=(0.22 / width, 1 - 0.7 / height), ncols=8,
        borderaxespad=0, borderpad=0, handlelength=2.0, columnspacing=1.6, fontsize=style.SIZES["label"] + 0.5,
        labelcolor=style.INK,
    )  # fmt: skip
