"""Settings of a run after every "auto" is resolved, and the facts about the data that the values depend on."""

from dataclasses import dataclass
from typing import Any, Literal

from jcl.console import join_words, pluralize
from jcl.settings import schema
from jcl.views.recipe import LOCAL_SCALE


class ResolvedDataSettings(schema.DataSettings):
    channels: schema.Channels = 3
    canvas: schema.PositiveInt
    windows: bool = False  # of runs that started before this setting existed
    workers: schema.Count


class ResolvedViewSettings(schema.ViewSettings):
    recipe: schema.ViewName = "moco-v2"
    image_size: schema.PositiveInt
    local_size: schema.PositiveInt = 1
    local_scale: tuple[schema.CropFraction, schema.CropFraction] = LOCAL_SCALE
    color: bool = True
    mean: schema.PerChannel
    std: schema.PositivePerChannel


class ResolvedModelSettings(schema.ModelSettings):
    stem: Literal["imagenet", "medium", "small"]
    bn_groups: schema.PositiveInt
    freeze_patch_embed: bool = False


class ResolvedMethodSettings(schema.MethodSettings):
    num_keys: schema.NumKeys = 5
    num_queries: schema.NumQueries = 1
    num_local_queries: schema.NumLocalQueries = 0
    covariance_scale: schema.NotNegative = 4.0
    queue_size: schema.PositiveInt
    key_momentum: schema.Fraction


class ResolvedTrainSettings(schema.TrainSettings):
    batch_size: schema.BatchSize
    lr: schema.Positive
    optimizer: schema.OptimizerName = "sgd"
    weight_decay: schema.NotNegative = 1e-4
    clip_grad: schema.NotNegative = 0.0
    warmup_epochs: schema.NotNegative = 0.0
    key_passes: schema.PositiveInt


class ResolvedRecordSettings(schema.RecordSettings):
    knn_k: schema.PositiveInt = 200


class ResolvedSettings(schema.Settings):
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
