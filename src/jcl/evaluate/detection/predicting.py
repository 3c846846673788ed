"""What a detector finds in images, in the form in which COCO takes results."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from jcl.distributed.device import autocast
from jcl.distributed.group import ALONE, Ranks
from jcl.errors import DataError
from jcl.evaluate.detection.batching import leave_signals_to_trainer, read_image
from jcl.evaluate.detection.coco_data import CocoImage, CocoSet
from jcl.evaluate.detection.library import coco_module
from jcl.evaluate.detection.packed import PackedImages
from jcl.evaluate.detection.transforms import PIXEL_CENTRE

KINDS = {"box": ("bbox",), "mask": ("bbox", "segm"), "keypoint": ("bbox", "keypoints")}
"""What each task is judged by, as COCO calls it."""

Results = dict[str, list[dict[str, Any]]]
"""For each kind, COCO's list of results."""

_MASK_THRESHOLD = 0.5
_DIGITS = 4  # of coordinates and scores, a hundredth of what could change a metric


class _Images(Dataset[tuple[int, Tensor | str]]):
    def __init__(self, images: list[CocoImage]) -> None:
        self._images = PackedImages(images)

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, row: int) -> tuple[int, Tensor | str]:
        image = self._images[row]
        try:
            return image.id, read_image(image)
        except DataError as error:
            return image.id, str(error)


@torch.inference_mode()
def predict(
    detector: nn.Module,
    images: CocoSet,
    kinds: Iterable[str],
    *,
    device: torch.device,
    precision: torch.dtype,
    workers: int,
    ranks: Ranks = ALONE,
) -> Results:
    """Every rank looks at its part of the images, one by one; all get the results of all."""
    kinds = tuple(kinds)
    category_ids = [category.id for category in images.categories]
    mine = list(images.images[ranks.rank :: ranks.count])
    found: Results = {kind: [] for kind in kinds}
    detector.eval()
    with contextlib.closing(_decoded(mine, workers)) as decoded:
        for image_id, pixels in decoded:
            with autocast(device, precision):
                (output,) = detector([pixels.to(device).float() / 255])
            for kind, results in found.items():
                results += as_results(kind, output, image_id, category_ids)
    return _of_all(found, ranks)


def _decoded(images: list[CocoImage], workers: int) -> Generator[tuple[int, Tensor]]:
    """Ids and pixels; closing it ends the workers."""
    if not images:
        return
    loader: DataLoader[tuple[int, Tensor | str]] = DataLoader(
        _Images(images),
        batch_size=None,
        num_workers=workers,
        worker_init_fn=leave_signals_to_trainer,
        generator=torch.Generator(),
    )
    for image_id, pixels in loader:
        if isinstance(pixels, str):
            raise DataError(pixels)
        yield image_id, pixels


def as_results(kind: str, output: dict[str, Tensor], image_id: int, category_ids: list[int]) -> list[dict[str, Any]]:
    """torchvision's detections in one image as entries of COCO's submission format, with COCO's category ids."""
    boxes, scores = output["boxes"].float().cpu(), output["scores"].float().cpu().tolist()
    ids = [category_ids[label - 1] for label in output["labels"].cpu().tolist()]
    common = [
        {"image_id": image_id, "category_id": category, "score": round(score, _DIGITS + 2)}
        for category, score in zip(ids, scores, strict=True)
    ]
    if kind == "bbox":
        values: list[Any] = torch.cat([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], 1).tolist()
        return [entry | {"bbox": _rounded(value)} for entry, value in zip(common, values, strict=True)]
    if kind == "segm":
        masks = (output["masks"][:, 0] > _MASK_THRESHOLD).cpu().numpy()
        return [entry | {"segmentation": _coded(mask)} for entry, mask in zip(common, masks, strict=True)]
    points = output["keypoints"].float().cpu().clone()
    points[..., :2] -= PIXEL_CENTRE
    return [
        entry | {"keypoints": _rounded(value)} for entry, value in zip(common, points.flatten(1).tolist(), strict=True)
    ]


def _coded(mask: np.ndarray[Any, Any]) -> dict[str, Any]:
    coded = coco_module("mask").encode(np.asfortranarray(mask.astype(np.uint8)))
    return {"size": [int(side) for side in coded["size"]], "counts": coded["counts"].decode("ascii")}


def _rounded(values: list[float]) -> list[float]:
    return [round(value, _DIGITS) for value in values]


def _of_all(found: Results, ranks: Ranks) -> Results:
    """The results of all ranks in the order of the images, so that they do not depend on the number of ranks."""
    if ranks.count > 1:
        for kind, results in found.items():
            found[kind] = [entry for part in ranks.from_all(results) for entry in part]
    return {kind: sorted(results, key=lambda entry: entry["image_id"]) for kind, results in found.items()}
