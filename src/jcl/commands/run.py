"""A run folder as Python users see it, and the files that describe a run: summary, choices, skipped images."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from jcl.console import pluralize
from jcl.errors import RunError
from jcl.export import load_backbone
from jcl.paths import home_expanded
from jcl.runs.checkpoint import Progress
from jcl.runs.folder import RunFolder, add_skipped
from jcl.runs.json_object import read_object, write_object
from jcl.runs.metrics import read_metrics
from jcl.settings.resolve import Choice, ResolvedSettings


@dataclass(frozen=True)
class Run:
    """A run folder and its contents."""

    path: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", home_expanded(self.path))  # may be given as a string

    @property
    def settings(self) -> ResolvedSettings:
        return RunFolder(self.path).settings()

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Every line of `metrics.jsonl`."""
        return read_metrics(RunFolder(self.path).metrics_file)

    @property
    def summary(self) -> dict[str, Any]:
        """The figures of a finished run, flat, with plain names."""
        return RunFolder(self.path).summary()

    def backbone(self) -> nn.Module:
        """The pre-trained backbone, giving pooled features."""
        return load_backbone(self.path)


def write_summary(
    folder: RunFolder,
    settings: ResolvedSettings,
    newest: dict[str, dict[str, Any]],
    progress: Progress,
    peak_memory: int,
) -> None:
    """Write the figures of a finished run; `newest` has the last line of metrics of each kind."""
    train, knn = newest.get("train", {}), newest.get("knn", {})
    summary = {
        "method": settings.method.name,
        "data": settings.data.location,
        "seed": settings.train.seed,
        "epochs": settings.train.epochs,
        "steps": progress.step,
        "ranks": progress.ranks,
        "loss": train.get("loss"),
        "contrastive_accuracy": train.get("contrastive_accuracy"),
        "images_per_second": progress.step * settings.train.batch_size / progress.seconds,
        "seconds": progress.seconds,
        "peak_memory_bytes": peak_memory,
        **{name: value for name, value in knn.items() if name not in ("kind", "step", "epoch")},
    }
    if settings.train.on_nan == "skip":
        summary["skipped_steps"] = progress.skipped_steps
    folder.write_summary(summary)


def write_choices(folder: RunFolder, choices: Sequence[Choice]) -> None:
    """Keep what each "auto" was resolved to, and why."""
    write_object(folder.choices_file, {"choices": [asdict(choice) for choice in choices]})


def read_choices(folder: RunFolder) -> list[Choice] | None:
    """What `write_choices` wrote; None if it cannot be read."""
    stored = None
    with contextlib.suppress(RunError):
        stored = read_object(folder.choices_file).get("choices")
    if not isinstance(stored, list):
        return None
    return [
        Choice(str(entry.get("name", "")), entry.get("value"), str(entry.get("reason", "")))
        for entry in stored
        if isinstance(entry, dict)
    ]


def write_skipped(folder: RunFolder, skipped: dict[str, str], say: Callable[[str], None], *, resumed: bool) -> None:
    """List unreadable images with the reasons; a resumed run adds to its list."""
    if not skipped:
        return
    try:
        listed = add_skipped(folder.skipped_file, skipped, anew=not resumed)
    except RunError as error:
        say(f"Skipped {pluralize(len(skipped), 'unreadable image')}, but {error}")
        return
    say(f"Skipped {pluralize(len(listed), 'unreadable image')}; the reasons are in {folder.skipped_file}.")
