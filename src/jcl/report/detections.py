"""What a detector finds next to what is there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Polygon, Rectangle

from jcl.evaluate.detection.batching import read_image
from jcl.evaluate.detection.coco_data import CocoImage, CocoSet
from jcl.evaluate.detection.library import coco_module
from jcl.evaluate.detection.predicting import Results
from jcl.evaluate.detection.transforms import PIXEL_CENTRE
from jcl.report import style

_WIDTH, _GAP, _TOP, _CAPTION = 3.4, 0.16, 0.95, 0.2  # inches
LEAST_SCORE = 0.5  # of what is drawn
MOST_OBJECTS = 20
_ANNOTATED = {"segm": "segmentation", "keypoints": "keypoints"}  # by the kind of results that is compared with it


def detections_picture(
    path: Path, images: CocoSet, results: Results, rows: Sequence[int], title: str, subtitle: str = ""
) -> Path:
    """A row for each of these images: at the left as annotated, at the right what was found with some certainty."""
    shown = [images.images[row] for row in rows]
    names = {category.id: category.name for category in images.categories}
    heights = [_WIDTH * image.height / image.width for image in shown]
    width = 2 * _WIDTH + 3 * _GAP
    height = _TOP + sum(heights) + len(shown) * (_GAP + _CAPTION)
    figure = style.new_figure(width, height)
    style.write_title(figure, style.plain(title, 70), style.plain(subtitle, 100))
    top = _TOP
    for image, high in zip(shown, heights, strict=True):
        pixels = read_image(image).permute(1, 2, 0).numpy()
        found = _found(results, image.id)
        sides = (("as annotated", _annotated(image, results)), (f"found, score {LEAST_SCORE:g} and up", found))
        for column, (caption, objects) in enumerate(sides):
            left = _GAP + column * (_WIDTH + _GAP)
            axes = figure.add_axes((left / width, (height - top - high) / height, _WIDTH / width, high / height))
            extent = (0, image.width, image.height, 0)  # so that coordinates are those of boxes
            axes.imshow(pixels, extent=extent, interpolation="nearest" if image.width <= 64 else "auto")
            axes.set_axis_off()
            axes.set_autoscale_on(False)
            axes.set_title(caption, fontsize=style.SIZES["small"], color=style.MUTED, pad=2, loc="left")
            for number, entry in enumerate(objects[:MOST_OBJECTS]):
                kind = number if len(names) == 1 else entry["category_id"]  # where all are alike, tell them apart
                colour = style.PALETTE[kind % len(style.PALETTE)]
                _draw(axes, entry, names[entry["category_id"]], image, colour)
        top += high + _GAP + _CAPTION
    return style.save(figure, path)


def _annotated(image: CocoImage, results: Results) -> list[dict[str, Any]]:
    """The annotated objects with what was looked for; a detector of boxes is not to be compared with masks."""
    left_out = {name for kind, name in _ANNOTATED.items() if kind not in results}
    return [{name: value for name, value in entry.items() if name not in left_out} for entry in image.annotations]


def _found(results: Results, image_id: int) -> list[dict[str, Any]]:
    """The objects found in an image, best first, with box, mask and key points together.

    All kinds of results are of the same objects in the same order.
    """
    kinds = [[entry for entry in entries if entry["image_id"] == image_id] for entries in results.values()]
    objects = [{name: value for entry in parts for name, value in entry.items()} for parts in zip(*kinds, strict=True)]
    return sorted((entry for entry in objects if entry["score"] >= LEAST_SCORE), key=lambda entry: -entry["score"])


def _draw(axes: Axes, entry: dict[str, Any], name: str, image: CocoImage, colour: str) -> None:
    left, top, width, height = entry["bbox"]
    axes.add_patch(Rectangle((left, top), width, height, fill=False, edgecolor=colour, linewidth=1.2))
    score = f" {entry['score']:.2f}" if "score" in entry else ""
    axes.annotate(
        style.plain(name, 18) + score, (left, top), (1, -1), textcoords="offset points", va="top",
        fontsize=style.SIZES["small"] - 2, color=style.PAPER, parse_math=False, annotation_clip=True, clip_on=True,
        bbox={"boxstyle": "square,pad=0.1", "facecolor": colour, "alpha": 0.8, "linewidth": 0},
    )  # fmt: skip
    _draw_shape(axes, entry.get("segmentation"), colour, image)
    points = np.array(entry.get("keypoints", ()), dtype=float).reshape(-1, 3)
    points = points[points[:, 2] > 0]
    axes.plot(
        points[:, 0] + 0.5, points[:, 1] + 0.5, "o", markersize=2.5, color=colour, markeredgecolor=style.PAPER, mew=0.4
    )


def _draw_shape(axes: Axes, outline: Any, colour: str, image: CocoImage) -> None:
    if isinstance(outline, list):
        for part in outline:
            corners = np.array(part, dtype=float).reshape(-1, 2)
            axes.add_patch(Polygon(corners, facecolor=colour, alpha=0.35, linewidth=0))
    elif isinstance(outline, dict):
        coder = coco_module("mask")
        coded = (
            coder.frPyObjects(outline, image.height, image.width) if isinstance(outline["counts"], list) else outline
        )
        mask = coder.decode(coded).astype(float)
        across, down = np.arange(image.width) + PIXEL_CENTRE, np.arange(image.height) + PIXEL_CENTRE
        axes.contourf(across, down, mask, levels=[0.5, 1.5], colors=[colour], alpha=0.35)
