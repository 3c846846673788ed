"""What happens to an image and its annotations before training: scaled, perhaps mirrored, turned into tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as vision

from jcl.evaluate.detection.coco_data import CocoImage
from jcl.evaluate.detection.library import coco_module

PIXEL_CENTRE = 0.5
"""COCO gives the pixel that a key point lies in; in the coordinates of boxes the middle of pixel 3 is at 3.5."""


def scaled_size(height: int, width: int, short_side: int, max_side: int) -> tuple[int, int]:
    """Height and width with the short side as wanted, or less where the long one would exceed `max_side`."""
    scale = min(short_side / min(height, width), max_side / max(height, width))
    return max(1, round(height * scale)), max(1, round(width * scale))


def scale(image: Tensor, height: int, width: int) -> Tensor:
    """Bilinear, antialiased where the image becomes smaller: (3, h, w) -> (3, height, width)."""
    if image.shape[-2:] == (height, width):
        return image
    scaled: Tensor = vision.resize(image, [height, width], antialias=True)
    return scaled


def flip_order(names: Sequence[str]) -> list[int]:
    """Where each key point comes from in a mirror image: `left_...` and `right_...` change places.

    For COCO's seventeen these are its pairs: eyes, ears, shoulders, elbows, wrists, hips, knees and ankles.
    """
    places = {name: place for place, name in enumerate(names)}
    return [places.get(_mirrored(name), place) for place, name in enumerate(names)]


def _mirrored(name: str) -> str:
    for side, other in (("left", "right"), ("right", "left")):
        if side in name:
            return name.replace(side, other, 1)
    return name


def mirrored(target: dict[str, Tensor], width: int, order: Sequence[int]) -> dict[str, Tensor]:
    """The target of a mirror image `width` pixels wide. Coordinates are continuous: x becomes width - x."""
    boxes = target["boxes"]
    flipped = target | {"boxes": torch.stack([width - boxes[:, 2], boxes[:, 1], width - boxes[:, 0], boxes[:, 3]], 1)}
    if "masks" in target:
        flipped["masks"] = target["masks"].flip(-1)
    if "keypoints" in target:
        points = target["keypoints"][:, list(order)].clone()
        points[..., 0] = torch.where(points[..., 2] > 0, width - points[..., 0], points[..., 0])
        flipped["keypoints"] = points
    return flipped


def make_target(
    image: CocoImage, class_of: dict[int, int], height: int, width: int, *, masks: bool, keypoints: int
) -> dict[str, Tensor]:
    """The annotations as torchvision's detectors take them, for the image scaled to height × width.

    `boxes` (n, 4) are corners, `labels` (n,) classes from 1 on, `masks` (n, height, width) uint8 and `keypoints`
    (n, k, 3) x, y and visibility. Outlines are scaled before they are rasterised, so no mask is resampled.
    """
    wide, high = width / image.width, height / image.height
    annotations = image.annotations
    corners = torch.tensor([annotation["bbox"] for annotation in annotations], dtype=torch.float64)
    corners[:, 2:] += corners[:, :2]
    target = {
        "boxes": (corners * torch.tensor([wide, high, wide, high], dtype=torch.float64)).float(),
        "labels": torch.tensor([class_of[annotation["category_id"]] for annotation in annotations]),
    }
    if masks:
        drawn = [_mask(annotation["segmentation"], image, height, width) for annotation in annotations]
        target["masks"] = torch.from_numpy(np.stack(drawn))
    if keypoints:
        points = torch.tensor([annotation["keypoints"] for annotation in annotations], dtype=torch.float32)
        points = points.view(len(annotations), keypoints, 3)
        points[..., :2] += PIXEL_CENTRE
        target["keypoints"] = points * torch.tensor([wide, high, 1.0])
    return target


def _mask(outline: Any, image: CocoImage, height: int, width: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Polygons or a run-length code as pixels (height, width) of 0 and 1."""
    coder = coco_module("mask")
    if isinstance(outline, dict):
        coded = outline
        if isinstance(outline["counts"], list):
            coded = coder.frPyObjects(outline, *outline["size"])
        whole = torch.from_numpy(coder.decode(coded))[None]
        scaled: Tensor = vision.resize(whole, [height, width], interpolation=InterpolationMode.NEAREST_EXACT)
        return scaled[0].numpy()
    factors = (width / image.width, height / image.height)
    polygons = [[value * factors[place % 2] for place, value in enumerate(part)] for part in outline]
    drawn: np.ndarray[Any, np.dtype[np.uint8]] = coder.decode(coder.merge(coder.frPyObjects(polygons, height, width)))
    return drawn
