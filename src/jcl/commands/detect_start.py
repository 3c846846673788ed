"""What a detector's backbone starts from: a run, a weights file, a supervised classifier or nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torchvision.models.resnet import ResNet

from jcl.core.encoder import build_backbone
from jcl.errors import RunError, SettingsError
from jcl.export import BackboneInfo
from jcl.export.loading import open_backbone
from jcl.export.targets import torchvision_name
from jcl.paths import home_expanded
from jcl.settings.schema import ViewSettings

RANDOM = "random"
SUPERVISED = "supervised:"
USUAL_BACKBONE = "resnet50"


@dataclass(frozen=True)
class Start:
    """A ResNet to put under a detector, how its images were normalised, and a sentence on where it comes from."""

    resnet: ResNet
    backbone: str
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    account: str
    label: str


def whole_init(init: str) -> str:
    """The start with the whole path of its file, so that work can be resumed from anywhere."""
    if init == RANDOM:
        return init
    kind = SUPERVISED if init.startswith(SUPERVISED) else ""
    return kind + str(home_expanded(init.removeprefix(SUPERVISED)).resolve())


def open_start(init: str, backbone: str | None, seed: int) -> Start:
    """Open `random`, `supervised:FILE`, a run folder or a weights file; `backbone` names the network where need be."""
    if init == RANDOM:
        return _random(backbone or USUAL_BACKBONE, seed)
    path = Path(init.removeprefix(SUPERVISED))
    found = open_backbone(path, backbone)
    heads = [name for name in found.unused if name.rpartition(".")[2] in ("fc", "head", "classifier")]
    if init.startswith(SUPERVISED) and not heads:
        raise RunError(
            f"{path} has no classifier, so nothing says that it was trained with labels; use it as --init {path}."
        )
    resnet = as_resnet(found.network, found.info, str(path))
    left = ", ".join(f"{name} ({count})" for name, count in found.unused.items())
    account = (
        f"{found.loaded} tensors of {found.info.backbone} were loaded from {path} ({found.source}), "
        f"all {len(resnet.state_dict())} that the detector's body has; "
        + (f"left out: {left}." if left else "none left.")
    )
    name = path.name or path.resolve().name  # "." has none of its own
    label = f"supervised {path.stem}" if init.startswith(SUPERVISED) else name
    return Start(resnet, _plain_name(found.info.backbone), found.info.mean, found.info.std, account, label)


def build_resnet(name: str) -> ResNet:
    """A torchvision ResNet by name, without its classifier, at random weights."""
    network, width = build_backbone(name)
    views = ViewSettings()
    return as_resnet(network, BackboneInfo(name, "imagenet", 224, width, views.mean, views.std), name)


def as_resnet(network: nn.Module, info: BackboneInfo, origin: str) -> ResNet:
    """The network if it is torchvision's ResNet, or its counterpart there with the same weights."""
    if info.stem != "imagenet":
        raise SettingsError(
            f"{origin} has the small stem, made for images of about 32 px; detectors need the usual one."
        )
    if not isinstance(network, ResNet):
        name = torchvision_name(network, info)
        other = build_backbone(name)[0] if name is not None else None
        if not isinstance(other, ResNet):
            raise SettingsError(
                f"{origin} is a {info.backbone}; detectors are for torchvision's ResNets, such as resnet18 or resnet50."
            )
        other.load_state_dict(network.state_dict())
        network = other
    return network


def _random(backbone: str, seed: int) -> Start:
    torch.manual_seed(seed)
    resnet, views = build_resnet(backbone), ViewSettings()
    return Start(resnet, backbone, views.mean, views.std, f"{backbone} starts from random weights.", RANDOM)


def _plain_name(backbone: str) -> str:
    return backbone.removeprefix("timm/").partition(".")[0]
