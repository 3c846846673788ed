"""Training batches of a COCO dataset: sampling, decoding, augmentation, and packing for the device.

Order, scale and flips are functions of (seed, iteration, image), so resumed training continues with exactly the
batches it would have had.
"""

from __future__ import annotations

import itertools
import math
import pickle
import signal
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as vision

from jcl.data.decode import decode, open_image
from jcl.distributed.group import ALONE, Ranks
from jcl.errors import DataError
from jcl.evaluate.detection.data import CocoDataset, CocoImage, coco_module
from jcl.random import DETECTION_AUGMENTATION, DETECTION_ORDER, hash_words, permutation, uniforms
from jcl.settings.detection import DetectionSettings

PIXEL_CENTER = 0.5
"""COCO gives the pixel of a keypoint; in box coordinates the center of pixel 3 is at 3.5."""


Key = tuple[int, int]
"""Row of an image and the iteration it is sampled for."""
Sample = dict[str, Tensor]
"""`image` (3, h, w) uint8 and its target as torchvision's detectors take it (see `make_target`)."""


def grouped_batches(wide: Sequence[bool], batch_size: int, seed: int) -> Iterator[list[int]]:
    """Endless batches of rows, each of wide or of tall images only, which keeps padding small.

    Every image comes once per epoch, in an order of (seed, epoch). Incomplete batches wait for the next epoch.
    """
    waiting: tuple[list[int], list[int]] = ([], [])
    for epoch in itertools.count():
        for row in permutation(seed, DETECTION_ORDER, epoch, len(wide)).tolist():
            group = waiting[wide[row]]
            group.append(row)
            if len(group) == batch_size:
                yield group.copy()
                group.clear()


def batch_keys(
    dataset: CocoDataset, settings: DetectionSettings, start: int, ranks: Ranks = ALONE
) -> Iterator[list[Key]]:
    """This rank's images of each part of each batch, from iteration `start` to the last."""
    wide = [image.width > image.height for image in dataset.images]
    batches = grouped_batches(wide, settings.batch_size, settings.seed)
    for iteration, rows in enumerate(itertools.islice(batches, start, settings.iterations), start=start):
        for part in torch.tensor(rows).view(settings.accumulate, -1):
            yield [(row, iteration) for row in ranks.share(part).tolist()]


@dataclass(frozen=True)
class DetectionBatch:
    """Samples with all tensors of a kind concatenated: workers send few large tensors instead of many small ones."""

    values: dict[str, Tensor]
    shapes: dict[str, list[torch.Size]]

    @classmethod
    def pack(cls, samples: Sequence[Sample]) -> DetectionBatch:
        values = {name: torch.cat([sample[name].flatten() for sample in samples]) for name in samples[0]}
        return cls(values, {name: [sample[name].shape for sample in samples] for name in values})

    def pin_memory(self) -> DetectionBatch:
        return DetectionBatch({name: value.pin_memory() for name, value in self.values.items()}, self.shapes)

    def unpack(self, device: torch.device) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
        """Images (3, h, w) in 0..1 and targets, as torchvision's detectors take them."""
        columns: dict[str, list[Tensor]] = {}
        for name, value in self.values.items():
            shapes = self.shapes[name]
            parts = torch.split(value.to(device, non_blocking=True), [math.prod(shape) for shape in shapes])
            columns[name] = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        images = [image.float() / 255 for image in columns.pop("image")]
        return images, [dict(zip(columns, target, strict=True)) for target in zip(*columns.values(), strict=True)]


def training_batches(
    dataset: CocoDataset,
    settings: DetectionSettings,
    start: int,
    *,
    workers: int,
    device: torch.device,
    ranks: Ranks = ALONE,
) -> Generator[DetectionBatch]:
    """The parts of all batches from iteration `start` on. Raises DataError for an image that cannot be read.

    Close the generator to end its workers, which ignore signals.
    """
    loader = DataLoader(
        TrainingImages(dataset, settings),
        batch_sampler=batch_keys(dataset, settings, start, ranks),
        num_workers=workers,
        collate_fn=_collate,
        worker_init_fn=ignore_signals,
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # leaves the global generator alone
    )
    for batch in loader:
        if isinstance(batch, str):
            raise DataError(batch)
        yield batch


def _collate(samples: list[Sample | str]) -> DetectionBatch | str:
    """A batch, or the error message of a sample that cannot be read."""
    messages = (sample for sample in samples if isinstance(sample, str))
    return next(messages, None) or DetectionBatch.pack([sample for sample in samples if not isinstance(sample, str)])


def ignore_signals(_worker: int) -> None:
    """The training process handles signals to the process group, and needs its workers until it has stopped."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


class TrainingImages(Dataset[Sample | str]):
    """Images with targets, scaled and flipped at random; an error message for an image that cannot be read."""

    def __init__(self, dataset: CocoDataset, settings: DetectionSettings) -> None:
        self.images, self.settings = PackedImages(dataset.images), settings
        self._class_of = dataset.class_of
        self._flip_order = flip_order(dataset.keypoints)

    def __getitem__(self, key: Key) -> Sample | str:
        row, iteration = key
        image = self.images[row]
        short_side, flip = self.draw(image, iteration)
        try:
            pixels = read_image(image)
        except DataError as error:  # raised in the training process: from a worker it would come with its traceback
            return str(error)
        height, width = scaled_size(image.height, image.width, short_side, self.settings.max_side)
        target = make_target(image, self._class_of, height, width, self.settings.task)
        sample = {"image": resize(pixels, height, width), **target}
        return flip_sample(sample, self._flip_order) if flip else sample

    def __len__(self) -> int:
        return len(self.images)

    def draw(self, image: CocoImage, iteration: int) -> tuple[int, bool]:
        """The short side and whether to flip, from (seed, iteration, image id)."""
        sides = self.settings.short_sides
        sample = hash_words(image.id)[None]
        view = torch.zeros(1, dtype=torch.int64)
        values = uniforms(self.settings.seed, DETECTION_AUGMENTATION, iteration, sample, view, 2)
        size, flip = values[0].tolist()
        return sides[int(size * len(sides))], flip < 0.5


class PackedImages:
    """Images with annotations, pickled into one tensor and unpickled one at a time.

    Workers share the parent's memory until it is written to, and reference counting writes to every object it
    visits. Hundreds of thousands of annotation objects would be copied into each worker; one tensor is not.
    """

    def __init__(self, images: Sequence[CocoImage]) -> None:
        pickled = [pickle.dumps(image) for image in images]
        self._block = torch.frombuffer(bytearray(b"".join(pickled)), dtype=torch.uint8)
        self._ends = torch.tensor([len(one) for one in pickled]).cumsum(0)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, row: int) -> CocoImage:
        start = int(self._ends[row - 1]) if row else 0
        image: CocoImage = pickle.loads(self._block[start : int(self._ends[row])].numpy().tobytes())
        return image


def read_image(image: CocoImage) -> Tensor:
    """The image as it was annotated, (3, height, width) uint8.

    Applies the EXIF orientation only if the result has the annotated size: some datasets annotate the stored pixels.
    """
    pixels = decode(image.path)
    if tuple(pixels.shape[-2:]) != (image.height, image.width):
        with open_image(image.path) as opened:
            pixels = torch.from_numpy(np.array(opened.convert("RGB"))).permute(2, 0, 1).contiguous()
    height, width = pixels.shape[-2:]
    if (height, width) != (image.height, image.width):
        raise DataError(
            f"{image.path} is {width}×{height} pixels, its annotations are for {image.width}×{image.height}. "
            "Do the images belong to these annotations?"
        )
    return pixels


def scaled_size(height: int, width: int, short_side: int, max_side: int) -> tuple[int, int]:
    """Height and width after scaling to `short_side`, or to less if the long side would exceed `max_side`."""
    scale = min(short_side / min(height, width), max_side / max(height, width))
    return max(1, round(height * scale)), max(1, round(width * scale))


def resize(image: Tensor, height: int, width: int) -> Tensor:
    """Bilinear with antialiasing, (3, h, w) -> (3, height, width)."""
    if image.shape[-2:] == (height, width):
        return image
    resized: Tensor = vision.resize(image, [height, width], antialias=True)
    return resized


def flip_order(names: Sequence[str]) -> list[int]:
    """The source of each keypoint in a flipped image: `left_*` and `right_*` are swapped."""
    places = {name: place for place, name in enumerate(names)}
    return [places.get(_swap_sides(name), place) for place, name in enumerate(names)]


def _swap_sides(name: str) -> str:
    for side, other in (("left", "right"), ("right", "left")):
        if side in name:
            return name.replace(side, other, 1)
    return name


def flip_sample(sample: Sample, order: Sequence[int]) -> Sample:
    """Mirror the image and its target horizontally. Coordinates are continuous: x becomes width - x."""
    width, boxes = sample["image"].shape[-1], sample["boxes"]
    flipped = sample | {"image": sample["image"].flip(-1)}
    flipped["boxes"] = torch.stack([width - boxes[:, 2], boxes[:, 1], width - boxes[:, 0], boxes[:, 3]], 1)
    if "masks" in sample:
        flipped["masks"] = sample["masks"].flip(-1)
    if "keypoints" in sample:
        points = sample["keypoints"][:, list(order)].clone()
        points[..., 0] = torch.where(points[..., 2] > 0, width - points[..., 0], points[..., 0])
        flipped["keypoints"] = points
    return flipped


def make_target(image: CocoImage, class_of: dict[int, int], height: int, width: int, task: str) -> dict[str, Tensor]:
    """The annotations for the image resized to height × width, as torchvision's detectors take them.

    `boxes` (n, 4) are corners, `labels` (n,) classes from 1, `masks` (n, height, width) uint8 and `keypoints`
    (n, k, 3) x, y and visibility. Polygons are scaled before they are rasterized, so they are not resampled.
    """
    x_scale, y_scale = width / image.width, height / image.height
    annotations = image.annotations
    corners = torch.tensor([annotation["bbox"] for annotation in annotations], dtype=torch.float64)
    corners[:, 2:] += corners[:, :2]
    target = {
        "boxes": (corners * torch.tensor([x_scale, y_scale, x_scale, y_scale], dtype=torch.float64)).float(),
        "labels": torch.tensor([class_of[annotation["category_id"]] for annotation in annotations]),
    }
    if task == "mask":
        masks = [_rasterize(annotation["segmentation"], image, height, width) for annotation in annotations]
        target["masks"] = torch.from_numpy(np.stack(masks))
    if task == "keypoint":
        points = torch.tensor([annotation["keypoints"] for annotation in annotations], dtype=torch.float32)
        points = points.view(len(annotations), -1, 3)
        points[..., :2] += PIXEL_CENTER
        target["keypoints"] = points * torch.tensor([x_scale, y_scale, 1.0])
    return target


def _rasterize(segmentation: Any, image: CocoImage, height: int, width: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Polygons or a run-length encoding as a mask (height, width) of 0 and 1."""
    coder = coco_module("mask")
    if isinstance(segmentation, dict):
        mask = torch.from_numpy(coder.decode(compressed(segmentation)))[None]
        resized: Tensor = vision.resize(mask, [height, width], interpolation=InterpolationMode.NEAREST_EXACT)
        return resized[0].numpy()
    factors = (width / image.width, height / image.height)
    polygons = [[value * factors[place % 2] for place, value in enumerate(polygon)] for polygon in segmentation]
    drawn: np.ndarray[Any, np.dtype[np.uint8]] = coder.decode(coder.merge(coder.frPyObjects(polygons, height, width)))
    return drawn


def compressed(encoding: dict[str, Any]) -> dict[str, Any]:
    """A run-length encoding with its counts compressed, as pycocotools decodes it."""
    if isinstance(encoding["counts"], list):
        encoding = coco_module("mask").frPyObjects(encoding, *encoding["size"])
    return encoding
