"""Plots the kNN accuracy over epochs of `benchmarks/continued.py`.

    python benchmarks/continued_figure.py benchmarks/results/continued-*.json -o docs/images/continued.png

Each results file has a panel, two in a row. Runs with `--init` start at the accuracy of the weights.
"""

import argparse
import math
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from jcl.errors import JclError, RunError
from jcl.report import style
from jcl.runs.json_object import read_object

TITLES = {
    "scratch": "from scratch",
    "naive": "--init, settings of scratch",
    "careful": "--init",
    "third": "--init, third of the rate",
    "tenth": "--init, tenth of the rate",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="files written by continued.py")
    parser.add_argument("-o", "--out", type=Path, required=True, help=".png file")
    arguments = parser.parse_args()
    try:
        files = [read_rows(file) for file in arguments.results]
    except JclError as error:
        raise SystemExit(f"Error: {error}") from None
    names: list[str] = list(dict.fromkeys(name for found in files for name in found["rows"]))
    colors = dict(zip(names, style.colors_for(names), strict=True))
    rows = math.ceil(len(files) / 2)
    figure, panels = style.new_panels(10, 1 + 3.2 * rows, rows=rows, columns=min(2, len(files)))
    for axes, found in zip(panels, files, strict=False):
        draw(axes, found, colors)
    style.add_legend(figure, columns=len(names))
    style.write_title(
        figure, "Continued pre-training", "Epoch 0 of the runs with --init is the accuracy of the weights"
    )
    print(f"The plot is in {style.save(figure, arguments.out)}.")


def read_rows(file: Path) -> dict[str, Any]:
    found = read_object(file)
    if not isinstance(found.get("rows"), dict) or "weights" not in found:
        raise RunError(f"{file} holds no results of continued.py.")
    return found


def draw(axes: Axes, found: dict[str, Any], colors: dict[str, str]) -> None:
    for name, row in found["rows"].items():
        axes.plot(row["epochs"], row["knn_top1"], color=colors[name], linewidth=1.8, label=TITLES.get(name, name))
        axes.plot(row["epochs"][-1:], row["knn_top1"][-1:], "o", color=colors[name], markersize=5)
    style.format_axes(axes, found["data"], "kNN top-1 in percent against epochs")


if __name__ == "__main__":
    main()
