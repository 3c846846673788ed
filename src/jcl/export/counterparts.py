"""Which network of another library is the same as one of ours."""

from __future__ import annotations

import torch
from torch import nn

from jcl.core.encoder import OWN_BACKBONES, build_backbone, torchvision_networks
from jcl.errors import JclError, SettingsError
from jcl.export.backbone_file import BackboneInfo

_TOLERANCE = 1e-5  # of features, relative to the largest


def in_torchvision(network: nn.Module, info: BackboneInfo) -> str | None:
    """torchvision's name for the network, or None where torchvision has no network of this name that is the same."""
    name = info.backbone.removeprefix("timm/").partition(".")[0]
    known = torchvision_networks()
    if info.backbone in known:
        return name
    return name if name in known and _same(network, info, name) else None


def in_timm(network: nn.Module, info: BackboneInfo) -> str | None:
    """timm's name for the network, or None where timm has no network of this name that is the same."""
    try:
        import timm
    except ImportError:
        raise SettingsError(
            "writing for timm needs timm, to see that it has the same network; "
            "run: pip install 'joint-contrastive-learning[timm]'."
        ) from None
    name = info.backbone.removeprefix("timm/")
    if name in OWN_BACKBONES or info.stem != "imagenet" or not timm.is_model(name):
        return None
    theirs = info.backbone not in torchvision_networks()
    return name if theirs or _same(network, info, f"timm/{name}") else None


def _same(network: nn.Module, info: BackboneInfo, name: str) -> bool:
    """Whether the other library's network takes these weights, all of them, and then gives the same features.

    Equal names and shapes are not enough: networks also differ in strides, paddings and pooling, which no weight shows.
    """
    try:
        other, _ = build_backbone(name, stem=info.stem, image_size=info.image_size)  # type: ignore[arg-type]
        other.load_state_dict(network.state_dict())
    except (JclError, RuntimeError):
        return False
    return same_features(network, other, info.image_size)


def same_features(network: nn.Module, other: nn.Module, image_size: int) -> bool:
    """Whether two networks give the same features of random images."""
    images = torch.randn(2, 3, image_size, image_size, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        ours, theirs = network.eval()(images), other.eval()(images)
    return ours.shape == theirs.shape and bool((ours - theirs).abs().max() <= _TOLERANCE * ours.abs().max())
