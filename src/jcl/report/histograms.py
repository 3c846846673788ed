"""Histograms of several networks laid over each other: the paper's Figure 3."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from jcl.evaluate.distribution import ViewSpread, paired_shares
from jcl.report import style

_MOST_BINS = 80
Values = NDArray[np.float64]


def plot_spreads(spreads: Mapping[str, ViewSpread], path: Path, *, subtitle: str = "") -> Path:
    """Similarity and variance of each image's views, one histogram per network, as a PNG 1500 pixels wide."""
    figure = style.new_figure(10, 4.3)
    left, right = figure.subplots(1, 2)
    figure.subplots_adjust(left=0.06, right=0.975, top=0.7, bottom=0.13, wspace=0.16)
    _draw(
        left,
        {name: spread.similarity.numpy() for name, spread in spreads.items()},
        "Similarity of an image's views",
        "mean cosine similarity of all pairs of views",
    )
    _draw(
        right,
        {name: spread.variance.numpy() for name, spread in spreads.items()},
        "Variance of an image's views",
        "mean variance of a coordinate of the unit feature",
    )
    style.write_title(figure, _finding(spreads), style.plain(subtitle, 150))
    return style.save(figure, path)


def _finding(spreads: Mapping[str, ViewSpread]) -> str:
    """What the histograms say, in one line."""
    (name, first), *others = spreads.items()
    if len(others) != 1:
        return "How alike the views of an image are"
    (other_name, other) = others[0]
    share = paired_shares(first, other).more_alike
    return (
        f"{style.plain(name, 24)} makes views more alike than {style.plain(other_name, 24)} on {share:.0f} % of images"
    )


def _draw(axes: Axes, values: Mapping[str, Values], title: str, label: str) -> None:
    """Shares per bin, not numbers, so that the height of a histogram does not depend on how many images there are."""
    edges = _edges(list(values.values()))
    tops = []
    for (name, own), colour in zip(values.items(), style.colours_for(list(values)), strict=True):
        shares = np.histogram(own, edges)[0] / max(len(own), 1) * 100
        axes.stairs(shares, edges, fill=True, facecolor=to_rgba(colour, 0.28), linewidth=0)
        axes.stairs(shares, edges, color=colour, linewidth=1.6)
        tops.append((float(np.median(own)), float(shares.max()), name, colour))
    highest = max(top for _, top, _, _ in tops)
    for place, (median, _, name, colour) in enumerate(sorted(tops)):
        # Names stand outside of the medians, the outermost lowest, so that no line runs through a name.
        at_left = place < len(tops) / 2
        level = highest * (1.06 + 0.09 * (place if at_left else len(tops) - 1 - place))
        axes.plot([median, median], [0, level], color=colour, linewidth=1.2, linestyle=(0, (4, 3)))
        _name(axes, median, level, name, at_left)
    medians = ", ".join(f"{median:.4g} ({style.plain(name, 14)})" for median, _, name, _ in tops)
    style.dress(axes, title, f"medians {medians}")
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(0, highest * (1.1 + 0.09 * math.ceil(len(tops) / 2)))
    axes.xaxis.set_major_locator(MaxNLocator(7))
    axes.set_xlabel(label, color=style.MUTED, fontsize=style.SIZES["label"], labelpad=3)
    axes.set_ylabel("% of images", color=style.MUTED, fontsize=style.SIZES["label"], labelpad=3)


def _name(axes: Axes, median: float, level: float, name: str, at_left: bool) -> None:
    axes.annotate(
        style.plain(name, 24), (median, level), (-4 if at_left else 4, 0), textcoords="offset points",
        ha="right" if at_left else "left", va="top", color=style.INK, fontsize=style.SIZES["label"],
        fontweight="bold", parse_math=False,
    )  # fmt: skip


def _edges(values: Sequence[Values]) -> Values:
    """Common bins over all values; where these are all alike, a little room around them."""
    low, high = float(min(own.min() for own in values)), float(max(own.max() for own in values))
    if math.isclose(low, high, rel_tol=1e-9, abs_tol=1e-12):
        room = max(abs(low) * 1e-3, 1e-6)
        low, high = low - room, high + room
    bins = min(_MOST_BINS, max(12, round(1.5 * math.sqrt(min(len(own) for own in values)))))
    return np.linspace(low, high, bins + 1)
