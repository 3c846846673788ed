"""The folder of a fine-tuning: which file is where, and that none is ever overwritten."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor, nn

from jcl.errors import RunError
from jcl.evaluate.finetune import FinetuneSettings, finetune_settings
from jcl.speech import typed
from jcl.train.atomic import write_atomically
from jcl.train.folder import RunFolder
from jcl.train.sealed import read_tensors

_CLASSIFIER_FORMAT = "jcl-classifier-1"


class FinetuneFolder:
    """`finetune.json` (the settings), `labels.txt` (the images whose labels are used), `metrics.jsonl`, `checkpoints/`;
    at the end `backbone.safetensors`, `classifier.safetensors` and `summary.json`.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.settings_file = self.path / "finetune.json"
        self.labels_file = self.path / "labels.txt"
        self.metrics_file = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.backbone_file = self.path / "backbone.safetensors"
        self.classifier_file = self.path / "classifier.safetensors"
        self.summary_file = self.path / "summary.json"

    @property
    def how_to_resume(self) -> str:
        return f"jcl finetune --resume {typed(self.path)}"

    def refuse_occupied(self) -> None:
        """Raise if something is here already."""
        if self.path.exists() and not self.path.is_dir():
            raise RunError(f"{self.path} is a file; give the fine-tuning a folder of its own with --out.")
        if self.settings_file.exists():
            raise RunError(
                f"{self.path} already holds a fine-tuning and is left as it is; "
                f"continue it with `{self.how_to_resume}` or choose another folder with --out."
            )
        if RunFolder(self.path).holds_run():
            raise RunError(f"{self.path} already holds a run and is left as it is; choose another folder with --out.")

    def create(self, settings: FinetuneSettings, names: list[str]) -> None:
        """Start a fine-tuning here with the labels of the images `names`."""
        self.refuse_occupied()
        write_atomically(self.labels_file, _lines(names))
        write_atomically(self.settings_file, settings.model_dump_json(indent=2).encode() + b"\n")

    def forget_unless_begun(self) -> None:
        """Take back what `create` and a first look at the data left, unless training has got to a checkpoint."""
        if self.checkpoints.exists():
            return
        for file in (self.settings_file, self.labels_file, self.metrics_file):
            file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty: something else is in it
            self.path.rmdir()

    def settings(self) -> FinetuneSettings:
        try:
            values = json.loads(self.settings_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise RunError(
                f"{self.path} holds no fine-tuning: there is no finetune.json in it that can be read."
            ) from None
        return finetune_settings(values, str(self.settings_file))

    def check_labels(self, names: list[str]) -> None:
        """Raise if the labels to be used are no longer those with which the fine-tuning was begun."""
        if not self.labels_file.exists() or self.labels_file.read_bytes() != _lines(names):
            raise RunError(
                f"the data has changed since {self.path} was begun, for labels.txt there lists other images; "
                "start anew in another folder with --out."
            )

    def summary(self) -> dict[str, Any]:
        """The figures of a finished fine-tuning, flat, with plain names."""
        if not self.summary_file.exists():
            raise RunError(f"the fine-tuning in {self.path} has not finished; continue it with `{self.how_to_resume}`.")
        summary: dict[str, Any] = json.loads(self.summary_file.read_text(encoding="utf-8"))
        return summary

    def write_summary(self, summary: dict[str, Any]) -> None:
        write_atomically(self.summary_file, json.dumps(summary, indent=2).encode() + b"\n")

    def save_classifier(self, layer: nn.Linear, class_names: tuple[str, ...]) -> None:
        tensors = {name: value.detach().cpu().contiguous() for name, value in layer.state_dict().items()}
        metadata = {"format": _CLASSIFIER_FORMAT, "classes": json.dumps(class_names)}
        write_atomically(self.classifier_file, save(tensors, metadata))

    def load_classifier(self) -> tuple[dict[str, Tensor], tuple[str, ...]]:
        """The layer's `weight` (c, d) and `bias` (c,), and the names of the classes."""
        tensors, metadata = read_tensors(self.classifier_file)
        if metadata.get("format") != _CLASSIFIER_FORMAT or not {"weight", "bias"} <= tensors.keys():
            raise RunError(f"{self.classifier_file} is not a classifier written by `jcl finetune`.")
        return tensors, tuple(json.loads(metadata["classes"]))


def _lines(names: list[str]) -> bytes:
    return "".join(f"{name}\n" for name in names).encode()
