"""Options of the commands that repeat the paper's studies."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from jcl.errors import SettingsError
from jcl.settings.evaluation import Protocol
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
from jcl.settings.schema import BatchSize, Count, PositiveInt
from jcl.settings.training import RunOptions


class AblateOptions(RunOptions, JsonOptions):
    over: tuple[str, ...] = option((), "Setting to vary; several: a grid.", metavar="NAME=VALUES")
    each_alone: bool = option(False, "Vary one setting at a time.")
    seeds: str = option("1", "Seeds: 3, or 0,7,42.")
    protocol: Protocol = option("fast", "Linear probe: fast, or the one of the paper's ablations (lr 10, 100 epochs).")
    out: Path | None = option(None, "Folder (default: in runs/).")
    at_once: PositiveInt = option(1, "Cells at once on a GPU or CPU.", panel=HARDWARE)
    plan_only: bool = option(False, "Write the cells, but run none.")


class AblateCellOptions(JsonOptions):
    folder: Path = argument("CELL", "A folder in cells/ of an ablation.")
    workers: Count | None = option(None, "Image decoding processes, unless set.", panel=HARDWARE)


class PlotOptions(ForceOptions):
    plot: Path | None = option(None, "Also plot to this .png file.", "-o", "--out", metavar="FILE", panel=OUTPUT)


class ViewOptions(PlotOptions, SeedOptions, WorkersOptions, DeviceOptions, JsonOptions):
    batch_size: PositiveInt = option(512, "Views per forward pass.", panel=HARDWARE)
    precision: str = option("auto", "Precision of the networks: auto, float32 or bfloat16.", panel=HARDWARE)


class DistributionOptions(ViewOptions):
    weights: tuple[str, ...] = argument(
        "RUN", "Runs or weights files, the first compared with the others; the last may be the data."
    )
    of: Literal["backbone", "projection"] = option("backbone", "Features of the backbone or of the projection head.")
    images: PositiveInt = option(32_768, "Number of images, drawn at random.")
    views_per_image: PositiveInt = option(32, "Views of each image.")
    views: str | None = option(None, "View recipe, such as moco-v2 (default: the first run's views).", metavar="RECIPE")
    split: str = option("train", "train or test.")
    values: Path | None = option(None, "Also write the values of each image, as .csv.", metavar="FILE", panel=OUTPUT)


class BoundOptions(ViewOptions):
    run: Path | None = argument("RUN", "A run, a checkpoint of it or of MoCo's authors (default: Gaussian keys).", None)
    data: str | None = argument("DATA", "Images (default: the data of the run).", None)
    scales: str = option("1,4", "Covariance scales of Eq. 8.", metavar="LIST")
    dimensions: str = option("32,128", "Dimensions of Gaussian keys.", metavar="LIST")
    spreads: str = option("0.1,0.2,0.4,0.6", "Spreads of Gaussian keys, between 0 and 1.", metavar="LIST")
    temperatures: str = option("0.1,0.2", "Temperatures for Gaussian keys, or of MoCo's checkpoint.", metavar="LIST")
    negatives: PositiveInt = option(4096, "Negatives for Gaussian keys; a run has its queue.")
    draws: Annotated[int, Field(ge=100)] = option(16_384, "Gaussian keys drawn for each image.")
    images: PositiveInt | None = option(None, "Images (default: 256 of a run, 16 with Gaussian keys).")
    keys: PositiveInt = option(256, "Views of each image of a run that serve as keys.")

    def refuse_unused_options(self) -> None:
        """Raise if an option was given that only the other kind of keys uses."""
        gaussian = ("dimensions", "spreads", "negatives", "draws")
        of_run = ("keys", "batch_size", "workers", "device", "precision")
        for name in of_run if self.run is None else gaussian:
            if name in self.model_fields_set:
                needs = "needs a run" if self.run is None else "is for Gaussian keys, without a run"
                raise SettingsError(f"--{name.replace('_', '-')} {needs}.")


class CostOptions(PlotOptions, DeviceOptions, JsonOptions):
    keys: str = option("1,2,4,8,16,32", "Numbers of keys M.", metavar="LIST")
    recipe: str | None = option(None, "Recipe (default: the paper's on a GPU, a small network on a CPU).")
    backbone: str | None = option(None, "Network, such as resnet18.")
    image_size: PositiveInt | None = option(None, "Side of the views in pixels.")
    batch_size: BatchSize | None = option(None, "Images per step.")
    repeats: PositiveInt = option(5, "Timed steps per measurement.")


def parse_numbers(text: str, name: str, valid: Callable[[float], bool], rule: str) -> list[float]:
    """The distinct numbers of a list such as 0.1,0.2; `rule` describes the `valid` ones in the error."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        raise SettingsError(f"{name} takes comma-separated numbers, such as 1,2,4, but got {text!r}.") from None
    if not all(math.isfinite(number) and valid(number) for number in numbers):
        raise SettingsError(f"{name} must be {rule}, but got {text}.")
    return list(dict.fromkeys(numbers))


def parse_integers(text: str, name: str, minimum: int) -> list[int]:
    """The distinct integers of a list such as 1,2,4."""
    rule = f"integers of at least {minimum}"
    return [int(number) for number in parse_numbers(text, name, lambda n: n.is_integer() and n >= minimum, rule)]
