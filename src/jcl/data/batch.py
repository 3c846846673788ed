"""A batch of decoded images on their way to the views."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class ImageBatch:
    """Images of different sizes on canvases of one size.

    pixels (n, 3, C, C) uint8, each image in the top left corner and zeros around it; sizes (n, 2) int64, the height and
    width it takes there; samples (n,) int64, its index in the source. On one of several ranks the n images are a part
    of a larger batch, and places (N,) int64 says where each image of that lies here, -1 where it does not.
    """

    pixels: Tensor
    sizes: Tensor
    samples: Tensor
    places: Tensor | None = None

    def __len__(self) -> int:
        return len(self.samples)

    def of_each(self, change: Callable[[Tensor], Tensor]) -> ImageBatch:
        """The batch with every tensor changed."""
        places = None if self.places is None else change(self.places)
        return ImageBatch(change(self.pixels), change(self.sizes), change(self.samples), places)

    def to(self, device: torch.device | str) -> ImageBatch:
        """Copy to a device, without waiting where the memory is pinned; what comes to the CPU is there on return."""
        waiting = torch.device(device).type == "cpu"  # or it would be read before it has arrived
        return self.of_each(lambda tensor: tensor.to(device, non_blocking=not waiting))

    def copied(self) -> ImageBatch:
        """The same in memory of its own."""
        return self.of_each(torch.clone)

    def tensors(self) -> list[Tensor]:
        """All that the batch consists of."""
        kept = (self.pixels, self.sizes, self.samples, self.places)
        return [tensor for tensor in kept if tensor is not None]
