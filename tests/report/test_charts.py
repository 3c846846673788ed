"""Charts of the page: round ticks, gaps where values are missing, classes told apart, and text escaped."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jcl.report.charts import Axis, class_marks, metric_points, moving_average, training_charts, value_range
from jcl.report.contents import FeatureMap, RunContents, SampleResults
from jcl.report.page import render_page
from small_runs import tiny_settings


def run(losses: Sequence[float | None], name: str = "run", **settings: Any) -> RunContents:
    lines = [
        {"kind": "train", "step": step, "epoch": step / 10, "loss": loss} for step, loss in enumerate(losses, start=1)
    ]
    return RunContents(name, Path("/runs/one"), tiny_settings("demo", **settings), lines, {"steps": len(losses)})


def curves(page: str) -> list[str]:
    return re.findall(r'class="line" d="(M[^"]*h0[^"]*)"', page)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 24, [0, 5, 10, 15, 20]),
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (-0.003, 0.0019, [-0.003, -0.002, -0.001, 0, 0.001]),
    ],
)
def test_ticks_are_round_and_within_the_axis(low: float, high: float, ticks: list[float]) -> None:
    assert Axis(low, high, 0, 100).ticks(5) == pytest.approx(ticks)


def test_axis_maps_its_ends() -> None:
    axis = Axis(0.0, 10.0, 204, 12)
    assert (axis(0), axis(5), axis(10)) == (204, 108, 12)


def test_value_range_has_a_margin_and_is_never_empty() -> None:
    low, high = value_range(np.array([1.0, 3.0, math.nan, math.inf]))
    assert low < 1 and high > 3 and math.isfinite(high)
    assert value_range(np.array([1.0, 3.0]), from_zero=True)[0] == 0
    for values in ([], [0.0], [5.0, 5.0], [math.nan]):
        low, high = value_range(np.array(values))
        assert low < high


def test_missing_values_leave_a_gap() -> None:
    page = render_page([run([1.0, 2.0, None, 2.0, 1.0])])
    (curve,) = curves(page)
    assert curve.count("M") == 2 and curve.count("L") == 2
    (chart,) = training_charts([run([1.0, 2.0, None, 2.0, 1.0])])
    assert [point[:2] for point in chart.data["series"][0]["points"]] == [[0.1, 1], [0.2, 2], [0.4, 2], [0.5, 1]]


@pytest.mark.parametrize(
    ("losses", "drawn"),
    [([], False), ([None] * 5, False), ([2.0], True), ([0.0], True), ([1.0, None] * 50, True), ([3.0] * 5000, True)],
    ids=["nothing", "all null", "one step", "zero", "every other one", "long"],
)
def test_a_metric_is_drawn_if_it_has_a_value(losses: list[float | None], drawn: bool) -> None:
    contents = run(losses)
    assert bool(training_charts([contents])) is drawn
    page = render_page([contents])
    assert bool(curves(page)) is drawn and "nan" not in "".join(curves(page)) and len(page) < 500_000


def test_long_curves_keep_their_last_point() -> None:
    losses = [1000.0 / step for step in range(1, 1001)]
    (chart,) = training_charts([run(losses)])
    series = chart.series[0]
    assert series.raw is not None and len(series.points) <= 260
    assert series.raw[-1].tolist() == [100.0, losses[-1]]


def test_the_uniform_guess_is_drawn_once_for_each_queue_size() -> None:
    first, second = run([5.0, 4.0]), run([5.0, 4.0], method__queue_size=64)
    sizes = {contents.settings.method.queue_size for contents in (first, second)}
    (chart,) = training_charts([first, second, first])
    assert [value for value, _ in chart.levels] == pytest.approx(sorted(math.log(int(size) + 1) for size in sizes))


def test_metric_points_take_the_lines_of_their_kind() -> None:
    lines = [
        {"kind": "train", "step": 1, "epoch": 0.5, "loss": None},
        {"kind": "knn", "step": 2, "epoch": 1.0, "knn_top1": 42.0},
        {"kind": "train", "step": 2, "epoch": 1.0, "lr": 0.1},
    ]
    assert metric_points(lines, "knn", "knn_top1").tolist() == [[1.0, 42.0]]
    assert math.isnan(metric_points(lines, "train", "loss")[0, 1]) and len(metric_points(lines, "train", "loss")) == 1


def test_moving_average_skips_gaps() -> None:
    values = np.where(np.arange(120) % 2, 3.0, 1.0)
    values[60] = np.nan
    curve = moving_average(values)  # over five points
    assert np.isnan(curve[60]) and np.isfinite(np.delete(curve, 60)).all()
    assert curve[30] == pytest.approx((1 + 3 + 1 + 3 + 1) / 5)
    assert curve[59] == pytest.approx((3 + 1 + 3 + 3) / 4)
    assert curve[0] == pytest.approx((1 + 3 + 1) / 3)
    assert moving_average(np.full(90, 2.5)) == pytest.approx(2.5)


def test_text_is_escaped() -> None:
    evil = '"><script>&'
    feature_map = FeatureMap({"principal": torch.rand(3, 2)}, ["a", "b", evil], [evil, "b", None])
    contents = replace(run([1.0, 2.0], evil), sample=SampleResults(2, 1, from_test_set=True, feature_map=feature_map))
    page = render_page([contents], title=evil, note=evil)
    tags: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: tags.append(tag)  # type: ignore[method-assign]
    parser.feed(page)
    assert tags.count("script") == 2 and "&lt;script&gt;&amp;" in page and "\\u003cscript\\u003e\\u0026" in page


def test_classes_are_told_apart_by_color_and_shape() -> None:
    marks = class_marks([f"class {number:02}" for number in range(12)])
    assert len({(mark.style, mark.shape) for mark in marks.values()}) == 12
    many = class_marks([*("common",) * 5, *(f"rare {number}" for number in range(30)), None])
    assert many["common"].style == "hue-0" and many[None].name == "other classes" and many[None].style == "hue-none"
    assert len(set(many.values())) == 12 and sum(mark.images for mark in set(many.values())) == 36
    assert {mark.name for mark in class_marks([None, None]).values()} == {"image"}
    assert {mark.name for mark in class_marks(["cat", None]).values()} == {"cat", "no label"}
