"""Plots of ablations: curves and panels, with odd names and missing cells."""

import itertools
import warnings
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from picture_tools import count, pixels

from jcl.report import style
from jcl.report.ablation_plot import draw_curves, draw_each_alone, plot_ablation
from jcl.studies.ablation import Point

KEYS, TAU, SCALE = "method.num_keys", "method.temperature", "method.covariance_scale"
CENTER: dict[str, Any] = {KEYS: 5, SCALE: 4.0, TAU: 0.2}


def point(values: dict[str, Any], *accuracies: float, failed: int = 0) -> Point:
    results = tuple({"linear_top1": value, "knn_top1": value - 5, "validation_top1": value} for value in accuracies)
    return Point(values, results, failed)


@pytest.fixture(autouse=True)
def no_warnings() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_one_curve_per_combination_of_further_settings(tmp_path):
    points = [point({KEYS: keys, TAU: tau}, 70.0 + keys + 10 * tau) for keys in (1, 2, 5) for tau in (0.1, 0.5)]
    points.append(point({KEYS: 9, TAU: 0.1}, failed=2))
    path = plot_ablation(points, tmp_path / "two.png", data="photos", chance=10.0)
    assert pixels(path).shape[1] == 1500
    assert min(count(path, style.BLUE), count(path, style.ORANGE)) > 500 and count(path, style.GREEN) == 0


def test_several_seeds_have_error_bars(tmp_path):
    flat = plot_ablation([point({KEYS: keys}, 70.0) for keys in (1, 2, 5)], tmp_path / "one.png")
    spread = plot_ablation([point({KEYS: keys}, 69.0, 71.0) for keys in (1, 2, 5)], tmp_path / "spread.png")
    assert count(spread, style.BLUE) > count(flat, style.BLUE)


def test_one_seed_has_the_binomial_interval_as_error_bar():
    results = [{"linear_top1": 50.0, "knn_top1": 50.0, "test_images": 10}]
    (axes, _, _) = panels_of(draw_each_alone([Point(CENTER, results)], CENTER))
    (segment,) = axes.collections[0].get_segments()
    assert list(segment[:, 1]) == pytest.approx([23.66, 76.34], abs=0.01)


@pytest.mark.parametrize("lowest", [0.0, 70.0, 99.8])
def test_a_small_difference_does_not_fill_the_plot(lowest):
    points = [point(CENTER | {KEYS: keys}, lowest + 0.1 * number) for number, keys in enumerate((1, 5, 9))]
    for each in points:
        each.results[0]["knn_top1"] = each.results[0]["linear_top1"]
    low, high = panels_of(draw_each_alone(points, CENTER))[0].get_ylim()
    assert high - low == pytest.approx(5) and low <= lowest and high >= lowest + 0.2 and low >= 0 and high <= 100


def test_many_combinations_have_different_colors():
    values = [0.1 * number for number in range(1, 10)]
    points = [point({KEYS: keys, TAU: tau}, 70.0 + keys + tau) for keys in (1, 2, 5) for tau in values]
    points[4] = point(points[4].values, failed=1)
    for axes in draw_curves(points).axes:
        assert len({line.get_color() for line in axes.lines if line.get_marker() == "o"}) == len(values)


@pytest.mark.parametrize(
    "values",
    [[5], ["$x", r"$\frac{1}$", "_hidden", "猫", "x" * 500, ""], [[1, 2], True, 1e-5]],
)
def test_any_values(tmp_path, values):
    points = [point({KEYS: value}, 50.0 + number, 51.0 + number) for number, value in enumerate(values)]
    assert count(plot_ablation(points, tmp_path / "any.png", data="$odd\n"), style.BLUE) > 50


def around(center: dict[str, Any], **lines: list[Any]) -> list[Point]:
    """The center and one setting at a time, by its short name; accuracies increase from 50."""
    names = {name.rpartition(".")[2]: name for name in center}
    values = [center, *(center | {names[short]: value} for short, tried in lines.items() for value in tried)]
    return [point(each, 50.0 + number) for number, each in enumerate(values)]


def panels_of(figure: Figure) -> list[Axes]:
    return [axes for axes in figure.axes if axes.get_visible()]


def test_each_setting_alone_has_a_panel_through_the_center(tmp_path):
    points = around(CENTER, num_keys=[1, 11], covariance_scale=[0.0], temperature=[0.07, 0.5])
    off_the_lines = point({KEYS: 1, SCALE: 4.0, TAU: 0.5}, 99.0)
    panels = panels_of(draw_each_alone([*points, off_the_lines], CENTER))
    curves = [[list(line.get_ydata()) for line in axes.lines if line.get_marker() == "o"] for axes in panels]
    linear = [[51.0, 50.0, 52.0], [53.0, 50.0], [54.0, 50.0, 55.0]]
    assert curves == [[line, [value - 5 for value in line]] for line in linear]
    failed = [point(CENTER, failed=1), *points[1:]]
    assert count(plot_ablation(failed, tmp_path / "alone.png", center=CENTER), style.ORANGE) > 500


@pytest.mark.parametrize("settings", [2, 5])
def test_one_panel_per_setting(settings):
    center = {f"section.setting_{number}": 1 for number in range(settings)}
    points = around(center, **{name.rpartition(".")[2]: [2, 3] for name in center})
    assert len(panels_of(draw_each_alone(points, center))) == settings


@pytest.mark.parametrize("values", [[1, 2, 3, 5, 7, 9, 11], [1e-05, 0.001, 0.1]])
def test_tick_labels_do_not_overlap(values):
    center = CENTER | {TAU: values[0]}
    figure = draw_each_alone(around(center, temperature=values[1:]), center)
    figure.draw_without_rendering()
    axes = next(axes for axes in panels_of(figure) if axes.get_xlabel().startswith("temperature"))
    boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
    assert len(boxes) == len(values) and all(one.x1 < two.x0 for one, two in itertools.pairwise(boxes))
