"""From the names and shapes in a weights file to the network they are the weights of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from jcl.core.encoder import OWN_BACKBONES, build_backbone, torchvision_networks
from jcl.errors import RunError
from jcl.export.backbone_file import BackboneInfo
from jcl.export.layouts import (
    DETECTRON2,
    WITHOUT_RELU,
    has_small_stem,
    prefixes_of,
    resnet_name,
    resnet_prefixes,
    torchvision_names,
)
from jcl.export.weights import WeightsFile

_HEADS = ("fc", "head", "heads", "classifier", "linear")
_WRAPPERS = ("module", "model", "_orig_mod")
_MOST_PIXELS = 4096  # a side: larger images fill the memory before they say that they do not fit
_COUNT = "num_batches_tracked"  # of no use to a network that is not trained on; old files lack it


@dataclass(frozen=True, eq=False)
class Recognised:
    """A network with the weights of a file, and what became of everything in that file."""

    network: nn.Module
    info: BackboneInfo
    recognised: str
    taken: int
    left_out: dict[str, int]  # tensors by the part they belong to
    notes: tuple[str, ...]


def recognise(weights: WeightsFile, backbone: str | None = None, image_size: int | None = None) -> Recognised:
    """Build the network that the file holds and give it the file's weights, in evaluation mode.

    Which network is told by `backbone`, by the file or by the shapes of a ResNet, in this order.
    """
    tensors, naming = torchvision_names(weights.tensors)
    if naming == WITHOUT_RELU:
        raise RunError(
            f"{weights.path} holds a ResNet without the ReLU after its first norm, which is what becomes of lightly's "
            "ResNetGenerator in a Sequential; the ResNets here have that ReLU and would give other features."
        )
    name = backbone or _name(weights, tensors)
    stem = weights.info.stem if weights.info else _stem(tensors)
    size = image_size or (weights.info.image_size if weights.info else weights.image_size) or _usual_size(name, stem)
    if not 1 <= size <= _MOST_PIXELS:
        raise RunError(
            f"{weights.path} is to be opened for images of {size:,} px, which makes no sense; take it with "
            f"`jcl import` and an --image-size from 1 to {_MOST_PIXELS:,}."
        )
    network, width = build_backbone(name, stem=stem, image_size=size)  # type: ignore[arg-type]
    wanted = network.state_dict()
    prefix = _prefix(weights, tensors, wanted, name)
    found = {part.removeprefix(prefix): value for part, value in tensors.items() if part.startswith(prefix)}
    _demand_fit(weights, found, wanted, name, size)
    _demand_plain(weights, {part: found[part] for part in wanted if part in found})
    taken = {part: found[part] for part in wanted if part in found}
    network.load_state_dict(taken, strict=False)
    info = BackboneInfo(
        backbone=name,
        stem=stem,
        image_size=size,
        feature_width=width,
        mean=weights.info.mean if weights.info else weights.mean,
        std=weights.info.std if weights.info else weights.std,
    )
    network.info = info  # type: ignore[assignment]
    return Recognised(
        network=network.eval(),
        info=info,
        recognised=f"{weights.kind}, {naming}" + (f", under {prefix.removesuffix('.')}" if prefix else ""),
        taken=len(taken),
        left_out=_left_out(tensors, prefix, taken),
        notes=tuple(_notes(weights, naming, info, taken, wanted)),
    )


def _name(weights: WeightsFile, tensors: Mapping[str, Tensor]) -> str:
    """The network as the file names it, if that is a name we know, or as its shapes tell."""
    if weights.info:
        return weights.info.backbone
    if weights.architecture and _is_known(weights.architecture):
        return weights.architecture
    prefixes = resnet_prefixes(tensors)
    names = {name for prefix in prefixes if (name := resnet_name(tensors, prefix))}
    if len(names) == 1:
        return names.pop()
    looks = "holds a ResNet of unusual depth or width" if prefixes else "does not look like a ResNet"
    said = f" It calls itself {weights.architecture!r}, which is no name known here." if weights.architecture else ""
    raise RunError(
        f"{weights.path} is a {weights.kind}, but not a backbone written by this tool, and it {looks}.{said} "
        "Say which network it is, with `jcl import --backbone NAME` or `load_backbone(path, backbone=NAME)`."
    )


def _is_known(name: str) -> bool:
    if name in OWN_BACKBONES or name in torchvision_networks():
        return True
    try:
        import timm
    except ImportError:
        return False
    return bool(timm.is_model(name.removeprefix("timm/")))


def _stem(tensors: Mapping[str, Tensor]) -> Literal["imagenet", "small"]:
    prefixes = resnet_prefixes(tensors)
    return "small" if prefixes and all(has_small_stem(tensors, prefix) for prefix in prefixes) else "imagenet"


def _usual_size(name: str, stem: str) -> int:
    """The image size a network is meant for where nothing else says it."""
    if stem == "small" or name in OWN_BACKBONES:
        return 32
    if name not in torchvision_networks():
        try:
            import timm
        except ImportError:
            return 224
        known = timm.get_pretrained_cfg(name.removeprefix("timm/"))
        return int(known.input_size[-1]) if known else 224
    return 224


def _prefix(weights: WeightsFile, tensors: Iterable[str], wanted: Mapping[str, Tensor], name: str) -> str:
    prefixes = prefixes_of(tensors, wanted)
    if len(prefixes) == 1:
        return prefixes[0]
    if not prefixes:
        raise RunError(
            f"{weights.path} does not hold a {name}: of its {len(wanted):,} tensors ({_some(wanted)}) fewer than half "
            f"are there, while the file has {_some(list(tensors))}. Is it another network, or half a file?"
        )
    raise RunError(
        f"{weights.path} holds {len(prefixes)} networks that could be meant, under "
        f"{' and '.join(prefix or 'no prefix' for prefix in prefixes)}; save the tensors of one of them alone."
    )


def _demand_fit(
    weights: WeightsFile, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], name: str, size: int
) -> None:
    """Refuse weights that are not exactly this network's, apart from a classifier: they would be silently wrong."""
    missing = [part for part in wanted if part not in found and not part.endswith(_COUNT)]
    shapes = [part for part, value in wanted.items() if part in found and found[part].shape != value.shape]
    parts = {part.partition(".")[0] for part in wanted}
    beyond = [
        part for part in found if part not in wanted and (top := part.partition(".")[0]) in parts and top not in _HEADS
    ]
    problems = []
    if missing:
        problems.append(f"{_count(missing)} missing ({_some(missing)})")
    if shapes:
        first = shapes[0]
        problems.append(
            f"{_count(shapes)} of another shape ({_some(shapes)}; {first} is {_shape(found[first])} in the file and "
            f"{_shape(wanted[first])} in the network)"
        )
    if beyond:
        problems.append(f"{_count(beyond)} without a place in it ({_some(beyond)})")
    if problems:
        raise RunError(
            f"the weights in {weights.path} do not fit {name} at {size} px: {'; '.join(problems)}. "
            "Is it another network, another image size, or half a file?"
        )


def _demand_plain(weights: WeightsFile, taken: Mapping[str, Tensor]) -> None:
    """Refuse tensors that hold something other than a real number for each place."""
    odd = [part for part, value in taken.items() if not _is_plain(value)]
    if odd:
        raise RunError(
            f"the weights in {weights.path} are sparse, quantised, complex or without values ({_some(odd)}); "
            "save them as plain float tensors."
        )


def _is_plain(value: Tensor) -> bool:
    dense = value.layout == torch.strided and not value.is_quantized and not value.is_nested
    return dense and not value.is_meta and not value.is_complex()


def _left_out(tensors: Iterable[str], prefix: str, taken: Mapping[str, Tensor]) -> dict[str, int]:
    """How many tensors of each part of the file were not taken."""
    rest = [name for name in tensors if not (name.startswith(prefix) and name.removeprefix(prefix) in taken)]
    return dict(Counter(_part(name, prefix) for name in rest))


def _part(name: str, prefix: str) -> str:
    """What to call the part of the file that a tensor belongs to: `module.encoder_k`, `module.encoder_q.fc`."""
    if prefix and name.startswith(prefix):
        return prefix + name.removeprefix(prefix).partition(".")[0]
    first, _, rest = name.partition(".")
    return f"{first}.{rest.partition('.')[0]}" if first in _WRAPPERS and rest else first


def _notes(
    weights: WeightsFile, naming: str, info: BackboneInfo, taken: Mapping[str, Tensor], wanted: Mapping[str, Tensor]
) -> Iterable[str]:
    """What the file does not say and had to be assumed, and what else was in it."""
    if weights.info is None and naming == DETECTRON2:
        yield (
            "the network is taken to be as torchvision's, shown RGB images and striding in its 3×3 convolutions; the "
            "file does not say (detectron2's own MSRA weights do neither)"
        )
    if weights.info is None and info.stem == "small":
        yield (
            "the first convolution is 3×3, which is taken to mean stride 1, padding 1 and no max-pool; the file does "
            "not say (solo-learn pads by 2, with which features near the border differ)"
        )
    others = {
        str(value.dtype).removeprefix("torch.") for part, value in taken.items() if value.dtype != wanted[part].dtype
    }
    if others:
        yield f"values are {' and '.join(sorted(others))} in the file and were turned into float32"
    if weights.ignored:
        yield f"beside the weights the file holds {_some(weights.ignored, 8)}, which were not needed"


def _count(parts: list[str]) -> str:
    return "1 tensor is" if len(parts) == 1 else f"{len(parts):,} tensors are"


def _some(names: Iterable[str], most: int = 3) -> str:
    listed = list(names)
    return ", ".join(listed[:most]) + (", ..." if len(listed) > most else "")


def _shape(value: Tensor) -> str:
    return "×".join(str(side) for side in value.shape) or "a single number"
