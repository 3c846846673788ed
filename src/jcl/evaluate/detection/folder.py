"""The folder of a transfer to COCO."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jcl.console import typed
from jcl.errors import RunError
from jcl.runs.atomic import write_atomically
from jcl.runs.folder import TrainingFolder
from jcl.settings.detection import DetectionSettings
from jcl.settings.schema import validated


class DetectionFolder(TrainingFolder):
    """`detect.json` (the settings), `metrics.jsonl`, `checkpoints/`; at the end `results-bbox.json` and the like in
    COCO's submission format, `detections.png` and `summary.json`.
    """

    kind = "detector"
    settings_name = "detect.json"

    def __init__(self, path: Path | str) -> None:
        super().__init__(path)
        self.picture_file = self.path / "detections.png"

    @property
    def how_to_resume(self) -> str:
        return f"continue with `jcl detect --resume {typed(self.path)}`"

    def refuse_occupied(self) -> None:
        super().refuse_occupied()
        if self.summary_file.exists():
            raise RunError(
                f"{self.path} already holds figures, in {self.summary_file.name}, and is left as it is; "
                "choose another folder with --out."
            )

    def summary(self) -> dict[str, Any]:
        found = super().summary()
        if "task" not in found:
            raise RunError(f"{self.path} holds no {self.kind}: its {self.summary_file.name} is of something else.")
        return found

    def results_file(self, kind: str) -> Path:
        return self.path / f"results-{kind}.json"

    def create(self, settings: DetectionSettings) -> None:
        self.refuse_occupied()
        write_atomically(self.settings_file, settings.model_dump_json(indent=2).encode() + b"\n")

    def settings(self) -> DetectionSettings:
        return validated(DetectionSettings, self.stored_settings(), str(self.settings_file))

    def write_results(self, results: dict[str, list[dict[str, Any]]]) -> None:
        for kind, entries in results.items():
            write_atomically(self.results_file(kind), json.dumps(entries).encode() + b"\n")
