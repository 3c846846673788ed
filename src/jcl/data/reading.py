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
        self._canvas = canvas
        self._stand_ins = stand_ins
        self._broken: dict[int, str] = {}  # what is known already, to be reported again but not tried again

    @property
    def source_module(self) -> str:
        """The module that a process must import to know the source's class."""
        return type(self._source).__module__

    def __getitem__(self, indices: Sequence[int]) -> Decoded:
        """Read the images; no rows at all mean that there are none left to read."""
        skipped: dict[str, str] = {}
        found = [pair for index in indices if (pair := self._find(index, skipped)) is not None]
        pixels = torch.zeros(len(found), 3, self._canvas, self._canvas, dtype=torch.uint8)
        sizes = torch.empty(len(found), 2, dtype=torch.int64)
        for row, (_, image) in enumerate(found):
            height, width = image.shape[1:]
            pixels[row, :, :height, :width] = image
            sizes[row, 0], sizes[row, 1] = height, width
        samples = torch.tensor([index for index, _ in found], dtype=torch.int64)
        return Decoded(pixels, sizes, samples, skipped)

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
            return self._source.read(index, self._canvas)
        except UnreadableImage as error:
            self._broken[index] = error.reason
            return None


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
