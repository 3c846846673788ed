"""Curves, maps and categories are drawn in the stated size, with odd names and missing cells."""

import warnings
from pathlib import Path
from typing import Any

import picture_tools
import pytest
from picture_tools import pixels

from jcl.report import style
from jcl.report.ablation_plot import MOST_CURVES, plot_ablation
from jcl.studies.ablation import Point

KEYS, TAU = "method.num_keys", "method.temperature"


def point(values: dict[str, Any], *accuracies: float, failed: int = 0) -> Point:
    results = tuple({"linear_top1": value, "knn_top1": value - 5, "validation_top1": value} for value in accuracies)
    return Point(values, results, failed)


def count(path: Path, colour: str) -> int:
    picture = pixels(path)
    assert picture.shape[1] == 1500
    return picture_tools.count(picture, colour)


@pytest.fixture(autouse=True)
def no_warnings() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_one_curve_and_its_spread(tmp_path):
    flat = plot_ablation([point({KEYS: keys}, 70.0) for keys in (1, 2, 5)], tmp_path / "a/one.png")
    spread = plot_ablation([point({KEYS: keys}, 69.0, 71.0) for keys in (1, 2, 5)], tmp_path / "spread.png")
    assert count(flat, style.BLUE) > 500 and count(flat, style.ORANGE) == 0
    assert count(spread, style.BLUE) > count(flat, style.BLUE)  # the same means, with bars


def test_a_curve_for_each_value_of_the_second_setting(tmp_path):
    points = [point({KEYS: keys, TAU: tau}, 70.0 + keys + 10 * tau) for keys in (1, 2, 5) for tau in (0.1, 0.5)]
    picture = plot_ablation(points, tmp_path / "two.png", data="photos", chance=10.0)
    assert count(picture, style.BLUE) > 500 and count(picture, style.ORANGE) > 500
    assert count(picture, style.GREEN) == 0


def test_many_curves_become_a_map(tmp_path):
    values = [0.1 * number for number in range(1, MOST_CURVES + 2)]
    points = [point({KEYS: keys, TAU: tau}, 70.0 + keys + tau) for keys in (1, 2, 5) for tau in values]
    points[4] = point(points[4].values, failed=1)
    assert count(plot_ablation(points, tmp_path / "map.png"), style.ORANGE) == 0
    assert count(tmp_path / "map.png", "#003e63") > 1000  # the darkest cell


@pytest.mark.parametrize(
    "values",
    [
        [5],
        [0.0, 0.001, 0.002, 10.0],
        ["$x", r"$\frac{1}$", "_hidden", "猫", "x" * 500, ""],
        [[1, 2], True, 1e-5],
    ],
)
def test_any_values(tmp_path, values):
    points = [point({KEYS: value}, 50.0 + number, 51.0 + number) for number, value in enumerate(values)]
    assert count(plot_ablation(points, tmp_path / "any.png", data="$odd\n"), style.BLUE) > 50


def test_cells_without_figures_leave_a_gap(tmp_path):
    points = [point({KEYS: 1}, 50.0), point({KEYS: 2}, failed=2), point({KEYS: 3}, 60.0, 61.0)]
    assert count(plot_ablation(points, tmp_path / "gap.png"), style.BLUE) > 500
