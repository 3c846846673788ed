"""Batches of decoded images: reading them onto canvases of one size, and keeping them in memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

import torch
from torch import Tensor

from jcl.data.source import RGB, ImageSource, PixelFormat, UnreadableImage, pixel_format, sample_images
from jcl.random import WINDOWS, uniforms

_PROBED_IMAGES: Final = 64


@dataclass(frozen=True, eq=False)
class ImageBatch:
    """Images of different sizes on canvases of one size.

    pixels (n, channels, C, C), uint8 or float32, each image in the top left corner and zeros around it; sizes (n, 2)
    int64, its height and width; samples (n,) int64, its index in the source. On several ranks the n images are those of
    a batch of N that this rank holds, and local_rows (N,) int64 is the row of each image of that batch, -1 if it is not
    held here.
    """

    pixels: Tensor
    sizes: Tensor
    samples: Tensor
    local_rows: Tensor | None = None

    @classmethod
    def empty(cls, count: int, canvas: int, stored: PixelFormat = RGB) -> Self:
        """Memory for images; no row holds one, so that all samples are -1."""
        pixels = torch.empty(count, stored.channels, canvas, canvas, dtype=stored.dtype)
        return cls(pixels, torch.empty(count, 2, dtype=torch.int64), torch.full((count,), -1))

    def __len__(self) -> int:
        return len(self.samples)

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        return type(self)(*map(function, self.tensors()))

    def to(self, device: torch.device | str) -> Self:
        """Copy to a device; asynchronous for pinned memory, except for copies to the CPU."""
        non_blocking = torch.device(device).type != "cpu"
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def clone(self) -> Self:
        return self.map(torch.clone)

    def gather(self, indices: Tensor) -> Self:
        """The images at these indices of the source, if this batch holds every image of it."""
        samples = self.samples[indices]
        return type(self)(self.pixels.index_select(0, samples), self.sizes.index_select(0, samples), samples)

    def put(self, indices: list[int], images: Self) -> None:
        """Store images that were read for these indices of the source; an unreadable image has a substitute."""
        self.pixels[images.samples] = images.pixels
        self.sizes[images.samples] = images.sizes
        self.samples[torch.tensor(indices)] = images.samples

    def tensors(self) -> list[Tensor]:
        return [tensor for tensor in vars(self).values() if tensor is not None]


class Decoded(NamedTuple):
    """A decoded batch, and the images that could not be read with the reasons."""

    batch: ImageBatch
    skipped: dict[str, str]


class ImageReader:
    """Reads the images of a list of indices; used in the main process or, as a copy, in each worker.

    With `substitute`, an unreadable image is replaced by the next readable one of the source, so that batches keep
    their size and do not depend on which worker reads them; otherwise it is left out. Long images are cut to the
    window at `window` or, with a seed, to a random one: index i + e·n reads image i of n with its window of epoch e.
    """

    def __init__(
        self, source: ImageSource, canvas: int, substitute: bool, window: float | None = 0.5, seed: int | None = None
    ) -> None:
        self.source = source
        self.canvas = canvas
        self._substitute = substitute
        self._window, self._seed = window, seed
        self._windows = (-1, torch.empty(0))  # an epoch, and the random windows of all images in it
        self._unreadable: dict[int, str] = {}  # with the reasons; not tried again

    def read(self, indices: Sequence[int]) -> Decoded:
        """Read the images; the result has no rows if none is readable."""
        batch = ImageBatch.empty(len(indices), self.canvas, pixel_format(self.source))
        return readable_rows(batch, self.read_into(indices, batch))

    def read_into(self, indices: Sequence[int], batch: ImageBatch) -> dict[str, str]:
        """Read each image into its row, or give it the sample -1; returns the unreadable images with the reasons."""
        skipped: dict[str, str] = {}
        for row, index in enumerate(indices):
            found = self._find(index, skipped)
            batch.samples[row] = -1
            if found is not None:
                batch.samples[row], image = found
                height, width = image.shape[1:]
                batch.sizes[row, 0], batch.sizes[row, 1] = height, width
                batch.pixels[row, :, :height, :width] = image
                batch.pixels[row, :, height:] = 0
                batch.pixels[row, :, :height, width:] = 0
        return skipped

    def _find(self, index: int, skipped: dict[str, str]) -> tuple[int, Tensor] | None:
        """The index and pixels of the image or its substitute."""
        count = len(self.source)
        epoch = index // count
        for step in range(count if self._substitute else 1):
            candidate = (index + step) % count
            if candidate not in self._unreadable:
                try:
                    return candidate, self.source.read(candidate, self.canvas, self._window_of(epoch, candidate))
                except UnreadableImage as error:
                    self._unreadable[candidate] = error.reason
            skipped[self.source.name_of(candidate)] = self._unreadable[candidate]
        return None

    def _window_of(self, epoch: int, index: int) -> float | None:
        if self._seed is None:
            return self._window
        if self._windows[0] != epoch:
            samples = torch.arange(len(self.source))
            self._windows = epoch, uniforms(self._seed, WINDOWS, epoch, samples, samples * 0, 1).squeeze(1)
        return float(self._windows[1][index])


def readable_rows(batch: ImageBatch, skipped: dict[str, str]) -> Decoded:
    """The rows that hold an image, without a copy if all do."""
    read = batch.samples >= 0
    return Decoded(batch if read.all() else batch.map(lambda rows: rows[read]), skipped)


def canvas_for(source: ImageSource, canvas: int, window: float | None = 0.5) -> int:
    """The canvas to use: `canvas`, or less if some evenly spaced images of the source are all smaller."""
    largest = 0
    for image in sample_images(source, _PROBED_IMAGES, canvas, window):
        largest = max(largest, *image.shape[1:])
        if largest >= canvas:
            return canvas
    return largest or canvas
