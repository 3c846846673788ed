"""Predictions of a detector in COCO's results format, COCO's metrics of them, and a table of several detectors."""

import contextlib
import copy
import io
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from jcl.distributed.device import autocast
from jcl.evaluate.detection.batches import PIXEL_CENTER, Hardware, load_images, read_image
from jcl.evaluate.detection.data import CocoDataset, CocoImage, coco_module

KINDS = {"box": ("bbox",), "mask": ("bbox", "segm"), "keypoint": ("bbox", "keypoints")}
"""The kinds of results of each task, as COCO calls them."""
OTHER_SIGMA = 0.05  # OKS sigma of keypoints other than COCO's seventeen, whose sigmas are 0.025 to 0.107

Results = dict[str, list[dict[str, Any]]]  # COCO's list of results for each kind

_MASK_THRESHOLD = 0.5
_DIGITS = 4  # of coordinates; two more for scores
_COCO_KEYPOINTS = 17
_FIGURES = {  # the first ones of COCO's summary; it has no keypoints of small people
    "bbox": [f"box_{name}" for name in ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")],
    "segm": [f"mask_{name}" for name in ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")],
    "keypoints": [f"keypoint_{name}" for name in ("ap", "ap50", "ap75", "ap_medium", "ap_large")],
}
_MODELS = {"box": "Faster R-CNN", "mask": "Mask R-CNN", "keypoint": "Keypoint R-CNN"}
_TABLE_FIGURES = {"ap": "AP", "ap50": "AP50", "ap75": "AP75"}
_TABLE_COLUMNS = ("label", "backbone", "iterations", "batch_size", "seed")
_COLUMNS_IF_DIFFERENT = ("heads", "lr", "accumulate")


@torch.inference_mode()
def predict(detector: nn.Module, dataset: CocoDataset, kinds: Sequence[str], hardware: Hardware) -> Results:
    """Run the detector on all images, one at a time, split over the ranks; all ranks get all results."""
    device, ranks = hardware.device, hardware.ranks
    category_ids = [category.id for category in dataset.categories]
    results: Results = {kind: [] for kind in kinds}
    detector.eval()
    own = dataset.images[ranks.rank :: ranks.count]
    keys = [(row, 0) for row in range(len(own))]
    with contextlib.closing(load_images(own, _read, hardware.workers, sampler=keys, batch_size=None)) as images:
        for image_id, pixels in images:
            with autocast(device, hardware.precision):
                (output,) = detector([pixels.to(device).float() / 255])
            for kind, entries in results.items():
                entries += to_coco(kind, output, image_id, category_ids)
    # Sorted, so that the results do not depend on the number of ranks.
    everything = {kind: itertools.chain(*ranks.gather_objects(entries)) for kind, entries in results.items()}
    return {kind: sorted(entries, key=lambda entry: entry["image_id"]) for kind, entries in everything.items()}


def _read(image: CocoImage, _iteration: int) -> tuple[int, Tensor]:
    return image.id, read_image(image)


def to_coco(kind: str, output: dict[str, Tensor], image_id: int, category_ids: list[int]) -> list[dict[str, Any]]:
    """torchvision's detections in one image as entries of COCO's results format."""
    scores, labels = output["scores"].float().cpu().tolist(), output["labels"].cpu().tolist()
    values: list[Any]
    if kind == "bbox":
        boxes = output["boxes"].float().cpu()
        name, values = "bbox", _rounded(torch.cat([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], 1))
    elif kind == "segm":
        masks = (output["masks"][:, 0] > _MASK_THRESHOLD).cpu().numpy()
        name, values = "segmentation", [_encode(mask) for mask in masks]
    else:
        points = output["keypoints"].float().cpu().clone()
        points[..., :2] -= PIXEL_CENTER
        name, values = "keypoints", _rounded(points.flatten(1))
    return [
        {"image_id": image_id, "category_id": category_ids[label - 1], "score": round(score, _DIGITS + 2), name: value}
        for score, label, value in zip(scores, labels, values, strict=True)
    ]


def _encode(mask: np.ndarray[Any, Any]) -> dict[str, Any]:
    encoding = coco_module("mask").encode(np.asfortranarray(mask.astype(np.uint8)))
    return {"size": [int(side) for side in encoding["size"]], "counts": encoding["counts"].decode("ascii")}


def _rounded(rows: Tensor) -> list[list[float]]:
    return [[round(value, _DIGITS) for value in row] for row in rows.tolist()]


def coco_scores(dataset: CocoDataset, results: list[dict[str, Any]], kind: str) -> dict[str, float | None]:
    """AP and its variants in percent for a kind of results, as `box_ap50`; None if there is nothing to measure."""
    index, evaluation = _scorer()
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints its progress
        truth = _indexed(index, dataset.ground_truth())
        # pycocotools cannot load an empty list of results.
        loaded = truth.loadRes(copy.deepcopy(results)) if results else _indexed(index, truth.dataset, annotations=[])
        evaluator = evaluation(truth, loaded, kind)
        if kind == "keypoints" and len(dataset.keypoints) != _COCO_KEYPOINTS:
            evaluator.params.kpt_oks_sigmas = np.full(len(dataset.keypoints), OTHER_SIGMA)
        evaluator.evaluate()
        evaluator.accumulate()
        evaluator.summarize()
    stats = zip(_FIGURES[kind], evaluator.stats, strict=False)
    return {name: 100 * float(value) if value >= 0 else None for name, value in stats}


def _scorer() -> tuple[Any, Any]:
    """The classes COCO and COCOeval of faster-coco-eval, which is several times faster, or else of pycocotools."""
    with contextlib.suppress(ImportError):
        import faster_coco_eval

        return faster_coco_eval.COCO, faster_coco_eval.COCOeval_faster
    return coco_module("coco").COCO, coco_module("cocoeval").COCOeval


def _indexed(index: Any, content: dict[str, Any], **changes: Any) -> Any:
    dataset = index()
    dataset.dataset = copy.deepcopy(content | changes)  # pycocotools writes into its arguments
    dataset.createIndex()
    return dataset


def detection_table(summaries: Sequence[dict[str, Any]], folders: Sequence[Path]) -> str:
    """A Markdown table of AP, AP50 and AP75 of each task, with a row per initialization, schedule and seed."""
    tasks = [task for task in _MODELS if any(summary["task"] == task for summary in summaries)]
    different = (name for name in _COLUMNS_IF_DIFFERENT if len({summary.get(name) for summary in summaries}) > 1)
    columns = (*_TABLE_COLUMNS, *different)
    header = ["initialization", *columns[1:]]
    header += [f"{_MODELS[task]} {figure}" for task in tasks for figure in _TABLE_FIGURES.values()]
    keys = [tuple(str(summary.get(name, "")) for name in columns) for summary in summaries]
    rows: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
    for summary, folder, key in zip(summaries, folders, keys, strict=True):
        same = [other for other, its in zip(summaries, keys, strict=True) if its == key and other is not summary]
        if any(other["task"] == summary["task"] or other.get("init") != summary.get("init") for other in same):
            key = (f"{key[0]} ({folder})", *key[1:])
        rows.setdefault(key, {})[summary["task"]] = summary
    lines = [header, ["---"] * len(header)]
    for key, row in rows.items():
        values = [row.get(task, {}).get(f"{task}_{figure}") for task in tasks for figure in _TABLE_FIGURES]
        lines.append([*key, *("" if value is None else f"{value:.2f}" for value in values)])
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
