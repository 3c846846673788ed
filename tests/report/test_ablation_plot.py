"""Curves, maps and categories are drawn in the stated size, with odd names and missing cells."""

import itertools
import warnings
from pathlib import Path
from typing import Any

import picture_tools
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from picture_tools import pixels

from jcl.report import style
from jcl.report.ablation_curves import draw_each_alone, on_line
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


SCALE = "method.covariance_scale"
CENTRE: dict[str, Any] = {KEYS: 5, SCALE: 4.0, TAU: 0.2}


def around(centre: dict[str, Any], **lines: list[Any]) -> list[Point]:
    """The centre and one setting at a time, by the end of its name; accuracies rise from 50 in the order of points."""
    names = {name.rpartition(".")[2]: name for name in centre}
    values = [centre, *(centre | {names[short]: value} for short, tried in lines.items() for value in tried)]
    return [point(each, 50.0 + number) for number, each in enumerate(values)]


def panels_of(figure: Figure) -> list[Axes]:
    return [axes for axes in figure.axes if axes.get_visible()]


def drawn(axes: Axes) -> list[list[float]]:
    """The heights of the curves in a panel, from left to right."""
    return [list(line.get_ydata()) for line in axes.lines if line.get_marker() == "o"]


def test_alone_each_setting_has_a_panel_with_the_centre_in_it():
    points = around(CENTRE, num_keys=[1, 11], covariance_scale=[0.0], temperature=[0.07, 0.5])
    panels = panels_of(draw_each_alone(points, CENTRE, several=False))
    assert [axes.get_xlabel().partition(",")[0] for axes in panels] == [
        "number of keys M'", "covariance scale λ", "temperature τ",
    ]  # fmt: skip
    linear = [[51.0, 50.0, 52.0], [53.0, 50.0], [54.0, 50.0, 55.0]]
    assert [drawn(axes) for axes in panels] == [[line, [value - 5 for value in line]] for line in linear]
    for axes, place in zip(panels, (1, 1, 1), strict=True):
        dotted = [line for line in axes.lines if line.get_marker() != "o"]
        assert [line.get_xdata()[0] for line in dotted] == [axes.get_xticks()[place]]


def test_points_off_the_lines_are_not_drawn():
    points = around(CENTRE, num_keys=[1], temperature=[0.5])
    corner = point({KEYS: 1, SCALE: 4.0, TAU: 0.5}, 99.0)
    with_corner = panels_of(draw_each_alone([*points, corner], CENTRE, several=False))
    without = panels_of(draw_each_alone(points, CENTRE, several=False))
    assert [drawn(axes) for axes in with_corner] == [drawn(axes) for axes in without]
    assert on_line(points[1], CENTRE, KEYS) and not on_line(corner, CENTRE, KEYS) and not on_line(corner, CENTRE, TAU)


@pytest.mark.parametrize("settings", [2, 3, 4, 5])
def test_as_many_panels_as_settings(settings, tmp_path):
    centre = {f"section.setting_{number}": 1 for number in range(settings)}
    points = around(centre, **{name.rpartition(".")[2]: [2, 3] for name in centre})
    assert len(panels_of(draw_each_alone(points, centre, several=True))) == settings
    assert count(plot_ablation(points, tmp_path / "alone.png", centre=centre), style.BLUE) > 500


def test_one_setting_alone_is_a_curve_as_ever(tmp_path):
    points = [point({KEYS: keys}, 60.0 + keys) for keys in (1, 2, 5)]
    alone = plot_ablation(points, tmp_path / "alone.png", centre={KEYS: 2})
    assert alone.read_bytes() == plot_ablation(points, tmp_path / "curve.png").read_bytes()


def test_the_cells_around_a_centre_that_failed_are_drawn(tmp_path):
    points = [point(CENTRE, failed=1), *around(CENTRE, num_keys=[1, 2], temperature=[0.1])[1:]]
    assert count(plot_ablation(points, tmp_path / "gap.png", centre=CENTRE), style.ORANGE) > 500


@pytest.mark.parametrize(
    "values", [[0.07, 0.1, 0.2, 0.5], [0.125, 0.13, 0.5], [1, 2, 3, 5, 7, 9, 11], [1e-05, 0.001, 0.1], [0, 0.2, 1, 10]]
)
@pytest.mark.parametrize("settings", [2, 3])
def test_labels_of_values_do_not_touch(values, settings):
    centre = dict(list(CENTRE.items())[:settings]) | {TAU: values[0]}
    figure = draw_each_alone(around(centre, temperature=values[1:]), centre, several=False)
    figure.canvas.draw()
    axes = next(axes for axes in panels_of(figure) if axes.get_xlabel().startswith("temperature"))
    boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
    assert len(boxes) == len(values) and all(one.x1 < two.x0 for one, two in itertools.pairwise(boxes))


@pytest.mark.parametrize("value", [1, 0.25, 0.001875, "a-backbone-with-a-long-name", [1, 2, 3, 4, 5, 6, 7, 8, 9]])
def test_what_stands_above_a_panel_ends_on_the_paper(value):
    centre = CENTRE | {TAU: value}
    figure = draw_each_alone(around(centre, num_keys=[1, 2]), centre, several=False)
    figure.canvas.draw()
    above = panels_of(figure)[-1].texts[-1]
    assert above.get_text().startswith("highest: Linear") and above.get_window_extent().x1 < 1500


@pytest.mark.parametrize("alone", [False, True])
def test_the_longest_line_below_the_title_ends_on_the_paper(tmp_path, monkeypatch, alone):
    figures = []
    monkeypatch.setattr(style, "save", lambda figure, path: figures.append(figure))
    points = around(CENTRE, num_keys=[1, 2, 3])
    points[1] = point(points[1].values, 60.0, 61.0, failed=11)
    options = {"data": "photographs of birds " * 9, "chance": 10.0, "centre": CENTRE if alone else None}
    plot_ablation(points, tmp_path / "long.png", **options)
    figures[0].canvas.draw()
    texts = [text for text in figures[0].texts if "11 cells failed" in text.get_text()]
    assert len(texts) == 1 and texts[0].get_window_extent().x1 < 1500
