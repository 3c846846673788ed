"""Batches of decoded images: reading them onto canvases of one size, and keeping them in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from jcl.data.source import ImageSource, UnreadableImage

_PROBED_IMAGES: Final = 64
_DEVICE_MEMORY_SHARE: Final = 0.3  # of the memory still free, so that the networks have room


@dataclass(frozen=True, eq=False)
class ImageBatch:
    """Images of different sizes on canvases of one size.

    pixels (n, 3, C, C) uint8, each image in the top left corner and zeros around it; sizes (n, 2) int64, its height and
    width; samples (n,) int64, its index in the source. On one of several ranks the n images are a part of a larger
    batch of N, and places (N,) int64 is the row of each image of that batch here, -1 if it is on another rank.
    """

    pixels: Tensor
    sizes: Tensor
    samples: Tensor
    places: Tensor | None = None

    def __len__(self) -> int:
        return len(self.samples)

    def map(self, function: Callable[[Tensor], Tensor]) -> ImageBatch:
        """Apply a function to every tensor."""
        places = None if self.places is None else function(self.places)
        return ImageBatch(function(self.pixels), function(self.sizes), function(self.samples), places)

    def to(self, device: torch.device | str) -> ImageBatch:
        """Copy to a device; asynchronous for pinned memory, except for copies to the CPU."""
        non_blocking = torch.device(device).type != "cpu"
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def clone(self) -> ImageBatch:
        return self.map(torch.clone)

    def tensors(self) -> list[Tensor]:
        tensors = (self.pixels, self.sizes, self.samples, self.places)
        return [tensor for tensor in tensors if tensor is not None]


class Decoded(NamedTuple):
    """What a worker sends back: the parts of an `ImageBatch`, and the images it could not read with the reasons."""

    pixels: Tensor
    sizes: Tensor
    samples: Tensor
    skipped: dict[str, str]


class ImageReader:
    """Reads the images of a list of indices; used in the main process or, as a copy, in each worker.

    With `substitute`, an unreadable image is replaced by the next readable one of the source, so that batches keep
    their size and do not depend on which worker reads them; otherwise it is left out.
    """

    def __init__(self, source: ImageSource, canvas: int, substitute: bool) -> None:
        self._source = source
        self.canvas = canvas
        self._substitute = substitute
        self._unreadable: dict[int, str] = {}  # reasons, so that no image is tried twice

    @property
    def source_module(self) -> str:
        """The module that a process must import to unpickle the source."""
        return type(self._source).__module__

    def __getitem__(self, indices: Sequence[int]) -> Decoded:
        """Read the images; the result has no rows if none is readable."""
        pixels = torch.empty(len(indices), 3, self.canvas, self.canvas, dtype=torch.uint8)
        sizes = torch.empty(len(indices), 2, dtype=torch.int64)
        samples = torch.empty(len(indices), dtype=torch.int64)
        skipped = self.read_into(indices, pixels, sizes, samples)
        return readable_rows(pixels, sizes, samples, skipped)

    def read_into(self, indices: Sequence[int], pixels: Tensor, sizes: Tensor, samples: Tensor) -> dict[str, str]:
        """Read each image into its row; rows for which nothing can be read get the sample -1.

        Returns the unreadable images with the reasons.
        """
        skipped: dict[str, str] = {}
        for row, index in enumerate(indices):
            found = self._find(index, skipped)
            samples[row] = -1
            if found is not None:
                samples[row], image = found
                sizes[row, 0], sizes[row, 1] = image.shape[1:]
                _copy_to_canvas(image, pixels[row])
        return skipped

    def _find(self, index: int, skipped: dict[str, str]) -> tuple[int, Tensor] | None:
        """The image, or its substitute, and the index of what was read."""
        for candidate in self._candidates(index):
            image = self._read(candidate)
            if image is not None:
                return candidate, image
            skipped[self._source.name_of(candidate)] = self._unreadable[candidate]
        return None

    def _candidates(self, index: int) -> Iterator[int]:
        count = len(self._source)
        return ((index + step) % count for step in range(count if self._substitute else 1))

    def _read(self, index: int) -> Tensor | None:
        if index in self._unreadable:
            return None
        try:
            return self._source.read(index, self.canvas)
        except UnreadableImage as error:
            self._unreadable[index] = error.reason
            return None


def readable_rows(pixels: Tensor, sizes: Tensor, samples: Tensor, skipped: dict[str, str]) -> Decoded:
    """The rows that hold an image, without a copy if all do."""
    read = samples >= 0
    if read.all():
        return Decoded(pixels, sizes, samples, skipped)
    return Decoded(pixels[read], sizes[read], samples[read], skipped)


def _copy_to_canvas(image: Tensor, canvas: Tensor) -> None:
    height, width = image.shape[1:]
    canvas[:, :height, :width] = image
    canvas[:, height:] = 0
    canvas[:, :height, width:] = 0


def canvas_for(source: ImageSource, canvas: int) -> int:
    """The canvas to use: the one asked for, or less where the images do not fill it.

    Estimated from images evenly spaced in the source, so it is the same on every run; larger images are scaled down.
    """
    largest = 0
    count = min(_PROBED_IMAGES, len(source))
    for probe in range(count):
        try:
            image = source.read(probe * len(source) // count, canvas)
        except UnreadableImage:
            continue
        largest = max(largest, *image.shape[1:])
        if largest >= canvas:
            return canvas
    return largest or canvas


class ResidentImages:
    """All images in memory, on the training device if they fit there, so that a batch is one gather.

    pixels (n, 3, H, W) uint8, sizes (n, 2). `places` (n,) maps an index to the image read for it: itself, or its
    substitute if it is unreadable.
    """

    def __init__(self, pixels: Tensor, sizes: Tensor, places: Tensor | None, device: torch.device) -> None:
        self.device = device if _fits(pixels, device) else torch.device("cpu")
        self.pixels = pixels.to(self.device)
        self.sizes = sizes.to(self.device)
        self.places = None if places is None else places.to(self.device)

    def batch(self, indices: Tensor) -> ImageBatch:
        samples = indices if self.places is None else self.places[indices]
        return ImageBatch(self.pixels.index_select(0, samples), self.sizes.index_select(0, samples), samples)


class GrowingStore:
    """Collects decoded images until it has every one, so that each file is decoded once in a run.

    The operating system allocates the pages of the large tensor as they are filled.
    """

    def __init__(self, count: int, canvas: int) -> None:
        self._pixels = torch.empty(count, 3, canvas, canvas, dtype=torch.uint8)
        self._sizes = torch.empty(count, 2, dtype=torch.int64)
        self._places = torch.full((count,), -1, dtype=torch.int64)

    @staticmethod
    def bytes_needed(count: int, canvas: int) -> int:
        return count * 3 * canvas * canvas

    def add(self, requested: list[int], decoded: Decoded) -> None:
        """Store what was decoded for the requested indices."""
        self._pixels[decoded.samples] = decoded.pixels
        self._sizes[decoded.samples] = decoded.sizes
        self._places[torch.tensor(requested)] = decoded.samples

    def missing(self) -> list[int]:
        """The indices not decoded yet."""
        return torch.nonzero(self._places < 0).flatten().tolist()

    def completed(self, device: torch.device) -> ResidentImages:
        return ResidentImages(self._pixels, self._sizes, self._places, device)


def _fits(pixels: Tensor, device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    return pixels.numel() <= _DEVICE_MEMORY_SHARE * free
