"""Settings of a COCO detector, and the options of `jcl detect` made from them.

The defaults are the paper's and, where it states none, those of MoCo's configuration for detectron2.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from jcl.errors import SettingsError
from jcl.paths import absolute_path
from jcl.settings import options
from jcl.settings.commands import DeviceOptions, DevicesOptions, JsonOptions, WorkersOptions
from jcl.settings.options import DATA, HARDWARE, OUTPUT, SETTINGS, Options, argument, option
from jcl.settings.schema import (
    LIBRARIES,
    Count,
    NotNegative,
    Positive,
    PositiveInt,
    Precision,
    Section,
    Seed,
    Triple,
)
from jcl.settings.values import validated

Task = Literal["box", "mask", "keypoint"]
Heads = Literal["standard", "small"]
_Side = Annotated[int, Field(ge=32, lt=2**16)]  # in pixels, at least one position of the coarsest features

ITERATIONS = {"1x": 90_000, "2x": 180_000}
RANK_TIMEOUT = 600.0  # seconds
RANDOM = "random"
_DEFAULT_BATCH = 16
_DEFAULT_LR = 0.02  # for a batch of _DEFAULT_BATCH
_MAX_WARMUP = 1000
_MILESTONES = (2 / 3, 8 / 9)  # of the iterations: 60k and 80k of 90k
_SHORT_SIDE_STEP = 32


class CocoSettings(Options):
    """Where images and annotations are: a folder in COCO's layout, or each part by itself."""

    folder: Path | None = option(None, "Folder in COCO's layout, or with images/ and instances.json.", "--coco")
    train_json: Path | None = option(None, "Annotations to train on.", panel=DATA)
    val_json: Path | None = option(None, "Annotations to test on.", panel=DATA)
    images: Path | None = option(None, "Image folder.", panel=DATA)
    val_images: Path | None = option(None, "Folder of the test images (default: --images).", panel=DATA)

    def coco(self) -> CocoSettings | None:
        """The given paths, absolute so that training can be resumed from another folder."""
        given = {name: getattr(self, name) for name in CocoSettings.model_fields}
        paths = {name: path.resolve() for name, path in given.items() if path is not None}
        return CocoSettings(**paths) if paths else None


class CocoFacts(Section):
    """What a detector is trained and tested on: its classes, and the checksums of the annotation files."""

    classes: tuple[str, ...]
    train_json: str
    val_json: str | None = None


class DetectionSettings(Section):
    """Task, data, initial backbone, sizes and schedule of a detector."""

    task: Task = option(..., "Detector: box, mask or keypoint R-CNN.", metavar="TASK")
    init: str = option(..., "Backbone: run, weights file, imagenet (torchvision), timm or random.")
    backbone: str = option(..., "With --init random, imagenet or timm (default: resnet50).", panel=SETTINGS)
    label: str = option(..., "Name in tables (default: that of --init).", panel=SETTINGS)
    mean: Triple = (0.485, 0.456, 0.406)
    std: tuple[Positive, Positive, Positive] = (0.229, 0.224, 0.225)
    coco: CocoSettings
    overfit: PositiveInt | None = option(None, "Train and test on this many images only.", panel=SETTINGS)
    heads: Heads = option("standard", "standard (default), or small for CPUs.", panel=SETTINGS, metavar="SIZE")
    short_side: tuple[_Side, _Side] = option((640, 800), "Short sides in training.", panel=SETTINGS, metavar="MIN MAX")
    test_short_side: _Side = option(800, "Short side in tests (default: MAX).", panel=SETTINGS)
    max_side: _Side = option(1333, "Longest side (default: 5/3 of MAX).", panel=SETTINGS)
    rois_per_image: Annotated[int, Field(ge=4)] = option(512, "Regions per image that train the heads.", panel=SETTINGS)
    iterations: PositiveInt = option(ITERATIONS["1x"], "Training iterations.")
    batch_size: PositiveInt = option(_DEFAULT_BATCH, "Images per iteration.")
    accumulate: PositiveInt = option(1, "Parts of a batch: saves memory.", panel=SETTINGS)
    lr: Positive = option(_DEFAULT_LR, "Learning rate (default: 0.02 * batch / 16).")
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    weight_decay: NotNegative = 1e-4
    warmup: Count = option(_MAX_WARMUP, "Warm-up iterations (default: a tenth, at most 1000).", panel=SETTINGS)
    checkpoint_every: PositiveInt = option(1000, "Iterations between checkpoints.", panel=OUTPUT)
    precision: Precision = option("auto", "auto (default), float32 or bfloat16.", panel=HARDWARE, metavar="TEXT")
    device: str = "auto"
    rank_timeout: Positive = RANK_TIMEOUT
    seed: Seed = option(0, "Random seed.")

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.short_side[0] > self.short_side[1]:
            raise ValueError("short_side must be in ascending order")
        if self.batch_size % self.accumulate:
            raise ValueError(f"batch_size {self.batch_size} is not divisible by accumulate {self.accumulate}")
        return self

    @property
    def short_sides(self) -> tuple[int, ...]:
        """The short sides that training chooses from: 640, 672, ..., 800."""
        smallest, largest = self.short_side
        return (*range(smallest, largest, _SHORT_SIDE_STEP), largest)

    @property
    def milestones(self) -> tuple[int, int]:
        """The iterations at which the learning rate is multiplied by 0.1."""
        first, second = (round(share * self.iterations) for share in _MILESTONES)
        return first, second


def scaled_lr(batch_size: int) -> float:
    """0.02 for a batch of 16, in proportion to the batch."""
    return _DEFAULT_LR * batch_size / _DEFAULT_BATCH


def default_warmup(iterations: int) -> int:
    """1,000 iterations, or a tenth of a short schedule."""
    return min(_MAX_WARMUP, max(1, iterations // 10))


def learning_rate(settings: DetectionSettings, iteration: int) -> float:
    """Linear warm-up from a thousandth, then x0.1 at each milestone."""
    warming = min(1.0, iteration / settings.warmup) if settings.warmup else 1.0
    factor = warming + 0.001 * (1 - warming)
    passed = sum(iteration >= milestone for milestone in settings.milestones)
    return float(settings.lr * factor * 0.1**passed)


def _setting_fields() -> dict[str, Any]:
    """An option for each setting that has a description."""
    fields: dict[str, Any] = {}
    for name, field in DetectionSettings.model_fields.items():
        if field.description:
            described = field.is_required() or field.default is None or "default" in field.description
            default = " ".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
            note = "" if described else f" Default: {default}."
            fields[name] = options.optional_field(field, options.cli_field(field), note)
    return fields


@options.with_fields(_setting_fields())
class _SettingsOptions(Options):
    """The settings of a detector as options, which all default to None."""


class DetectOptions(CocoSettings, _SettingsOptions, WorkersOptions, DeviceOptions, DevicesOptions, JsonOptions):
    schedule: Literal["1x", "2x"] | None = option(None, "90,000 (default) or 180,000 iterations.")
    out: Path | None = option(None, "Folder of the results (default: in runs/).")
    resume: Path | None = option(None, "Continue the training in this folder.", metavar="FOLDER")
    eval_only: Path | None = option(None, "Only evaluate this folder or checkpoint.")
    pictures: Count = option(6, "Test images to draw.", panel=OUTPUT)

    @property
    def values(self) -> dict[str, Any]:
        """The settings that were given."""
        names = DetectionSettings.model_fields.keys() - {"coco"}
        return {name: value for name in names if (value := getattr(self, name, None)) is not None}

    def settings(self, **start: Any) -> DetectionSettings:
        """Complete settings; `start` is determined by the initial backbone: `backbone`, `mean`, `std` and `label`."""
        iterations = ITERATIONS[self.schedule or "1x"]
        values = start | {"iterations": iterations} | self.values | {"backbone": start["backbone"]}
        values["coco"] = self.coco() or CocoSettings()
        if values["init"] not in (RANDOM, *LIBRARIES):
            values["init"] = absolute_path(values["init"])
        checked = validated(DetectionSettings, values, "the options of `jcl detect`")
        derived = {"lr": scaled_lr(checked.batch_size), "warmup": default_warmup(checked.iterations)}
        if "short_side" in values:
            derived["test_short_side"] = checked.short_side[1]
            derived["max_side"] = round(checked.short_side[1] * 1333 / 800)
        return DetectionSettings(**(derived | values))

    def check(self) -> None:
        """Raise if options are missing or exclude each other."""
        unrelated = ("workers", "devices", "pictures", "json_file")
        if self.resume is not None:
            self.refuse_others("resume", *unrelated, "device")
        elif self.eval_only is not None:
            self.refuse_others("eval_only", *unrelated, *CocoSettings.model_fields, "out", "device")
        elif not {"task", "init"} <= self.values.keys():
            raise SettingsError("Give --task and --init, as in: jcl detect --task box --coco coco/ --init runs/photos.")
        if {"schedule", "iterations"} <= self.model_fields_set:
            raise SettingsError("--schedule and --iterations exclude each other.")


class DetectTableOptions(Options):
    folders: tuple[Path, ...] = argument("FOLDER", "Finished folders of `jcl detect`.")
