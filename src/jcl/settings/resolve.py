"""Values that read "auto", chosen from the data and said aloud with the reason."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from jcl.console import pluralize
from jcl.cores import MOST_WORKERS, cpu_cores, usual_workers
from jcl.errors import SettingsError
from jcl.settings.schema import SINGLE_KEY_METHODS, Settings, known, with_values


@dataclass(frozen=True)
class DataFacts:
    """What the choices depend on."""

    images: int
    short_side: int  # typical, in pixels
    decoded: bool  # True when the images are already in memory as arrays
    ranks_on_machine: int = 1


@dataclass(frozen=True)
class Choice:
    """One value that "auto" became."""

    name: str
    value: Any
    reason: str


def choose(settings: Settings, facts: DataFacts) -> tuple[Settings, list[Choice]]:
    """Replace every "auto"; later choices may rest on earlier ones (the queue on the batch, and so on)."""
    choices: list[Choice] = []
    for rule in _undecided(settings):
        value, reason = rule.choose(settings, facts)
        settings = with_values(settings, {rule.name: value})
        if reason:  # what has no bearing on the run is not worth a line
            choices.append(Choice(rule.name, value, reason))
    return settings, choices


def undecided(settings: Settings) -> list[str]:
    """The settings that still read "auto" and that `choose` would replace."""
    return [rule.name for rule in _undecided(settings)]


def _undecided(settings: Settings) -> list[_Rule]:
    def value_of(section: str, key: str) -> Any:
        return getattr(getattr(settings, section), key)

    return [rule for rule in RULES if value_of(*rule.name.split(".")) == "auto"]


def fit_to_ranks(settings: Settings, ranks: int) -> tuple[Settings, list[Choice]]:
    """Settings that `ranks` ranks can carry out, and what had to change for it."""
    batch, groups = known(settings.train.batch_size), known(settings.model.bn_groups)
    if batch % ranks or batch < 2 * ranks:
        raise SettingsError(
            f"a batch of {batch} images cannot be shared out evenly to {ranks} ranks, at least 2 images to each; "
            f"use a --batch-size that is a multiple of {ranks}, or another number of ranks."
        )
    if groups % ranks == 0:
        return settings, []
    fitting = max(1, round(groups / ranks)) * ranks
    while batch % fitting:
        fitting -= ranks
    reason = f"instead of {groups}: each of {ranks} ranks normalises whole groups"
    # Each pass takes whole groups too; with fewer groups there may be fewer passes, as each rank has anyway.
    passes = math.gcd(known(settings.train.key_passes), fitting)
    fitted = with_values(settings, {"train.key_passes": passes, "model.bn_groups": fitting})
    return fitted, [Choice("model.bn_groups", fitting, reason)]


_COLLECTION = 100_000  # images: fewer are somebody's collection, more begin to be like ImageNet
_SMALL_VIEW = 32  # px
_WARMUP_EPOCHS = 5.0  # of long runs


def _small(settings: Settings) -> bool:
    """Whether views are as small as CIFAR's, for which its recipe was made."""
    return known(settings.views.image_size) <= _SMALL_VIEW


def _image_size(settings: Settings, facts: DataFacts) -> tuple[int, str]:
    for limit, size in ((48, 32), (96, 64), (192, 128)):
        if facts.short_side <= limit:
            return size, f"the images' short side is about {facts.short_side} px"
    return 224, f"the images' short side is about {facts.short_side} px, enough for the usual size"


def _views(settings: Settings, facts: DataFacts) -> tuple[str, str]:
    if _small(settings):
        return "small", f"as for CIFAR: at {settings.views.image_size} px a blur would leave little to see"
    return "moco-v2", "the paper's"


def _stem(settings: Settings, facts: DataFacts) -> tuple[str, str]:
    size = settings.views.image_size
    # Other networks, even some that are called ResNets (resnet50d, resnetv2_50), start with layers of another kind.
    resnet = re.fullmatch(r"(timm/)?resnet\d+(_tiny)?", settings.model.backbone)
    if resnet and isinstance(size, int) and size <= 64:
        return "small", f"views of {size} px would shrink to nothing behind a stem made for photographs"
    return "imagenet", "the stem the backbone comes with"


def _canvas(settings: Settings, facts: DataFacts) -> tuple[int, str]:
    size = known(settings.views.image_size)
    if facts.decoded:
        return facts.short_side, "arrays are used at their own size"
    canvas = max(32, round(size * 10 / 7))
    return canvas, f"keeps detail for crops of {size} px views at a bounded size"


def _workers(settings: Settings, facts: DataFacts) -> tuple[int, str]:
    if facts.decoded:
        return 0, "the images are in memory already"
    cores, most = cpu_cores(), f"{MOST_WORKERS} at most"
    if facts.ranks_on_machine > 1:
        share = max(1, min(MOST_WORKERS, cores // facts.ranks_on_machine))
        return share, f"this rank's share of the {cores} cores, {most}"
    return usual_workers(), f"one per CPU core, {most} ({pluralize(cores, 'core')} here)"


def _batch_size(settings: Settings, facts: DataFacts) -> tuple[int, str]:
    largest = 256
    if facts.images < 16:
        few = "1 image is" if facts.images == 1 else f"{facts.images} images are"
        raise SettingsError(
            f"{few} too few to choose a batch size for; "
            "give --batch-size, or better more images (a few hundred at least)."
        )
    batch = min(largest, _power_of_two_below(facts.images // 8))
    if batch == largest:
        return batch, "MoCo's"
    return batch, f"an eighth of the {facts.images:,} images at most, so that an epoch has several steps"


def _bn_groups(settings: Settings, facts: DataFacts) -> tuple[int, str]:
    batch = known(settings.train.batch_size)
    groups = 1
    while groups < 8 and batch % (groups * 2) == 0 and batch // (groups * 2) >= 32:
        groups *= 2
    if groups == 1:
        return 1, f"a batch of {batch} is too small to split into groups of 32 or more"
    return groups, f"ShuffleBN as on {groups} GPUs, {batch // groups} images each"


def _lr(settings: Settings, facts: DataFacts) -> tuple[float, str]:
    batch = known(settings.train.batch_size)
    if _small(settings):
        rate, whose = 0.24, ", as for CIFAR"
    else:
        rate, whose = (0.06, "") if facts.images < _COLLECTION else (0.03, ", the paper's")
    return round(rate * batch / 256, 6), f"{rate} for a batch of 256{whose}, in proportion to {batch}"


def _warmup_epochs(settings: Settings, facts: DataFacts) -> tuple[float, str]:
    tenth = settings.train.epochs / 10
    if tenth >= _WARMUP_EPOCHS:
        return _WARMUP_EPOCHS, ""  # as ever
    return tenth, f"a tenth of {pluralize(settings.train.epochs, 'epoch')}; long runs have {_WARMUP_EPOCHS:g}"


def _weight_decay(settings: Settings, facts: DataFacts) -> tuple[float, str]:
    if _small(settings):
        return 5e-4, f"as for CIFAR, whose views have {_SMALL_VIEW} px"
    return 1e-4, "the paper's"


def _num_queries(settings: Settings, facts: DataFacts) -> tuple[int, str]:
    if settings.method.name in SINGLE_KEY_METHODS or not _small(settings):
        return 1, ""  # as ever
    if settings.method.num_keys != "auto":
        return 1, "as in the paper, since the number of keys was given; without that there would be a second"
    return 2, f"as for CIFAR, whose views have {_SMALL_VIEW} px"


def _num_keys(settings: Settings, facts: DataFacts) -> tuple[int, str]:
    if settings.method.name in SINGLE_KEY_METHODS:
        return 1, ""
    if known(settings.method.num_queries) > 1:
        return 3, "beside a second query two more would gain little"
    return 5, "the paper's"


def _covariance_scale(settings: Settings, facts: DataFacts) -> tuple[float, str]:
    scale, reason = 4.0, "the paper's"
    if _small(settings):
        scale, reason = 0.5, f"as for CIFAR, whose views have {_SMALL_VIEW} px"
    elif facts.images < _COLLECTION:
        scale, reason = 1.0, f"the paper's 4 is for ImageNet's many negatives; here are {facts.images:,} images"
    looked_at = settings.method.name == "jcl" and known(settings.method.num_keys) > 1  # one key has no covariance
    return scale, reason if looked_at else ""


def _queue_size(settings: Settings, facts: DataFacts) -> tuple[int, str]:
    queue = min(65536, max(256, _power_of_two_below(facts.images // 8)))
    if queue == 65536:
        return queue, "the paper's"
    if queue > facts.images // 8:
        return (
            queue,
            f"the least that gives a query enough to differ from, though there are only {facts.images:,} images",
        )
    return queue, f"an eighth of the {facts.images:,} images, so that few negatives are the same image's older keys"


def _key_momentum(settings: Settings, facts: DataFacts) -> tuple[float, str]:
    steps = settings.train.epochs * max(1, facts.images // known(settings.train.batch_size))
    for momentum, least_steps in ((0.999, 100_000), (0.99, 1_000)):
        if steps >= least_steps:
            return momentum, f"the key encoder follows over {round(1 / (1 - momentum)):,} of the {steps:,} steps"
    return 0.95, f"a short run of {pluralize(steps, 'step')} needs a key encoder that follows quickly"


def _key_passes(settings: Settings, facts: DataFacts) -> tuple[int, str]:
    groups, keys = known(settings.model.bn_groups), known(settings.method.num_keys)
    if settings.method.name == "multi-key-backprop":
        return 1, "gradients need all keys in one pass"
    # Small views take little memory either way, and a GPU is faster at many of them together.
    if keys > 4 and _pixels_of_keys(settings) <= _FOUR_BATCHES_OF_PHOTOGRAPHS:
        return 1, f"{keys} views of {settings.views.image_size} px per image take little memory at once"
    passes = passes_of_flat_memory(keys, groups)
    if keys / passes > 4:
        return passes, f"no more parts than BN groups ({groups}), so {keys} key views per image take more memory"
    return passes, f"{pluralize(keys, 'key view')} per image at no more memory than the query takes"


def passes_of_flat_memory(keys: int, groups: int) -> int:
    """Passes of whole BN groups in which so many keys an image take no more memory than the query, if groups allow.

    A pass without gradients holds a few layers' activations, a query all of them: four batches stay below it.
    """
    passes = 1
    while passes < groups and keys / passes > 4 and groups % (passes * 2) == 0:
        passes *= 2
    return passes


_FOUR_BATCHES_OF_PHOTOGRAPHS = 4 * 256 * 224**2  # in pixels, as MoCo has them


def _pixels_of_keys(settings: Settings) -> int:
    """Of a batch's keys, as the layers behind the stem see them: the small stem keeps 16 times as many."""
    views = known(settings.train.batch_size) * known(settings.method.num_keys)
    return views * known(settings.views.image_size) ** 2 * (16 if settings.model.stem == "small" else 1)


def voters(images: int) -> int:
    """How many of so many training images vote in kNN: the usual 200, unless most votes would be of other classes."""
    return min(200, max(1, images // 10))


def _knn_k(settings: Settings, facts: DataFacts) -> tuple[int, str]:
    k = voters(facts.images)
    if k == 200:
        return k, "the usual number of neighbours that vote"
    return k, f"a tenth of the {facts.images:,} images, so that those of a class are not outvoted by the others"


@dataclass(frozen=True)
class _Rule:
    name: str
    choose: Any


# In the order in which they rest on each other.
RULES = (
    _Rule("views.image_size", _image_size),
    _Rule("views.recipe", _views),
    _Rule("model.stem", _stem),
    _Rule("data.canvas", _canvas),
    _Rule("data.workers", _workers),
    _Rule("train.batch_size", _batch_size),
    _Rule("model.bn_groups", _bn_groups),
    _Rule("train.lr", _lr),
    _Rule("train.warmup_epochs", _warmup_epochs),
    _Rule("train.weight_decay", _weight_decay),
    _Rule("method.queue_size", _queue_size),
    _Rule("method.key_momentum", _key_momentum),
    _Rule("method.num_queries", _num_queries),
    _Rule("method.num_keys", _num_keys),
    _Rule("method.covariance_scale", _covariance_scale),
    _Rule("train.key_passes", _key_passes),
    _Rule("record.knn_k", _knn_k),
)


def _power_of_two_below(number: int) -> int:
    return 1 << max(1, number.bit_length() - 1)
