"""COCO's metrics, computed by COCO's own code."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from jcl.evaluate.detection.coco_data import CocoSet
from jcl.evaluate.detection.library import coco_module, silence

_NAMES = {"bbox": "box", "segm": "mask", "keypoints": "keypoint"}
_OBJECT_FIGURES = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")
_KEYPOINT_FIGURES = ("ap", "ap50", "ap75", "ap_medium", "ap_large")  # COCO marks no key points in small people
COCO_KEYPOINTS = 17
OTHER_SIGMA = 0.05
"""How far key points that are not COCO's seventeen may lie off, relative to the object; COCO's are 0.025 to 0.107."""

Scores = dict[str, float | None]


def coco_scores(images: CocoSet, results: list[dict[str, Any]], kind: str) -> Scores:
    """AP and its variants in per cent for results of a kind (`bbox`, `segm`, `keypoints`), e.g. `box_ap50`.

    A figure is None where the images hold nothing to measure it with, such as no large objects.
    """
    evaluation = coco_module("cocoeval").COCOeval
    with silence():
        truth = _library_set(images.ground_truth())
        judged = evaluation(truth, _loaded(truth, results), kind)
        if kind == "keypoints" and len(images.keypoints) != COCO_KEYPOINTS:
            judged.params.kpt_oks_sigmas = np.full(len(images.keypoints), OTHER_SIGMA)
        judged.evaluate()
        judged.accumulate()
        judged.summarize()
    names = _KEYPOINT_FIGURES if kind == "keypoints" else _OBJECT_FIGURES
    values = judged.stats[: len(names)]
    return {
        f"{_NAMES[kind]}_{name}": 100 * float(value) if value >= 0 else None
        for name, value in zip(names, values, strict=True)
    }


def _library_set(content: dict[str, Any]) -> Any:
    made = coco_module("coco").COCO()
    made.dataset = copy.deepcopy(content)  # the library writes into what it is given
    made.createIndex()
    return made


def _loaded(truth: Any, results: list[dict[str, Any]]) -> Any:
    """Results as the library holds them; it cannot load an empty list."""
    if results:
        return truth.loadRes(copy.deepcopy(results))
    return _library_set({**truth.dataset, "annotations": []})
