"""ResNets as detectron2 reads them: a pickle of arrays under its names, and the configuration that must go with it."""

from __future__ import annotations

import re
from pathlib import Path

from torch import nn

from jcl.errors import SettingsError
from jcl.export.array_pickle import dump_arrays
from jcl.export.backbone_file import BackboneInfo, weights_of
from jcl.export.counterparts import in_torchvision
from jcl.export.layouts import resnet_name, to_detectron2
from jcl.export.weights import INFO_KEY


def detectron2_name(network: nn.Module, info: BackboneInfo) -> str:
    """The ResNet that this is, if detectron2 can build it."""
    name = resnet_name(weights_of(network), "")
    if name is None or in_torchvision(network, info) != name:
        raise SettingsError(
            f"detectron2 takes ResNets, and {info.backbone} is none that it knows; "
            "--to safetensors and --to onnx carry every backbone."
        )
    if info.stem == "small":
        raise SettingsError(
            f"detectron2's ResNets begin with a 7×7 convolution, and this {name} has the small stem; "
            "--to torchvision, safetensors or onnx can carry it."
        )
    return name


def detectron2_content(network: nn.Module, info: BackboneInfo) -> bytes:
    """The file that detectron2's own converter would make of the torchvision weights."""
    return dump_arrays(
        {
            "model": {to_detectron2(name): value.numpy() for name, value in weights_of(network).items()},
            "__author__": "jcl",
            "matching_heuristics": True,
            INFO_KEY: info.to_text(),  # detectron2 leaves what it does not know alone
        }
    )


def detectron2_configuration(name: str, network: nn.Module, info: BackboneInfo, file: Path) -> str:
    """What to set in a detectron2 configuration, whose defaults are for BGR and for other ResNets."""
    outputs, inputs = weights_of(network)["layer1.0.conv2.weight"].shape[:2]
    depth = re.findall(r"res(?:net|next)(\d+)", name)[0]
    lines = [
        "MODEL:",
        f"  WEIGHTS: {str(file)!r}",
        f"  PIXEL_MEAN: {[round(255 * value, 3) for value in info.mean]}",
        f"  PIXEL_STD: {[round(255 * value, 3) for value in info.std]}",
        "  BACKBONE: {FREEZE_AT: 0}  # as MoCo and JCL fine-tune",
        "  RESNETS:",
        f"    DEPTH: {depth}",
        "    STRIDE_IN_1X1: False",
        "    NORM: SyncBN",
    ]
    if (outputs, inputs) != (64, 64):
        lines += [f"    NUM_GROUPS: {outputs // inputs}", f"    WIDTH_PER_GROUP: {inputs}"]
    if depth in ("18", "34"):
        lines.append("    RES2_OUT_CHANNELS: 64")
    return "\n".join([*lines, "INPUT:", "  FORMAT: RGB"])
