"""Curves of training and bars that compare methods."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from jcl.report import style

_LEGEND_COLUMNS = 5
_SOLID: tuple[float, tuple[float, ...]] = (0.0, ())
Points = tuple[NDArray[np.float64], NDArray[np.float64]]


@dataclass(frozen=True)
class RunCurves:
    """One run's lines of `metrics.jsonl` under the name to show; the size of its queue gives the uniform guess."""

    name: str
    metrics: Sequence[Mapping[str, Any]]
    queue_size: int | None = None


@dataclass(frozen=True)
class _Look:
    colour: str
    dash: tuple[float, tuple[float, ...]]


@dataclass(frozen=True)
class _Panel:
    """What one panel shows: a figure of the lines of one kind, how to write it, and which of its values to name."""

    title: str
    kind: str
    name: str
    write: Callable[[float], str]
    naming: str = "ends at"


def _percent(value: float) -> str:
    return f"{value:.1f} %"


_LOSS = _Panel("Loss", "train", "loss", lambda value: f"{value:.2f}")
_ACCURACY = _Panel("Contrastive accuracy", "train", "contrastive_accuracy", _percent)
_RATE = _Panel("Learning rate", "train", "lr", lambda value: f"{value:.3g}", naming="peaks at")
_KNN = _Panel("kNN top-1 of the frozen features", "knn", "knn_top1", _percent)


def plot_training(runs: Sequence[RunCurves], path: Path, *, title: str = "Training") -> Path:
    """Loss, contrastive accuracy, learning rate and online kNN of one or several runs, as a PNG 1500 pixels wide.

    Figures that a run lacks, or that are not finite, leave a gap; a panel that no run has figures for says so.
    """
    legend_rows = math.ceil(len(runs) / _LEGEND_COLUMNS)
    height = 6.25 + 0.22 * legend_rows
    figure = style.new_figure(10, height)
    panels = figure.subplots(2, 2)
    top = 1 - (0.95 + 0.22 * legend_rows) / height
    figure.subplots_adjust(left=0.065, right=0.975, top=top, bottom=0.55 / height, hspace=0.5, wspace=0.16)
    axis = "epoch" if all("epoch" in line for run in runs for line in run.metrics) else "step"
    looks = _looks([run.name for run in runs])
    for axes, panel in zip(panels.flat, (_LOSS, _ACCURACY, _RATE, _KNN), strict=True):
        if _draw_panel(axes, panel, runs, looks, axis) and panel is _LOSS:
            _draw_uniform_guess(axes, runs, looks)
    _share_extent(list(panels.flat), runs, axis)
    style.write_title(figure, style.plain(title, 90))
    _legend(figure, [run.name for run in runs], looks)
    return style.save(figure, path)


def plot_comparison(
    scores: Mapping[str, float],
    path: Path,
    *,
    title: str = "What the features are worth",
    subtitle: str = "kNN top-1 accuracy in percent; higher is better",
    chance: float | None = None,
) -> Path:
    """One bar per method with its figure in percent, in the order given; `chance` draws the line of a blind guess."""
    count = len(scores)
    height = 1.15 + 0.46 * count
    figure = style.new_figure(8, height)
    axes = figure.add_axes((0.19, 0.42 / height, 0.75, 0.46 * count / height))
    names = [style.plain(name, 22) for name in scores]
    values = [value if math.isfinite(value) else 0.0 for value in scores.values()]
    places = range(count)
    axes.barh(places, values, height=0.66, color=style.colours_for(list(scores)), linewidth=0)
    for place, value in zip(places, scores.values(), strict=True):
        text = _percent(value) if math.isfinite(value) else "not measured"
        axes.annotate(
            text, (value if math.isfinite(value) else 0, place), (5, 0), textcoords="offset points",
            va="center_baseline", color=style.INK, fontsize=style.SIZES["panel"], fontweight="bold",
        )  # fmt: skip
    _dress_bars(axes, names, max([*values, 1.0]))
    if chance is not None:
        axes.axvline(chance, color=style.INK, linewidth=1, linestyle=(0, (4, 3)))
        subtitle += f"; dashed: guessing, {_percent(chance)}"
    style.write_title(figure, style.plain(title, 90), style.plain(subtitle, 120))
    return style.save(figure, path)


def _dress_bars(axes: Axes, names: Sequence[str], largest: float) -> None:
    axes.set_yticks(range(len(names)), names, parse_math=False)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, largest * 1.12)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    axes.spines["left"].set_color(style.MUTED)
    axes.grid(visible=True, axis="x", color=style.FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(axis="x", colors=style.MUTED, labelsize=style.SIZES["label"], length=0)
    axes.tick_params(axis="y", colors=style.INK, labelsize=style.SIZES["panel"] - 0.5, length=0)


def _looks(names: Sequence[str]) -> list[_Look]:
    """A colour for each run, and another dash for each further run that has the same colour."""
    colours = style.colours_for(names)
    dashes = (_SOLID, (0.0, (4.0, 1.5)), (0.0, (1.0, 1.0)))
    return [_Look(colour, dashes[colours[:place].count(colour) % 3]) for place, colour in enumerate(colours)]


def _draw_panel(axes: Axes, panel: _Panel, runs: Sequence[RunCurves], looks: Sequence[_Look], axis: str) -> bool:
    """Draw one figure of all runs and say under the title where it ended; False if no run has it."""
    named: dict[str, float] = {}
    for place, (run, look) in enumerate(zip(runs, looks, strict=True)):
        where, values = points(run.metrics, axis, panel.kind, panel.name)
        finite = values[np.isfinite(values)]
        if len(finite) == 0:
            continue
        # Schedules often coincide: those of later runs are thinner, so that the ones below show at their sides.
        width = max(4.5 - 1.5 * place, 1.5) if panel is _RATE and len(runs) > 1 else 1.9
        _line(axes, where, values, look, width)
        named[run.name] = float(finite.max() if panel is _RATE else finite[-1])
    style.dress(axes, panel.title, _summary(named, panel))
    if not named:
        axes.grid(visible=False)
        axes.set_yticks([])
        axes.text(
            0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", color=style.MUTED,
            fontsize=style.SIZES["panel"],
        )  # fmt: skip
    return bool(named)


def _draw_uniform_guess(axes: Axes, runs: Sequence[RunCurves], looks: Sequence[_Look]) -> None:
    """The loss of guessing uniformly among the true key and K negatives, log(K + 1), as a dashed line."""
    levels = {
        math.log(run.queue_size + 1): look.colour for run, look in zip(runs, looks, strict=True) if run.queue_size
    }
    if not levels:
        return
    for level, colour in levels.items():
        shade = style.MUTED if len(levels) == 1 else colour
        axes.axhline(level, color=shade, linewidth=1.1, linestyle=(0, (4, 3)), zorder=1.5)
    highest = max(levels)
    text = f"uniform guess: log(K + 1) = {highest:.2f}" if len(levels) == 1 else "uniform guesses: log(K + 1)"
    axes.annotate(
        text, (1, highest), (0, 3), xycoords=("axes fraction", "data"), textcoords="offset points", ha="right",
        color=style.MUTED, fontsize=style.SIZES["small"], parse_math=False,
    )  # fmt: skip
    axes.margins(y=0.1)


def _share_extent(panels: Sequence[Axes], runs: Sequence[RunCurves], axis: str) -> None:
    """The same stretch of training in all panels; shares and rates stand on zero."""
    end = max((float(line[axis]) for run in runs for line in run.metrics), default=1.0)
    for axes in panels:
        axes.set_xlim(0, (end or 1.0) * 1.01)
        axes.xaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 5, 10]))
        axes.set_xlabel(axis, color=style.MUTED, fontsize=style.SIZES["label"], labelpad=2)
    for axes in panels[1:3]:
        axes.set_ylim(bottom=0)


def points(metrics: Sequence[Mapping[str, Any]], axis: str, kind: str, name: str) -> Points:
    """The values called `name` in the lines of this kind, over `axis`; a value that is null is NaN."""
    lines = [line for line in metrics if line.get("kind") == kind and name in line]
    where = np.array([line[axis] for line in lines], dtype=np.float64)
    values = [math.nan if line[name] is None else line[name] for line in lines]
    return where, np.array(values, dtype=np.float64)


def smoothed(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """A centred moving average over about a thirtieth of the curve that skips NaN (and stays NaN where all are)."""
    half = len(values) // 60
    finite = np.isfinite(values)
    kernel = np.ones(2 * half + 1)
    total = np.convolve(np.pad(np.where(finite, values, 0.0), half), kernel, mode="valid")
    count = np.convolve(np.pad(finite.astype(np.float64), half), kernel, mode="valid")
    return np.where(finite, total / np.maximum(count, 1), np.nan)


def isolated(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which values are finite and have neighbours that are not."""
    finite = np.pad(np.isfinite(values), 1)
    return np.asarray(finite[1:-1] & ~finite[:-2] & ~finite[2:])


def _line(axes: Axes, where: NDArray[np.float64], values: NDArray[np.float64], look: _Look, width: float) -> None:
    """A curve; a long one as its average over a pale trace of the raw values, a short one with its points marked."""
    if len(values) > 25:
        alone = isolated(values)  # a line through one point would not be seen
        axes.plot(where[alone], values[alone], color=look.colour, linestyle="none", marker="o", markersize=2)
    if len(values) >= 60:
        axes.plot(where, values, color=look.colour, linewidth=0.8, alpha=0.25)
        axes.plot(where, smoothed(values), color=look.colour, linewidth=width, linestyle=look.dash)
        return
    axes.plot(
        where, values, color=look.colour, linewidth=width, linestyle=look.dash, clip_on=len(values) > 25,
        marker="o" if len(values) <= 25 else "", markersize=5, markeredgecolor=style.PAPER, markeredgewidth=0.8,
    )  # fmt: skip


def _summary(named: Mapping[str, float], panel: _Panel) -> str:
    """Where the curves ended, in words; of many, only how far they lie apart."""
    written = {name: panel.write(value) for name, value in named.items()}
    if len(set(written.values())) <= 1:
        return "".join(f"{panel.naming} {value}" for value in set(written.values()))
    if len(written) <= 3:
        return f"{panel.naming} " + ", ".join(f"{value} ({style.plain(name, 14)})" for name, value in written.items())
    low, high = min(named.values()), max(named.values())
    return f"{panel.naming} {panel.write(low)} to {panel.write(high)}"


def _legend(figure: Figure, names: Sequence[str], looks: Sequence[_Look]) -> None:
    handles = [Line2D([], [], color=look.colour, linestyle=look.dash, linewidth=2.4) for look in looks]
    height = figure.get_size_inches()[1]
    legend = figure.legend(
        handles, [f"run {number}" for number in range(len(names))], loc="upper left", frameon=False,
        bbox_to_anchor=(0.022, 1 - 0.46 / height), ncols=_LEGEND_COLUMNS, borderaxespad=0, borderpad=0,
        handlelength=2.2, fontsize=style.SIZES["label"] + 0.5, labelcolor=style.INK,
    )  # fmt: skip
    # Written afterwards, since a label that begins with an underscore would be taken as a wish to be hidden.
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set_parse_math(False)
        text.set_text(style.plain(name, 26))
