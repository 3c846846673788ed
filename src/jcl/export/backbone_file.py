"""The backbone file: weights with what is needed to rebuild the network and to preprocess its images."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Self

import torch
from pydantic import ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass as pydantic_dataclass
from torch import Tensor, nn

from jcl.core.encoder import Stem
from jcl.evaluate.features import FeatureSettings
from jcl.runs.atomic import write_atomically
from jcl.runs.checkpoint import to_safetensors
from jcl.settings.resolved import ResolvedSettings
from jcl.settings.schema import ImageSize, PerChannel, PositivePerChannel

FORMAT = "jcl-backbone-1"
INFO_KEY = "jcl"  # holds the `BackboneInfo` in files for other libraries


@pydantic_dataclass(frozen=True, config=ConfigDict(allow_inf_nan=False))
class BackboneInfo:
    """What is needed to rebuild a network and to preprocess its images."""

    backbone: str
    stem: Stem
    image_size: ImageSize
    feature_width: int
    mean: PerChannel
    std: PositivePerChannel

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std):
            raise ValueError("mean and std must have one value per channel")

    @property
    def channels(self) -> int:
        return len(self.mean)

    @property
    def values(self) -> str:
        """What the values of images are before they are normalized."""
        return "RGB in [0, 1]" if self.channels == 3 else f"{self.channels}-channel images (uint8 and uint16 in [0, 1])"

    @property
    def preprocessing(self) -> FeatureSettings:
        return FeatureSettings(self.image_size, self.mean, self.std)

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: object) -> Self | None:
        """The description in a file, or None if it is missing or invalid. The text is not trusted."""
        try:
            return TypeAdapter(cls).validate_json(text) if isinstance(text, str) else None
        except ValueError:
            return None


def backbone_info(settings: ResolvedSettings, feature_width: int) -> BackboneInfo:
    return BackboneInfo(
        backbone=settings.model.backbone,
        stem=settings.model.stem,
        image_size=settings.views.image_size,
        feature_width=feature_width,
        mean=settings.views.mean,
        std=settings.views.std,
    )


def save_backbone(backbone: nn.Module, info: BackboneInfo, path: Path, *, follow_links: bool = False) -> None:
    """Write a backbone file, atomically."""
    write_atomically(path, backbone_bytes(backbone, info), follow_links=follow_links)


def backbone_bytes(backbone: nn.Module, info: BackboneInfo) -> bytes:
    return to_safetensors(weights_of(backbone), {"format": FORMAT, "info": info.to_text()})


def weights_of(backbone: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, contiguous and on the CPU; copies, because layers may share theirs."""
    copied = torch.contiguous_format
    return {name: value.detach().cpu().clone(memory_format=copied) for name, value in backbone.state_dict().items()}


def weights_digest(backbone: nn.Module) -> str:
    """SHA-256 of all parameters and buffers."""
    digest = hashlib.sha256()
    for name, value in sorted(weights_of(backbone).items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def same_features(
    network: nn.Module, other: Callable[[Tensor], Tensor], info: BackboneInfo, tolerance: float = 1e-5
) -> bool:
    """Whether two networks in evaluation mode give the same features of random images, relative to the largest."""
    shape = (3, info.channels, info.image_size, info.image_size)
    images = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        ours, theirs = network(images), other(images)
    return ours.shape == theirs.shape and bool((ours - theirs).abs().max() <= tolerance * ours.abs().max())
