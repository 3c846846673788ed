"""Figures as PNG files show what they are given, whatever the names and however many values are missing."""

import math
import warnings
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot
import pytest
import torch
from picture_tools import count
from torch import Tensor

from jcl.errors import RunError
from jcl.report import style
from jcl.report.contents import NamedImage, NeighbourRow
from jcl.report.figures import draw_neighbours, plot_comparison

ODD_NAMES = ["$x", r"$\frac{1}$", "<script>alert(1)</script>", "_hidden", "a\nb\x00", "naïve ✓", "猫", "", "x" * 500]
TITLES = {"title": "a title", "subtitle": "a subtitle"}


@pytest.fixture(autouse=True)
def no_warnings_and_no_global_state() -> Any:
    settings = dict(matplotlib.rcParams)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    assert dict(matplotlib.rcParams) == settings
    assert matplotlib.pyplot.get_fignums() == []


def flat(color: tuple[int, int, int], height: int = 32, width: int = 32) -> Tensor:
    return torch.tensor(color, dtype=torch.uint8)[:, None, None].expand(3, height, width)


def neighbours(query: str | None, *labels: str | None) -> NeighbourRow:
    grey = flat((128, 128, 128))
    return NeighbourRow(NamedImage(grey, "q", query), [NamedImage(grey, "n", own) for own in labels], [0.5] * 3)


def test_bars_are_as_long_as_their_values(tmp_path: Path) -> None:
    scores = {"raw pixels": 20.0, "MoCo v2": 40.0, "JCL": 80.0}
    path = plot_comparison(scores, tmp_path / "bars.png", **TITLES, chance=0.0)
    assert count(path, style.BLUE) / count(path, style.ORANGE) == pytest.approx(2, rel=0.05)
    again = plot_comparison(scores, tmp_path / "again.png", **TITLES, chance=0.0)
    assert path.read_bytes() == again.read_bytes()


def test_odd_names_are_drawn_as_text(tmp_path: Path) -> None:
    scores = {name: 10.0 * number for number, name in enumerate(ODD_NAMES)}
    path = plot_comparison(scores, tmp_path / "bars.png", title="$", subtitle="$_$", chance=0.0)
    bars = [count(path, color) for color in style.colors_for(ODD_NAMES)[3:6]]  # colors that only one bar has
    assert [bar / bars[0] for bar in bars] == pytest.approx([1, 4 / 3, 5 / 3], rel=0.05)
    rows = [neighbours("$a_{", "$a_{", "\\alpha$", ""), neighbours("<b>\n" * 30, "x" * 300)]
    assert count(draw_neighbours(rows, tmp_path / "n.png", title="$x^"), style.RED) > 100


def test_frames_tell_right_from_wrong(tmp_path: Path) -> None:
    right = draw_neighbours([neighbours("cat", "cat", "cat", "cat")], tmp_path / "r.png")
    mixed = draw_neighbours([neighbours("cat", "cat", "dog", "dog")], tmp_path / "m.png")
    unknown = draw_neighbours([neighbours("cat", None, None, None)], tmp_path / "u.png")
    assert count(right, style.GREEN) > 500 and count(right, style.RED) == 0
    assert count(mixed, style.RED) == pytest.approx(2 * count(mixed, style.GREEN), rel=0.25)
    assert count(unknown, style.GREEN) == count(unknown, style.RED) == 0


def test_images_keep_their_shape_and_rows_may_differ_in_length(tmp_path: Path) -> None:
    shades = [(50 * number, 20, 30) for number in range(4)]
    images = [NamedImage(flat(shade, 90 + 40 * number, 200), "") for number, shade in enumerate(shades)]
    rows = [NeighbourRow(images[0], images, [0.9, 0.5, -0.1, math.nan]), NeighbourRow(images[1], images[:1], [1.0])]
    path = draw_neighbours(rows, tmp_path / "n.png")
    areas = [count(path, shade) / (90 + 40 * number) for number, shade in enumerate(shades)]
    assert min(areas) > 30
    assert [area / areas[3] for area in areas] == pytest.approx([3, 2, 1, 1], rel=0.1)


def test_methods_have_their_own_colors() -> None:
    assert style.colors_for(["moco v2", "JCL"]) == [style.ORANGE, style.BLUE]
    assert len(set(style.colors_for(["mine", "jcl", "yours", "moco-v2"]))) == 4
    assert len(style.colors_for([str(number) for number in range(40)])) == 40


def test_plain_text_keeps_both_ends() -> None:
    assert style.plain("a  b\n\tc\x00") == "a b c"
    assert style.plain("x" * 10, 10) == "x" * 10
    assert style.plain("beginning and end", 9) == "begi… end"
    assert len(style.plain("y" * 99, 12)) == 12


def test_a_full_disk_raises_and_keeps_the_old_figure(tmp_path: Path, no_room_for: Any) -> None:
    file = style.save(style.new_figure(1, 1), tmp_path / "a.png")
    before = file.read_bytes()
    no_room_for(file)
    with pytest.raises(RunError):
        style.save(style.new_figure(2, 2), file)
    assert file.read_bytes() == before and list(tmp_path.iterdir()) == [file]
