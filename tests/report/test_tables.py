"""Tables of the page: intervals beside accuracies, and no winner within the uncertainty."""

from pathlib import Path

import pytest

from jcl.evaluate.baselines import estimate
from jcl.report.contents import Metric, RunContents
from jcl.report.tables import Row, class_tables, resource_table, result_tables
from small_runs import tiny_settings


def rows_of(images: int, **figures: list[float]) -> dict[str, Row]:
    """The rows of a table with a run for each of the values."""
    runs = [
        RunContents(
            *(str(number), Path(f"/runs/{number}"), tiny_settings("demo"), [], {"images_per_second": 100}),
            measured={Metric(name): estimate(values[number], images) for name, values in figures.items()},
        )
        for number in range(len(next(iter(figures.values()))))
    ]
    (table,) = result_tables(runs)
    return {row.name: row for row in [*table.rows, *resource_table(runs).rows]}


def test_an_accuracy_is_shown_with_its_interval():
    rows = rows_of(40, knn_top1=[24.0])
    assert rows["kNN, top-1"].values == ["24.0 % (13.4 to 39.1)"] and rows["kNN, top-1"].best is None


def test_the_number_of_images_is_shown():
    assert rows_of(40, knn_top1=[24.0])["kNN, top-1"].note == "40 test images"


@pytest.mark.parametrize("classes", [1, 8, 9, 40])
def test_few_classes_are_in_one_table(classes):
    found = {f"class {number}": (10, 10.0 * (number % 11)) for number in range(classes)}
    run = RunContents("run", Path("/runs/one"), tiny_settings("demo"), [], None, classes=found)
    tables = class_tables([run])
    assert len(tables) == (1 if classes <= 8 else 2)
    assert sum(len(table.rows) for table in tables) == min(classes, 16)


def test_a_lead_within_the_uncertainty_or_a_tie_is_no_win():
    assert rows_of(400, knn_top1=[84.0, 82.0])["kNN, top-1"].best is None
    assert rows_of(40_000, knn_top1=[82.0, 84.0])["kNN, top-1"].best == 1
    assert rows_of(40_000, knn_top1=[84.0, 82.0, 84.0])["kNN, top-1"].best is None
    assert rows_of(400, knn_top1=[84.0, 82.0])["images per second"].best is None


def test_baselines_have_no_winner():
    rows = rows_of(40_000, untrained_knn_top1=[20.0, 50.0], knn_top1=[60.0, 80.0])
    assert rows["untrained network, kNN top-1"].best is None and rows["kNN, top-1"].best == 1
