"""The folder of a fine-tuning."""

from __future__ import annotations

from pathlib import Path

from jcl.console import typed
from jcl.errors import RunError
from jcl.evaluate.finetune import FinetuneSettings, finetune_settings
from jcl.evaluate.training_folder import ClassifierFolder
from jcl.runs.atomic import write_atomically


class FinetuneFolder(ClassifierFolder):
    """`finetune.json` (the settings), `labels.txt` (the images whose labels are used), `metrics.jsonl`, `checkpoints/`;
    at the end `backbone.safetensors`, `classifier.safetensors` and `summary.json`.
    """

    kind = "fine-tuning"
    settings_name = "finetune.json"

    def __init__(self, path: Path | str) -> None:
        super().__init__(path)
        self.labels_file = self.path / "labels.txt"
        self.backbone_file = self.path / "backbone.safetensors"

    @property
    def how_to_resume(self) -> str:
        return f"continue it with `jcl finetune --resume {typed(self.path)}`"

    @property
    def first_files(self) -> tuple[Path, ...]:
        return *super().first_files, self.labels_file

    def create(self, settings: FinetuneSettings, names: list[str]) -> None:
        """Start a fine-tuning here with the labels of the images `names`."""
        self.refuse_occupied()
        if self.labels_file.exists() and self.labels_file.read_bytes() != _lines(names):
            raise RunError(
                f"{self.labels_file} is there already and is left as it is, but a fine-tuning lists the images whose "
                "labels it uses under that name; choose another folder with --out."
            )
        write_atomically(self.labels_file, _lines(names))
        write_atomically(self.settings_file, settings.model_dump_json(indent=2).encode() + b"\n")

    def settings(self) -> FinetuneSettings:
        return finetune_settings(self.stored_settings(), str(self.settings_file))

    def check_labels(self, names: list[str]) -> None:
        """Raise if the labels to be used are no longer those with which the fine-tuning was begun."""
        if not self.labels_file.exists() or self.labels_file.read_bytes() != _lines(names):
            raise RunError(
                f"the data has changed since {self.path} was begun, for labels.txt there lists other images; "
                "start anew in another folder with --out."
            )


def _lines(names: list[str]) -> bytes:
    return "".join(f"{name}\n" for name in names).encode()
