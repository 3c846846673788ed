"""Annotation files in COCO's format: read, checked, and made ready for training and for evaluation."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jcl.console import pluralize
from jcl.errors import DataError
from jcl.evaluate.detection.coco_layout import CocoFiles
from jcl.evaluate.detection.settings import Task
from jcl.random import permutation

_HELD_OUT = 5  # one image in so many is held out where there is no annotation file to test with
_HELD_OUT_STREAM = 0x68656C64
_FEW_STREAM = 0x66657700
_LEAST_SIDE = 1.0  # pixels of a box worth training on


@dataclass(frozen=True)
class Category:
    """A class: COCO's id of it, its name and the names of its key points."""

    id: int
    name: str
    keypoints: tuple[str, ...] = ()


@dataclass(frozen=True)
class CocoImage:
    """An image and what is annotated in it, as in the file but with `iscrowd` and `area` filled in."""

    id: int
    path: Path
    width: int
    height: int
    annotations: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class CocoSet:
    """The images of an annotation file. Class c of a network, from 1 on, is `categories[c - 1]`; 0 is background."""

    file: Path
    images: tuple[CocoImage, ...]
    categories: tuple[Category, ...]

    @property
    def class_of(self) -> dict[int, int]:
        """From COCO's category ids to the network's classes."""
        return {category.id: number for number, category in enumerate(self.categories, start=1)}

    @property
    def keypoints(self) -> tuple[str, ...]:
        """The names of the key points, which all categories share."""
        return self.categories[0].keypoints

    def ground_truth(self) -> dict[str, Any]:
        """The set as COCO's own code takes it, which reads an annotation's number 0 as none: they count from 1."""
        annotations = [annotation for image in self.images for annotation in image.annotations]
        return {
            "images": [{"id": image.id, "width": image.width, "height": image.height} for image in self.images],
            "annotations": [entry | {"id": number} for number, entry in enumerate(annotations, start=1)],
            "categories": [{"id": category.id, "name": category.name} for category in self.categories],
        }


def open_coco(files: CocoFiles, task: Task) -> tuple[CocoSet, CocoSet]:
    """The set to train on, as it is in the file, and the one to test with."""
    train = read_coco(files.train_json, files.train_images, task)
    if files.val_json is None:
        train, val = hold_out(train)
    else:
        val = read_coco(files.val_json, files.val_images, task)
        _demand_same_categories(train, val)
    bare = [entry for image in val.images for entry in image.annotations if not entry.get("segmentation")]
    if task == "mask" and bare:
        raise DataError(
            f"{len(bare):,} objects to test with in {val.file} have no outline; leave them out of the file."
        )
    return train, val


def read_coco(file: Path, images: Path, task: Task) -> CocoSet:
    """Read an annotation file; whatever is wrong with it, or images that are missing, becomes a sentence."""
    try:
        content = json.loads(file.read_bytes())
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError):
        raise DataError(f"{file} is not valid JSON; is it a whole annotation file in COCO's format?") from None
    try:
        found = _parse(file, content, images, task)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise DataError(f"{file} is not an annotation file in COCO's format: {reason}.") from None
    _demand_images(found)
    return found


def hold_out(whole: CocoSet) -> tuple[CocoSet, CocoSet]:
    """Part a set: one image in five, always the same ones, to test with and the others to train on."""
    order = permutation(0, _HELD_OUT_STREAM, 0, len(whole.images)).tolist()
    held = set(order[: max(1, len(order) // _HELD_OUT)])
    train = tuple(image for row, image in enumerate(whole.images) if row not in held)
    val = tuple(image for row, image in enumerate(whole.images) if row in held)
    return replace(whole, images=train), replace(whole, images=val)


def for_training(whole: CocoSet, task: Task) -> tuple[CocoSet, list[str]]:
    """What can be trained on, and sentences on what was left out.

    Crowds are no single objects and are left out, as are boxes of which less than a pixel lies inside the image and,
    for masks, objects without an outline. Boxes are cut at the image's edge. Images with nothing left are dropped;
    for key points so are those without a visible one.
    """
    images, outside, shapeless = [], 0, 0
    for image in whole.images:
        kept = []
        for annotation in image.annotations:
            if annotation["iscrowd"]:
                continue
            box = clipped_box(annotation["bbox"], image.width, image.height)
            if box is None:
                outside += 1
            elif task == "mask" and not annotation.get("segmentation"):
                shapeless += 1
            else:
                kept.append({**annotation, "bbox": box})
        if kept and (task != "keypoint" or any(annotation["num_keypoints"] > 0 for annotation in kept)):
            images.append(replace(image, annotations=tuple(kept)))
    notes = []
    if outside:
        notes.append(f"{outside:,} boxes in {whole.file} have less than a pixel inside their image and were left out.")
    if shapeless:
        notes.append(f"{shapeless:,} objects in {whole.file} have no outline and were left out.")
    if not images:
        raise DataError(
            f"none of the {pluralize(len(whole.images), 'image')} of {whole.file} has an object inside it to train on"
            + (f" ({notes[0].rstrip('.')})." if notes else ".")
        )
    return replace(whole, images=tuple(images)), notes


def only_few(train: CocoSet, whole: CocoSet, count: int) -> tuple[CocoSet, CocoSet]:
    """The same few images, always the same ones, to train on and, with all their annotations, to test with."""
    if count > len(train.images):
        raise DataError(
            f"{train.file} has {pluralize(len(train.images), 'image')} to train on, fewer than the {count:,} wanted."
        )
    rows = sorted(permutation(0, _FEW_STREAM, 0, len(train.images))[:count].tolist())
    few = tuple(train.images[row] for row in rows)
    chosen = {image.id for image in few}
    return replace(train, images=few), replace(whole, images=tuple(one for one in whole.images if one.id in chosen))


def clipped_box(box: Sequence[float], width: int, height: int) -> list[float] | None:
    """COCO's [x, y, width, height] cut at the image's edge, or None where less than a pixel is left."""
    left, top = max(0.0, box[0]), max(0.0, box[1])
    right, bottom = min(float(width), box[0] + box[2]), min(float(height), box[1] + box[3])
    if right - left < _LEAST_SIDE or bottom - top < _LEAST_SIDE:
        return None
    return [left, top, right - left, bottom - top]


def _parse(file: Path, content: Any, folder: Path, task: Task) -> CocoSet:
    if not isinstance(content, dict):
        raise ValueError("it holds no object with images, annotations and categories")
    categories = tuple(
        Category(int(entry["id"]), str(entry["name"]), tuple(map(str, entry.get("keypoints", ()))))
        for entry in sorted(content["categories"], key=lambda entry: int(entry["id"]))
    )
    known = {category.id: category for category in categories}
    if len(known) < len(categories) or not known:
        raise ValueError("its categories are empty or two share an id")
    of_image: dict[int, list[dict[str, Any]]] = {int(entry["id"]): [] for entry in content["images"]}
    if len(of_image) < len(content["images"]):
        raise ValueError("two images share an id")
    sizes = {int(entry["id"]): (int(entry["height"]), int(entry["width"])) for entry in content["images"]}
    for entry in content["annotations"]:
        if entry["image_id"] not in of_image:
            raise ValueError(f"annotation {entry['id']} is of image {entry['image_id']}, which is not listed")
        if entry["category_id"] not in known:
            raise ValueError(f"annotation {entry['id']} is of category {entry['category_id']}, which is not listed")
        size = sizes[entry["image_id"]]
        of_image[entry["image_id"]].append(_annotation(entry, known[entry["category_id"]], size, task))
    images = tuple(
        CocoImage(number, folder / str(entry["file_name"]), sizes[number][1], sizes[number][0], tuple(of_image[number]))
        for entry in content["images"]
        for number in [int(entry["id"])]
    )
    found = CocoSet(file, images, categories)
    _demand_fit(found, task)
    return found


def _annotation(entry: dict[str, Any], category: Category, size: tuple[int, int], task: Task) -> dict[str, Any]:
    """An annotation with what its writer may have left to be understood; `size` is its image's height and width."""
    box = _numbers(entry["bbox"])
    if box is None or len(box) != 4:
        raise ValueError(f"the box of annotation {entry['id']} is not four numbers")
    crowd = int(entry.get("iscrowd", 0))
    filled = {**entry, "bbox": box, "iscrowd": crowd, "area": float(entry.get("area", box[2] * box[3]))}
    if task == "mask":
        filled["segmentation"] = _outline(entry, size)
    if task == "keypoint":
        values = list(entry.get("keypoints") or [0] * (3 * len(category.keypoints)))
        if len(values) != 3 * len(category.keypoints):
            raise ValueError(
                f"annotation {entry['id']} has {len(values) / 3:g} key points and its category "
                f"{category.name!r} has {len(category.keypoints)}"
            )
        filled |= {"keypoints": values, "num_keypoints": sum(visible > 0 for visible in values[2::3])}
    return filled


def _outline(entry: dict[str, Any], size: tuple[int, int]) -> Any:
    """A run-length code as it is, or the polygons that have an area; nothing where there are none."""
    given = entry.get("segmentation") or []
    if isinstance(given, dict) and "counts" in given and "size" in given:
        if not _covers(given, size):
            raise ValueError(
                f"the run-length code of annotation {entry['id']} is not of {size[1]}×{size[0]} pixels, as its image is"
            )
        return given
    parts = [_numbers(part) for part in given] if isinstance(given, list) else [None]
    if any(part is None for part in parts):
        raise ValueError(f"the outline of annotation {entry['id']} is neither polygons nor a run-length code")
    return [part for part in parts if part is not None and len(part) >= 6 and len(part) % 2 == 0]


def _covers(code: dict[str, Any], size: tuple[int, int]) -> bool:
    """Whether a run-length code tells of each pixel of its image; COCO's own code makes up those it does not tell of.

    Runs that are packed into text are left to that code, which refuses too many of them.
    """
    runs = code["counts"]
    if not isinstance(runs, list):
        return list(code["size"]) == list(size)
    whole = all(isinstance(run, int) and run >= 0 for run in runs)
    return list(code["size"]) == list(size) and whole and sum(runs) == size[0] * size[1]


def _numbers(values: Any) -> list[float] | None:
    """A list of finite numbers, or None where it is something else."""
    if not isinstance(values, list) or not all(isinstance(value, int | float) for value in values):
        return None
    return [float(value) for value in values] if all(map(math.isfinite, values)) else None


def _demand_fit(found: CocoSet, task: Task) -> None:
    """Refuse a file that is whole but not for this task."""
    if not found.images or not any(image.annotations for image in found.images):
        raise DataError(
            f"{found.file} has {pluralize(len(found.images), 'image')} and no annotations in them; nothing to do."
        )
    annotations = [annotation for image in found.images for annotation in image.annotations]
    if task == "mask" and not any(annotation.get("segmentation") for annotation in annotations):
        raise DataError(f"{found.file} has boxes and no masks; use --task box, or a file with outlines.")
    if task == "keypoint":
        if len({category.keypoints for category in found.categories}) > 1:
            raise DataError(f"the categories in {found.file} have different key points; keep those of one kind.")
        if not found.keypoints or not any(annotation["num_keypoints"] for annotation in annotations):
            raise DataError(
                f"{found.file} has no key points; use --task box or mask, or a file such as person_keypoints.json."
            )


def _demand_images(found: CocoSet) -> None:
    missing = [image.path for image in found.images if not image.path.is_file()]
    if missing:
        raise DataError(
            f"{len(missing):,} of the {len(found.images):,} images of {found.file} are missing, the first is "
            f"{missing[0]}; is --images the right folder?"
        )


def _demand_same_categories(train: CocoSet, val: CocoSet) -> None:
    ours, theirs = set(train.categories), set(val.categories)
    if ours == theirs:
        return
    odd = min(ours ^ theirs, key=lambda category: category.id)
    where = train.file if odd in ours else val.file
    raise DataError(
        f"{train.file} and {val.file} have different categories: {odd.name!r} (id {odd.id}) is in {where} alone; "
        f"categories with the same ids and names are needed in both."
    )
