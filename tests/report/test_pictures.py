"""Sheets of images show each image in its cell, and frames say what is right and wrong."""

from pathlib import Path

import pytest
import torch
from picture_tools import count
from torch import Tensor

from jcl.report import style
from jcl.report.pictures import draw_neighbours


def flat(colour: tuple[int, int, int], height: int = 32, width: int = 32) -> Tensor:
    return torch.tensor(colour, dtype=torch.uint8)[:, None, None].expand(3, height, width)


def test_frames_tell_right_from_wrong(tmp_path: Path) -> None:
    grey = flat((128, 128, 128))
    labels = {"query_labels": ["cat"]}
    right = draw_neighbours([grey], [[grey] * 3], tmp_path / "r.png", **labels, neighbour_labels=[["cat"] * 3])
    mixed = draw_neighbours(
        [grey], [[grey] * 3], tmp_path / "m.png", **labels, neighbour_labels=[["cat", "dog", "dog"]]
    )
    unknown = draw_neighbours([grey], [[grey] * 3], tmp_path / "u.png", **labels, neighbour_labels=[[None] * 3])
    assert count(right, style.GREEN) > 500 and count(right, style.RED) == 0
    assert count(mixed, style.RED) == pytest.approx(2 * count(mixed, style.GREEN), rel=0.25)
    assert count(unknown, style.GREEN) == count(unknown, style.RED) == 0


def test_odd_labels_large_images_and_short_rows(tmp_path: Path) -> None:
    shades = [(50 * number, 20, 30) for number in range(4)]
    images = [flat(shade, 90 + 40 * number, 200) for number, shade in enumerate(shades)]
    path = draw_neighbours(
        images[:2],
        [images, images[:1]],
        tmp_path / "n.png",
        query_labels=["$a_{", "<b>\n" * 30],
        neighbour_labels=[["$a_{", "$", "\\alpha$", ""], ["x" * 300]],
        similarities=[[0.9, 0.5, -0.1, float("nan")], [1.0]],
        title="$x^",
    )
    areas = [count(path, shade) / (90 + 40 * number) for number, shade in enumerate(shades)]
    assert min(areas) > 30  # all are there in their shape: two queries, and their neighbours in rows of four and of one
    assert [area / areas[3] for area in areas] == pytest.approx([3, 2, 1, 1], rel=0.1)


def test_neighbours_without_labels(tmp_path: Path) -> None:
    path = draw_neighbours([flat((9, 9, 9))], [[flat((7, 7, 7))]], tmp_path / "n.png")
    assert count(path, (9, 9, 9)) > 1000 and count(path, (7, 7, 7)) > 1000
