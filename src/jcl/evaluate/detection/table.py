"""Several finished transfers side by side, as the paper's Table 2."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jcl.errors import SettingsError

_GROUPS = {"box": ("Faster R-CNN", "box"), "mask": ("Mask R-CNN", "mask"), "keypoint": ("Keypoint R-CNN", "keypoint")}
_FIGURES = {"ap": "AP", "ap50": "AP50", "ap75": "AP75"}
_ROW = ("label", "backbone", "iterations", "batch_size", "seed")
_WHERE_THEY_DIFFER = ("heads", "lr", "accumulate")
"""Columns only of tables whose transfers are not alike in them: figures side by side are taken to compare."""


def detection_table(summaries: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Heads and rows: a row for each start (with equal schedule and seed), a column for each task's AP, AP50, AP75."""
    tasks = [task for task in _GROUPS if any(summary["task"] == task for summary in summaries)]
    names = _row_names(summaries)
    heads = ["initialisation", *names[1:]]
    heads += [f"{_GROUPS[task][0]} {figure}" for task in tasks for figure in _FIGURES.values()]
    rows: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for summary in summaries:
        row = rows.setdefault(_key(summary, names), {})
        if summary["task"] in row:
            raise SettingsError(
                f"two folders hold the same transfer ({summary['task']}, {summary['label']}, {summary['iterations']:,} "
                f"iterations, seed {summary['seed']}); give each once."
            )
        row[summary["task"]] = summary
    cells = [
        [*(str(value) for value in key), *(_cell(found.get(task), task, name) for task in tasks for name in _FIGURES)]
        for key, found in rows.items()
    ]
    return heads, cells


def told_by_folder(summaries: Sequence[dict[str, Any]], folders: Sequence[Path]) -> list[dict[str, Any]]:
    """The summaries, with its folder behind the label of each that a table would take for another one's."""
    keys = [(summary["task"], *_key(summary, _row_names(summaries))) for summary in summaries]
    return [
        summary | {"label": f"{summary['label']} ({folder})"} if keys.count(key) > 1 else summary
        for summary, folder, key in zip(summaries, folders, keys, strict=True)
    ]


def equally_tested(summaries: Sequence[dict[str, Any]]) -> bool:
    """Whether all transfers of a task were tested on equally many images, as on the same ones they are."""
    counts = {(summary["task"], summary.get("test_images")) for summary in summaries}
    return len(counts) == len({task for task, _ in counts})


def as_markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The table in Markdown; bars in cells are escaped."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def as_csv(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The table as CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([heads, *rows])
    return text.getvalue()


def _row_names(summaries: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    differ = (name for name in _WHERE_THEY_DIFFER if len({summary.get(name) for summary in summaries}) > 1)
    return *_ROW, *differ


def _key(summary: dict[str, Any], names: Sequence[str]) -> tuple[Any, ...]:
    return tuple(summary.get(name, "") for name in names)


def _cell(summary: dict[str, Any] | None, task: str, figure: str) -> str:
    value = None if summary is None else summary.get(f"{_GROUPS[task][1]}_{figure}")
    return "" if value is None else f"{value:.2f}"
