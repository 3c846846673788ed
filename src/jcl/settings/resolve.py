"""Replaces every setting that is "auto" by a value chosen from the data, with the reason."""

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from jcl.console import pluralize
from jcl.core.encoder import BackboneTraits, backbone_traits
from jcl.core.registry import METHODS
from jcl.cores import MAX_WORKERS, cpu_cores, default_workers
from jcl.errors import SettingsError
from jcl.settings.resolved import Choice, DataFacts, ResolvedSettings
from jcl.settings.schema import Settings, setting_names
from jcl.settings.values import set_value, validated, values_of, with_values
from jcl.views.recipe import IMAGENET_MEAN, IMAGENET_STD, LOCAL_SCALE, canvas_side

Values = dict[str, Any]  # settings by dotted name; those resolved after a rule may still be "auto" in it
Rule = Callable[[Values, DataFacts], tuple[Any, str]]  # value and reason; without a reason it is not printed
_RULES: dict[str, Rule] = {}  # in the order in which they depend on each other


def resolve(settings: Settings, facts: DataFacts) -> tuple[ResolvedSettings, list[Choice]]:
    """Replace every "auto"; returns the choices with their reasons."""
    nested, values = settings.model_dump(), values_of(settings, setting_names())
    choices = []
    for name, rule in _RULES.items():
        if values[name] != "auto":
            continue
        values[name], reason = rule(values, facts)
        set_value(nested, name, values[name])
        if reason:
            choices.append(Choice(name, values[name], reason))
    return validated(ResolvedSettings, nested, "the chosen values"), choices


FITTED_TO_RANKS = ("model.bn_groups", "train.key_passes", "train.accumulate")


def fit_to_ranks(settings: ResolvedSettings, ranks: int) -> tuple[ResolvedSettings, list[Choice]]:
    """Settings that `ranks` ranks can train with, and what had to change for that."""
    batch, groups = settings.train.batch_size, settings.model.bn_groups
    if batch % ranks or batch < 2 * ranks:
        raise SettingsError(f"--batch-size {batch} must be a multiple of {ranks} ranks, with 2 images each or more.")
    if groups % ranks == 0 or not backbone_traits(settings.model.backbone).batch_norm:
        return settings, []
    fitting = max(1, round(groups / ranks)) * ranks
    while batch % fitting:
        fitting -= ranks
    # Each pass takes whole groups, so fewer groups may mean fewer passes; each rank needs fewer anyway.
    before = values_of(settings, FITTED_TO_RANKS)
    fitted = {name: math.gcd(count, fitting) for name, count in before.items()} | {"model.bn_groups": fitting}
    reason = f"so that each of the {ranks} ranks has whole groups"
    changes = [
        Choice(name, value, f"instead of {before[name]}, {reason}")
        for name, value in fitted.items()
        if value != before[name]
    ]
    return with_values(settings, fitted), changes


_SMALL_DATASET = 100_000  # images; larger sets are treated like ImageNet
_SMALL_VIEW = 32  # px
_WARMUP_EPOCHS = 5.0  # of long runs
_FOUR_BATCHES_OF_PHOTOGRAPHS = 4 * 256 * 224**2  # in pixels, as in MoCo
_AS_WEIGHTS = "as for the weights at the start"
_AS_CIFAR = f"as for CIFAR, whose views have {_SMALL_VIEW} px"
_MEASURED_ON_PHOTOGRAPHS = "the best measured on Caltech-101"


def _rule(name: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        _RULES[name] = rule
        return rule

    return register


def _small(values: Values) -> bool:
    """Whether views are as small as CIFAR's, for which its recipe was made."""
    return bool(values["views.image_size"] <= _SMALL_VIEW)


def _adamw(values: Values) -> bool:
    return bool(values["train.optimizer"] == "adamw")


def _traits(values: Values) -> BackboneTraits:
    return backbone_traits(values["model.backbone"])


def _few_photographs(values: Values, facts: DataFacts) -> bool:
    return facts.images < _SMALL_DATASET and not _small(values)


def _single_key(values: Values) -> bool:
    return not METHODS[values["method.name"]].several_keys


@_rule("views.image_size")
def _image_size(values: Values, facts: DataFacts) -> tuple[int, str]:
    if facts.init and facts.init.image_size:
        return facts.init.image_size, _AS_WEIGHTS
    reason = f"the images' short side is about {facts.short_side} px"
    for limit, size in ((48, 32), (96, 64), (192, 128)):
        if facts.short_side <= limit:
            return size, reason
    return 224, f"{reason}, enough for the usual size"


@_rule("method.num_local_queries")
def _num_local_queries(values: Values, facts: DataFacts) -> tuple[int, str]:
    if "resne" not in values["model.backbone"]:  # other networks may not take crops of another size
        return 0, ""
    if _small(values):
        return 6, _AS_CIFAR
    return (4, _MEASURED_ON_PHOTOGRAPHS) if _few_photographs(values, facts) else (0, "")


@_rule("views.local_size")
def _local_size(values: Values, facts: DataFacts) -> tuple[int, str]:
    used = values["method.num_local_queries"] > 0
    patch = max(1, _traits(values).patch_size) if used else 1
    return max(patch, values["views.image_size"] // 2 // patch * patch), "half of the views" if used else ""


@_rule("views.local_scale")
def _local_scale(values: Values, facts: DataFacts) -> tuple[tuple[float, float], str]:
    scale, reason = ((0.08, 0.6), _AS_CIFAR) if _small(values) else (LOCAL_SCALE, _MEASURED_ON_PHOTOGRAPHS)
    return scale, reason if values["method.num_local_queries"] else ""


@_rule("views.recipe")
def _views(values: Values, facts: DataFacts) -> tuple[str, str]:
    if _small(values):
        return "small", f"as for CIFAR: blur removes too much detail at {values['views.image_size']} px"
    return "moco-v2", "the paper's"


@_rule("data.channels")
def _channels(values: Values, facts: DataFacts) -> tuple[int, str]:
    return facts.channels, "" if facts.mean is None else "as in the images"


@_rule("views.color")
def _color(values: Values, facts: DataFacts) -> tuple[bool, str]:
    color = facts.color and values["data.channels"] == 3
    return color, "" if color else "not red, green and blue: each channel has its own brightness, contrast and noise"


def _normalization(values: Values, facts: DataFacts, name: str, usual: tuple[float, ...]) -> tuple[Any, str]:
    estimated, of_weights = getattr(facts, name), getattr(facts.init, name, usual)
    if estimated is not None:
        if values["views.color"] and not all(0 <= value <= 1 for value in facts.mean or ()):
            raise SettingsError("The values of the images are not from 0 to 1, as colors are; set views.color=false.")
        return estimated, "estimated from the images, which are not 8-bit RGB"
    return (of_weights, _AS_WEIGHTS) if usual != of_weights and len(of_weights) == facts.channels else (usual, "")


_rule("views.mean")(partial(_normalization, name="mean", usual=IMAGENET_MEAN))
_rule("views.std")(partial(_normalization, name="std", usual=IMAGENET_STD))


@_rule("model.stem")
def _stem(values: Values, facts: DataFacts) -> tuple[str, str]:
    if facts.init and "resne" in values["model.backbone"]:
        return facts.init.stem, _AS_WEIGHTS
    size = values["views.image_size"]
    # Other networks, even some that are called ResNets (resnet50d, resnetv2_50), begin with layers of another kind.
    resnet = re.fullmatch(r"(timm/)?resnet\d+(_tiny)?", values["model.backbone"])
    if resnet and size <= 64:
        reason = f"the stem for photographs shrinks views of {size} px too much"
        # Without its strides, features are four times as high and wide.
        slow = f"; with the small stem a step takes as long as at {4 * size} px, so --image-size 96 is faster"
        return "small", reason + (slow if size > _SMALL_VIEW else "")
    return "imagenet", "the backbone's own stem"


@_rule("data.canvas")
def _canvas(values: Values, facts: DataFacts) -> tuple[int, str]:
    size = values["views.image_size"]
    if facts.decoded:
        return facts.short_side, "arrays are used at their own size"
    return canvas_side(size, values["views.min_scale"]), f"so that few crops are enlarged to {size} px"


@_rule("data.workers")
def _workers(values: Values, facts: DataFacts) -> tuple[int, str]:
    if facts.decoded:
        return 0, "the images are already in memory"
    share = f"this rank's share of {cpu_cores()}" if facts.ranks_on_machine > 1 else f"{cpu_cores()} here"
    return default_workers(facts.ranks_on_machine), f"one per CPU core ({share}), {MAX_WORKERS} at most"


@_rule("train.batch_size")
def _batch_size(values: Values, facts: DataFacts) -> tuple[int, str]:
    if facts.images < 16:
        few = pluralize(facts.images, "image is", "images are")
        raise SettingsError(f"{few} too few to choose a batch size; give --batch-size, or better more images.")
    batch = min(256, max(8, power_of_two_below(facts.images // 8)))
    return batch, f"an eighth of the {facts.images:,} images or less, from 8 to MoCo's 256"


@_rule("model.bn_groups")
def _bn_groups(values: Values, facts: DataFacts) -> tuple[int, str]:
    if not _traits(values).batch_norm:
        return 1, f"{values['model.backbone']} has no batch norm"
    batch, accumulate = values["train.batch_size"], values["train.accumulate"]
    groups = accumulate if batch % accumulate == 0 and batch >= 2 * accumulate else 1
    while groups < 8 and batch % (groups * 2) == 0 and batch // (groups * 2) >= 32:
        groups *= 2
    if groups == 1:
        return 1, "groups need 32 images each or more; a --batch-size of 64 or more gives several"
    return groups, f"ShuffleBN as on {groups} GPUs, {batch // groups} images each"


@_rule("model.freeze_patch_embed")
def _freeze_patch_embed(values: Values, facts: DataFacts) -> tuple[bool, str]:
    vit = _traits(values).patch_size > 0
    return vit, "keeps ViTs stable, as in MoCo v3" if vit else ""


@_rule("train.optimizer")
def _optimizer(values: Values, facts: DataFacts) -> tuple[str, str]:
    if _traits(values).layer_norm:
        return "adamw", "usual for networks with layer norm, such as transformers and ConvNeXt"
    return "sgd", ""


@_rule("train.clip_grad")
def _clip_grad(values: Values, facts: DataFacts) -> tuple[float, str]:
    return (1.0, "usual for ViTs") if _traits(values).patch_size else (0.0, "")


@_rule("train.lr")
def _lr(values: Values, facts: DataFacts) -> tuple[float, str]:
    batch = values["train.batch_size"]
    if _adamw(values):
        rate, source = 1.5e-4, ", MoCo v3's for AdamW"
    elif _small(values):
        rate, source = 0.24, ", as for CIFAR"
    elif not _few_photographs(values, facts):
        rate, source = 0.03, ", the paper's"
    else:
        rate, source = 0.24, f", {_MEASURED_ON_PHOTOGRAPHS}"
    if facts.init:
        rate, source = rate / 3, ", a third of the usual rate to keep what the weights know"
    return round(rate * batch / 256, 10), f"{rate:g} for a batch of 256{source}, scaled to {batch}"


@_rule("train.warmup_epochs")
def _warmup_epochs(values: Values, facts: DataFacts) -> tuple[float, str]:
    epochs = values["train.epochs"]
    if _adamw(values):
        return round(epochs * 40 / 300, 2), "40 of 300 epochs, as MoCo v3"
    warmup = epochs / (4 if facts.init else 10)
    if warmup >= _WARMUP_EPOCHS:
        return _WARMUP_EPOCHS, ""
    return warmup, f"{warmup / epochs:.0%} of {pluralize(epochs, 'epoch')}; long runs have {_WARMUP_EPOCHS:g}"


@_rule("train.weight_decay")
def _weight_decay(values: Values, facts: DataFacts) -> tuple[float, str]:
    if _adamw(values):
        return 0.1, "MoCo v3's for AdamW"
    if _small(values):
        return 5e-4, _AS_CIFAR
    return (5e-4, _MEASURED_ON_PHOTOGRAPHS) if _few_photographs(values, facts) else (1e-4, "the paper's")


@_rule("method.queue_size")
def _queue_size(values: Values, facts: DataFacts) -> tuple[int, str]:
    if facts.images >= _SMALL_DATASET:
        queue = min(65536, power_of_two_below(facts.images // 8))
        return queue, f"an eighth of the {facts.images:,} images or less, at most the paper's 65,536"
    queue = min(4096, max(256, power_of_two_below(facts.images * 3 // 4)))
    return queue, f"three quarters of the {facts.images:,} images or less, from 256 to 4,096"


@_rule("method.key_momentum")
def _key_momentum(values: Values, facts: DataFacts) -> tuple[float, str]:
    steps = values["train.epochs"] * max(1, facts.images // values["train.batch_size"])
    for momentum, min_steps in ((0.999, 100_000), (0.99, 1_000)):
        if steps >= min_steps:
            return momentum, f"the key encoder averages over {round(1 / (1 - momentum)):,} of the {steps:,} steps"
    return 0.95, f"a short run of {pluralize(steps, 'step')} needs a key encoder that follows quickly"


@_rule("method.num_queries")
def _num_queries(values: Values, facts: DataFacts) -> tuple[int, str]:
    if _single_key(values) or not (_small(values) or _few_photographs(values, facts)):
        return 1, ""
    if values["method.num_keys"] != "auto":
        return 1, "as in the paper, because the number of keys was given"
    if _small(values) and not values["method.num_local_queries"]:
        return 2, "the best measured on CIFAR-10 without local queries"
    return (1, _AS_CIFAR) if _small(values) else (2, _MEASURED_ON_PHOTOGRAPHS)


@_rule("method.num_keys")
def _num_keys(values: Values, facts: DataFacts) -> tuple[int, str]:
    if _single_key(values):
        return 1, ""
    if values["method.num_queries"] > 1:
        return 3, "with a second query, more keys gain little"
    if _small(values) and values["method.num_local_queries"]:
        return 2, _AS_CIFAR
    return 5, "the paper's"


@_rule("method.covariance_scale")
def _covariance_scale(values: Values, facts: DataFacts) -> tuple[float, str]:
    scale, reason = 4.0, "the paper's"
    if _small(values):
        scale, reason = 0.5, _AS_CIFAR
    elif facts.images < _SMALL_DATASET:
        scale, reason = 1.0, f"the paper's 4 is for ImageNet's many negatives; you have {facts.images:,} images"
    used = METHODS[values["method.name"]].uses_covariance and values["method.num_keys"] > 1
    return scale, reason if used else ""


@_rule("train.key_passes")
def _key_passes(values: Values, facts: DataFacts) -> tuple[int, str]:
    groups, keys, accumulate = values["model.bn_groups"], values["method.num_keys"], values["train.accumulate"]
    if METHODS[values["method.name"]].gradient_through_keys:
        return 1, "gradients need all keys in one pass"
    # Pixels after the stem, relative to ImageNet's: smaller stems keep 4 or 16 times as many.
    kept = {"imagenet": 1, "medium": 4, "small": 16}[values["model.stem"]]
    pixels = values["train.batch_size"] * keys * values["views.image_size"] ** 2 * kept
    # Small views need little memory either way, and a GPU is faster with many of them together.
    if accumulate == 1 and keys > 4 and pixels <= _FOUR_BATCHES_OF_PHOTOGRAPHS:
        return 1, f"{keys} views of {values['views.image_size']} px per image need little memory"
    passes = passes_for_constant_memory(
        keys * accumulate, groups if _traits(values).batch_norm else values["train.batch_size"]
    )
    return passes, f"the memory of the query, as far as the number of BN groups ({groups}) allows"


def passes_for_constant_memory(keys: int, groups: int, batches: int = 4) -> int:
    """Number of passes in which `keys` per image need no more memory than the query, if the BN groups allow it.

    A pass without gradients holds the activations of a few layers, a query those of all: four batches of keys stay
    below it, unless the network is small.
    """
    return next(n for n in range(1, groups + 1) if groups % n == 0 and (keys <= n * batches or n == groups))


def default_knn_k(images: int) -> int:
    """Neighbors that vote in kNN: 200, or a tenth of the images if that is less."""
    return min(200, max(1, images // 10))


@_rule("record.knn_k")
def _knn_k(values: Values, facts: DataFacts) -> tuple[int, str]:
    images = min(facts.images, values["record.knn_images"])
    return default_knn_k(images), f"a tenth of the {images:,} images, at most 200"


def power_of_two_below(number: int) -> int:
    """The largest power of two that is not above the number, at least 2."""
    return 1 << max(1, number.bit_length() - 1)
