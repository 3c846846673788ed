"""Means and spreads over seeds, the best by held-out training images, and every cell in the CSV."""

import csv
import io
import statistics
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from jcl.cli.study import _print_ablation
from jcl.commands.ablate import Ablation
from jcl.errors import RunError
from jcl.evaluate.baselines import estimate
from jcl.settings.schema import Settings
from jcl.studies.ablation import CellFolder, CellRecord, Point, as_csv, best_points, flat_results, points_of
from jcl.studies.cells import Cell

NAMES = ["method.num_keys"]


def record(keys: Any, seed: int, linear: float | None, failure: str | None = None) -> CellRecord:
    cell = Cell(values={"method.num_keys": keys}, seed=seed, settings=Settings())
    result = None
    if linear is not None:
        result = {"seed": seed, "linear_top1": linear, "knn_top1": linear - 10, "validation_top1": 100 - linear}
    return CellRecord(cell, result, failure)


RECORDS = [
    record(11, 0, 72.0),
    record(2, 1, 61.5),
    record(2, 0, 60.0),
    record(2, 7, 64.5),
    record(5, 0, None, '=the loss is not finite, "so" it stopped.'),
    record(7, 0, None),
]


def test_of_equally_good_points_none_is_best():
    points = points_of([record(2, 0, 60.0), record(5, 0, 60.0), record(7, 0, 72.0)], NAMES)
    assert [point.values["method.num_keys"] for point in best_points(points)] == [2, 5]
    assert "best_num_keys" not in flat_results(points)
    assert best_points(points_of([record(2, 0, 60.0), record(5, 0, None, "it failed")], NAMES)) == []  # no choice


def test_points_rise_and_count_what_failed():
    points = points_of(RECORDS, NAMES)
    assert [point.values["method.num_keys"] for point in points] == [2, 5, 7, 11]
    assert [(len(point.results), point.failed) for point in points] == [(3, 0), (0, 1), (0, 0), (1, 0)]
    two = points[0]
    assert two.each("linear_top1") == [60.0, 61.5, 64.5]  # by seed
    assert two.mean("linear_top1") == 62.0 and two.spread("linear_top1") == statistics.stdev([60.0, 61.5, 64.5])
    assert points[3].spread("linear_top1") is None and points[1].mean("linear_top1") is None


def test_other_values_stay_in_the_order_in_which_they_come():
    records = [record(name, 0, 50.0) for name in ("moco-v2", "jcl", [3, 4])]
    assert [point.values["method.num_keys"] for point in points_of(records, NAMES)] == ["moco-v2", "jcl", [3, 4]]


def test_the_best_is_chosen_without_the_test_images():
    points = points_of(RECORDS, NAMES)
    (best,) = best_points(points)
    assert best.values == {"method.num_keys": 2}  # the test images would have it 11
    assert best_points(points[3:]) == []


def test_the_uncertainty_is_students_interval_of_seeds_or_binomial():
    counted = {"linear_top1": 50.0, "validation_top1": 50.0, "test_images": 10, "train_images": 50}
    one = Point({}, [counted])
    assert one.estimate("linear_top1") == one.estimate("validation_top1") == estimate(50.0, 10)
    two = Point({}, [counted, counted | {"linear_top1": 52.0}])
    found = two.estimate("linear_top1")
    assert found and found[:3] == pytest.approx((51.0, 51 - 12.706, 51 + 12.706), abs=1e-3)  # the std of 50, 52 is √2
    assert Point({}, [counted, counted]).estimate("linear_top1") == one.estimate("linear_top1"), "equal by chance"
    many = Point({}, [{"linear_top1": value} for value in (49.0, 51.0) * 50]).estimate("linear_top1")
    assert many and many.high - many.low < 0.5
    assert Point({}, []).estimate("linear_top1") is None


@pytest.mark.parametrize(("images", "bold"), [(100, False), (100_000, True)])
def test_the_best_is_bold_only_beyond_the_uncertainty(monkeypatch, images, bold):
    text = io.StringIO()
    monkeypatch.setattr("jcl.cli.study.out", Console(file=text, force_terminal=True, width=150))
    found = {"validation_top1": 70.0, "test_images": images, "train_images": 5 * images}
    points = [Point({"method.num_keys": keys}, [found | {"validation_top1": 70.0 + keys}]) for keys in (1, 5)]
    counts = {"cells_done": 2, "unseen_class_images": 0, "test_images": images, "test_held_out": False}
    _print_ablation(Ablation(Path("none"), NAMES, points, counts))
    (row,) = [line for line in text.getvalue().splitlines() if "75.00" in line]
    assert ("\x1b[1m" in row) == bold


def test_flat_figures():
    figures = flat_results(points_of(RECORDS, NAMES))
    assert figures["linear_top1_num_keys_2"] == 62.0 and figures["knn_top1_num_keys_2"] == 52.0
    assert figures["linear_top1_std_num_keys_11"] is None and figures["linear_top1_num_keys_5"] is None
    assert figures["seeds_num_keys_2"] == 3 and figures["best_num_keys"] == 2 and figures["best_linear_top1"] == 62.0
    assert not any(isinstance(value, dict | list) for value in figures.values())


def test_every_cell_is_a_line_of_the_csv():
    lines = list(csv.DictReader(io.StringIO(as_csv(RECORDS, NAMES))))
    assert [(line["num_keys"], line["seed"], line["state"]) for line in lines] == [
        ("11", "0", "done"), ("2", "1", "done"), ("2", "0", "done"), ("2", "7", "done"), ("5", "0", "failed"),
        ("7", "0", "unfinished"),
    ]  # fmt: skip
    assert float(lines[1]["linear_top1"]) == 61.5 and lines[4]["linear_top1"] == ""
    assert lines[4]["error"] == RECORDS[4].failure


def test_no_cell_is_planned_through_a_link(tmp_path):
    """Not even one that has started: training would go on in the other folder."""
    cell = Cell(values={}, seed=0, settings=Settings())
    started = CellFolder(tmp_path / "other/cells" / cell.name)
    started.path.mkdir(parents=True)
    started.plan(cell)
    (started.path / "settings.yaml").write_text("")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/cells").symlink_to(tmp_path / "other/cells")
    with pytest.raises(RunError, match="cells"):
        CellFolder(tmp_path / "mine/cells" / cell.name).plan(cell)
