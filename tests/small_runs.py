"""Data and settings with which a whole run takes a second."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from jcl.core.encoder import OWN_BACKBONES
from jcl.settings.recipes import build_settings
from jcl.settings.schema import Settings

TINY_BACKBONE = next(iter(OWN_BACKBONES))
TINY_VALUES: dict[str, Any] = {
    "views.recipe": "small",
    "views.image_size": 16,
    "model.backbone": TINY_BACKBONE,
    "model.stem": "imagenet",
    "model.embedding_dim": 16,
    "model.bn_groups": 2,
    "method.num_keys": 2,
    "method.num_local_queries": 0,
    "method.num_queries": 1,
    "method.queue_size": 32,
    "method.key_momentum": 0.9,
    "train.epochs": 3,
    "train.batch_size": 8,
    "train.lr": 0.05,
    "train.key_passes": 1,
    "train.device": "cpu",
    "record.log_every": 3,
    "record.checkpoint_every": 2,
    "record.knn_every": 1,
    "record.knn_k": 5,
    "record.tensorboard": False,
    "record.report": False,
    "data.workers": 0,
}


def drawn_pixels(count: int, side: int = 16, seed: int = 0) -> np.ndarray:
    """Images (count, side, side, 3) uint8 with something to tell them apart: noise of few large pixels."""
    coarse = np.random.default_rng(seed).integers(0, 256, (count, 4, 4, 3), dtype=np.uint8)
    return coarse.repeat(side // 4, axis=1).repeat(side // 4, axis=2)


def write_image_folder(folder: Path, count: int = 26, classes: tuple[str, ...] = ("cats", "dogs")) -> Path:
    for number, pixels in enumerate(drawn_pixels(count, side=20, seed=1)):
        place = folder / classes[number % len(classes)]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(place / f"{number:03}.png")
    return folder


def tiny_settings(location: Path | str, method: str | None = None, **changes: Any) -> Settings:
    """Settings of a run over in a second; changes are dotted names with __ for the dot."""
    values = TINY_VALUES | {"data.location": str(location)}
    if method in ("moco-v1", "moco-v2"):
        values = values | {"method.num_keys": 1}
    values = values | {name.replace("__", "."): value for name, value in changes.items()}
    return build_settings("folder", method=method, values=values)


def snapshot(folder: Path) -> dict[Path, bytes | None]:
    """Every file's content, and every folder."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@contextlib.contextmanager
def networks_of_zeros() -> Iterator[None]:
    """Networks start as zeros, which takes no time."""
    import timm.layers.weight_init

    def zeros(tensor: Tensor, *ways: object, **named_ways: object) -> Tensor:
        with torch.no_grad():
            return tensor.zero_()

    names = ("kaiming_normal_", "kaiming_uniform_", "trunc_normal_", "normal_", "uniform_")
    with (
        mock.patch.multiple(torch.nn.init, **dict.fromkeys(names, zeros)),
        mock.patch.object(timm.layers.weight_init, "_trunc_normal_", zeros),
    ):
        yield
