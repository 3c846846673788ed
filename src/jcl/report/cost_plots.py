"""What a step costs over the number of keys: the comparison in the paper's supplement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from jcl.core.registry import METHODS
from jcl.report import style
from jcl.studies.cost import BASELINE, Cell, StepCost

_DASHES = {"multi-key": (0, (4, 2))}  # it lies on JCL's line, as a rule


def plot_cost(cells: Sequence[Cell], titles: Mapping[str, str], path: Path, *, of: str, finding: str) -> Path:
    """Memory and time of a step over the number of keys, as a PNG 1500 pixels wide; crosses are what did not fit."""
    figure = style.new_figure(10, 4.6)
    memory, taken = figure.subplots(1, 2)
    figure.subplots_adjust(left=0.07, right=0.975, top=0.645, bottom=0.12, wspace=0.17)
    largest = max((cell.cost.bytes for cell in cells if cell.cost is not None), default=0)
    unit, name = (2**30, "GiB") if largest >= 2**30 else (2**20, "MiB")
    _draw(memory, cells, [None if cell.cost is None else cell.cost.bytes / unit for cell in cells])
    style.dress(memory, "Memory", f"{name} held at most during a step")
    seconds, time_name = _time_unit([cell.cost for cell in cells if cell.cost is not None])
    _draw(taken, cells, [None if cell.cost is None else cell.cost.milliseconds / seconds for cell in cells])
    style.dress(taken, "Time", f"{time_name} a step")
    _legend(figure, cells, titles)
    style.write_title(figure, style.plain(f"What more keys cost: {of}", 85), style.plain(finding, 140))
    return style.save(figure, path)


def _time_unit(costs: Sequence[StepCost]) -> tuple[float, str]:
    return (
        (1000.0, "seconds")
        if max((cost.milliseconds for cost in costs), default=0) >= 10_000
        else (1.0, "milliseconds")
    )


def _draw(axes: Axes, cells: Sequence[Cell], values: Sequence[float | None]) -> None:
    top = max((value for value in values if value is not None), default=1.0)
    for method in dict.fromkeys(cell.method for cell in cells):
        own = [(cell.keys, value) for cell, value in zip(cells, values, strict=True) if cell.method == method]
        fitting = [(keys, value) for keys, value in own if value is not None]
        colour = METHODS[method].colour
        if method == BASELINE:
            for _, value in fitting:
                axes.axhline(value, color=colour, linewidth=1.4, linestyle=(0, (1, 1)))
            continue
        axes.plot(
            [keys for keys, _ in fitting], [value for _, value in fitting], color=colour, linewidth=1.9, marker="o",
            markersize=5, markeredgecolor=style.PAPER, markeredgewidth=0.8, linestyle=_DASHES.get(method, "-"),
        )  # fmt: skip
        missing = [keys for keys, value in own if value is None]
        axes.plot(missing, [top * 1.08] * len(missing), "x", color=colour, markersize=6, markeredgewidth=1.6)
    keys = sorted({cell.keys for cell in cells})
    axes.set_xticks(keys, [str(number) for number in keys])  # evenly, so that what grows by the key is a straight line
    room = 0.04 * max(keys[-1] - keys[0], 1)
    axes.set_xlim(keys[0] - room, keys[-1] + room)
    axes.set_ylim(0, top * 1.15)
    axes.set_xlabel("keys of an image, M", color=style.MUTED, fontsize=style.SIZES["label"], labelpad=2)


def _legend(figure: Figure, cells: Sequence[Cell], titles: Mapping[str, str]) -> None:
    methods = list(dict.fromkeys(cell.method for cell in cells))
    handles = [
        Line2D(
            [], [], color=METHODS[method].colour, linewidth=2.2,
            linestyle=(0, (1, 1)) if method == BASELINE else _DASHES.get(method, "-"),
        )
        for method in methods
    ]  # fmt: skip
    names = [titles[method] for method in methods]
    if any(cell.cost is None for cell in cells):
        handles.append(Line2D([], [], color=style.INK, marker="x", linestyle="", markersize=6, markeredgewidth=1.6))
        names.append("out of memory")
    width, height = figure.get_size_inches()
    figure.legend(
        handles, names, loc="upper left", frameon=False, bbox_to_anchor=(0.22 / width, 1 - 0.72 / height), ncols=5,
        borderaxespad=0, borderpad=0, handlelength=2.4, columnspacing=1.5, fontsize=style.SIZES["label"] + 0.5,
        labelcolor=style.INK,
    )  # fmt: skip
