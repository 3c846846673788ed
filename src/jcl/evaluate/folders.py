"""The folders of fine-tuning, the paper's linear probe and COCO detectors."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from jcl.errors import RunError
from jcl.paths import read_file
from jcl.runs.atomic import write_atomically
from jcl.runs.checkpoint import read_tensors, to_safetensors
from jcl.runs.folder import TrainingFolder
from jcl.runs.json_object import describe_differences, read_object, write_object
from jcl.settings.detection import CocoFacts, DetectionSettings
from jcl.settings.values import validated

_CLASSIFIER_FORMAT = "jcl-classifier-1"


class ClassifierFolder(TrainingFolder):
    """The folder of a training whose result is a linear layer, in `classifier.safetensors`."""

    def save_classifier(self, layer: nn.Linear, class_names: tuple[str, ...]) -> None:
        tensors = {name: value.detach().cpu().contiguous() for name, value in layer.state_dict().items()}
        metadata = {"format": _CLASSIFIER_FORMAT, "classes": json.dumps(class_names)}
        write_atomically(self.classifier_file, to_safetensors(tensors, metadata))

    def load_classifier(self) -> tuple[dict[str, Tensor], tuple[str, ...]]:
        """The layer's `weight` (c, d) and `bias` (c,), and the names of the classes."""
        tensors, metadata = read_tensors(self.classifier_file)
        if metadata.get("format") != _CLASSIFIER_FORMAT or not {"weight", "bias"} <= tensors.keys():
            raise RunError(f"{self.classifier_file} is not a classifier written by `jcl finetune` or `jcl linear`.")
        return tensors, tuple(json.loads(metadata["classes"]))


class FinetuneFolder(ClassifierFolder):
    """`finetune.json` (settings), `labels.txt` (images whose labels are used), `metrics.jsonl`, `checkpoints/`; at the
    end `backbone.safetensors`, `classifier.safetensors` and `summary.json`.
    """

    kind = "fine-tuning"
    settings_name = "finetune.json"
    result_name = "finetune_top1"
    resume_with = "jcl finetune --resume"

    @property
    def first_files(self) -> tuple[Path, ...]:
        return *super().first_files, self.labels_file

    def create(self, settings: str, names: list[str]) -> None:
        """Start a fine-tuning with the labels of the images `names`; `settings` is JSON."""
        self.refuse_occupied()
        if self.labels_file.exists() and not self.holds_labels(names):
            raise RunError(f"{self.labels_file} already exists; choose another folder with --out.")
        write_atomically(self.labels_file, _lines(names))
        write_atomically(self.settings_file, settings.encode() + b"\n")

    def holds_labels(self, names: list[str]) -> bool:
        return read_file(self.labels_file, RunError) == _lines(names)


class ProbeFolder(ClassifierFolder):
    """`probe.json` (backbone, data and settings), `metrics.jsonl`, `checkpoints/`; at the end `classifier.safetensors`,
    `classes.json` (accuracies of the classes) and `summary.json`.
    """

    kind = "linear probe"
    settings_name = "probe.json"
    result_name = "linear_top1"
    how_to_resume = "repeat the same command to continue"

    def refuse_other(self, probe: Mapping[str, Any]) -> None:
        """Raise if the folder holds anything but this very probe."""
        self.refuse_other_kinds()
        if not self.settings_file.exists():
            return
        if differences := describe_differences(self.stored_settings(), probe):
            problem = f"The linear probe in {self.path} was started with {differences}"
            raise RunError(f"{problem}; repeat that command to continue it, or choose another folder with --out.")


class DetectionFolder(TrainingFolder):
    """`detect.json` (the settings), `data.json` (classes and checksums of the annotation files), `metrics.jsonl` and
    `checkpoints/`; at the end `results-bbox.json` and the like in COCO's results format, `detections.png` and
    `summary.json`.
    """

    kind = "detector"
    settings_name = "detect.json"
    result_name = "task"
    resume_with = "jcl detect --resume"

    @property
    def first_files(self) -> tuple[Path, ...]:
        return *super().first_files, self.data_file

    def refuse_occupied(self) -> None:
        super().refuse_occupied()
        if self.summary_file.exists():
            raise RunError(f"{self.summary_file} already exists; choose another folder with --out.")

    def create(self, settings: DetectionSettings, data: CocoFacts) -> None:
        self.refuse_occupied()
        write_object(self.data_file, data.model_dump())
        write_atomically(self.settings_file, settings.model_dump_json(indent=2).encode() + b"\n")

    def settings(self) -> DetectionSettings:
        return validated(DetectionSettings, self.stored_settings(), str(self.settings_file))

    def data(self) -> CocoFacts:
        """What the detector is trained on."""
        return validated(CocoFacts, read_object(self.data_file), str(self.data_file))

    def check_data(self, data: CocoFacts) -> None:
        """Raise if the annotations differ from those the training started with."""
        if self.data() != data:
            problem = f"The annotations have changed since {self.path} was started"
            raise RunError(f"{problem}. Restore them, or start again in another folder with --out.")

    def check_classes(self, classes: Sequence[str], file: Path) -> None:
        """Raise if the detector was trained on other classes than those of an annotation file."""
        both = classes, self.data().classes
        found, expected = ({f"class {row}": name for row, name in enumerate(each, 1)} for each in both)
        if differences := describe_differences(found, expected):
            problem = f"{file} has other classes than the detector in {self.path} was trained on"
            raise RunError(f"{problem} (in order of their ids): {differences}.")

    def results_file(self, kind: str) -> Path:
        return self.path / f"results-{kind}.json"

    def write_results(self, results: dict[str, list[dict[str, Any]]]) -> None:
        for kind, entries in results.items():
            write_atomically(self.results_file(kind), json.dumps(entries).encode() + b"\n")


def _lines(names: list[str]) -> bytes:
    return "".join(f"{name}\n" for name in names).encode()
