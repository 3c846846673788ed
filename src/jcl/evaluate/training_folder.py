"""The folder of a training that shows what a backbone is worth: which file is where, and that none is overwritten."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from safetensors.torch import save
from torch import Tensor, nn

from jcl.errors import DataError, Interrupted, RunError
from jcl.runs.atomic import write_atomically
from jcl.runs.checkpoint import read_tensors
from jcl.runs.folder import RunFolder, starting_folder
from jcl.runs.json_object import read_object, write_object
from jcl.runs.lock import RunLock

_CLASSIFIER_FORMAT = "jcl-classifier-1"


class TrainingFolder:
    """A file that says what is trained, `metrics.jsonl`, `checkpoints/`, `skipped.txt` where images could not be read;
    at the end `summary.json`."""

    kind: ClassVar[str]
    """What the folder holds, in words."""
    settings_name: ClassVar[str]
    """The file that says what is trained; without it there is nothing of this kind in a folder."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.settings_file = self.path / self.settings_name
        self.metrics_file = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.skipped_file = self.path / "skipped.txt"
        self.summary_file = self.path / "summary.json"

    @property
    def how_to_resume(self) -> str:
        """What to do to go on, as the end of a sentence."""
        raise NotImplementedError

    @property
    def first_files(self) -> tuple[Path, ...]:
        """What is there before the first checkpoint."""
        return self.settings_file, self.metrics_file

    def refuse_occupied(self) -> None:
        """Raise if something is here already."""
        if self.settings_file.exists():
            raise RunError(
                f"{self.path} already holds a {self.kind} and is left as it is; "
                f"{self.how_to_resume} or choose another folder with --out."
            )
        self.refuse_other_kinds()

    def refuse_other_kinds(self) -> None:
        """Raise if something is here that is not of this kind."""
        if self.path.exists() and not self.path.is_dir():
            raise RunError(f"{self.path} is a file; give the {self.kind} a folder of its own with --out.")
        if not self.settings_file.exists() and RunFolder(self.path).holds_run():
            raise RunError(f"{self.path} already holds a run and is left as it is; choose another folder with --out.")

    @contextlib.contextmanager
    def begun(self, warn: Callable[[str], None]) -> Iterator[None]:
        """Keep other processes out for as long as the block lasts, and leave nothing where training never began."""
        with starting_folder(self.path), RunLock(self.path, warn), self.taken_back_unless_begun(), self.resumable():
            yield

    @contextlib.contextmanager
    def taken_back_unless_begun(self) -> Iterator[None]:
        """Where the images turn out to be of no use, or Ctrl-C comes, before there is a checkpoint, take back what was
        written at the start, so that the same command can be given again.

        What lay in the folder before is taken back only where an unfinished training of this kind had left it.
        """
        written = (*self.first_files, self.skipped_file)
        ours = self.settings_file.exists() and not self.summary_file.exists()
        found = () if ours else tuple(file for file in written if file.exists())
        try:
            yield
        except (DataError, KeyboardInterrupt):
            if not self.checkpoints.exists():
                for file in written:
                    if file not in found:
                        file.unlink(missing_ok=True)
            raise

    @contextlib.contextmanager
    def resumable(self) -> Iterator[None]:
        """Where Ctrl-C ends training at once, say how to go on from the newest checkpoint, if there is one."""
        try:
            yield
        except KeyboardInterrupt:
            if not self.checkpoints.exists():
                raise
            raise Interrupted(
                f"Ctrl-C received: training stopped at once, and the newest checkpoint stays; {self.how_to_resume}."
            ) from None

    def stored_settings(self) -> dict[str, Any]:
        """What the settings file holds."""
        try:
            return read_object(self.settings_file)
        except RunError:
            raise RunError(
                f"{self.path} holds no {self.kind}: there is no {self.settings_name} in it that can be read."
            ) from None

    def summary(self) -> dict[str, Any]:
        """The figures of finished work, flat, with plain names."""
        if not self.summary_file.exists():
            self.stored_settings()  # says so where there is nothing at all
            raise RunError(f"the {self.kind} in {self.path} has not finished; {self.how_to_resume}.")
        return read_object(self.summary_file)

    def write_summary(self, summary: dict[str, Any]) -> None:
        write_object(self.summary_file, summary)


class ClassifierFolder(TrainingFolder):
    """The folder of a training that ends with a linear layer, in `classifier.safetensors`."""

    def __init__(self, path: Path | str) -> None:
        super().__init__(path)
        self.classifier_file = self.path / "classifier.safetensors"

    def save_classifier(self, layer: nn.Linear, class_names: tuple[str, ...]) -> None:
        tensors = {name: value.detach().cpu().contiguous() for name, value in layer.state_dict().items()}
        metadata = {"format": _CLASSIFIER_FORMAT, "classes": json.dumps(class_names)}
        write_atomically(self.classifier_file, save(tensors, metadata))

    def load_classifier(self) -> tuple[dict[str, Tensor], tuple[str, ...]]:
        """The layer's `weight` (c, d) and `bias` (c,), and the names of the classes."""
        tensors, metadata = read_tensors(self.classifier_file)
        if metadata.get("format") != _CLASSIFIER_FORMAT or not {"weight", "bias"} <= tensors.keys():
            raise RunError(f"{self.classifier_file} is not a classifier written by `jcl finetune` or `jcl linear`.")
        return tensors, tuple(json.loads(metadata["classes"]))
