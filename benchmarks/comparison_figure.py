"""Plots the kNN accuracy of the rows of a comparison against epochs and against compute.

    python benchmarks/comparison_figure.py benchmarks/results/cifar10-compare.json -o docs/images/results-cifar10.png

Reads the results of `benchmarks/compare.py`. A line is the mean over a row's seeds, with a band from the lowest to the
highest. The learning rate decays to 0 at a run's last epoch, so only the ends of the lines can be compared.
"""

import argparse
import math
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from comparison import accuracies, measured_rows, relative_compute, results_of, row_title
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from jcl.errors import JclError, RunError
from jcl.report import style
from jcl.runs.json_object import read_object

LEGEND_COLUMNS = 2
DASHED, DOTTED = (0, (4, 1.5)), (0, (1, 1))
# Variants of a method share its color; rows that may coincide with JCL differ in color and dashes.
VARIANTS: dict[str, dict[str, Any]] = {
    "jcl-two-queries": {"color": style.BLUE, "linestyle": "-"},
    "jcl-one-query": {"color": style.BLUE, "linestyle": DASHED},
    "moco-v2-two-queries": {"color": style.ORANGE, "linestyle": DOTTED},
    "moco-v2-twice": {"color": style.ORANGE, "linestyle": DASHED},
    "multi-key": {"color": style.GREEN, "linestyle": DASHED},
    "multi-key-two-queries": {"color": style.GREEN, "linestyle": DASHED},
    "jcl-scale-0": {"color": style.RED, "linestyle": DOTTED},
    "jcl-scale-0-two-queries": {"color": style.RED, "linestyle": DOTTED},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="file written by compare.py")
    parser.add_argument("-o", "--out", type=Path, required=True, help=".png file")
    arguments = parser.parse_args()
    try:
        print(f"The plot is in {draw(read_results(arguments.results), arguments.out)}.")
    except JclError as error:
        raise SystemExit(f"Error: {error}") from None


def read_results(file: Path) -> dict[str, Any]:
    found = read_object(file)
    if not isinstance(found.get("rows"), dict) or not measured_rows(found):
        raise RunError(f"{file} holds no results of a comparison.")
    return found


def draw(found: dict[str, Any], path: Path) -> Path:
    """Both panels, as a PNG 1500 pixels wide."""
    rows = {name: found["rows"][name] for name in measured_rows(found)}
    height = 4.6 + 0.22 * math.ceil(len(rows) / LEGEND_COLUMNS)
    figure = style.new_figure(10, height)
    over_epochs, over_compute = figure.subplots(1, 2, sharey=True)
    figure.subplots_adjust(left=0.065, right=0.975, top=3.3 / height, bottom=0.45 / height, wspace=0.08)
    looks = {
        name: VARIANTS.get(name, {"color": color, "linestyle": "-"})
        for name, color in zip(rows, style.colors_for(list(rows)), strict=True)
    }
    for name, row in rows.items():
        results = list(results_of(found, name).values())
        draw_row(over_epochs, looks[name], results, 1)
        draw_row(over_compute, looks[name], results, relative_compute(row, results[0]) / found["epochs"])
    style.format_axes(over_epochs, "At equal epochs", "kNN in percent against epochs")
    style.format_axes(over_compute, "At equal compute", f"kNN against compute, in {found['epochs']} epochs of MoCo v2")
    handles = [Line2D([], [], linewidth=2.2, **look) for look in looks.values()]
    labels, place = [label(name, found) for name in rows], (0.015, 1 - 0.62 / height)
    figure.legend(
        handles, labels, loc="upper left", bbox_to_anchor=place, ncols=LEGEND_COLUMNS, frameon=False,
        fontsize=style.SIZES["label"], labelcolor=style.INK,
    )  # fmt: skip
    style.write_title(figure, *title_of(found, rows))
    return style.save(figure, path)


def title_of(found: dict[str, Any], rows: Iterable[str]) -> tuple[str, str]:
    counts = sorted({len(results_of(found, name)) for name in rows})
    number = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    seeds = "one seed" if counts == [1] else f"{number} seeds"
    subtitle = f"{seeds} per row; compare only the ends, where the learning rate is 0"
    return f"{found['recipe']}, {found['epochs']} epochs", subtitle


def label(name: str, found: dict[str, Any]) -> str:
    words, one = found["rows"][name]["words"], next(iter(results_of(found, name).values()))
    return style.plain(f"{row_title(words, one)}: {last_accuracy(found, name):.1f} %", 70)


def last_accuracy(found: dict[str, Any], name: str) -> float:
    return fmean(accuracies(list(results_of(found, name).values()), "kNN"))


def draw_row(axes: Axes, look: dict[str, Any], results: list[dict[str, Any]], scale: float) -> None:
    """Mean and range of a row at the epochs that all its seeds have."""
    epochs = sorted(set.intersection(*(set(result["online_knn"]) for result in results)), key=float)
    values = np.array([[result["online_knn"][epoch] for epoch in epochs] for result in results])
    where = np.array([float(epoch) for epoch in epochs]) * scale
    color, mean = look["color"], values.mean(axis=0)
    axes.fill_between(where, values.min(axis=0), values.max(axis=0), color=color, alpha=0.2, linewidth=0)
    axes.plot(where, mean, linewidth=1.8, **look)
    axes.plot(where[-1:], mean[-1:], "o", color=color, markersize=5, markeredgecolor=style.PAPER, markeredgewidth=0.8)


if __name__ == "__main__":
    main()
