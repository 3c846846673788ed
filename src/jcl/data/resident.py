"""Images that stay in memory, on the device that trains where they fit: a batch is then one gather."""

from typing import Final

import torch
from torch import Tensor

from jcl.data.batch import ImageBatch
from jcl.data.reading import Decoded

_SHARE_OF_DEVICE: Final = 0.3  # of the memory still free, so that the networks have room


class ResidentImages:
    """All images on canvases of one size: pixels (n, 3, H, W) uint8, sizes (n, 2), places (n,).

    `places` says which image a requested index stands for: itself, or its stand-in where it cannot be read.
    """

    def __init__(self, pixels: Tensor, sizes: Tensor, places: Tensor | None, device: torch.device) -> None:
        home = device if _fits(pixels, device) else torch.device("cpu")
        self.pixels = pixels.to(home)
        self.sizes = sizes.to(home)
        self.places = None if places is None else places.to(home)
        self.device = home

    def batch(self, indices: Tensor) -> ImageBatch:
        """The images of these indices, or their stand-ins."""
        samples = indices if self.places is None else self.places[indices]
        return ImageBatch(self.pixels.index_select(0, samples), self.sizes.index_select(0, samples), samples)


class GrowingStore:
    """Collects decoded images until it has every one, so that each file is decoded once in a run.

    The pages of the large tensor are taken from the system only as they are filled.
    """

    def __init__(self, count: int, canvas: int) -> None:
        self._pixels = torch.empty(count, 3, canvas, canvas, dtype=torch.uint8)
        self._sizes = torch.empty(count, 2, dtype=torch.int64)
        self._places = torch.full((count,), -1, dtype=torch.int64)

    @staticmethod
    def bytes_needed(count: int, canvas: int) -> int:
        """What all images take, decoded."""
        return count * 3 * canvas * canvas

    def remember(self, requested: list[int], decoded: Decoded) -> None:
        """Keep what was decoded for the indices asked for."""
        self._pixels[decoded.samples] = decoded.pixels
        self._sizes[decoded.samples] = decoded.sizes
        self._places[torch.tensor(requested)] = decoded.samples

    def missing(self) -> list[int]:
        """The indices not decoded yet."""
        return torch.nonzero(self._places < 0).flatten().tolist()

    def completed(self, device: torch.device) -> ResidentImages:
        """All images, on the device where they fit there."""
        return ResidentImages(self._pixels, self._sizes, self._places, device)


def _fits(pixels: Tensor, device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    return pixels.numel() <= _SHARE_OF_DEVICE * free
