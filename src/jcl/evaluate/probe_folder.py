"""The folder of the paper's linear probe, which goes on when the same command is given again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jcl.errors import RunError
from jcl.evaluate.classification import Scores
from jcl.evaluate.training_folder import ClassifierFolder
from jcl.runs.json_object import named_differences, read_object, write_object


class ProbeFolder(ClassifierFolder):
    """`probe.json` (backbone, data and settings), `metrics.jsonl`, `checkpoints/`; at the end `classifier.safetensors`,
    `scores.json` (by class too) and `summary.json`.
    """

    kind = "linear probe"
    settings_name = "probe.json"

    def __init__(self, path: Path | str) -> None:
        super().__init__(path)
        self.scores_file = self.path / "scores.json"

    @property
    def how_to_resume(self) -> str:
        return "give the same command again to go on"

    def refuse_other(self, probe: Mapping[str, Any]) -> None:
        """Raise if something is here that is not the beginnings of this very probe."""
        self.refuse_other_kinds()
        if not self.settings_file.exists():
            return
        stored = self.stored_settings()
        moved = {name for name in ("weights", "data") if _content(stored.get(name)) == _content(probe[name])}
        differences = named_differences(stored, {**probe, **{name: stored[name] for name in moved}})
        if differences:
            raise RunError(
                f"the linear probe in {self.path} was begun with {differences}; "
                "give the command as it was then to go on with it, or choose another folder with --out."
            )

    def begin(self, probe: Mapping[str, Any]) -> bool:
        """Start this probe here; gives whether it had been started before."""
        self.refuse_other(probe)
        begun_before = self.settings_file.exists()
        if not begun_before:
            write_object(self.settings_file, probe)
        return begun_before

    @property
    def finished(self) -> bool:
        return self.summary_file.exists() and self.scores_file.exists()

    def write_scores(self, scores: Scores) -> None:
        write_object(self.scores_file, asdict(scores))

    def scores(self) -> Scores:
        """The scores of a finished probe."""
        stored = read_object(self.scores_file)
        try:
            stored |= {name: tuple(stored[name]) for name in ("class_images", "class_top1")}
            return Scores(**stored)
        except (KeyError, TypeError):
            raise RunError(
                f"{self.scores_file} is damaged: it holds no scores; remove it to have it made again."
            ) from None


def _content(described: Any) -> str:
    """The fingerprints at the end of what weights or data are called; their names may change."""
    return str(described).rpartition(" (")[2]
