"""Our own backbone file: weights with what is needed to build the network again and to feed it."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor, nn

from jcl.evaluate.features import FeatureSettings
from jcl.runs.atomic import write_atomically
from jcl.settings.schema import Settings

FORMAT = "jcl-backbone-1"


@dataclass(frozen=True)
class BackboneInfo:
    """What is needed to build the network again and to feed it."""

    backbone: str
    stem: str
    image_size: int
    feature_width: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    @property
    def shown(self) -> FeatureSettings:
        """How images are shown to the network when its features are measured."""
        return FeatureSettings(self.image_size, self.mean, self.std)

    def to_text(self) -> str:
        """As JSON, the form in which every file that can carry text carries it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: object) -> BackboneInfo | None:
        """The description in a file, or None where there is none that makes sense: the text is a stranger's."""
        try:
            values = json.loads(text) if isinstance(text, str) else {}
            info = cls(
                backbone=str(values["backbone"]),
                stem=values["stem"],
                image_size=int(values["image_size"]),
                feature_width=int(values["feature_width"]),
                mean=_triple(values["mean"]),
                std=_triple(values["std"]),
            )
        except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError):
            return None
        sensible = info.stem in ("imagenet", "small") and info.image_size > 0 and can_normalise(info.mean, info.std)
        return info if sensible else None


def backbone_info(settings: Settings, feature_width: int) -> BackboneInfo:
    """What is needed to build a run's backbone again and to feed it."""
    image_size = settings.views.image_size
    assert isinstance(image_size, int), "settings of a run are resolved"
    return BackboneInfo(
        backbone=settings.model.backbone,
        stem=settings.model.stem,
        image_size=image_size,
        feature_width=feature_width,
        mean=settings.views.mean,
        std=settings.views.std,
    )


def save_backbone(backbone: nn.Module, info: BackboneInfo, path: Path) -> None:
    """Write the weights with what is needed to rebuild the network; nothing in the file can run."""
    write_atomically(path, save(weights_of(backbone), {"format": FORMAT, "info": info.to_text()}))


def weights_of(backbone: nn.Module) -> dict[str, Tensor]:
    """The network's parameters and buffers by name, on the CPU and laid out plainly."""
    return {name: value.detach().cpu().contiguous() for name, value in backbone.state_dict().items()}


def weights_digest(backbone: nn.Module) -> str:
    """A fingerprint of all weights and statistics of a network."""
    digest = hashlib.sha256()
    for name, value in sorted(backbone.state_dict().items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def can_normalise(mean: tuple[float, float, float], std: tuple[float, float, float]) -> bool:
    """Whether images stay numbers when they are normalised in this way."""
    return all(map(math.isfinite, (*mean, *std))) and min(std) > 0


def _triple(values: list[float]) -> tuple[float, float, float]:
    red, green, blue = (float(value) for value in values)
    return red, green, blue
