"""A batch of decoded images on their way to the views."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class ImageBatch:
    """Images of different sizes on canvases of one size.

    pixels (n, 3, C, C) uint8, each image in the top left corner and zeros around it; sizes (n, 2) int64, the height and
    width it takes there; samples (n,) int64, its index in the source.
    """

    pixels: Tensor
    sizes: Tensor
    samples: Tensor

    def __len__(self) -> int:
        return len(self.samples)

    def to(self, device: torch.device | str) -> "ImageBatch":
        """Copy to a device, without waiting where the memory is pinned."""
        return ImageBatch(
            self.pixels.to(device, non_blocking=True),
            self.sizes.to(device, non_blocking=True),
            self.samples.to(device, non_blocking=True),
        )

    def copied(self) -> "ImageBatch":
        return ImageBatch(self.pixels.clone(), self.sizes.clone(), self.samples.clone())
