"""Several finished detectors side by side, as in the paper's Table 2."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_MODELS = {"box": "Faster R-CNN", "mask": "Mask R-CNN", "keypoint": "Keypoint R-CNN"}
_FIGURES = {"ap": "AP", "ap50": "AP50", "ap75": "AP75"}
_COLUMNS = ("label", "backbone", "iterations", "batch_size", "seed")
_COLUMNS_IF_DIFFERENT = ("heads", "lr", "accumulate")


def detection_table(summaries: Sequence[dict[str, Any]], folders: Sequence[Path]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: one row per initialization, schedule and seed, with AP, AP50 and AP75 of each task.

    Detectors of a task that would share a row have their folder appended to the label.
    """
    tasks = [task for task in _MODELS if any(summary["task"] == task for summary in summaries)]
    different = (name for name in _COLUMNS_IF_DIFFERENT if len({summary.get(name) for summary in summaries}) > 1)
    columns = (*_COLUMNS, *different)
    header = ["initialisation", *columns[1:]]
    header += [f"{_MODELS[task]} {figure}" for task in tasks for figure in _FIGURES.values()]
    keys = [tuple(str(summary.get(name, "")) for name in columns) for summary in summaries]
    cells = [(summary["task"], *key) for summary, key in zip(summaries, keys, strict=True)]
    rows: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
    for summary, folder, key, cell in zip(summaries, folders, keys, cells, strict=True):
        unique = key if cells.count(cell) == 1 else (f"{key[0]} ({folder})", *key[1:])
        rows.setdefault(unique, {})[summary["task"]] = summary
    return header, [
        [*key, *(_text(row.get(task, {}).get(f"{task}_{figure}")) for task in tasks for figure in _FIGURES)]
        for key, row in rows.items()
    ]


def same_test_images(summaries: Sequence[dict[str, Any]]) -> bool:
    """Whether all detectors of a task were tested on equally many images."""
    counts = {(summary["task"], summary.get("test_images")) for summary in summaries}
    return len(counts) == len({task for task, _ in counts})


def to_markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def to_csv(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    return text.getvalue()


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
