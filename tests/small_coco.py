"""A tiny set in COCO's format, drawn by code: colored shapes with boxes, outlines and key points on dark ground."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from jcl.settings.detection import DetectOptions

KEYPOINTS = ["head", "left_hand", "right_hand"]
SIDE = 64


def write_coco(folder: Path, count: int = 8, seed: int = 0, *, kind: str = "instances") -> Path:
    """`folder` with images/ and `kind`.json; the annotation file's path is returned.

    Instances are squares (category 3) and discs (category 7). For `person_keypoints` each image holds one figure: a
    kite with its head at the top, its left hand red and its right hand blue.
    """
    (folder / "images").mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    images, annotations = [], []
    for number in range(1, count + 1):
        wide = number % 4 != 0
        width, height = (SIDE + 16, SIDE) if wide else (SIDE, SIDE + 16)
        picture = Image.new("RGB", (width, height), (30, 30, 30))
        images.append({"id": 100 + number, "file_name": f"{number:03}.png", "width": width, "height": height})
        side = int(random.integers(30, 42))
        left, top = int(random.integers(2, width - side - 2)), int(random.integers(2, height - side - 2))
        draw = _figure if kind == "person_keypoints" else (_square if number % 2 else _disc)
        found = draw(ImageDraw.Draw(picture), left, top, side)
        box = [left, top, side, side]
        common = {"id": number, "image_id": 100 + number, "bbox": box, "iscrowd": 0, "area": side * side}
        annotations.append(common | found)
        picture.save(folder / "images" / f"{number:03}.png")
    content = {"images": images, "annotations": annotations, "categories": categories(kind)}
    file = folder / f"{kind}.json"
    file.write_text(json.dumps(content))
    return file


def categories(kind: str) -> list[dict[str, Any]]:
    if kind == "person_keypoints":
        return [{"id": 1, "name": "person", "keypoints": KEYPOINTS, "skeleton": []}]
    return [{"id": 3, "name": "square"}, {"id": 7, "name": "disc"}]


def _square(draw: ImageDraw.ImageDraw, left: int, top: int, side: int) -> dict[str, Any]:
    draw.rectangle((left, top, left + side - 1, top + side - 1), fill=(240, 200, 40))
    outline = [left, top, left + side, top, left + side, top + side, left, top + side]
    return {"category_id": 3, "segmentation": [outline]}


def _disc(draw: ImageDraw.ImageDraw, left: int, top: int, side: int) -> dict[str, Any]:
    draw.ellipse((left, top, left + side - 1, top + side - 1), fill=(60, 160, 255))
    angles = np.linspace(0, 2 * np.pi, 24, endpoint=False)
    x, y = left + side / 2 * (1 + np.cos(angles)), top + side / 2 * (1 + np.sin(angles))
    return {"category_id": 7, "segmentation": [np.stack([x, y], 1).flatten().round(2).tolist()]}


def _figure(draw: ImageDraw.ImageDraw, left: int, top: int, side: int) -> dict[str, Any]:
    middle, waist = left + side // 2, top + side // 2
    draw.polygon([(middle, top), (left + side, waist), (middle, top + side), (left, waist)], fill=(200, 200, 200))
    points = [(middle, top + 4), (left + side - 5, waist), (left + 5, waist)]  # its left hand is at the right
    for (x, y), color in zip(points, [(255, 255, 0), (255, 0, 0), (0, 0, 255)], strict=True):
        draw.ellipse((x - 3, y - 3, x + 3, y + 3), fill=color)
    flat = [value for x, y in points for value in (x, y, 2)]
    return {"category_id": 1, "keypoints": flat, "num_keypoints": 3}


def small_options(task: str, file: Path, **changes: Any) -> DetectOptions:
    """Options of a detector that takes seconds on a CPU, trained and tested on the same images."""
    data = {"train_json": file, "val_json": file, "images": file.parent / "images"}
    return DetectOptions(**(small_values(task) | data | {"pictures": 0, "workers": 0} | changes))


def small_values(task: str) -> dict[str, Any]:
    """Settings of a detector that takes seconds on a CPU."""
    return {
        "task": task,
        "init": "random",
        "backbone": "timm/test_resnet",
        "heads": "small",
        "short_side": (SIDE, SIDE),
        "rois_per_image": 32,
        "iterations": 16,
        "batch_size": 4,
        "lr": 0.02,
        "warmup": 2,
        "device": "cpu",
    }


def edit(file: Path, change: Any) -> Path:
    """Rewrite an annotation file after `change` has been made to what it holds."""
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    return file
