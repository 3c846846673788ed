"""The backbone file: weights with what is needed to rebuild the network and to preprocess its images."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor, nn

from jcl.evaluate.features import FeatureSettings
from jcl.runs.atomic import write_atomically
from jcl.settings.resolve import ResolvedSettings

FORMAT = "jcl-backbone-1"
INFO_KEY = "jcl"  # holds the `BackboneInfo` in files for other libraries


@dataclass(frozen=True)
class BackboneInfo:
    """What is needed to rebuild a network and to preprocess its images."""

    backbone: str
    stem: str
    image_size: int
    feature_width: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    @property
    def preprocessing(self) -> FeatureSettings:
        """How images are preprocessed when features are extracted."""
        return FeatureSettings(self.image_size, self.mean, self.std)

    def to_text(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: object) -> BackboneInfo | None:
        """The description in a file, or None if there is none or it makes no sense. The text is not trusted."""
        try:
            values = json.loads(text) if isinstance(text, str) else {}
            info = cls(
                backbone=str(values["backbone"]),
                stem=values["stem"],
                image_size=int(values["image_size"]),
                feature_width=int(values["feature_width"]),
                mean=channel_values(values["mean"]),
                std=channel_values(values["std"], positive=True),
            )
        except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError):
            return None
        return info if info.stem in ("imagenet", "small") and info.image_size > 0 else None


def channel_values(values: Iterable[float], *, positive: bool = False) -> tuple[float, float, float]:
    """A finite number for each of red, green and blue; raises ValueError otherwise."""
    red, green, blue = (float(value) for value in values)
    if not all(math.isfinite(value) and (value > 0 or not positive) for value in (red, green, blue)):
        raise ValueError("invalid mean or standard deviation")
    return red, green, blue


def backbone_info(settings: ResolvedSettings, feature_width: int) -> BackboneInfo:
    """The description of a run's backbone."""
    return BackboneInfo(
        backbone=settings.model.backbone,
        stem=settings.model.stem,
        image_size=settings.views.image_size,
        feature_width=feature_width,
        mean=settings.views.mean,
        std=settings.views.std,
    )


def save_backbone(backbone: nn.Module, info: BackboneInfo, path: Path) -> None:
    """Write a backbone file, atomically."""
    write_atomically(path, backbone_bytes(backbone, info))


def backbone_bytes(backbone: nn.Module, info: BackboneInfo) -> bytes:
    """The content of a backbone file."""
    return save(weights_of(backbone), {"format": FORMAT, "info": info.to_text()})


def weights_of(backbone: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, contiguous and on the CPU."""
    return {name: value.detach().cpu().contiguous() for name, value in backbone.state_dict().items()}


def weights_digest(backbone: nn.Module) -> str:
    """SHA-256 of all parameters and buffers."""
    digest = hashlib.sha256()
    for name, value in sorted(weights_of(backbone).items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
