"""Batches of images of all sizes: which images, how they are read, and how they travel to the device.

Order, scale and mirroring are functions of (seed, iteration, image), so training that was stopped goes on with exactly
the batches it would have had.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from jcl.data.decode import decode, open_image
from jcl.distributed.group import ALONE, Ranks
from jcl.errors import DataError
from jcl.evaluate.detection.coco_data import CocoImage, CocoSet
from jcl.evaluate.detection.packed import PackedImages
from jcl.evaluate.detection.settings import DetectionSettings
from jcl.evaluate.detection.transforms import flip_order, make_target, mirrored, scale, scaled_size
from jcl.random import hash_words, permutation, uniforms

_ORDER_STREAM = 0x6F72646572
_CHANGE_STREAM = 0x666C6970
Key = tuple[int, int]
"""Row of an image and iteration for which it is drawn."""


def grouped_batches(wide: Sequence[bool], batch_size: int, seed: int) -> Iterator[list[int]]:
    """Rows of images in batches without end, each batch of wide images or of tall ones, so that little is padding.

    Every image comes once an epoch in an order of (seed, epoch); what does not fill a batch waits for the next epoch.
    """
    waiting: tuple[list[int], list[int]] = ([], [])
    for epoch in itertools.count():
        for row in permutation(seed, _ORDER_STREAM, epoch, len(wide)).tolist():
            group = waiting[wide[row]]
            group.append(row)
            if len(group) == batch_size:
                yield group.copy()
                group.clear()


def batch_keys(images: CocoSet, settings: DetectionSettings, start: int, ranks: Ranks = ALONE) -> Iterator[list[Key]]:
    """For each iteration from `start` to the last and each part of its batch, this rank's images."""
    wide = [image.width > image.height for image in images.images]
    batches = grouped_batches(wide, settings.batch_size, settings.seed)
    for iteration, rows in enumerate(itertools.islice(batches, start, settings.iterations), start=start):
        parts = torch.tensor(rows).view(settings.accumulate, -1)
        for part in parts:
            yield [(row, iteration) for row in ranks.share(part).tolist()]


@dataclass(frozen=True)
class DetectionBatch:
    """n images and their targets, each kind end to end in one tensor, so that a batch travels in few pieces."""

    pixels: Tensor  # uint8, the images' values one after the other
    sizes: Tensor  # (n, 2) height and width
    counts: Tensor  # (n,) objects of each image
    boxes: Tensor  # (objects, 4)
    labels: Tensor  # (objects,)
    masks: Tensor  # uint8, the masks' values one after the other; empty without masks
    keypoints: Tensor  # (objects, k, 3); k = 0 without key points

    def pin_memory(self) -> DetectionBatch:
        return DetectionBatch(*(getattr(self, field.name).pin_memory() for field in fields(self)))

    def unpacked(self, device: torch.device) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
        """Images (3, h, w) in 0..1 and targets, as torchvision's detectors take them."""
        counts = self.counts.tolist()
        sizes = [(int(height), int(width)) for height, width in self.sizes.tolist()]
        pixels = self.pixels.to(device, non_blocking=True)
        flat = torch.split(pixels, [3 * height * width for height, width in sizes])
        images = [part.view(3, *size).float() / 255 for part, size in zip(flat, sizes, strict=True)]
        boxes = torch.split(self.boxes.to(device, non_blocking=True), counts)
        labels = torch.split(self.labels.to(device, non_blocking=True), counts)
        targets = [{"boxes": box, "labels": label} for box, label in zip(boxes, labels, strict=True)]
        if len(self.masks):
            areas = [count * height * width for count, (height, width) in zip(counts, sizes, strict=True)]
            masks = torch.split(self.masks.to(device, non_blocking=True), areas)
            for target, mask, size in zip(targets, masks, sizes, strict=True):
                target["masks"] = mask.view(-1, *size)
        if self.keypoints.shape[1]:
            points = torch.split(self.keypoints.to(device, non_blocking=True), counts)
            for target, point in zip(targets, points, strict=True):
                target["keypoints"] = point
        return images, targets


Sample = tuple[Tensor, dict[str, Tensor]]


def pack(samples: list[Sample | str]) -> DetectionBatch | str:
    """Put images (3, h, w) and their targets end to end; a sentence on an image that cannot be read goes before all."""
    good = []
    for sample in samples:
        if isinstance(sample, str):
            return sample
        good.append(sample)
    targets = [target for _, target in good]
    none, no_points = torch.zeros(0, dtype=torch.uint8), torch.zeros(0, 0, 3)
    return DetectionBatch(
        pixels=torch.cat([image.flatten() for image, _ in good]),
        sizes=torch.tensor([tuple(image.shape[-2:]) for image, _ in good]),
        counts=torch.tensor([len(target["boxes"]) for target in targets]),
        boxes=torch.cat([target["boxes"] for target in targets]),
        labels=torch.cat([target["labels"] for target in targets]),
        masks=torch.cat([target["masks"].flatten() for target in targets]) if "masks" in targets[0] else none,
        keypoints=torch.cat([target["keypoints"] for target in targets]) if "keypoints" in targets[0] else no_points,
    )


class TrainingImages(Dataset[Sample | str]):
    """Images with targets, scaled and mirrored as the draw of (seed, iteration, image) says."""

    def __init__(self, images: CocoSet, settings: DetectionSettings) -> None:
        self.images, self.settings = PackedImages(images.images), settings
        self._class_of = images.class_of
        self._order = flip_order(images.keypoints)
        self._masks = settings.task == "mask"
        self._keypoints = len(images.keypoints) if settings.task == "keypoint" else 0

    def __getitem__(self, key: Key) -> Sample | str:
        row, iteration = key
        image = self.images[row]
        short_side, mirror = self.draw(image, iteration)
        try:
            pixels = read_image(image)
        except DataError as error:  # raised where training happens: a worker's error would arrive as a trace
            return str(error)
        height, width = scaled_size(image.height, image.width, short_side, self.settings.max_side)
        pixels = scale(pixels, height, width)
        target = make_target(image, self._class_of, height, width, masks=self._masks, keypoints=self._keypoints)
        if mirror:
            return pixels.flip(-1), mirrored(target, width, self._order)
        return pixels, target

    def __len__(self) -> int:
        return len(self.images)

    def draw(self, image: CocoImage, iteration: int) -> tuple[int, bool]:
        """Short side and whether to mirror; of the image's id, not of its place in the file."""
        sides = self.settings.short_sides
        sample = hash_words(image.id)[None]
        values = uniforms(self.settings.seed, _CHANGE_STREAM, iteration, sample, torch.zeros(1, dtype=torch.int64), 2)
        size, mirror = values[0].tolist()
        return sides[int(size * len(sides))], mirror < 0.5


def read_image(image: CocoImage) -> Tensor:
    """The image as it was annotated, (3, height, width) uint8.

    A camera's orientation mark is obeyed where the image then has the size of the annotations; some are annotated as
    the pixels lie in the file.
    """
    pixels = decode(image.path)
    if tuple(pixels.shape[-2:]) != (image.height, image.width):
        pixels = _as_it_lies(image)
    if tuple(pixels.shape[-2:]) != (image.height, image.width):
        raise DataError(
            f"{image.path} is {pixels.shape[-1]}×{pixels.shape[-2]} pixels and its annotations are for "
            f"{image.width}×{image.height}; do images and annotations belong together?"
        )
    return pixels


def _as_it_lies(image: CocoImage) -> Tensor:
    with open_image(image.path) as opened:
        picture: Image.Image = opened.convert("RGB")
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous()


def training_batches(
    images: CocoSet,
    settings: DetectionSettings,
    start: int,
    *,
    workers: int,
    device: torch.device,
    ranks: Ranks = ALONE,
) -> Generator[DetectionBatch]:
    """The parts of all batches from iteration `start` on; an image that cannot be read ends them with a sentence.

    To be closed, which ends the workers: they heed no signal, so the process would wait for them at its end.
    """
    loader = DataLoader(
        TrainingImages(images, settings),
        batch_sampler=_Keys(images, settings, start, ranks),
        num_workers=workers,
        collate_fn=pack,
        worker_init_fn=leave_signals_to_trainer,
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # so that no draw of the global one is spent on workers
    )
    for batch in loader:
        if isinstance(batch, str):
            raise DataError(batch)
        yield batch


def leave_signals_to_trainer(_worker: int) -> None:
    """A signal to the whole group of processes is answered by the one that trains, which still needs its workers."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


@dataclass(frozen=True)
class _Keys:
    """What a loader asks for, from the beginning each time."""

    images: CocoSet
    settings: DetectionSettings
    start: int
    ranks: Ranks

    def __iter__(self) -> Iterator[list[Key]]:
        return batch_keys(self.images, self.settings, self.start, self.ranks)
