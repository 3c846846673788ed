"""Datasets in COCO format: where their files are, reading and checking them, and what training uses of them."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, FiniteFloat, NonNegativeInt, PositiveInt, ValidationError, create_model

from jcl.console import pluralize
from jcl.errors import DataError, import_extra
from jcl.paths import read_file
from jcl.random import DETECTION_HELD_OUT, DETECTION_OVERFIT, permutation
from jcl.settings.detection import CocoSettings, Task

_ANNOTATION_FILES = {"box": "instances", "mask": "instances", "keypoint": "person_keypoints"}
_HELD_OUT = 5  # without a validation file, one image in five is held out
_MIN_BOX_SIDE = 1.0  # pixels; smaller boxes are not trained on
_POLYGON_REACH = 10  # sides of the image; pycocotools takes memory for each pixel of an outline, inside or not


@dataclass(frozen=True)
class CocoFiles:
    """Annotation files and image folders; without `val_json`, part of the training images is held out."""

    train_json: Path
    train_images: Path
    val_json: Path | None
    val_images: Path

    def checksums(self) -> dict[str, str]:
        """Of the annotation files."""
        files = {"train_json": self.train_json, "val_json": self.val_json}
        return {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items() if file is not None}


@dataclass(frozen=True)
class Category:
    """COCO's id of a class, its name and the names of its keypoints."""

    id: int
    name: Annotated[str, Field(coerce_numbers_to_str=True)]
    keypoints: tuple[str, ...] = ()


@dataclass(frozen=True)
class CocoImage:
    """An image and its annotations, with the fields that the task needs; missing `iscrowd` and `area` are filled in."""

    id: Annotated[int, Field(ge=-(2**63), lt=2**63)]
    path: Annotated[Path, Field(validation_alias="file_name")]
    width: PositiveInt
    height: PositiveInt
    annotations: tuple[dict[str, Any], ...] = ()


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

    def class_names(self, task: Task) -> list[str]:
        """What each class of the network detects, with the names of its keypoints if the task needs them."""
        points = [f" ({', '.join(each.keypoints)})" if task == "keypoint" else "" for each in self.categories]
        return [each.name + more for each, more in zip(self.categories, points, strict=True)]

    def ground_truth(self) -> dict[str, Any]:
        """The dataset as pycocotools takes it. Annotation ids start at 1: pycocotools treats id 0 as unmatched."""
        annotations = [annotation for image in self.images for annotation in image.annotations]
        return {
            "images": [{"id": image.id, "width": image.width, "height": image.height} for image in self.images],
            "annotations": [entry | {"id": number} for number, entry in enumerate(annotations, start=1)],
            "categories": [{"id": category.id, "name": category.name} for category in self.categories],
        }


_RunLengths = create_model("_RunLengths", size=list[int], counts=str | list[NonNegativeInt])
_FIELDS: dict[str, Any] = {
    "image_id": int,
    "category_id": int,
    "bbox": Annotated[list[FiniteFloat], Field(min_length=4, max_length=4)],
    "iscrowd": (int, 0),
    "area": (float | None, None),
}
_TASK_FIELDS: dict[Task, dict[str, Any]] = {  # what a task does not need is neither checked nor kept
    "box": {},
    "mask": {"segmentation": (list[list[FiniteFloat]] | _RunLengths | None, None)},
    "keypoint": {"keypoints": (list[FiniteFloat] | None, None)},
}


def coco_module(name: str) -> Any:
    """Import `pycocotools.NAME`, which is an optional dependency."""
    return import_extra(f"pycocotools.{name}", "coco", "`jcl detect`")


def coco_files(coco: CocoSettings, task: Task) -> CocoFiles:
    """Locate the files: COCO's own layout, or one annotation file next to images/. Explicit paths take precedence."""
    folder, kind = coco.folder, _ANNOTATION_FILES[task]
    if folder is not None:
        if folder.is_file():
            raise DataError(f"--coco takes a folder; for the file {folder} use --train-json and --images.")
        train, val = (sorted((folder / "annotations").glob(f"{kind}_{part}*.json")) for part in ("train", "val"))
        found = CocoFiles(folder / f"{kind}.json", folder / "images", None, folder / "images")
        if len(train) == len(val) == 1:
            images = [folder / file.stem.removeprefix(f"{kind}_") for file in (train[0], val[0])]
            found = CocoFiles(train[0], images[0], val[0], images[1])
    elif coco.train_json is not None and coco.images is not None:
        found = CocoFiles(coco.train_json, coco.images, None, coco.images)
    else:
        raise DataError("Give the dataset with --coco, or with --train-json, --val-json and --images.")
    files = CocoFiles(
        train_json=coco.train_json or found.train_json,
        train_images=coco.images or found.train_images,
        val_json=coco.val_json or (None if coco.train_json else found.val_json),
        val_images=coco.val_images or coco.images or found.val_images,
    )
    for file in (files.train_json, files.val_json):
        if file is not None and not file.is_file():
            usual = f"one annotations/{kind}_train*.json and {kind}_val*.json"
            raise DataError(f"No annotation file {file}, nor {usual}. Give it with --train-json or --val-json.")
    for image_folder in (files.train_images, files.val_images):
        if not image_folder.is_dir():
            raise DataError(f"No image folder {image_folder}. Give it with --images or --val-images.")
    return files


def load_coco(files: CocoFiles, task: Task) -> tuple[CocoDataset, CocoDataset]:
    """Read the training set, unfiltered, and the test set."""
    train = read_coco(files.train_json, files.train_images, task)
    if files.val_json is None:
        train, val = hold_out(train)
    else:
        val = read_coco(files.val_json, files.val_images, task)
        if train.categories != val.categories:
            raise DataError(f"{train.file} and {val.file} have different categories.")
        if not any(entry.get("num_keypoints", 1) for image in val.images for entry in image.annotations):
            raise DataError(f"{val.file} has nothing to test --task {task} on.")
    bare = [entry for image in val.images for entry in image.annotations if not entry.get("segmentation")]
    if task == "mask" and bare:
        raise DataError(f"{len(bare):,} test objects in {val.file} have no segmentation. Remove them from the file.")
    return train, val


def read_coco(file: Path, images: Path, task: Task) -> CocoDataset:
    """Read and check an annotation file; `images` is the folder of its images. Raises DataError."""
    annotation: Any = create_model("_Annotation", **_FIELDS, **_TASK_FIELDS[task])
    model = create_model("_Content", images=list[CocoImage], annotations=list[annotation], categories=list[Category])
    try:
        dataset = _parse(file, model.model_validate_json(read_file(file, DataError)), images, task)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"][:3])
        raise DataError(f"{file} is not an annotation file in COCO format: {place[1:]} {problem['msg']}.") from None
    except ValueError as error:
        raise DataError(f"{file} is not an annotation file in COCO format: {error}.") from None
    if task == "keypoint" and len({category.keypoints for category in dataset.categories}) > 1:
        raise DataError(f"The categories in {file} have different keypoints. Keep those of one kind.")
    missing = [image.path for image in dataset.images if not image.path.is_file()]
    if missing:
        count = f"{len(missing):,} of the {len(dataset.images):,} images of {file}"
        raise DataError(f"{count} are missing, the first is {missing[0]}. Is --images the right folder?")
    return dataset


def hold_out(dataset: CocoDataset) -> tuple[CocoDataset, CocoDataset]:
    """Split off one image in five, always the same ones, for testing."""
    held = _draw(DETECTION_HELD_OUT, dataset, max(1, len(dataset.images) // _HELD_OUT))
    return _select(dataset, held, False), _select(dataset, held, True)


def overfit_subset(train: CocoDataset, dataset: CocoDataset, count: int) -> tuple[CocoDataset, CocoDataset]:
    """The same `count` images to train on and, with all their annotations, to test on."""
    if count > len(train.images):
        images = pluralize(len(train.images), "training image")
        raise DataError(f"--overfit {count} needs more images: {train.file} has {images}.")
    drawn = _draw(DETECTION_OVERFIT, train, count)
    return _select(train, drawn, True), _select(dataset, drawn, True)


def _draw(stream: int, dataset: CocoDataset, count: int) -> set[int]:
    """Ids of random images, always the same ones."""
    rows = permutation(0, stream, 0, len(dataset.images))[:count].tolist()
    return {dataset.images[row].id for row in rows}


def _select(dataset: CocoDataset, ids: set[int], member: bool) -> CocoDataset:
    """The images with these ids or, if `member` is false, all others."""
    return replace(dataset, images=tuple(image for image in dataset.images if (image.id in ids) == member))


def training_subset(dataset: CocoDataset, task: Task) -> tuple[CocoDataset, list[str]]:
    """The images and objects that can be trained on, and notes on what was left out.

    Leaves out crowds, boxes with less than a pixel inside the image and, for masks, objects without a segmentation.
    Clips boxes to the image. Drops images without objects and, for keypoints, images without a visible keypoint.
    """
    images, left_out = [], 0
    for image in dataset.images:
        kept = []
        for annotation in image.annotations:
            if annotation["iscrowd"]:
                continue
            box = clip_box(annotation["bbox"], image.width, image.height)
            if box is None or (task == "mask" and not annotation.get("segmentation")):
                left_out += 1
            else:
                kept.append({**annotation, "bbox": box})
        if kept and (task != "keypoint" or any(annotation["num_keypoints"] > 0 for annotation in kept)):
            images.append(replace(image, annotations=tuple(kept)))
    needed = "a pixel inside the image" + (" and a segmentation" if task == "mask" else "")
    notes = [f"left out {pluralize(left_out, 'object')} without {needed}"] if left_out else []
    if not images:
        raise DataError(f"{dataset.file} has no image with an object to train on with --task {task}.")
    return replace(dataset, images=tuple(images)), notes


def clip_box(box: Sequence[float], width: int, height: int) -> list[float] | None:
    """COCO's [x, y, width, height] clipped to the image, or None if less than a pixel is left."""
    left, top = max(0.0, box[0]), max(0.0, box[1])
    right, bottom = min(float(width), box[0] + box[2]), min(float(height), box[1] + box[3])
    if right - left < _MIN_BOX_SIDE or bottom - top < _MIN_BOX_SIDE:
        return None
    return [left, top, right - left, bottom - top]


def _parse(file: Path, content: Any, folder: Path, task: Task) -> CocoDataset:
    """The images with their annotations from the content of a file; raises ValueError if it contradicts itself."""
    categories = {category.id: category for category in sorted(content.categories, key=attrgetter("id"))}
    if not categories or len(categories) < len(content.categories):
        raise ValueError("it has no categories, or two with the same id")
    images = {image.id: image for image in content.images}
    if len(images) < len(content.images):
        raise ValueError("two images have the same id")
    annotations: dict[int, list[dict[str, Any]]] = {number: [] for number in images}
    for row, entry in enumerate(content.annotations):
        image, category = images.get(entry.image_id), categories.get(entry.category_id)
        if image is None or category is None:
            unknown = f"category {entry.category_id}" if image else f"image {entry.image_id}"
            raise ValueError(f"annotations[{row}] refers to unknown {unknown}")
        values = vars(entry)
        if entry.area is None:
            values["area"] = entry.bbox[2] * entry.bbox[3]
        if task == "mask":
            values["segmentation"] = _usable_segmentation(entry.segmentation, image, row)
        if task == "keypoint":
            points = values["keypoints"] = entry.keypoints or [0.0] * (3 * len(category.keypoints))
            values["num_keypoints"] = sum(visible > 0 for visible in points[2::3])
            if len(points) != 3 * len(category.keypoints):
                counts = f"{len(points) / 3:g} keypoints instead of {len(category.keypoints)}"
                raise ValueError(f"annotations[{row}] of category {category.name!r} has {counts}")
        annotations[image.id].append(values)
    parsed = (
        replace(image, path=folder / image.path, annotations=tuple(annotations[image.id])) for image in content.images
    )
    return CocoDataset(file, tuple(parsed), tuple(categories.values()))


def _usable_segmentation(given: Any, image: CocoImage, row: int) -> Any:
    """A compressed run-length encoding, or the polygons with at least three points (possibly none).

    pycocotools reads past the end of run lengths that do not cover the image.
    """
    if given is None or isinstance(given, list):
        polygons = [polygon for polygon in given or [] if len(polygon) >= 6 and len(polygon) % 2 == 0]
        if any(abs(value) > _POLYGON_REACH * max(image.width, image.height) for each in polygons for value in each):
            raise ValueError(f"a polygon of annotations[{row}] is far outside its image")
        return polygons
    lengths = given.counts if isinstance(given.counts, list) else _run_lengths(given.counts)
    covered = sum(lengths) if min(lengths, default=0) >= 0 else None
    if given.size != [image.height, image.width] or covered != image.height * image.width:
        raise ValueError(f"the run-length encoding of annotations[{row}] is not {image.width}×{image.height} pixels")
    return coco_module("mask").frPyObjects({"size": given.size, "counts": lengths}, *given.size)


def _run_lengths(text: str) -> list[int]:
    """The run lengths in COCO's compressed encoding; [-1] if it is damaged.

    A character has five bits, the lowest first, and says whether more follow. From the fourth number on, they are
    differences to the last number but one.
    """
    lengths: list[int] = []
    value = shift = 0
    for code in text.encode():
        bits = code - 48
        if not 0 <= bits < 64 or shift > 60:
            return [-1]
        value |= (bits & 31) << shift
        shift += 5
        if not bits & 32:
            signed = value - (1 << shift) if bits & 16 else value
            lengths.append(signed + (lengths[-2] if len(lengths) > 2 else 0))
            value = shift = 0
    return [-1] if shift else lengths
