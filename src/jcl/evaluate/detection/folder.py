"""The folder of a transfer to COCO: which file is where, and that none is ever overwritten."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from jcl.errors import RunError
from jcl.evaluate.detection.settings import DetectionSettings, detection_settings
from jcl.speech import typed
from jcl.train.atomic import write_atomically
from jcl.train.folder import RunFolder


class DetectionFolder:
    """`detect.json` (the settings), `metrics.jsonl`, `checkpoints/`; at the end `results-bbox.json` and the like in
    COCO's submission format, `detections.png` and `summary.json`.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.settings_file = self.path / "detect.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.picture_file = self.path / "detections.png"
        self.summary_file = self.path / "summary.json"

    @property
    def how_to_resume(self) -> str:
        return f"jcl detect --resume {typed(self.path)}"

    def results_file(self, kind: str) -> Path:
        return self.path / f"results-{kind}.json"

    def refuse_occupied(self) -> None:
        """Raise if something is here already."""
        if self.path.exists() and not self.path.is_dir():
            raise RunError(f"{self.path} is a file; give the detector a folder of its own with --out.")
        if self.settings_file.exists():
            raise RunError(
                f"{self.path} already holds a detector and is left as it is; "
                f"continue it with `{self.how_to_resume}` or choose another folder with --out."
            )
        if RunFolder(self.path).holds_run():
            raise RunError(f"{self.path} already holds a run and is left as it is; choose another folder with --out.")

    def create(self, settings: DetectionSettings) -> None:
        self.refuse_occupied()
        write_atomically(self.settings_file, settings.model_dump_json(indent=2).encode() + b"\n")

    def forget_unless_begun(self) -> None:
        """Take back what `create` and a first look at the data left, unless training has got to a checkpoint."""
        if self.checkpoints.exists():
            return
        for file in (self.settings_file, self.metrics_file):
            file.unlink(missing_ok=True)

    def remove_if_empty(self) -> None:
        with contextlib.suppress(OSError):  # not empty, or not there
            self.path.rmdir()

    def settings(self) -> DetectionSettings:
        try:
            values = json.loads(self.settings_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise RunError(f"{self.path} holds no detector: there is no detect.json in it that can be read.") from None
        return detection_settings(values, str(self.settings_file))

    def summary(self) -> dict[str, Any]:
        """The figures of a finished transfer, flat, with plain names."""
        if not self.summary_file.exists():
            self.settings()  # says so where there is no detector at all
            raise RunError(f"the detector in {self.path} has not finished; continue it with `{self.how_to_resume}`.")
        try:
            summary: dict[str, Any] = json.loads(self.summary_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise RunError(f"{self.summary_file} cannot be read; evaluate again with --eval-only.") from None
        return summary

    def write_results(self, results: dict[str, list[dict[str, Any]]]) -> None:
        for kind, entries in results.items():
            write_atomically(self.results_file(kind), json.dumps(entries).encode() + b"\n")

    def write_summary(self, summary: dict[str, Any]) -> None:
        write_atomically(self.summary_file, json.dumps(summary, indent=2).encode() + b"\n")
