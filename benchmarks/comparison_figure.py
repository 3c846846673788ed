"""How the rows of a comparison come along: kNN against epochs, and against arithmetic.

    python benchmarks/comparison_figure.py benchmarks/results/cifar10-compare.json -o docs/images/results-cifar10.png

Reads what `benchmarks/compare.py` has written and trains nothing. A line is the mean over a row's seeds, with a band
from the lowest to the highest of them. The learning rate of a run falls until its own last epoch, so only the ends of
the lines, which are marked, can be compared; what comes before shows how they got there.
"""

import argparse
import contextlib
import math
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from comparison_rows import BASELINE, LEADING, ROWS
from comparison_table import accuracies, compute_of_an_epoch, rows_in_order, seeds_of, views_not_told
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from jcl.errors import JclError, RunError
from jcl.report import style
from jcl.runs.json_object import read_object

LEGEND_COLUMNS = 2
DASHED, DOTTED = (0, (4, 1.5)), (0, (1, 1))
# Variants have their method's colour and dashes of their own; what lies on JCL's line differs from it in both.
VARIANTS: dict[str, dict[str, Any]] = {
    "jcl-one-query": {"color": style.BLUE, "linestyle": DASHED},
    "moco-v2-two-queries": {"color": style.ORANGE, "linestyle": DOTTED},
    "moco-v2-twice": {"color": style.ORANGE, "linestyle": DASHED},
    "multi-key": {"color": style.GREEN, "linestyle": DASHED},
    "jcl-scale-0": {"color": style.RED, "linestyle": DOTTED},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="the file that compare.py has written")
    parser.add_argument("-o", "--out", type=Path, required=True, help="the figure, a .png file")
    arguments = parser.parse_args()
    if arguments.out.suffix != ".png":
        parser.error(f"--out {arguments.out}: the figure is a .png file")
    try:
        print(f"Drawn in {draw(results_in(arguments.results), arguments.out)}.")
    except JclError as error:
        raise SystemExit(f"Error: {error}") from None


def results_in(file: Path) -> dict[str, Any]:
    with contextlib.suppress(RunError):  # what it says is meant for a run's own files
        found = read_object(file)
        if isinstance(found.get("rows"), dict) and rows_in_order(found):
            return found
    raise RunError(f"{file} holds no results of a comparison; give the file that compare.py wrote with --json.")


def draw(found: dict[str, Any], path: Path) -> Path:
    """Both panels, as a PNG 1500 pixels wide."""
    rows = {name: found["rows"][name] for name in rows_in_order(found)}
    height = 4.6 + 0.22 * math.ceil(len(rows) / LEGEND_COLUMNS)
    figure = style.new_figure(10, height)
    over_epochs, over_compute = figure.subplots(1, 2, sharey=True)
    figure.subplots_adjust(left=0.065, right=0.975, top=3.3 / height, bottom=0.45 / height, wspace=0.08)
    looks = {
        name: VARIANTS.get(name, {"color": colour, "linestyle": "-"})
        for name, colour in zip(rows, style.colours_for(list(rows)), strict=True)
    }
    for name, row in rows.items():
        results = list(seeds_of(found, name).values())
        draw_row(over_epochs, looks[name], results, 1)
        draw_row(over_compute, looks[name], results, compute_of_an_epoch(row, results[0]) / found["epochs"])
    style.dress(over_epochs, "At equal epochs", "kNN in percent, against the epochs")
    times = f"MoCo v2's {found['epochs']} epochs being one"
    style.dress(over_compute, "At equal compute", f"the same against the arithmetic done, {times}")
    handles = [Line2D([], [], linewidth=2.2, **look) for look in looks.values()]
    labels, place = [label(name, found) for name in rows], (0.015, 1 - 0.62 / height)
    figure.legend(
        handles, labels, loc="upper left", bbox_to_anchor=place, ncols=LEGEND_COLUMNS, frameon=False,
        fontsize=style.SIZES["label"], labelcolor=style.INK,
    )  # fmt: skip
    style.write_title(figure, *title_of(found, rows))
    return style.save(figure, path)


def title_of(found: dict[str, Any], rows: Iterable[str]) -> tuple[str, str]:
    """By how much the first row leads, where that is known, and of how many seeds the lines are."""
    title = f"{found['recipe']}, {found['epochs']} epochs"
    compared = [name for name in (LEADING, BASELINE) if seeds_of(found, name)]
    ends = {last_accuracy(found, name): ROWS[name].words for name in compared}
    if len(ends) > 1:
        title += f": {ends[max(ends)]} leads {ends[min(ends)]} by {max(ends) - min(ends):.1f} points"
    counts = sorted({len(seeds_of(found, name)) for name in rows})
    seeds = "one seed" if counts == [1] else f"{' or '.join(map(str, counts))} seeds"
    ends_only = "only the ends, marked by dots, can be compared: there the learning rate has fallen to 0"
    return title, f"{seeds} a row; {ends_only}"


def label(name: str, found: dict[str, Any]) -> str:
    words, one = found["rows"][name]["words"], next(iter(seeds_of(found, name).values()))
    views = views_not_told(words, one["num_queries"], one["num_keys"])
    return style.plain(f"{words}{views}: {last_accuracy(found, name):.1f} %", 70)


def last_accuracy(found: dict[str, Any], name: str) -> float:
    return fmean(accuracies(list(seeds_of(found, name).values()), "kNN"))


def draw_row(axes: Axes, look: dict[str, Any], results: list[dict[str, Any]], scale: float) -> None:
    """The mean and the band of a row over the epochs that all of its seeds were measured at."""
    epochs = sorted(set.intersection(*(set(result["online_knn"]) for result in results)), key=float)
    values = np.array([[result["online_knn"][epoch] for epoch in epochs] for result in results])
    where = np.array([float(epoch) for epoch in epochs]) * scale
    colour, mean = look["color"], values.mean(axis=0)
    axes.fill_between(where, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.2, linewidth=0)
    axes.plot(where, mean, linewidth=1.8, **look)
    axes.plot(where[-1:], mean[-1:], "o", color=colour, markersize=5, markeredgecolor=style.PAPER, markeredgewidth=0.8)


if __name__ == "__main__":
    main()
