"""The folder of a detector, and a table of several finished ones as in the paper's Table 2."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jcl.errors import RunError
from jcl.runs.atomic import write_atomically
from jcl.runs.folder import TrainingFolder
from jcl.settings.detection import DetectionSettings
from jcl.settings.schema import validated

_MODELS = {"box": "Faster R-CNN", "mask": "Mask R-CNN", "keypoint": "Keypoint R-CNN"}
_FIGURES = {"ap": "AP", "ap50": "AP50", "ap75": "AP75"}
_COLUMNS = ("label", "backbone", "iterations", "batch_size", "seed")
_COLUMNS_IF_DIFFERENT = ("heads", "lr", "accumulate")


class DetectionFolder(TrainingFolder):
    """`detect.json` (the settings), `metrics.jsonl` and `checkpoints/`; at the end `results-bbox.json` and the like in
    COCO's results format, `detections.png` and `summary.json`.
    """

    kind = "detector"
    settings_name = "detect.json"
    result_name = "task"
    resume_with = "jcl detect --resume"

    def __init__(self, path: Path | str) -> None:
        super().__init__(path)
        self.picture_file = self.path / "detections.png"

    def refuse_occupied(self) -> None:
        super().refuse_occupied()
        if self.summary_file.exists():
            raise RunError(f"{self.summary_file} already exists; choose another folder with --out.")

    def create(self, settings: DetectionSettings) -> None:
        self.refuse_occupied()
        write_atomically(self.settings_file, settings.model_dump_json(indent=2).encode() + b"\n")

    def settings(self) -> DetectionSettings:
        return validated(DetectionSettings, self.stored_settings(), str(self.settings_file))

    def results_file(self, kind: str) -> Path:
        return self.path / f"results-{kind}.json"

    def write_results(self, results: dict[str, list[dict[str, Any]]]) -> None:
        for kind, entries in results.items():
            write_atomically(self.results_file(kind), json.dumps(entries).encode() + b"\n")


def detection_table(summaries: Sequence[dict[str, Any]], folders: Sequence[Path]) -> str:
    """A Markdown table: one row per initialization, schedule and seed, with AP, AP50 and AP75 of each task.

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
    lines = [header, ["---"] * len(header)]
    for key, row in rows.items():
        values = [row.get(task, {}).get(f"{task}_{figure}") for task in tasks for figure in _FIGURES]
        lines.append([*key, *("" if value is None else f"{value:.2f}" for value in values)])
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
