"""Tables of the page: intervals beside accuracies, and no winner within the uncertainty."""

from pathlib import Path

from jcl.evaluate.baselines import estimate
from jcl.report.contents import Metric, RunContents
from jcl.report.tables import Row, resource_table, result_tables
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


def test_a_lead_within_the_uncertainty_or_a_tie_is_no_win():
    assert rows_of(400, knn_top1=[84.0, 82.0])["kNN, top-1"].best is None
    assert rows_of(40_000, knn_top1=[82.0, 84.0])["kNN, top-1"].best == 1
    assert rows_of(40_000, knn_top1=[84.0, 82.0, 84.0])["kNN, top-1"].best is None
    assert rows_of(400, knn_top1=[84.0, 82.0])["images per second"].best is None


def test_baselines_have_no_winner():
    rows = rows_of(40_000, untrained_knn_top1=[20.0, 50.0], knn_top1=[60.0, 80.0])
    assert rows["kNN of the untrained network, top-1"].best is None and rows["kNN, top-1"].best == 1
