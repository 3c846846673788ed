"""Settings of a pre-training run, typed and validated.

A recipe is a YAML file with some of these settings; a run folder keeps all of them in `settings.yaml`. Values that are
"auto" are chosen from the data before training (see `resolve.py`). Descriptions are help texts of command-line options.
"""

from typing import Annotated, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

from jcl.core import MAX_CHANNELS
from jcl.core.registry import METHODS


def _known_method(name: str) -> str:
    if name not in METHODS:
        raise ValueError(f"must be one of {', '.join(map(repr, METHODS))}")
    return name


Auto = Literal["auto"]
Text = Annotated[str, BeforeValidator(lambda value: "" if value is None else value)]  # None: `name:` in YAML
LIBRARIES = ("imagenet", "timm")  # weights of torchvision and timm: values of `model.init` that are not paths

PositiveInt = Annotated[int, Field(ge=1, lt=2**40)]
Count = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
CropFraction = Annotated[float, Field(gt=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0, le=1e38)]  # fits in float32
NotNegative = Annotated[float, Field(ge=0.0, le=1e38)]
Probability = Annotated[float, Field(ge=0.0, le=1.0)]
HueShift = Annotated[float, Field(ge=0.0, le=0.5)]
Triple = tuple[float, float, float]
Channels = Annotated[int, Field(ge=1, le=MAX_CHANNELS)]
ImageSize = Annotated[int, Field(ge=1, le=4096)]  # larger images exhaust the memory
PerChannel = Annotated[tuple[float, ...], Field(min_length=1, max_length=MAX_CHANNELS)]
PositivePerChannel = Annotated[tuple[Positive, ...], Field(min_length=1, max_length=MAX_CHANNELS)]
ViewName = Literal["moco-v2", "moco-v1", "small", "no-color", "microscopy", "aerial", "none"]
MethodName = Annotated[str, AfterValidator(_known_method)]
BatchSize = Annotated[int, Field(ge=2)]
NumKeys = Annotated[int, Field(ge=1, le=1024)]
NumQueries = Annotated[int, Field(ge=1, le=64)]
NumLocalQueries = Annotated[int, Field(ge=0, le=64)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Precision = Literal["auto", "float32", "bfloat16"]
OptimizerName = Literal["sgd", "adamw"]

_MAX_ADAMW_LR = 0.02  # the rates of the recipes are for SGD


class Section(BaseModel):
    """A group of settings; unknown names are errors, and values do not change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


LOCATION = "Folder, .npz or .npy file, shards ('s/{00..99}.tar'), hf:user/dataset, demo, cifar10, cifar100 or stl10."


class DataSettings(Section):
    location: str = Field("", description=LOCATION)
    root: Text = Field("", description="Folder for downloaded data sets (default: $JCL_DATA or ~/.cache/jcl/data).")
    subset: Text = Field("", description="Classes to use: imagenet100 or a file, one per line.")
    download: bool = Field(True, description="Download data sets that are not in data.root.")
    channels: Channels | Auto = Field("auto", description="Channels of the images; 1 or 3 converts gray and color.")
    canvas: PositiveInt | Auto = Field("auto", description="Longest side in pixels of decoded images.")
    windows: bool = Field(True, description="Cut images longer than 2:1 to random windows.")
    workers: Count | Auto = Field("auto", description="Image decoding processes.")
    strict: bool = Field(False, description="Stop at the first unreadable image, folder or shard.")
    max_failed_share: Probability = Field(0.1, description="Stop if a larger share of images is unreadable; 1: never.")


class ViewSettings(Section):
    recipe: ViewName | Auto = Field("moco-v2", description=f"Augmentations: {', '.join(get_args(ViewName))}.")
    image_size: PositiveInt | Auto = Field("auto", description="Side of the views in pixels.")
    min_scale: CropFraction = Field(0.2, description="Smallest fraction of an image in a crop.")
    brightness: NotNegative | None = Field(None, description="Brightness in the color jitter (default: the recipe's).")
    contrast: NotNegative | None = Field(None, description="Contrast in the color jitter (default: the recipe's).")
    saturation: NotNegative | None = Field(None, description="Saturation in the color jitter (default: the recipe's).")
    hue: HueShift | None = Field(None, description="Hue in the color jitter (default: the recipe's).")
    noise: NotNegative | None = Field(
        None, description="Noise of channels that are not colors (default: the recipe's)."
    )
    color: bool | Auto = Field("auto", description="Channels are red, green and blue; false: jitter each by itself.")
    jitter_probability: Probability | None = Field(None, description="Color jitter (default: the recipe's).")
    gray_probability: Probability | None = Field(None, description="Grayscale (default: the recipe's).")
    blur_probability: Probability | None = Field(None, description="Gaussian blur (default: the recipe's).")
    blur_sigma: tuple[Positive, Positive] | None = Field(None, description="Sigma of the blur (default: the recipe's).")
    solarize_probability: Probability | None = Field(None, description="Solarization (default: the recipe's).")
    flip_probability: Probability | None = Field(None, description="Horizontal flip (default: the recipe's).")
    vertical_flip_probability: Probability | None = Field(None, description="Vertical flip (default: the recipe's).")
    rotation_probability: Probability | None = Field(None, description="Right-angle rotation (default: the recipe's).")
    local_size: PositiveInt | Auto = Field("auto", description="Side of the small crops of local queries in pixels.")
    local_scale: tuple[CropFraction, CropFraction] | Auto = Field(
        "auto", description="Fraction of an image in small crops."
    )
    mean: PerChannel | Auto = Field("auto", description="Mean of the channels, for normalization.")
    std: PositivePerChannel | Auto = Field("auto", description="Standard deviation of the channels, for normalization.")


class ModelSettings(Section):
    backbone: str = Field("resnet50", description="Backbone in torchvision or timm.")
    init: Text = Field("", description="Weights to start from: imagenet, timm, a run or a weights file.")
    freeze: Count = Field(0, description="How many first stages of a ResNet keep the weights of init; 1: the stem.")
    stem: Literal["imagenet", "medium", "small"] | Auto = Field(
        "auto", description="First layers: imagenet for photographs, medium or small (slower) for views of 64 or 32 px."
    )
    head: Literal["mlp", "linear"] = Field("mlp", description="Projection head: mlp (MoCo v2) or linear (MoCo v1).")
    head_width: PositiveInt | Literal["features"] = Field(
        "features", description="Width of the MLP head's hidden layer (features: as the backbone's features)."
    )
    embedding_dim: PositiveInt = Field(128, description="Dimension of queries and keys, d.")
    bn_groups: PositiveInt | Auto = Field("auto", description="Batch-norm groups of a batch (ShuffleBN).")
    drop_path: Fraction = Field(0.0, description="Stochastic depth: how often the query skips the last block.")
    freeze_patch_embed: bool | Auto = Field("auto", description="Do not train the patch embedding of a ViT.")


class MethodSettings(Section):
    name: MethodName = Field("jcl", description=f"Method: {', '.join(METHODS)}.")
    num_keys: NumKeys | Auto = Field(5, description="Key views per image, M'.")
    num_queries: NumQueries | Auto = Field(1, description="Query views per image (1 in the paper).")
    num_local_queries: NumLocalQueries | Auto = Field(
        0, description="Small crops per image as further queries (0 in the paper)."
    )
    covariance_scale: NotNegative | Auto = Field(4.0, description="Weight of the covariance, lambda.")
    covariance_schedule: Literal["constant", "linear"] = Field(
        "constant", description="How lambda changes: constant, or linear from lambda/E in the first of E epochs."
    )
    temperature: Positive = Field(0.2, description="Softmax temperature, tau.")
    queue_size: PositiveInt | Auto = Field("auto", description="Past keys kept as negatives, K.")
    key_momentum: Fraction | Auto = Field("auto", description="Momentum of the key encoder.")
    key_momentum_schedule: Literal["constant", "cosine"] = Field(
        "constant", description="Constant, or rising to 1 by a cosine."
    )


class TrainSettings(Section):
    """Optimization and hardware."""

    epochs: PositiveInt = Field(200, description="Training epochs.")
    batch_size: BatchSize | Auto = Field("auto", description="Images per step, over all devices.")
    lr: Positive | Auto = Field("auto", description="Peak learning rate.")
    optimizer: OptimizerName | Auto = Field("auto", description="Optimizer: sgd, or adamw for ViT and ConvNeXt.")
    weight_decay: NotNegative | Auto = Field(1e-4, description="Weight decay; AdamW leaves norms and biases out.")
    momentum: Fraction = Field(0.9, description="Momentum of SGD.")
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.999), description="Betas of AdamW.")
    clip_grad: NotNegative | Auto = Field("auto", description="Clip gradients to this norm; 0: no clipping.")
    schedule: Literal["cosine", "step", "constant"] = Field("cosine", description="Learning rate schedule.")
    schedule_by: Literal["epoch", "step"] = Field("epoch", description="Change the learning rate every epoch or step.")
    milestones: tuple[PositiveInt, ...] = Field((120, 160), description="Epochs at which a step schedule decays.")
    decay: Positive = Field(0.1, description="Decay factor of a step schedule.")
    warmup_epochs: NotNegative | Auto = Field(0.0, description="Epochs of linear warm-up.")
    head_epochs: NotNegative = Field(0.0, description="Epochs in which only the projection head is trained.")
    layer_decay: float = Field(1.0, gt=0.0, le=1.0, description="Learning rate of a stage relative to the next one's.")
    seed: Seed = Field(0, description="Random seed.")
    device: str = Field("auto", description="Device: auto, cpu, cuda, cuda:1, ...")
    precision: Precision = Field("auto", description="Precision of the encoders; bfloat16 needs a GPU.")
    compile: bool | Auto = Field("auto", description="Fuse or compile the step (auto: on a GPU).")
    cuda_graph: bool | Auto = Field("auto", description="Record a step as one CUDA graph (auto: on a GPU).")
    key_passes: PositiveInt | Auto = Field("auto", description="Forward passes in which the keys are encoded.")
    accumulate: PositiveInt = Field(1, description="Number of micro-batches of a step: saves memory.")
    checkpoint_activations: bool = Field(False, description="Compute activations twice: less memory, but slower.")
    rank_timeout: Positive = Field(600.0, description="Seconds to wait for a rank that does not respond.")
    on_nan: Literal["stop", "skip"] = Field("stop", description="What to do if the loss is not finite.")


class RecordSettings(Section):
    """Metrics, checkpoints and evaluation during training."""

    log_every: PositiveInt | Auto = Field("auto", description="Steps per line of metrics.jsonl (auto: 20 or fewer).")
    checkpoint_every: PositiveInt = Field(5, description="Epochs between checkpoints.")
    checkpoint_minutes: NotNegative = Field(15.0, description="Minutes between checkpoints within epochs; 0: none.")
    keep: PositiveInt = Field(2, description="Number of newest checkpoints to keep.")
    knn_every: Count = Field(10, description="Epochs between kNN evaluations; 0: only at the end.")
    knn_k: PositiveInt | Auto = Field(200, description="Neighbors that vote in kNN.")
    knn_images: PositiveInt = Field(50_000, description="Most training images that vote in kNN during training.")
    knn_temperature: Positive = Field(0.1, description="Temperature of the kNN votes.")
    tensorboard: bool = Field(True, description="Write TensorBoard events.")
    track: Literal["none", "wandb", "mlflow", "trackio"] = Field(
        "none", description="Tracker: wandb, mlflow or trackio."
    )
    report: bool = Field(True, description="Write report.html at the end.")


class Settings(Section):
    """All settings of a run, in sections: `settings.train.lr`. They cannot be changed; use `build_settings`."""

    recipe: Text = Field("", description="Recipe that these settings are based on.")
    data: DataSettings = DataSettings()
    views: ViewSettings = ViewSettings()
    model: ModelSettings = ModelSettings()
    method: MethodSettings = MethodSettings()
    train: TrainSettings = TrainSettings()
    record: RecordSettings = RecordSettings()

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        views = (self.method.num_keys, self.method.num_queries, self.method.num_local_queries)
        if METHODS[self.method.name].symmetric:
            if views != (2, 2, 0):
                raise ValueError(f"{self.method.name} uses two views per image; remove settings of keys and queries")
        elif not METHODS[self.method.name].several_keys and self.method.num_keys not in (1, "auto"):
            keys = f"method.num_keys is {self.method.num_keys}"
            raise ValueError(f"{self.method.name} uses exactly one key per image, but {keys}; for several use jcl")
        batch, groups = self.train.batch_size, self.model.bn_groups
        if isinstance(batch, int) and isinstance(groups, int):
            if batch % groups:
                raise ValueError(f"train.batch_size={batch} cannot be split into model.bn_groups={groups} equal groups")
            if batch // groups < 2:
                raise ValueError(f"model.bn_groups={groups} leaves one image per group of a batch of {batch}")
        if self.train.optimizer == "adamw" and self.train.lr != "auto" and self.train.lr > _MAX_ADAMW_LR:
            others = "--set train.weight_decay=auto --set train.warmup_epochs=auto"
            raise ValueError(f"train.lr={self.train.lr} is too high for AdamW; use --lr auto {others}")
        return self


def setting_fields() -> dict[str, FieldInfo]:
    """All settings by their dotted names."""
    fields: dict[str, FieldInfo] = {}
    for section, field in Settings.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            fields |= {f"{section}.{key}": inner for key, inner in kind.model_fields.items()}
        else:
            fields[section] = field
    return fields


def setting_names() -> list[str]:
    return list(setting_fields())


_NO_EFFECT = {
    *("data.root", "data.download", "data.workers", "data.max_failed_share"),
    *("train.device", "train.compile", "train.cuda_graph", "train.key_passes", "train.rank_timeout", "train.on_nan"),
    *("train.accumulate", "train.checkpoint_activations"),
}


def affects_results(name: str) -> bool:
    """Whether a setting changes what a run learns or measures, not only where and how fast it runs."""
    if name.startswith("record."):
        return name in ("record.knn_k", "record.knn_images", "record.knn_temperature")
    return name not in _NO_EFFECT
