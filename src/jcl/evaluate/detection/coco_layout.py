"""Which annotation files and folders of images a transfer uses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jcl.errors import DataError
from jcl.evaluate.detection.settings import CocoSettings, Task

_ANNOTATIONS = {"box": "instances", "mask": "instances", "keypoint": "person_keypoints"}


@dataclass(frozen=True)
class CocoFiles:
    """Annotations and images to train on and to test with; without `val_json` part of the former is held out."""

    train_json: Path
    train_images: Path
    val_json: Path | None
    val_images: Path


def coco_files(coco: CocoSettings, task: Task) -> CocoFiles:
    """Find the files: COCO's own layout (annotations/, train2017/, val2017/), one file beside images/, or as named."""
    found = _in_folder(Path(coco.folder), task, coco) if coco.folder is not None else _named(coco)
    for file in (found.train_json, found.val_json):
        if file is not None and not file.is_file():
            raise DataError(f"there is no annotation file {file}; name it with --train-json and --val-json.")
    for folder in (found.train_images, found.val_images):
        if not folder.is_dir():
            raise DataError(f"there is no folder of images {folder}; name it with --images.")
    return found


def _named(coco: CocoSettings) -> CocoFiles:
    if coco.train_json is None or coco.images is None:
        raise DataError("say where COCO lies with --coco, or give --train-json, --val-json and --images.")
    return _with_names(CocoFiles(Path(coco.train_json), Path(coco.images), None, Path(coco.images)), coco)


def _in_folder(folder: Path, task: Task, coco: CocoSettings) -> CocoFiles:
    if not folder.is_dir():
        raise DataError(
            f"there is no folder {folder}; --coco takes the folder that holds COCO's annotations and images."
        )
    kind = _ANNOTATIONS[task]
    train = sorted((folder / "annotations").glob(f"{kind}_train*.json"))
    val = sorted((folder / "annotations").glob(f"{kind}_val*.json"))
    if len(train) > 1 or len(val) > 1:
        raise DataError(
            f"{folder / 'annotations'} has several years of {kind}; choose with --train-json, --val-json and --images."
        )
    if train and val:
        parts = [folder / file.stem.removeprefix(f"{kind}_") for file in (train[0], val[0])]
        return _with_names(CocoFiles(train[0], parts[0], val[0], parts[1]), coco)
    alone = folder / f"{kind}.json"
    if not alone.is_file() and coco.train_json is None:
        raise DataError(
            f"{folder} holds neither annotations/{kind}_train*.json with annotations/{kind}_val*.json nor {kind}.json; "
            "name the files with --train-json and --val-json."
        )
    return _with_names(CocoFiles(alone, folder / "images", None, folder / "images"), coco)


def _with_names(found: CocoFiles, coco: CocoSettings) -> CocoFiles:
    """What is named by itself goes before what was found."""
    own = coco.images is not None
    return CocoFiles(
        train_json=Path(coco.train_json) if coco.train_json else found.train_json,
        train_images=Path(coco.images) if coco.images else found.train_images,
        val_json=Path(coco.val_json) if coco.val_json else None if coco.train_json else found.val_json,
        val_images=Path(coco.val_images or (coco.images if own and coco.images else found.val_images)),
    )
