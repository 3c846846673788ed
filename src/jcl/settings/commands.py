"""Options of the commands; those of `jcl detect` are in `detection.py`."""

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BeforeValidator, Field, WithJsonSchema

from jcl.cores import default_workers
from jcl.errors import SettingsError
from jcl.settings import options
from jcl.settings.options import DATA, HARDWARE, OUTPUT, SETTINGS, Options, SharedOptions, argument, option
from jcl.settings.recipes import build_settings, parse_assignments, recipe_names
from jcl.settings.schema import (
    LOCATION,
    BatchSize,
    Count,
    ImageSize,
    NotNegative,
    Positive,
    PositiveInt,
    Precision,
    Seed,
    Settings,
)

Number = TypeVar("Number")
Listed = Annotated[  # numbers separated by commas
    tuple[Number, ...],
    BeforeValidator(lambda given: given.split(",") if isinstance(given, str) else given),
    WithJsonSchema({"type": "string"}),
]
ProbeProtocol = Literal["fast", "paper"]
Target = Literal[
    "torchvision", "timm", "detectron2", "mmdetection", "ultralytics", "safetensors", "onnx", "hub-folder", "hf"
]

_WEIGHTS = "A run folder, a weights file or hf:USER/NAME."
_BACKBONE = "torchvision or timm name of the network, if the file does not state it."


class JsonOptions(SharedOptions):
    json_file: Path | None = option(None, "Also write the results to this JSON file.", "--json", panel=OUTPUT)


class DeviceOptions(SharedOptions):
    device: str = option("auto", "auto, cpu, cuda, cuda:1, ...", panel=HARDWARE)

    @property
    def given_device(self) -> str | None:
        return self.device if "device" in self.model_fields_set else None


class WorkersOptions(SharedOptions):
    workers: Count | None = option(None, "Decoding processes (default: one per core).", panel=HARDWARE)

    @property
    def worker_count(self) -> int:
        return default_workers() if self.workers is None else self.workers


class DevicesOptions(SharedOptions):
    devices: PositiveInt = option(1, "Number of GPUs, or CPU processes.", panel=HARDWARE)


class SeedOptions(SharedOptions):
    seed: Seed = option(0, "Random seed.")


class ForceOptions(SharedOptions):
    force: bool = option(False, "Overwrite existing files.", panel=OUTPUT)


# The settings with an option, by its panel in the help.
RUN_SETTINGS = {
    "": (
        *("data.location", "method.name", "model.backbone", "model.init", "views.image_size", "train.epochs"),
        *("train.batch_size", "train.lr", "method.num_keys", "method.covariance_scale", "method.temperature"),
        "train.seed",
    ),
    SETTINGS: ("train.on_nan",),
    DATA: ("data.strict", "data.subset"),
    HARDWARE: ("train.accumulate", "train.device"),
    OUTPUT: ("record.track",),
}


@options.with_fields(options.run_setting_fields(RUN_SETTINGS))
class RunOptions(Options):
    """Options that determine the settings of a run."""

    recipe: str | None = option(None, "Recipe (`jcl recipes`) or a file.")
    assignments: tuple[str, ...] = option(
        (), "Any setting (`jcl recipes --settings`).", "--set", metavar="SECTION.NAME=VALUE", panel=SETTINGS
    )

    def values(self) -> dict[str, Any]:
        """The settings given by options and by --set, by dotted name."""
        assigned = parse_assignments(self.assignments)
        values = dict(assigned)
        for name, field in type(self).model_fields.items():
            setting, value = options.cli_field(field).setting, getattr(self, name)
            if not setting or value is None:
                continue
            if setting in assigned:
                given = self.flag(name)
                raise SettingsError(f"{setting} is given both with {given} and with --set; leave one of them out.")
            values[setting] = value
        return values

    def settings(self, values: dict[str, Any] | None = None) -> Settings:
        """Settings of a run from `values` (default: the given options).

        The default recipe is that of the data set, if it has one and training does not start from existing weights.
        """
        from jcl.data.named import KNOWN_SETS

        values = self.values() if values is None else values
        location = values.get("data.location")
        own = location in KNOWN_SETS and location in recipe_names() and not values.get("model.init")
        return build_settings(self.recipe or (str(location) if own else "folder"), values=values)


class PretrainOptions(RunOptions, DevicesOptions, JsonOptions):
    out: Path | None = option(None, "Run folder (default: in runs/).")
    resume: Literal["never", "auto"] = option("never", "auto: continue a stopped run.")
    profile: bool = option(False, "Only time the parts of a step.", panel=OUTPUT)


class ResumeOptions(DevicesOptions, JsonOptions):
    run: Path = argument("RUN", "Folder of an unfinished run.")
    device: str | None = option(None, "Device: auto, cpu, cuda, cuda:1, ... (default: the run's).", panel=HARDWARE)


class DemoOptions(SeedOptions, JsonOptions):
    out: Path | None = option(None, "Where to write (default: a new folder in runs/).")


class EvaluationOptions(WorkersOptions, DeviceOptions, JsonOptions):
    weights: Path = argument("RUN_OR_WEIGHTS", _WEIGHTS)
    data: str | None = argument("DATA", "Labeled data (default: the data of the run).", None)


class FrozenOptions(EvaluationOptions):
    no_untrained: bool = option(False, "Do not measure the untrained network for comparison.")


class KnnOptions(FrozenOptions):
    k: tuple[PositiveInt, ...] = option(
        (), "Neighbors that vote; repeatable (default: as in the run, or 200, fewer for few images).", "-k"
    )
    temperature: tuple[Positive, ...] = option(
        (), "Temperature of the votes; repeatable (default: as in the run, or 0.1)."
    )
    batch_size: PositiveInt = option(256, "Images per forward pass.", panel=HARDWARE)


class LinearOptions(SeedOptions, FrozenOptions):
    protocol: ProbeProtocol = option(
        "fast", "fast: cached features, best of a grid; paper: random crops, lr 30, 100 epochs."
    )
    lr: tuple[Positive, ...] = option((), "Learning rate; repeat for a grid (default: a grid; paper: 30).")
    weight_decay: tuple[NotNegative, ...] = option((), "Weight decay; repeat for a grid (default: a grid; paper: 0).")
    epochs: PositiveInt | None = option(None, "Epochs (default: by the number of images; paper: 100).")
    batch_size: BatchSize = option(256, "Images per forward pass; paper: per training step.")
    least_crop: Annotated[float, Field(ge=0.01, le=1.0)] = option(
        0.08, "paper: smallest fraction of an image in a training crop."
    )
    out: Path | None = option(None, "paper: folder for checkpoints; the same command again resumes.")
    per_class: bool = option(False, "Show the accuracy of each class too.", panel=OUTPUT)
    compile: bool = option(False, "paper: compile the backbone (pays off in long runs).", panel=HARDWARE)


class FinetuneOptions(SeedOptions, EvaluationOptions):
    weights: Path | None = argument("RUN_OR_WEIGHTS", _WEIGHTS, None)  # type: ignore[assignment]
    labels: str = option("100%", "Labels to train with, such as 10% or 20-per-class.")
    out: Path | None = option(None, "Folder (default: a new one in runs/).")
    resume: Path | None = option(None, "Continue the fine-tuning in this folder.", metavar="FOLDER")
    from_scratch: bool = option(False, "Start from random weights (a baseline).")
    epochs: PositiveInt = option(50, "Training epochs.")
    batch_size: BatchSize | None = option(None, "Images per step (default: from the labels).")
    lr: Positive | None = option(None, "Learning rate of the last backbone stage (default: scales with the batch).")
    head_lr: Positive | None = option(None, "Learning rate of the new classifier (default: from batch and features).")
    layer_decay: float | None = option(None, "Ratio between the learning rates of consecutive stages (default: 0.7).")
    weight_decay: NotNegative = option(1e-4, "Weight decay; norms and biases have none.")
    warmup_epochs: NotNegative | None = option(None, "Warm-up epochs (default: a tenth).")
    label_smoothing: float = option(0.0, "Label smoothing.")
    jitter: bool = option(False, "Add color jitter to crops and flips.")
    compile: bool = option(False, "Compile the backbone (pays off in long runs).", panel=HARDWARE)


class ReportOptions(ForceOptions, DeviceOptions, JsonOptions):
    runs: tuple[Path, ...] = argument("RUN", "Run folders, finished or not.")
    out: Path | None = option(None, "HTML file to write (default: report.html in the run folder).", "-o", "--out")
    name: tuple[str, ...] = option((), "Name of a run on the page; repeatable, in the order of the runs.")
    title: str | None = option(None, "Title of the page.")


ViewCount = Annotated[int, Field(ge=2, le=65_536)]


class NetworksOptions(Options):
    weights: tuple[str, ...] = argument(
        "RUN", "Runs, checkpoints or weights files; last, optionally, the data (default: the first run's)."
    )
    views: str | None = option(None, "View recipe, such as moco-v2 (default: the first run's views).", metavar="RECIPE")


class CompareOptions(NetworksOptions, WorkersOptions, DeviceOptions, JsonOptions):
    images: Annotated[int, Field(ge=2)] = option(1000, "Number of images, drawn at random.")
    views_per_image: ViewCount = option(4, "Views of each image, for LiDAR.")


class EmbedOptions(WorkersOptions, DeviceOptions, ForceOptions, JsonOptions):
    weights: Path = argument("RUN_OR_WEIGHTS", _WEIGHTS)
    data: str = argument("DATA", LOCATION)
    out: Path = option(..., "File to write, .npz or .parquet.", "-o", "--out")
    split: str = option("all", "train, test or all.")
    batch_size: PositiveInt = option(256, "Images per forward pass.", panel=HARDWARE)


class NeighboursOptions(DeviceOptions, ForceOptions, JsonOptions):
    images: tuple[str, ...] = argument("IMAGE", "Image files, or names of images in the index.", ())
    index: Path = option(..., "Features written by `jcl embed`.")
    row: tuple[int, ...] = option((), "Row of the index to use as a query; repeatable.")
    weights: Path | None = option(None, "Run or weights file (default: the one that made the index).")
    k: PositiveInt = option(8, "Neighbors of each image.", "-k")
    out: Path | None = option(None, "Also draw them to this .png file.", "-o", "--out", ending=".png")


class AblateOptions(RunOptions, JsonOptions):
    over: tuple[str, ...] = option((), "Setting to vary; several: a grid.", metavar="NAME=VALUES")
    each_alone: bool = option(False, "One setting at a time, not a grid.")
    seeds: str = option("1", "Number of seeds, or list: 0,7,42.")
    protocol: ProbeProtocol = option(
        "fast", "Linear probe: fast, or the one of the paper's ablations (lr 10, 100 epochs)."
    )
    out: Path | None = option(None, "Folder (default: in runs/).")
    at_once: PositiveInt = option(1, "Parallel cells per GPU or CPU.", panel=HARDWARE)
    plan_only: bool = option(False, "Write the cells, but run none.")


class AblateCellOptions(JsonOptions):
    folder: Path = argument("CELL", "A folder in cells/ of an ablation.")
    workers: Count | None = option(None, "Decoding processes, unless the cell sets them.", panel=HARDWARE)


class PlotOptions(ForceOptions, JsonOptions):
    plot: Path | None = option(
        None, "Also plot to this .png file.", "-o", "--out", metavar="FILE", panel=OUTPUT, ending=".png"
    )


class ViewOptions(PlotOptions, SeedOptions, WorkersOptions, DeviceOptions):
    batch_size: PositiveInt = option(512, "Views per forward pass.", panel=HARDWARE)
    precision: Precision = option("auto", "Precision of the networks: auto, float32 or bfloat16.", panel=HARDWARE)


class DistributionOptions(NetworksOptions, ViewOptions):
    of: Literal["backbone", "projection"] = option("backbone", "Features of the backbone or of the projection head.")
    images: PositiveInt = option(32_768, "Number of images, drawn at random.")
    views_per_image: ViewCount = option(32, "Views of each image.")
    split: Literal["train", "test"] = option("train", "Images to use.")
    values: Path | None = option(
        None, "Also write the values of each image, as .csv.", metavar="FILE", panel=OUTPUT, ending=".csv"
    )


class BoundOptions(ViewOptions):
    run: Path | None = argument("RUN", "A run, or a checkpoint of it, MoCo or JCL (default: Gaussian keys).", None)
    data: str | None = argument("DATA", "Images (default: the data of the run).", None)
    scales: Listed[NotNegative] = option("1,4", "Covariance scales of Eq. 8.", metavar="LIST")
    dimensions: Listed[Annotated[int, Field(ge=2)]] = option("32,128", "Dimensions of Gaussian keys.", metavar="LIST")
    spreads: Listed[Annotated[float, Field(gt=0, lt=1)]] = option(
        "0.1,0.2,0.4,0.6", "Spreads of Gaussian keys, between 0 and 1.", metavar="LIST"
    )
    temperatures: Listed[Positive] = option(
        "0.1,0.2", "Temperatures of Gaussian keys, or of the authors' checkpoint.", metavar="LIST"
    )
    negatives: PositiveInt = option(4096, "Negatives of Gaussian keys; a run has its queue.")
    draws: Annotated[int, Field(ge=100)] = option(16_384, "Gaussian keys drawn for each image.")
    images: PositiveInt | None = option(None, "Images (default: 256 of a run, 16 with Gaussian keys).")
    keys: Annotated[int, Field(ge=1, le=65_536)] = option(256, "Key views of each image of a run.")


class CostOptions(PlotOptions, DeviceOptions):
    keys: Listed[PositiveInt] = option("1,2,4,8,16,32", "Numbers of keys per image.", metavar="LIST")
    recipe: str | None = option(None, "Recipe (default: the paper's on a GPU, a small network on a CPU).")
    backbone: str | None = option(None, "Network, such as resnet18.")
    image_size: PositiveInt | None = option(None, "Side of the views in pixels.")
    batch_size: BatchSize | None = option(None, "Images per step.")
    repeats: PositiveInt = option(5, "Timed steps per measurement.")


class ImportOptions(ForceOptions):
    file: Path = argument("FILE", "Weights of MoCo, JCL, torchvision, timm, lightly, solo-learn or detectron2.")
    out: Path = option(..., "Backbone file to write.", "-o", "--out", metavar="OUT.safetensors")
    backbone: str | None = option(None, _BACKBONE)
    image_size: ImageSize | None = option(None, "Image size in pixels (default: the usual one of the network).")


class ExportOptions(ForceOptions):
    weights: Path = argument("RUN_OR_WEIGHTS", _WEIGHTS)
    target: Target = option(..., f"{', '.join(get_args(Target))}.", "--to", metavar="FORMAT")
    out: Path = option(..., "File to write; for hub-folder a folder, for hf USER/NAME.", "-o", "--out")
    backbone: str | None = option(None, _BACKBONE)


class RecipesOptions(Options):
    name: str | None = argument("NAME", "Show the values of this recipe.", None)
    settings: bool = option(False, "List every setting with its default, or with the recipe's value.")


class CheckOptions(JsonOptions):
    data: str = argument("DATA", LOCATION)


class ViewsOptions(RunOptions, ForceOptions, JsonOptions):
    out: Path = option(Path("views.png"), "Picture to write.", "-o", "--out", metavar="OUT.png", ending=".png")


class ShardOptions(SeedOptions, JsonOptions):
    data: str = argument("DATA", LOCATION)
    out_folder: Path = argument("OUT", "New folder for the shards.")
    images_per_shard: PositiveInt = option(5000, "Images in each tar file.")
