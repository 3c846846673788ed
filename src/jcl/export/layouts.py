"""How libraries name the weights of one and the same ResNet, and how to find a network among a file's names.

Everything is turned into torchvision's names: `conv1`, `bn1`, `layer1.0.conv1`, `layer1.0.downsample.0` and so on.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

_STAGES = {f"layer{stage}": f"res{stage + 1}" for stage in (1, 2, 3, 4)}
# Blocks in each stage, whether they are bottlenecks, and the width (outputs, inputs) of the first 3×3 convolution.
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
# A network that follows another one by averaging is not the one that was trained.
_FOLLOWERS = re.compile(r"(^|[._])(k|key|momentum|teacher|target|ema)([._]|$)")


def to_detectron2(name: str) -> str:
    """`layer1.0.bn1.weight` -> `res2.0.conv1.norm.weight`, as detectron2's own converter has it."""
    stage, _, rest = name.partition(".")
    name = f"{_STAGES[stage]}.{rest}" if stage in _STAGES else f"stem.{name}"
    name = re.sub(r"(^|\.)bn(\d)\.", r"\1conv\2.norm.", name)
    return name.replace("downsample.0.", "shortcut.").replace("downsample.1.", "shortcut.norm.")


def from_detectron2(name: str) -> str:
    """The way back from `to_detectron2`."""
    name = name.replace("shortcut.norm.", "downsample.1.").replace("shortcut.", "downsample.0.")
    name = re.sub(r"(^|\.)conv(\d)\.norm\.", r"\1bn\2.", name)
    stage, _, rest = name.partition(".")
    back = {theirs: ours for ours, theirs in _STAGES.items()}
    return f"{back[stage]}.{rest}" if stage in back else name.removeprefix("stem.")


def _from_numbers(first_stage: int) -> Callable[[str], str]:
    """From places in a Sequential of a ResNet's parts, whose stages begin at `first_stage`, to their names."""
    names = {"0": "conv1", "1": "bn1"} | {str(first_stage + stage): f"layer{stage + 1}" for stage in range(4)}

    def rename(name: str) -> str:
        part, _, rest = name.partition(".")
        return f"{names.get(part, part)}.{rest}"

    return rename


DETECTRON2 = "detectron2's names"
NUMBERED = "numbered parts, as lightly has them"
WITHOUT_RELU = "numbered parts without the first ReLU"
# Each way of naming: what to call it, two names that give it away, and the way to torchvision's names. Between the
# first norm and the first stage of a ResNet lie a ReLU and a max-pool (stages begin at 4), or in one for small images
# the ReLU alone (3). Of lightly's own ResNet, which calls its ReLU as a function, the ReLU is lost in a Sequential (2).
_NAMINGS: tuple[tuple[str, tuple[str, str], Callable[[str], str]], ...] = (
    (DETECTRON2, ("stem.conv1.weight", "res2.0.conv1.weight"), from_detectron2),
    (WITHOUT_RELU, ("0.weight", "2.0.conv1.weight"), _from_numbers(2)),
    (NUMBERED, ("0.weight", "3.0.conv1.weight"), _from_numbers(3)),
    (NUMBERED, ("0.weight", "4.0.conv1.weight"), _from_numbers(4)),
)


def torchvision_names(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], str]:
    """The same tensors under torchvision's names, behind whatever prefix they have, and what their naming was."""
    for naming, (first, second), rename in _NAMINGS:
        prefixes = [
            name.removesuffix(first)
            for name in tensors
            if _is_part(name, first) and _swapped(name, first, second) in tensors
        ]
        if prefixes:
            renamed = {_renamed(name, prefixes, rename): value for name, value in tensors.items()}
            return renamed, naming
    return dict(tensors), "torchvision's or timm's names"


def prefixes_of(names: Iterable[str], wanted: Iterable[str]) -> list[str]:
    """The prefixes behind which most of the `wanted` names are found; those of followers only if there is no other."""
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
    return _leaders([prefix for prefix, count in found.items() if count == most])


def resnet_prefixes(names: Iterable[str]) -> list[str]:
    """The prefixes behind which something named like a ResNet lies."""
    known = set(names)
    first, second = "conv1.weight", "layer1.0.conv1.weight"
    return _leaders(
        [name.removesuffix(first) for name in known if _is_part(name, first) and _swapped(name, first, second) in known]
    )


def resnet_name(tensors: Mapping[str, Tensor], prefix: str) -> str | None:
    """The ResNet that has these blocks and widths, or None."""
    blocks = tuple(_count_blocks(tensors, f"{prefix}layer{stage}.") for stage in (1, 2, 3, 4))
    bottleneck = f"{prefix}layer1.0.conv3.weight" in tensors
    middle = tensors.get(f"{prefix}layer1.0.conv2.weight")
    if middle is None or middle.dim() != 4:
        return None
    return _RESNETS.get((blocks, bottleneck, (middle.shape[0], middle.shape[1])))


def has_small_stem(tensors: Mapping[str, Tensor], prefix: str) -> bool:
    """Whether the first convolution is the 3×3 one for small images."""
    first = tensors.get(f"{prefix}conv1.weight")
    return first is not None and first.dim() == 4 and tuple(first.shape[2:]) == (3, 3)


def _is_part(name: str, part: str) -> bool:
    return name == part or name.endswith(f".{part}")


def _swapped(name: str, part: str, other: str) -> str:
    return name.removesuffix(part) + other


def _renamed(name: str, prefixes: list[str], rename: Callable[[str], str]) -> str:
    for prefix in sorted(prefixes, key=len, reverse=True):
        if name.startswith(prefix):
            return prefix + rename(name.removeprefix(prefix))
    return name


def _leaders(prefixes: list[str]) -> list[str]:
    return sorted(prefix for prefix in prefixes if not _FOLLOWERS.search(prefix)) or sorted(prefixes)


def _count_blocks(tensors: Mapping[str, Tensor], prefix: str) -> int:
    return len({name.removeprefix(prefix).partition(".")[0] for name in tensors if name.startswith(prefix)})
