"""What an ablation found: figures by value with their spread over the seeds, as a table, as CSV and by plain names."""

from __future__ import annotations

import csv
import io
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jcl.runs.json_object import written
from jcl.studies.ablation_folder import CellRecord
from jcl.studies.cells import short_name

MEASURED = ("linear_top1", "knn_top1")
"""The figures that are drawn and tabulated."""
CHOSEN_BY = "validation_top1"
"""The figure by which a best value is named: of held-out training images, so that no choice rests on the test's."""


@dataclass(frozen=True)
class Point:
    """What the seeds with the same values came to."""

    values: Mapping[str, Any]
    results: tuple[Mapping[str, Any], ...]
    failed: int = 0

    def each(self, figure: str) -> list[float]:
        return [float(result[figure]) for result in self.results if result.get(figure) is not None]

    def mean(self, figure: str) -> float | None:
        found = self.each(figure)
        return statistics.fmean(found) if found else None

    def spread(self, figure: str) -> float | None:
        """The standard deviation over seeds, as estimated from these; None for fewer than two."""
        found = self.each(figure)
        return statistics.stdev(found) if len(found) > 1 else None


def points_of(records: Sequence[CellRecord], names: Sequence[str]) -> list[Point]:
    """One point for each combination of values; numbers rise, other values stay in the order in which they come."""
    orders = [_order([record.cell.values[name] for record in records]) for name in names]
    groups: dict[tuple[int, ...], list[CellRecord]] = {}
    for record in records:
        place = tuple(order.index(record.cell.values[name]) for order, name in zip(orders, names, strict=True))
        groups.setdefault(place, []).append(record)
    return [_point(groups[place]) for place in sorted(groups)]


def _order(values: Sequence[Any]) -> list[Any]:
    distinct: list[Any] = []
    for value in values:  # lists cannot be hashed
        if value not in distinct:
            distinct.append(value)
    return sorted(distinct) if all(is_number(value) for value in distinct) else distinct


def is_number(value: Any) -> bool:
    """Whether a value of JSON is a number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _point(records: Sequence[CellRecord]) -> Point:
    by_seed = sorted(records, key=lambda record: record.cell.seed)
    results = tuple(record.result for record in by_seed if record.result is not None)
    failed = sum(record.result is None and record.failure is not None for record in records)
    return Point(records[0].cell.values, results, failed)


def best_of(points: Sequence[Point]) -> Point | None:
    """The point that is best on held-out training images, if there are several to choose from and none is as good."""
    judged = [point for point in points if point.mean(CHOSEN_BY) is not None]
    ahead = equally_good(judged)
    return ahead[0] if len(judged) > 1 and len(ahead) == 1 else None


def equally_good(points: Sequence[Point]) -> list[Point]:
    """The points that none is better than on held-out training images."""
    means = [point.mean(CHOSEN_BY) for point in points]
    highest = max((mean for mean in means if mean is not None), default=None)
    return [point for point, mean in zip(points, means, strict=True) if mean is not None and mean == highest]


def plain_figures(points: Sequence[Point]) -> dict[str, Any]:
    """One flat object: means under names such as linear_top1_num_keys_5, spreads under linear_top1_std_..."""
    figures: dict[str, Any] = {}
    for point in points:
        ending = "_".join(f"{short_name(name)}_{_plain(value)}" for name, value in point.values.items())
        for figure in (*MEASURED, CHOSEN_BY):
            figures[f"{figure}_{ending}"] = point.mean(figure)
            figures[f"{figure}_std_{ending}"] = point.spread(figure)
        figures[f"seeds_{ending}"] = len(point.results)
    best = best_of(points)
    if best is not None:
        figures |= {f"best_{short_name(name)}": _flat(value) for name, value in best.values.items()}
        figures |= {f"best_{figure}": best.mean(figure) for figure in MEASURED}
    return figures


def as_csv(records: Sequence[CellRecord], names: Sequence[str]) -> str:
    """One line for each cell: its values, its seed, every figure, and the sentence it failed with."""
    figures = list(dict.fromkeys(figure for record in records for figure in record.result or {}))
    figures = [figure for figure in figures if figure != "seed"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*map(short_name, names), "seed", "state", *figures, "error"])
    for record in records:
        values = [_flat(record.cell.values[name]) for name in names]
        found = [(record.result or {}).get(figure, "") for figure in figures]
        error = "" if record.result is not None else record.failure or ""
        writer.writerow([*values, record.cell.seed, state_of(record), *found, error])
    return text.getvalue()


def state_of(record: CellRecord) -> str:
    """`done`, `failed` or `unfinished`."""
    if record.result is not None:
        return "done"
    return "unfinished" if record.failure is None else "failed"


def _flat(value: Any) -> Any:
    return written(value) if isinstance(value, list | dict) else value


def _plain(value: Any) -> str:
    return re.sub(r"[^A-Za-z0-9.+-]+", "_", written(value))
