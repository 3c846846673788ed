"""Datasets in COCO format: where their files are, reading and checking them, and what training uses of them."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from jcl.console import pluralize
from jcl.errors import DataError, SettingsError
from jcl.random import DETECTION_HELD_OUT, DETECTION_OVERFIT, permutation
from jcl.settings.detection import CocoSettings, Task

_ANNOTATION_FILES = {"box": "instances", "mask": "instances", "keypoint": "person_keypoints"}
_HELD_OUT = 5  # without a validation file, one image in five is held out
_MIN_BOX_SIDE = 1.0  # pixels; smaller boxes are not trained on


@dataclass(frozen=True)
class CocoFiles:
    """Annotation files and image folders; without `val_json`, part of the training images is held out."""

    train_json: Path
    train_images: Path
    val_json: Path | None
    val_images: Path


@dataclass(frozen=True)
class Category:
    """COCO's id of a class, its name and the names of its keypoints."""

    id: int
    name: str
    keypoints: tuple[str, ...] = ()


@dataclass(frozen=True)
class CocoImage:
    """An image and its annotations as in the file, with missing `iscrowd` and `area` filled in."""

    id: int
    path: Path
    width: int
    height: int
    annotations: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class CocoDataset:
    """The images of an annotation file. The network's class c >= 1 is `categories[c - 1]`; 0 is background."""

    file: Path
    images: tuple[CocoImage, ...]
    categories: tuple[Category, ...]

    @property
    def class_of(self) -> dict[int, int]:
        """Maps COCO's category ids to the network's classes."""
        return {category.id: number for number, category in enumerate(self.categories, start=1)}

    @property
    def keypoints(self) -> tuple[str, ...]:
        """The names of the keypoints, which all categories share."""
        return self.categories[0].keypoints

    def ground_truth(self) -> dict[str, Any]:
        """The dataset as pycocotools takes it. Annotation ids start at 1: pycocotools treats id 0 as unmatched."""
        annotations = [annotation for image in self.images for annotation in image.annotations]
        return {
            "images": [{"id": image.id, "width": image.width, "height": image.height} for image in self.images],
            "annotations": [entry | {"id": number} for number, entry in enumerate(annotations, start=1)],
            "categories": [{"id": category.id, "name": category.name} for category in self.categories],
        }


def coco_module(name: str) -> ModuleType:
    """Import `pycocotools.NAME`, which is an optional dependency."""
    try:
        return importlib.import_module(f"pycocotools.{name}")
    except ImportError:
        raise SettingsError(
            "`jcl detect` needs pycocotools, which is not installed. "
            "Run: pip install 'joint-contrastive-learning[coco]'."
        ) from None


def coco_files(coco: CocoSettings, task: Task) -> CocoFiles:
    """Locate the files: COCO's own layout, one annotation file beside images/, or explicit paths, which win."""
    if coco.folder is not None:
        found = _files_in_folder(coco.folder, task, coco)
    elif coco.train_json is not None and coco.images is not None:
        found = CocoFiles(coco.train_json, coco.images, None, coco.images)
    else:
        raise DataError("give the dataset with --coco, or with --train-json, --val-json and --images.")
    files = CocoFiles(
        train_json=coco.train_json or found.train_json,
        train_images=coco.images or found.train_images,
        val_json=coco.val_json or (None if coco.train_json else found.val_json),
        val_images=coco.val_images or coco.images or found.val_images,
    )
    for file in (files.train_json, files.val_json):
        if file is not None and not file.is_file():
            raise DataError(f"no annotation file {file}. Give it with --train-json or --val-json.")
    for folder in (files.train_images, files.val_images):
        if not folder.is_dir():
            raise DataError(f"no image folder {folder}. Give it with --images or --val-images.")
    return files


def _files_in_folder(folder: Path, task: Task, coco: CocoSettings) -> CocoFiles:
    if not folder.is_dir():
        raise DataError(f"no folder {folder}; --coco takes the folder with COCO's annotations and images.")
    kind, annotations = _ANNOTATION_FILES[task], folder / "annotations"
    train, val = (sorted(annotations.glob(f"{kind}_{part}*.json")) for part in ("train", "val"))
    if len(train) > 1 or len(val) > 1:
        raise DataError(f"{annotations} has several {kind} files. Choose with --train-json, --val-json and --images.")
    if train and val:
        images = [folder / file.stem.removeprefix(f"{kind}_") for file in (train[0], val[0])]
        return CocoFiles(train[0], images[0], val[0], images[1])
    single = folder / f"{kind}.json"
    if not single.is_file() and coco.train_json is None:
        raise DataError(
            f"{folder} has neither annotations/{kind}_train*.json and annotations/{kind}_val*.json nor {kind}.json. "
            "Give the files with --train-json and --val-json."
        )
    return CocoFiles(single, folder / "images", None, folder / "images")


def load_coco(files: CocoFiles, task: Task) -> tuple[CocoDataset, CocoDataset]:
    """Read the training set, unfiltered, and the test set."""
    train = read_coco(files.train_json, files.train_images, task)
    if files.val_json is None:
        train, val = hold_out(train)
    else:
        val = read_coco(files.val_json, files.val_images, task)
        _check_same_categories(train, val)
    bare = [entry for image in val.images for entry in image.annotations if not entry.get("segmentation")]
    if task == "mask" and bare:
        raise DataError(f"{len(bare):,} test objects in {val.file} have no segmentation. Remove them from the file.")
    return train, val


def read_coco(file: Path, images: Path, task: Task) -> CocoDataset:
    """Read and check an annotation file; `images` is the folder of its images. Raises DataError."""
    try:
        content = json.loads(file.read_bytes())
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}.") from None
    except (ValueError, RecursionError):
        raise DataError(f"{file} is not valid JSON. Is it a complete annotation file in COCO format?") from None
    try:
        dataset = _parse(file, content, images, task)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise DataError(f"{file} is not an annotation file in COCO format: {reason}.") from None
    missing = [image.path for image in dataset.images if not image.path.is_file()]
    if missing:
        raise DataError(
            f"{len(missing):,} of the {len(dataset.images):,} images of {file} are missing, the first is {missing[0]}. "
            "Is --images the right folder?"
        )
    return dataset


def hold_out(dataset: CocoDataset) -> tuple[CocoDataset, CocoDataset]:
    """Split off one image in five, always the same ones, for testing."""
    order = permutation(0, DETECTION_HELD_OUT, 0, len(dataset.images)).tolist()
    held = set(order[: max(1, len(order) // _HELD_OUT)])
    train = tuple(image for row, image in enumerate(dataset.images) if row not in held)
    val = tuple(image for row, image in enumerate(dataset.images) if row in held)
    return replace(dataset, images=train), replace(dataset, images=val)


def training_subset(dataset: CocoDataset, task: Task) -> tuple[CocoDataset, list[str]]:
    """The images and objects that can be trained on, and notes on what was left out.

    Leaves out crowds, boxes with less than a pixel inside the image and, for masks, objects without a segmentation.
    Clips boxes to the image. Drops images without objects and, for keypoints, images without a visible keypoint.
    """
    images, outside, bare = [], 0, 0
    for image in dataset.images:
        kept = []
        for annotation in image.annotations:
            if annotation["iscrowd"]:
                continue
            box = clip_box(annotation["bbox"], image.width, image.height)
            if box is None:
                outside += 1
            elif task == "mask" and not annotation.get("segmentation"):
                bare += 1
            else:
                kept.append({**annotation, "bbox": box})
        if kept and (task != "keypoint" or any(annotation["num_keypoints"] > 0 for annotation in kept)):
            images.append(replace(image, annotations=tuple(kept)))
    notes = []
    if outside:
        notes.append(f"left out {pluralize(outside, 'box', 'boxes')} with less than a pixel inside the image")
    if bare:
        notes.append(f"left out {pluralize(bare, 'object')} without a segmentation")
    if not images:
        reason = f" ({notes[0]})" if notes else ""
        raise DataError(f"{dataset.file} has no image with an object to train on{reason}.")
    return replace(dataset, images=tuple(images)), notes


def overfit_subset(train: CocoDataset, dataset: CocoDataset, count: int) -> tuple[CocoDataset, CocoDataset]:
    """The same `count` images to train on and, with all their annotations, to test on."""
    if count > len(train.images):
        images = pluralize(len(train.images), "training image")
        raise DataError(f"--overfit {count} needs more images: {train.file} has {images}.")
    rows = sorted(permutation(0, DETECTION_OVERFIT, 0, len(train.images))[:count].tolist())
    chosen = tuple(train.images[row] for row in rows)
    ids = {image.id for image in chosen}
    tested = tuple(image for image in dataset.images if image.id in ids)
    return replace(train, images=chosen), replace(dataset, images=tested)


def clip_box(box: Sequence[float], width: int, height: int) -> list[float] | None:
    """COCO's [x, y, width, height] clipped to the image, or None if less than a pixel is left."""
    left, top = max(0.0, box[0]), max(0.0, box[1])
    right, bottom = min(float(width), box[0] + box[2]), min(float(height), box[1] + box[3])
    if right - left < _MIN_BOX_SIDE or bottom - top < _MIN_BOX_SIDE:
        return None
    return [left, top, right - left, bottom - top]


def _parse(file: Path, content: Any, folder: Path, task: Task) -> CocoDataset:
    if not isinstance(content, dict):
        raise ValueError("it is not an object with images, annotations and categories")
    categories = tuple(
        Category(int(entry["id"]), str(entry["name"]), tuple(map(str, entry.get("keypoints", ()))))
        for entry in sorted(content["categories"], key=lambda entry: int(entry["id"]))
    )
    known = {category.id: category for category in categories}
    if len(known) < len(categories) or not known:
        raise ValueError("it has no categories, or two with the same id")
    sizes = {int(entry["id"]): (int(entry["height"]), int(entry["width"])) for entry in content["images"]}
    if len(sizes) < len(content["images"]):
        raise ValueError("two images have the same id")
    annotations: dict[int, list[dict[str, Any]]] = {number: [] for number in sizes}
    for entry in content["annotations"]:
        image, category = entry["image_id"], entry["category_id"]
        if image not in sizes or category not in known:
            name = f"category {category}" if image in sizes else f"image {image}"
            raise ValueError(f"annotation {entry['id']} refers to unknown {name}")
        annotations[image].append(_parse_annotation(entry, known[category], sizes[image], task))
    images = []
    for entry in content["images"]:
        number = int(entry["id"])
        height, width = sizes[number]
        path = folder / str(entry["file_name"])
        images.append(CocoImage(number, path, width, height, tuple(annotations[number])))
    dataset = CocoDataset(file, tuple(images), categories)
    _check_task(dataset, task)
    return dataset


def _parse_annotation(entry: dict[str, Any], category: Category, size: tuple[int, int], task: Task) -> dict[str, Any]:
    """An annotation with optional fields filled in; `size` is its image's height and width."""
    box = _finite_numbers(entry["bbox"])
    if box is None or len(box) != 4:
        raise ValueError(f"the box of annotation {entry['id']} is not four numbers")
    crowd = int(entry.get("iscrowd", 0))
    filled = {**entry, "bbox": box, "iscrowd": crowd, "area": float(entry.get("area", box[2] * box[3]))}
    if task == "mask":
        filled["segmentation"] = _parse_segmentation(entry, size)
    if task == "keypoint":
        values = list(entry.get("keypoints") or [0] * (3 * len(category.keypoints)))
        if len(values) != 3 * len(category.keypoints):
            raise ValueError(
                f"annotation {entry['id']} has {len(values) / 3:g} keypoints, its category {category.name!r} has "
                f"{len(category.keypoints)}"
            )
        filled |= {"keypoints": values, "num_keypoints": sum(visible > 0 for visible in values[2::3])}
    return filled


def _parse_segmentation(entry: dict[str, Any], size: tuple[int, int]) -> Any:
    """A run-length encoding as it is, or the polygons with at least three points (possibly none)."""
    given = entry.get("segmentation") or []
    if isinstance(given, dict) and "counts" in given and "size" in given:
        if not _covers(given, size):
            raise ValueError(f"the run-length encoding of annotation {entry['id']} is not {size[1]}×{size[0]} pixels")
        return given
    polygons = [_finite_numbers(polygon) for polygon in given] if isinstance(given, list) else [None]
    if any(polygon is None for polygon in polygons):
        raise ValueError(f"the segmentation of annotation {entry['id']} is neither polygons nor run-length encoded")
    return [polygon for polygon in polygons if polygon is not None and len(polygon) >= 6 and len(polygon) % 2 == 0]


def _covers(encoding: dict[str, Any], size: tuple[int, int]) -> bool:
    """Whether a run-length encoding covers its image exactly; pycocotools would read past the end of a short one.

    Compressed counts are checked by pycocotools itself.
    """
    runs = encoding["counts"]
    if list(encoding["size"]) != list(size) or not isinstance(runs, list):
        return list(encoding["size"]) == list(size)
    return all(isinstance(run, int) and run >= 0 for run in runs) and sum(runs) == size[0] * size[1]


def _finite_numbers(values: Any) -> list[float] | None:
    """A list of finite numbers as floats, or None for anything else."""
    if not isinstance(values, list) or not all(isinstance(value, int | float) for value in values):
        return None
    return [float(value) for value in values] if all(map(math.isfinite, values)) else None


def _check_task(dataset: CocoDataset, task: Task) -> None:
    """Raise if a valid file has nothing for this task."""
    file, annotations = dataset.file, [entry for image in dataset.images for entry in image.annotations]
    if not annotations:
        raise DataError(f"{file} has {pluralize(len(dataset.images), 'image')} and no annotations.")
    if task == "mask" and not any(entry.get("segmentation") for entry in annotations):
        raise DataError(f"{file} has boxes and no masks. Use --task box, or a file with segmentations.")
    if task == "keypoint" and len({category.keypoints for category in dataset.categories}) > 1:
        raise DataError(f"the categories in {file} have different keypoints. Keep those of one kind.")
    if task == "keypoint" and not any(entry["num_keypoints"] for entry in annotations):
        raise DataError(f"{file} has no keypoints. Use --task box or mask, or a file such as person_keypoints.json.")


def _check_same_categories(train: CocoDataset, val: CocoDataset) -> None:
    ours, theirs = set(train.categories), set(val.categories)
    if ours != theirs:
        odd = min(ours ^ theirs, key=lambda category: category.id)
        where = train.file if odd in ours else val.file
        raise DataError(
            f"{train.file} and {val.file} have different categories: {odd.name!r} (id {odd.id}) is only in {where}."
        )
