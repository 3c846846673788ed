"""Options of the commands that evaluate features."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from jcl.settings.options import (
    HARDWARE,
    OUTPUT,
    DeviceOptions,
    ForceOptions,
    JsonOptions,
    SeedOptions,
    WorkersOptions,
    argument,
    option,
)
from jcl.settings.schema import BatchSize, Positive, PositiveInt

Protocol = Literal["fast", "paper"]  # of a linear probe
_WEIGHTS = "A run folder or an exported backbone."
_NO_UNTRAINED = "Do not measure the untrained network for comparison."
_LABELLED = "Labeled data (default: the data of the run)."


class KnnOptions(WorkersOptions, DeviceOptions, JsonOptions):
    weights: Path = argument("RUN_OR_WEIGHTS", _WEIGHTS)
    data: str | None = argument("DATA", _LABELLED, None)
    k: tuple[PositiveInt, ...] = option(
        (), "Neighbors that vote; repeatable (default: 200, fewer for few images).", "-k"
    )
    temperature: tuple[Positive, ...] = option((0.1,), "Temperature of the votes; repeatable.")
    no_untrained: bool = option(False, _NO_UNTRAINED)
    batch_size: PositiveInt = option(256, "Images per forward pass.", panel=HARDWARE)


class LinearOptions(SeedOptions, WorkersOptions, DeviceOptions, JsonOptions):
    weights: Path = argument("RUN_OR_WEIGHTS", _WEIGHTS)
    data: str | None = argument("DATA", _LABELLED, None)
    protocol: Protocol = option(
        "fast", "fast: cached features, best of a grid; paper: random crops, lr 30, 100 epochs."
    )
    lr: tuple[float, ...] = option((), "Learning rate; several make a grid (default: a grid; 30 for paper).")
    weight_decay: tuple[float, ...] = option((), "Weight decay; several make a grid (default: a grid; 0 for paper).")
    epochs: PositiveInt | None = option(None, "Epochs (default: depends on the number of images; 100 for paper).")
    batch_size: BatchSize = option(256, "Images per forward pass; for paper, images per training step.")
    least_crop: Annotated[float, Field(ge=0.01, le=1.0)] = option(
        0.08, "Smallest fraction of an image in a training crop (paper)."
    )
    no_untrained: bool = option(False, _NO_UNTRAINED)
    out: Path | None = option(None, "Folder for checkpoints (paper); the same command again resumes from it.")
    per_class: bool = option(False, "Show the accuracy of each class too.", panel=OUTPUT)
    compile: bool = option(False, "Compile the backbone (paper; pays off in long runs).", panel=HARDWARE)


class FinetuneOptions(SeedOptions, WorkersOptions, DeviceOptions, JsonOptions):
    weights: Path | None = argument("RUN_OR_WEIGHTS", _WEIGHTS, None)
    data: str | None = argument("DATA", _LABELLED, None)
    labels: str = option("100%", "10%, 20-per-class, ...")
    out: Path | None = option(None, "Folder (default: a new one in runs/).")
    resume: Path | None = option(None, "Continue the fine-tuning in this folder.", metavar="FOLDER")
    from_scratch: bool = option(False, "Start from random weights (a baseline).")
    epochs: PositiveInt = option(50, "Training epochs.")
    batch_size: BatchSize | None = option(None, "Images per step (default: by labels).")
    lr: float | None = option(None, "Learning rate of the last backbone stage (default: scales with the batch).")
    head_lr: float | None = option(None, "Learning rate of the new classifier (default: scales with the batch).")
    layer_decay: float | None = option(None, "Ratio between the learning rates of consecutive stages (default: 0.7).")
    weight_decay: float = option(1e-4, "Weight decay, not of norms and biases.")
    warmup_epochs: float | None = option(None, "Warm-up epochs (default: a tenth).")
    label_smoothing: float = option(0.0, "Label smoothing.")
    jitter: bool = option(False, "Add color jitter to crops and flips.")
    compile: bool = option(False, "Compile the backbone (pays off in long runs).", panel=HARDWARE)


class CompareOptions(WorkersOptions, DeviceOptions, JsonOptions):
    weights: tuple[str, ...] = argument(
        "RUN", "Runs, checkpoints of a run or weights files; the last may be the data (default: of the first run)."
    )
    images: Annotated[int, Field(ge=2)] = option(1000, "Number of images, drawn at random.")
    views_per_image: Annotated[int, Field(ge=2)] = option(4, "Views of each image, for LiDAR.")
    views: str | None = option(None, "View recipe, such as moco-v2 (default: the first run's views).", metavar="RECIPE")


class ReportOptions(ForceOptions, DeviceOptions, JsonOptions):
    runs: tuple[Path, ...] = argument("RUN", "Run folders, finished or not.")
    out: Path | None = option(None, "HTML file to write (default: report.html in the run folder).", "-o", "--out")
    name: tuple[str, ...] = option((), "Name of a run on the page; repeatable, in the order of the runs.")
    title: str | None = option(None, "Title of the page.")
