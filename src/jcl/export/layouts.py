"""How libraries name the weights of a ResNet, and how to find a network among the names in a file.

Everything is renamed to torchvision's names: `conv1`, `bn1`, `layer1.0.conv1`, `layer1.0.downsample.0` and so on.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from torch import Tensor

_STAGES = {f"layer{stage}": f"res{stage + 1}" for stage in (1, 2, 3, 4)}
# Blocks per stage, whether they are bottlenecks, and (outputs, inputs) of the first block's conv2.
_RESNETS: dict[tuple[tuple[int, ...], bool, tuple[int, int]], str] = {
    ((2, 2, 2, 2), False, (64, 64)): "resnet18",
    ((3, 4, 6, 3), False, (64, 64)): "resnet34",
    ((3, 4, 6, 3), True, (64, 64)): "resnet50",
    ((3, 4, 23, 3), True, (64, 64)): "resnet101",
    ((3, 8, 36, 3), True, (64, 64)): "resnet152",
    ((3, 4, 6, 3), True, (128, 128)): "wide_resnet50_2",
    ((3, 4, 23, 3), True, (128, 128)): "wide_resnet101_2",
    ((3, 4, 6, 3), True, (128, 4)): "resnext50_32x4d",
    ((3, 4, 23, 3), True, (256, 8)): "resnext101_32x8d",
    ((3, 4, 23, 3), True, (256, 4)): "resnext101_64x4d",
}
_MOMENTUM_ENCODER = re.compile(r"(^|[._])(k|key|momentum|teacher|target|ema)([._]|$)")


def to_detectron2(name: str) -> str:
    """`layer1.0.bn1.weight` -> `res2.0.conv1.norm.weight`, as in detectron2's converter."""
    stage, _, rest = name.partition(".")
    name = f"{_STAGES[stage]}.{rest}" if stage in _STAGES else f"stem.{name}"
    name = re.sub(r"(^|\.)bn(\d)\.", r"\1conv\2.norm.", name)
    return name.replace("downsample.0.", "shortcut.").replace("downsample.1.", "shortcut.norm.")


def from_detectron2(name: str) -> str:
    """The inverse of `to_detectron2`."""
    name = name.replace("shortcut.norm.", "downsample.1.").replace("shortcut.", "downsample.0.")
    name = re.sub(r"(^|\.)conv(\d)\.norm\.", r"\1bn\2.", name)
    stage, _, rest = name.partition(".")
    stages = {theirs: ours for ours, theirs in _STAGES.items()}
    return f"{stages[stage]}.{rest}" if stage in stages else name.removeprefix("stem.")


def _from_sequential(first_stage: int, name: str) -> str:
    """Rename a part of an nn.Sequential whose first stage is number `first_stage`."""
    names = {"0": "conv1", "1": "bn1"} | {str(first_stage + stage): f"layer{stage + 1}" for stage in range(4)}
    part, _, rest = name.partition(".")
    return f"{names.get(part, part)}.{rest}"


DETECTRON2 = "detectron2's names"
SEQUENTIAL = "numbered layers, as in lightly"
# A layout's title, two names that identify it, and how to rename it. Between the first norm and the first stage of a
# ResNet lie a ReLU and a max-pool (stages begin at 4), or for small images the ReLU alone (3).
_LAYOUTS: tuple[tuple[str, tuple[str, str], Callable[[str], str]], ...] = (
    (DETECTRON2, ("stem.conv1.weight", "res2.0.conv1.weight"), from_detectron2),
    (SEQUENTIAL, ("0.weight", "3.0.conv1.weight"), partial(_from_sequential, 3)),
    (SEQUENTIAL, ("0.weight", "4.0.conv1.weight"), partial(_from_sequential, 4)),
)


def torchvision_names(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], str]:
    """The tensors under torchvision's names, with their prefixes, and the title of the layout they had."""
    for title, pair, rename in _LAYOUTS:
        if not (prefixes := sorted(_prefixes_of_pair(tensors, *pair), key=len, reverse=True)):
            continue
        renamed = {}
        for name, value in tensors.items():
            prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
            renamed[name if prefix is None else prefix + rename(name.removeprefix(prefix))] = value
        return renamed, title
    return dict(tensors), "torchvision's or timm's names"


def network_prefixes(names: Iterable[str], wanted: Iterable[str]) -> list[str]:
    """The prefixes with the most `wanted` names; those of momentum encoders only if there are no others."""
    parts, found = set(wanted), Counter[str]()
    for name in names:
        start = 0
        while start >= 0:
            if name[start:] in parts:
                found[name[:start]] += 1
            start = name.find(".", start) + 1 or -1
    most = max(found.values(), default=0)
    if most * 2 < len(parts):
        return []
    return _prefer_trained([prefix for prefix, count in found.items() if count == most])


def resnet_prefixes(names: Iterable[str]) -> list[str]:
    """The prefixes of what is named like a ResNet."""
    return _prefer_trained(_prefixes_of_pair(set(names), "conv1.weight", "layer4.0.conv1.weight"))


def resnet_name(tensors: Mapping[str, Tensor], prefix: str) -> str | None:
    """torchvision's name of the ResNet with these blocks and widths."""
    stages = [f"{prefix}layer{stage}." for stage in (1, 2, 3, 4)]
    blocks = tuple(len({n.removeprefix(s).partition(".")[0] for n in tensors if n.startswith(s)}) for s in stages)
    bottleneck = f"{prefix}layer1.0.conv3.weight" in tensors
    middle = tensors.get(f"{prefix}layer1.0.conv2.weight")
    if middle is None or middle.dim() != 4:
        return None
    return _RESNETS.get((blocks, bottleneck, (middle.shape[0], middle.shape[1])))


def has_small_stem(tensors: Mapping[str, Tensor]) -> bool:
    """Whether there are ResNets and all start with a 3×3 convolution."""
    shapes = [tensors[f"{prefix}conv1.weight"].shape for prefix in resnet_prefixes(tensors)]
    return bool(shapes) and all(len(shape) == 4 and tuple(shape[2:]) == (3, 3) for shape in shapes)


def _prefixes_of_pair(names: Iterable[str], first: str, second: str) -> list[str]:
    """The prefixes under which both names occur."""
    known = set(names)
    prefixes = [name.removesuffix(first) for name in known if name == first or name.endswith(f".{first}")]
    return [prefix for prefix in prefixes if prefix + second in known]


def _prefer_trained(prefixes: list[str]) -> list[str]:
    return sorted(prefix for prefix in prefixes if not _MOMENTUM_ENCODER.search(prefix)) or sorted(prefixes)
