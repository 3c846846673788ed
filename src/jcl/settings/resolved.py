"""Settings of a run in which no value that training depends on is "auto" any more, and what these were chosen from."""

from dataclasses import dataclass
from typing import Any, Literal

from jcl.console import join_words, pluralize
from jcl.settings.schema import (
    BatchSize,
    Channels,
    Count,
    CropFraction,
    DataSettings,
    Fraction,
    MethodSettings,
    ModelSettings,
    NotNegative,
    NumKeys,
    NumQueries,
    OptimizerName,
    PerChannel,
    Positive,
    PositiveInt,
    PositivePerChannel,
    RecordSettings,
    Settings,
    TrainSettings,
    ViewName,
    ViewSettings,
)
from jcl.views.recipe import LOCAL_SCALE


class ResolvedDataSettings(DataSettings):
    channels: Channels = 3
    canvas: PositiveInt
    windows: bool = False  # of runs that began before there were windows
    workers: Count


class ResolvedViewSettings(ViewSettings):
    recipe: ViewName = "moco-v2"
    image_size: PositiveInt
    local_size: PositiveInt = 1
    local_scale: tuple[CropFraction, CropFraction] = LOCAL_SCALE
    color: bool = True
    mean: PerChannel
    std: PositivePerChannel


class ResolvedModelSettings(ModelSettings):
    stem: Literal["imagenet", "medium", "small"]
    bn_groups: PositiveInt
    freeze_patch_embed: bool = False


class ResolvedMethodSettings(MethodSettings):
    num_keys: NumKeys = 5
    num_queries: NumQueries = 1
    num_local_queries: Count = 0
    covariance_scale: NotNegative = 4.0
    queue_size: PositiveInt
    key_momentum: Fraction


class ResolvedTrainSettings(TrainSettings):
    batch_size: BatchSize
    lr: Positive
    optimizer: OptimizerName = "sgd"
    weight_decay: NotNegative = 1e-4
    clip_grad: NotNegative = 0.0
    warmup_epochs: NotNegative = 0.0
    head_epochs: NotNegative = 0.0
    key_passes: PositiveInt


class ResolvedRecordSettings(RecordSettings):
    knn_k: PositiveInt = 200


class ResolvedSettings(Settings):
    """All settings of a run.

    Device, precision, `compile` and `cuda_graph` may be "auto": they are decided on the machine that trains.
    """

    data: ResolvedDataSettings
    views: ResolvedViewSettings
    model: ResolvedModelSettings
    method: ResolvedMethodSettings
    train: ResolvedTrainSettings
    record: ResolvedRecordSettings = ResolvedRecordSettings()


def describe_views(settings: ResolvedSettings) -> str:
    """`, 3 keys, 2 queries and 4 local queries per image`, to follow the name of the method; empty for one of each."""
    method = settings.method
    if method.num_keys == method.num_queries == 1 and not method.num_local_queries:
        return ""
    parts = [pluralize(method.num_keys, "key")]
    parts += [f"{method.num_queries} queries"] if method.num_queries > 1 else []
    parts += [pluralize(method.num_local_queries, "local query", "local queries")] if method.num_local_queries else []
    return f", {join_words(parts)} per image"


@dataclass(frozen=True)
class InitialWeights:
    """What automatic values depend on if training starts from existing weights."""

    stem: str
    image_size: int | None  # if known, or if the network takes no other
    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class DataFacts:
    """What automatic values depend on."""

    images: int
    short_side: int  # typical, in pixels
    decoded: bool  # True for images that are in memory as arrays
    channels: int = 3
    color: bool = True  # the channels are red, green and blue
    mean: tuple[float, ...] | None = None  # estimated from images that are not 8-bit RGB
    std: tuple[float, ...] | None = None
    ranks_on_machine: int = 1
    init: InitialWeights | None = None


@dataclass(frozen=True)
class Choice:
    """The value that replaced an "auto"."""

    name: str
    value: Any
    reason: str
