"""Charts inside a page: round ticks, places in proportion, gaps where values are missing, and nothing unescaped."""

import math
import re

import pytest
import torch

from jcl.report.contents import FlatMap
from jcl.report.inline import image_address, script_json
from jcl.report.scatter import class_marks, map_chart
from jcl.report.svg import Curve, Frame, extent, line_chart, ticks


@pytest.mark.parametrize(
    ("low", "high", "marks"),
    [
        (0, 24, [0, 5, 10, 15, 20]),
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (-0.003, 0.0019, [-0.003, -0.002, -0.001, 0, 0.001]),
    ],
)
def test_ticks_are_round(low: float, high: float, marks: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(marks)


def test_ticks_of_nothing() -> None:
    assert ticks(2, 2) == [2] and ticks(0, math.nan) == [0]


def test_extent_has_air_and_is_never_empty() -> None:
    low, high = extent([1.0, 3.0, math.nan, math.inf])
    assert low < 1 and high > 3 and math.isfinite(high)
    assert extent([1.0, 3.0], from_zero=True)[0] == 0
    for values in ([], [0.0], [5.0, 5.0], [math.nan]):
        low, high = extent(values)
        assert low < high


def test_points_lie_where_they_belong() -> None:
    frame = Frame((0.0, 10.0), (0.0, 100.0))
    left, top, right, bottom = frame.box
    assert (frame.across(0), frame.across(10)) == (left, right) and (frame.down(0), frame.down(100)) == (bottom, top)
    assert frame.across(5) == (left + right) / 2


def test_a_value_that_is_missing_leaves_a_gap() -> None:
    curve = Curve(0, [(0, 1), (1, 2), (2, math.nan), (3, 2), (4, 1)], marked=True)
    chart = line_chart([curve], Frame((0.0, 4.0), (0.0, 3.0)), label="x", x_name="epoch", write=str)
    path = re.search(r'class="line" d="([^"]*)"', chart.svg)
    assert path is not None and path[1].count("M") == 2 and path[1].count("L") == 2
    assert chart.svg.count("<circle") == 4
    assert [point[:2] for point in chart.data["series"][0]["points"]] == [[0, 1], [1, 2], [3, 2], [4, 1]]


def test_texts_are_escaped() -> None:
    evil = '"><script>&'
    chart = line_chart([], Frame((0.0, 1.0), (0.0, 1.0)), label=evil, x_name=evil, write=str, levels=[(0.5, evil)])
    assert "<script>" not in chart.svg and chart.svg.count("&lt;script&gt;&amp;") == 3
    flat = FlatMap(torch.rand(3, 2), torch.rand(3, 2), ["a"] * 3, [evil] * 3)
    assert "<script>" not in map_chart(evil, flat).svg
    assert "<" not in script_json([evil]) and ">" not in script_json([evil])


def test_classes_are_told_apart_by_colour_and_shape() -> None:
    marks = class_marks([f"class {number:02}" for number in range(12)])
    assert len({(mark.hue, mark.shape) for mark in marks.values()}) == 12
    many = class_marks([*("common",) * 5, *(f"rare {number}" for number in range(30)), None])
    assert many["common"].hue is not None and many[None].hue is None and many[None].name == "other classes"
    assert (
        len({mark.name for mark in many.values()}) == 12
        and sum({id(m): m.images for m in many.values()}.values()) == 36
    )
    assert {mark.name for mark in class_marks([None, None]).values()} == {"image"}


def test_small_pictures_are_exact_and_large_ones_small() -> None:
    large = torch.randint(0, 256, (3, 900, 600), dtype=torch.uint8)
    assert image_address(large[:, :32, :32]).startswith("data:image/png;base64,")
    assert image_address(large).startswith("data:image/jpeg;base64,") and len(image_address(large)) < 20_000
