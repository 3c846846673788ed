"""Training batches of a COCO dataset: sampling, decoding, augmentation, and packing for the device.

Order, scale and flips are functions of (seed, iteration, image), so resumed training continues with exactly the
batches it would have had.
"""

import itertools
import math
import pickle
import re
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as vision

from jcl.data.decode import decode, open_image, to_planes
from jcl.distributed.group import ALONE, Ranks
from jcl.errors import DataError
from jcl.evaluate.detection.data import CocoDataset, CocoImage, coco_module
from jcl.random import DETECTION_AUGMENTATION, DETECTION_ORDER, hash_words, permutation, uniforms
from jcl.settings.detection import DetectionSettings
from jcl.signals import STOP_SIGNALS

PIXEL_CENTER = 0.5  # COCO gives the pixel of a keypoint; in box coordinates the center of pixel 3 is at 3.5

Key = tuple[int, int]  # row of an image and the iteration it is sampled for
Sample = dict[str, Tensor]  # `image` (3, h, w) uint8 and its target (see `make_target`)


@dataclass(frozen=True)
class Hardware:
    """Where a detector is trained and tested, and how many processes decode images for it."""

    device: torch.device
    precision: torch.dtype = torch.float32
    workers: int = 0
    ranks: Ranks = ALONE


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
    def pack(cls, samples: Sequence[Sample]) -> Self:
        values = {name: torch.cat([sample[name].flatten() for sample in samples]) for name in samples[0]}
        return cls(values, {name: [sample[name].shape for sample in samples] for name in values})

    def pin_memory(self) -> Self:
        return type(self)({name: value.pin_memory() for name, value in self.values.items()}, self.shapes)

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
    dataset: CocoDataset, settings: DetectionSettings, start: int, hardware: Hardware
) -> Generator[DetectionBatch]:
    """The parts of all batches from iteration `start` on; see `load_images`."""
    return load_images(
        dataset.images,
        TrainingSample(dataset, settings),
        hardware.workers,
        batch_sampler=batch_keys(dataset, settings, start, hardware.ranks),
        collate_fn=_collate,
        pin_memory=hardware.device.type == "cuda",
    )


def _collate(samples: list[Sample | DataError]) -> DetectionBatch | DataError:
    errors = (sample for sample in samples if isinstance(sample, DataError))
    return next(errors, None) or DetectionBatch.pack(samples)  # type: ignore[arg-type]


def load_images(
    images: Sequence[CocoImage], make: Callable[[CocoImage, int], Any], workers: int, **options: Any
) -> Generator[Any]:
    """What `make` returns for the keys of a DataLoader; close it to end its workers, which ignore signals."""
    if not images:  # a rank may have none to test
        return
    loader: DataLoader[Any] = DataLoader(
        PackedImages(images, make),
        num_workers=workers,
        worker_init_fn=_ignore_signals,
        generator=torch.Generator(),  # leaves the global generator alone
        **options,
    )
    for item in loader:
        if isinstance(item, DataError):
            raise item
        yield item


def _ignore_signals(_worker: int) -> None:
    """The training process handles signals to the process group, and needs its workers until it has stopped."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class PackedImages(Dataset[Any]):
    """Images with annotations, pickled into one tensor and unpickled one at a time.

    Workers share the parent's memory until it is written to, and reference counting writes to every object it
    visits. Hundreds of thousands of annotation objects would be copied into each worker; one tensor is not.
    """

    def __init__(self, images: Sequence[CocoImage], make: Callable[[CocoImage, int], Any]) -> None:
        pickled = [pickle.dumps(image) for image in images]
        self._block = torch.frombuffer(bytearray(b"".join(pickled)), dtype=torch.uint8)
        self._ends = torch.tensor([0, *map(len, pickled)]).cumsum(0)
        self._make = make

    def __getitem__(self, key: Key) -> Any:
        row, iteration = key
        start, end = self._ends[row : row + 2].tolist()
        try:
            return self._make(pickle.loads(self._block[start:end].numpy().tobytes()), iteration)
        except DataError as error:  # raised in the training process: from a worker it would come with its traceback
            return error


class TrainingSample:
    """Makes the image and target of an iteration, scaled and flipped at random."""

    def __init__(self, dataset: CocoDataset, settings: DetectionSettings) -> None:
        self._settings, self._class_of = settings, dataset.class_of
        self._flip_order = flip_order(dataset.keypoints)

    def __call__(self, image: CocoImage, iteration: int) -> Sample:
        short_side, flip = self.draw(image, iteration)
        height, width = scaled_size(image.height, image.width, short_side, self._settings.max_side)
        pixels: Tensor = vision.resize(read_image(image), [height, width])
        sample = {"image": pixels, **make_target(image, self._class_of, height, width, self._settings.task)}
        return flip_sample(sample, self._flip_order) if flip else sample

    def draw(self, image: CocoImage, iteration: int) -> tuple[int, bool]:
        """The short side and whether to flip, from (seed, iteration, image id)."""
        sides, view = self._settings.short_sides, torch.zeros(1, dtype=torch.int64)
        values = uniforms(self._settings.seed, DETECTION_AUGMENTATION, iteration, hash_words(image.id)[None], view, 2)
        size, flip = values[0].tolist()
        return sides[int(size * len(sides))], flip < 0.5


def read_image(image: CocoImage) -> Tensor:
    """The image (3, height, width) uint8 as annotated: EXIF orientation is applied only if the size then fits."""
    pixels = decode(image.path)
    if tuple(pixels.shape[-2:]) != (image.height, image.width):
        with open_image(image.path) as opened:
            pixels = to_planes(opened.convert("RGB"))
    height, width = pixels.shape[-2:]
    if (height, width) != (image.height, image.width):
        sizes = f"is {width}×{height} pixels, its annotations are for {image.width}×{image.height}"
        raise DataError(f"{image.path} {sizes}. Do the images belong to these annotations?")
    return pixels


def scaled_size(height: int, width: int, short_side: int, max_side: int) -> tuple[int, int]:
    """Height and width after scaling to `short_side`, or to less if the long side would exceed `max_side`."""
    scale = min(short_side / min(height, width), max_side / max(height, width))
    return max(1, round(height * scale)), max(1, round(width * scale))


def flip_order(names: Sequence[str]) -> list[int]:
    """The source of each keypoint in a flipped image: `left_*` and `right_*` are swapped."""
    swap = {"left": "right", "right": "left"}
    others = [re.sub("left|right", lambda side: swap[side[0]], name, count=1) for name in names]
    return [names.index(other) if other in names else place for place, other in enumerate(others)]


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
    scale = torch.tensor([width / image.width, height / image.height], dtype=torch.float64)
    annotations = image.annotations
    corners = torch.tensor([annotation["bbox"] for annotation in annotations], dtype=torch.float64)
    corners[:, 2:] += corners[:, :2]
    target = {
        "boxes": (corners * scale.repeat(2)).float(),
        "labels": torch.tensor([class_of[annotation["category_id"]] for annotation in annotations]),
    }
    if task == "mask":
        masks = [_rasterize(annotation["segmentation"], scale, height, width) for annotation in annotations]
        target["masks"] = torch.stack(masks)
    if task == "keypoint":
        points = torch.tensor([annotation["keypoints"] for annotation in annotations], dtype=torch.float32)
        points = points.view(len(annotations), -1, 3)
        points[..., :2] = (points[..., :2] + PIXEL_CENTER) * scale.float()
        target["keypoints"] = points
    return target


def _rasterize(segmentation: Any, scale: Tensor, height: int, width: int) -> Tensor:
    """Polygons or a run-length encoding as a mask (height, width) of 0 and 1."""
    coder = coco_module("mask")
    if isinstance(segmentation, dict):
        mask = torch.from_numpy(coder.decode(segmentation))[None]
        resized: Tensor = vision.resize(mask, [height, width], interpolation=InterpolationMode.NEAREST_EXACT)
        return resized[0]
    polygons = [
        (torch.tensor(polygon, dtype=torch.float64).view(-1, 2) * scale).flatten().tolist() for polygon in segmentation
    ]
    return torch.from_numpy(coder.decode(coder.merge(coder.frPyObjects(polygons, height, width))))
