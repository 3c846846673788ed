"""Several finished detectors side by side, as in the paper's Table 2."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jcl.errors import SettingsError

_MODELS = {"box": "Faster R-CNN", "mask": "Mask R-CNN", "keypoint": "Keypoint R-CNN"}
_FIGURES = {"ap": "AP", "ap50": "AP50", "ap75": "AP75"}
_COLUMNS = ("label", "backbone", "iterations", "batch_size", "seed")
_COLUMNS_IF_DIFFERENT = ("heads", "lr", "accumulate")


def detection_table(summaries: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: one row per initialization, schedule and seed, with AP, AP50 and AP75 of each task."""
    tasks = [task for task in _MODELS if any(summary["task"] == task for summary in summaries)]
    columns = _columns(summaries)
    header = ["initialisation", *columns[1:]]
    header += [f"{_MODELS[task]} {figure}" for task in tasks for figure in _FIGURES.values()]
    rows: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for summary in summaries:
        row = rows.setdefault(_key(summary, columns), {})
        if summary["task"] in row:
            raise SettingsError(
                f"two folders hold the same detector ({summary['task']}, {summary['label']}, "
                f"{summary['iterations']:,} iterations, seed {summary['seed']}). Give each once."
            )
        row[summary["task"]] = summary
    return header, [
        [*map(str, key), *(_cell(found.get(task, {}), f"{task}_{figure}") for task in tasks for figure in _FIGURES)]
        for key, found in rows.items()
    ]


def with_unique_labels(summaries: Sequence[dict[str, Any]], folders: Sequence[Path]) -> list[dict[str, Any]]:
    """The summaries, with the folder appended to labels that would otherwise name the same row and task twice."""
    columns = _columns(summaries)
    keys = [(summary["task"], *_key(summary, columns)) for summary in summaries]
    return [
        summary | {"label": f"{summary['label']} ({folder})"} if keys.count(key) > 1 else summary
        for summary, folder, key in zip(summaries, folders, keys, strict=True)
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


def _columns(summaries: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    different = (name for name in _COLUMNS_IF_DIFFERENT if len({summary.get(name) for summary in summaries}) > 1)
    return *_COLUMNS, *different


def _key(summary: dict[str, Any], columns: Sequence[str]) -> tuple[Any, ...]:
    return tuple(summary.get(name, "") for name in columns)


def _cell(summary: dict[str, Any], figure: str) -> str:
    value = summary.get(figure)
    return "" if value is None else f"{value:.2f}"
