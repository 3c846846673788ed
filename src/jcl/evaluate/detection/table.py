"""Several finished transfers side by side, as the paper's Table 2."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from jcl.errors import SettingsError

_GROUPS = {"box": ("Faster R-CNN", "box"), "mask": ("Mask R-CNN", "mask"), "keypoint": ("Keypoint R-CNN", "keypoint")}
_FIGURES = {"ap": "AP", "ap50": "AP50", "ap75": "AP75"}
_ROW = ("label", "backbone", "iterations", "batch_size", "seed")


def detection_table(summaries: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Heads and rows: a row for each start (with equal schedule and seed), a column for each task's AP, AP50, AP75."""
    tasks = [task for task in _GROUPS if any(summary["task"] == task for summary in summaries)]
    heads = ["initialisation", *_ROW[1:]]
    heads += [f"{_GROUPS[task][0]} {figure}" for task in tasks for figure in _FIGURES.values()]
    rows: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for summary in summaries:
        row = rows.setdefault(tuple(summary[name] for name in _ROW), {})
        if summary["task"] in row:
            raise SettingsError(
                f"two folders hold the same transfer ({summary['task']}, {summary['label']}, {summary['iterations']:,} "
                f"iterations, seed {summary['seed']}); give each once, or tell them apart with --label."
            )
        row[summary["task"]] = summary
    cells = [
        [*(str(value) for value in key), *(_cell(found.get(task), task, name) for task in tasks for name in _FIGURES)]
        for key, found in rows.items()
    ]
    return heads, cells


def as_markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def as_csv(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([heads, *rows])
    return text.getvalue()


def _cell(summary: dict[str, Any] | None, task: str, figure: str) -> str:
    value = None if summary is None else summary.get(f"{_GROUPS[task][1]}_{figure}")
    return "" if value is None else f"{value:.2f}"
