"""Many images onto canvases of one size, with a stand-in for each that cannot be read."""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from jcl.data.source import ImageSource, UnreadableImage

_PROBES: Final = 64


class Decoded(NamedTuple):
    """What a worker sends back: the parts of an `ImageBatch`, and the images it could not read with the reasons."""

    pixels: Tensor
    sizes: Tensor
    samples: Tensor
    skipped: dict[str, str]


class ImageReader:
    """Reads the images of a list of indices; lives in the main process or, as a copy, in each worker.

    An unreadable image is replaced by the next one in the source that can be read (`stand_ins`), so that batches keep
    their size and do not depend on which worker met the image first; else it is left out. It raises nothing for a bad
    image, because an error loses its type and its sentence on the way out of a worker.
    """

    def __init__(self, source: ImageSource, canvas: int, stand_ins: bool) -> None:
        self._source = source
        self.canvas = canvas
        self._stand_ins = stand_ins
        self._broken: dict[int, str] = {}  # what is known already, to be reported again but not tried again

    @property
    def source_module(self) -> str:
        """The module that a process must import to know the source's class."""
        return type(self._source).__module__

    def __getitem__(self, indices: Sequence[int]) -> Decoded:
        """Read the images; no rows at all mean that there are none left to read."""
        pixels = torch.empty(len(indices), 3, self.canvas, self.canvas, dtype=torch.uint8)
        sizes = torch.empty(len(indices), 2, dtype=torch.int64)
        samples = torch.empty(len(indices), dtype=torch.int64)
        skipped = self.read_into(indices, pixels, sizes, samples)
        return decoded_rows(pixels, sizes, samples, skipped)

    def read_into(self, indices: Sequence[int], pixels: Tensor, sizes: Tensor, samples: Tensor) -> dict[str, str]:
        """Read each image into its row; a row for which nothing can be read has the sample -1.

        Returns the images that could not be read, with the reasons.
        """
        skipped: dict[str, str] = {}
        for row, index in enumerate(indices):
            found = self._find(index, skipped)
            samples[row] = -1
            if found is not None:
                samples[row], image = found
                sizes[row, 0], sizes[row, 1] = image.shape[1:]
                _place(image, pixels[row])
        return skipped

    def _find(self, index: int, skipped: dict[str, str]) -> tuple[int, Tensor] | None:
        """The image, or its stand-in, and the index of what was read."""
        for candidate in self._candidates(index):
            image = self._read(candidate)
            if image is not None:
                return candidate, image
            skipped[self._source.name_of(candidate)] = self._broken[candidate]
        return None

    def _candidates(self, index: int) -> Iterator[int]:
        count = len(self._source)
        return ((index + step) % count for step in range(count if self._stand_ins else 1))

    def _read(self, index: int) -> Tensor | None:
        if index in self._broken:
            return None
        try:
            return self._source.read(index, self.canvas)
        except UnreadableImage as error:
            self._broken[index] = error.reason
            return None


def decoded_rows(pixels: Tensor, sizes: Tensor, samples: Tensor, skipped: dict[str, str]) -> Decoded:
    """The rows for which something could be read: all of them as they are, as a rule."""
    read = samples >= 0
    if read.all():
        return Decoded(pixels, sizes, samples, skipped)
    return Decoded(pixels[read], sizes[read], samples[read], skipped)


def _place(image: Tensor, canvas: Tensor) -> None:
    """Put an image into the top left corner of a canvas and zeros around it."""
    height, width = image.shape[1:]
    canvas[:, :height, :width] = image
    canvas[:, height:] = 0
    canvas[:, :height, width:] = 0


def canvas_for(source: ImageSource, canvas: int) -> int:
    """The canvas to use: the one asked for, or less where the images do not fill it.

    Judged by a few images spread over the source, so it is the same on every run; should one of the others be larger,
    it is scaled down as any large image is.
    """
    largest = 0
    for probe in range(min(_PROBES, len(source))):
        try:
            image = source.read(probe * len(source) // min(_PROBES, len(source)), canvas)
        except UnreadableImage:
            continue
        largest = max(largest, *image.shape[1:])
        if largest >= canvas:
            return canvas
    return largest or canvas
