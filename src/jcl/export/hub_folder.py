"""Folders as model hubs keep them and timm opens them: `config.json`, `model.safetensors` and a model card."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jcl.errors import RunError
from jcl.export.backbone_file import BackboneInfo, can_normalise
from jcl.views import IMAGENET_MEAN, IMAGENET_STD

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"


@dataclass(frozen=True)
class HubConfig:
    """What a `config.json` says about the weights beside it."""

    architecture: str | None  # a name that `build_backbone` takes
    image_size: int | None
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


def is_hub_folder(path: Path) -> bool:
    """Whether a folder looks like one that timm opens."""
    return (path / CONFIG).is_file()


def read_hub_config(folder: Path) -> HubConfig:
    """timm's description of a model; what it leaves out is taken to be as for ImageNet."""
    file = folder / CONFIG
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        shown = values.get("pretrained_cfg", values)
        name, options = values.get("architecture"), dict(values.get("model_args") or {})
        size = options.pop("img_size", None) or shown.get("input_size")
        if unknown := options.keys() - {"num_classes"}:
            raise RunError(f"{file} builds its network with {', '.join(sorted(unknown))}, which is not known here.")
        config = HubConfig(
            architecture=f"timm/{name}" if isinstance(name, str) else None,
            image_size=int(size[-1] if isinstance(size, list) else size) if size else None,
            mean=_triple(shown.get("mean", IMAGENET_MEAN)),
            std=_triple(shown.get("std", IMAGENET_STD)),
        )
        if not can_normalise(config.mean, config.std):
            raise ValueError("a normalisation that makes no sense")
        return config
    except OSError as error:
        raise RunError(f"{file} cannot be read: {error.strerror}.") from None
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError):
        raise RunError(f"{file} is not a description of a model as timm writes it.") from None


def hub_config(name: str, info: BackboneInfo, crop_ratio: float) -> dict[str, Any]:
    """The `config.json` with which timm builds `name` for these weights and shows it images as we do."""
    import timm

    known = timm.get_pretrained_cfg(name)
    size = [3, info.image_size, info.image_size]
    return {
        "architecture": name.partition(".")[0],
        "num_classes": 0,
        "num_features": info.feature_width,
        "pretrained_cfg": {
            "num_classes": 0,
            "input_size": size,
            "fixed_input_size": bool(known and known.fixed_input_size),
            "interpolation": "bilinear",
            "crop_pct": crop_ratio,
            "crop_mode": "center",
            "mean": list(info.mean),
            "std": list(info.std),
            "first_conv": known.first_conv if known else None,
            "classifier": known.classifier if known else None,
        },
    }


def _triple(values: Any) -> tuple[float, float, float]:
    red, green, blue = (float(value) for value in values)
    return red, green, blue
