"""A picture of what a detector found beside the annotations."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Polygon, Rectangle

from jcl.evaluate.detection.batches import PIXEL_CENTER, read_image
from jcl.evaluate.detection.data import CocoDataset, CocoImage, coco_module
from jcl.evaluate.detection.predict import Results
from jcl.report import style

_WIDTH, _TOP, _CAPTION = 7.3, 0.7, 0.3  # inches
_MIN_SCORE = 0.5
_MAX_OBJECTS = 20


def detections_picture(
    path: Path, dataset: CocoDataset, results: Results, rows: Sequence[int], title: str, subtitle: str = ""
) -> Path:
    """One row per image: annotations on the left, confident detections on the right."""
    shown = [dataset.images[row] for row in rows]
    names = {category.id: category.name for category in dataset.categories}
    heights = [_WIDTH / 2 * image.height / image.width + _CAPTION for image in shown]
    height = _TOP + sum(heights)
    figure = style.new_figure(_WIDTH, height)
    style.write_title(figure, style.plain(title, 70), style.plain(subtitle, 100))
    figure.set_layout_engine("constrained", rect=(0, 0, 1, 1 - _TOP / height))
    panels = figure.subplots(len(shown), 2, squeeze=False, height_ratios=heights)
    for image, sides in zip(shown, panels, strict=True):
        pixels = read_image(image).permute(1, 2, 0).numpy()
        captions = ("annotated", f"detected, score at least {_MIN_SCORE:g}")
        for axes, caption, objects in zip(sides, captions, (image.annotations, _detected(image, results)), strict=True):
            extent = (0, image.width, image.height, 0)  # the coordinates of boxes
            axes.imshow(pixels, extent=extent, interpolation="nearest" if image.width <= 64 else "auto")
            axes.set_axis_off()
            axes.set_autoscale_on(False)
            axes.set_title(caption, fontsize=style.SIZES["small"], color=style.MUTED, pad=2, loc="left")
            for number, entry in enumerate(objects[:_MAX_OBJECTS]):
                key = number if len(names) == 1 else entry["category_id"]
                color = style.PALETTE[key % len(style.PALETTE)]
                _draw_object(axes, entry, names[entry["category_id"]], image, color)
    return style.save(figure, path, follow_links=False)


def _detected(image: CocoImage, results: Results) -> list[dict[str, Any]]:
    """Confident detections, best first. All kinds of results list the same objects in the same order."""
    kinds = [[entry for entry in entries if entry["image_id"] == image.id] for entries in results.values()]
    objects = [{name: value for entry in parts for name, value in entry.items()} for parts in zip(*kinds, strict=True)]
    return sorted((entry for entry in objects if entry["score"] >= _MIN_SCORE), key=lambda entry: -entry["score"])


def _draw_object(axes: Axes, entry: dict[str, Any], name: str, image: CocoImage, color: str) -> None:
    left, top, width, height = entry["bbox"]
    axes.add_patch(Rectangle((left, top), width, height, fill=False, edgecolor=color, linewidth=1.2))
    score = f" {entry['score']:.2f}" if "score" in entry else ""
    look = {"color": style.PAPER, "va": "top", "bbox": style.label_box(color, 0.8), "clip_on": True}
    style.write(axes, style.plain(name, 18) + score, (left, top), (1, -1), size="tiny", annotation_clip=True, **look)
    shape = entry.get("segmentation")
    if isinstance(shape, list):
        for polygon in shape:
            corners = np.array(polygon, dtype=float).reshape(-1, 2)
            axes.add_patch(Polygon(corners, facecolor=color, alpha=0.35, linewidth=0))
    elif shape is not None:
        mask = coco_module("mask").decode(shape).astype(float)
        x, y = np.arange(image.width) + PIXEL_CENTER, np.arange(image.height) + PIXEL_CENTER
        axes.contourf(x, y, mask, levels=[0.5, 1.5], colors=[color], alpha=0.35)
    points = np.array(entry.get("keypoints", ()), dtype=float).reshape(-1, 3)
    x, y, _ = points[points[:, 2] > 0].T
    axes.plot(x + PIXEL_CENTER, y + PIXEL_CENTER, "o", markersize=2.5, color=color, mec=style.PAPER, mew=0.4)
