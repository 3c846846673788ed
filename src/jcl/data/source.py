"""Where images come from: the protocol every source follows, and images held in memory."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from jcl.errors import DataError

UNLABELLED = -1
"""The label of an image without one, in a source where others have one."""


class UnreadableImage(DataError):
    """One image cannot be read; `reason` says why without naming the image."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"The image {name} cannot be read: {reason}.")
        self.name = name
        self.reason = reason

    def __reduce__(self) -> tuple[type["UnreadableImage"], tuple[str, str]]:
        """Workers send this error to the main process, which rebuilds it from both of its parts."""
        return type(self), (self.name, self.reason)


class NoneReadable(DataError):
    """Not one image of a source can be read; `skipped` has the reason for each."""

    def __init__(self, description: str, skipped: Mapping[str, str]) -> None:
        name, reason = next(iter(skipped.items()))
        super().__init__(f"None of the images can be read ({description}); the first is {name}: {reason}.")
        self.skipped = dict(skipped)


class ImageSource(Protocol):
    """A list of images that never changes its order.

    A source is sent to worker processes, so it must pickle, and should do so in little space.
    """

    @property
    def description(self) -> str:
        """A few words for people: what it is and where."""
        ...

    @property
    def labels(self) -> Tensor | None:
        """Class of each image, (n,) int64, `UNLABELLED` where unknown; None where no image has one."""
        ...

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """What the labels index."""
        ...

    def __len__(self) -> int: ...

    def read(self, index: int, canvas: int | None = None) -> Tensor:
        """Read one image, (3, h, w) uint8; with a canvas, its longer side scaled down to at most that.

        Raises `UnreadableImage`.
        """
        ...

    def name_of(self, index: int) -> str:
        """What to call the image in a message."""
        ...


@dataclass(frozen=True, eq=False)
class ArrayImages:
    """Images of one size that lie in memory: pixels (n, 3, h, w) uint8, labels (n,) int64."""

    pixels: Tensor
    labels: Tensor | None = None
    class_names: tuple[str, ...] | None = None
    description: str = "images in memory"

    def __post_init__(self) -> None:
        if self.pixels.dtype != torch.uint8 or self.pixels.ndim != 4 or self.pixels.shape[1] != 3:
            raise DataError(
                f"Images in memory must be a uint8 tensor of shape (n, 3, height, width), but these are "
                f"{self.pixels.dtype} of shape {tuple(self.pixels.shape)}."
            )
        if self.pixels.numel() == 0:
            raise DataError(f"There are no images in {self.description}.")
        if self.labels is not None and self.labels.shape != (len(self.pixels),):
            raise DataError(
                f"There are {len(self.pixels)} images but labels of shape {tuple(self.labels.shape)} in "
                f"{self.description}; give one label for each image."
            )

    def __len__(self) -> int:
        return len(self.pixels)

    def read(self, index: int, canvas: int | None = None) -> Tensor:
        """Give the stored pixels as they are: arrays are never scaled, their size is the canvas."""
        return self.pixels[index]

    def name_of(self, index: int) -> str:
        return f"number {index}"


def all_class_names(splits: Iterable[ImageSource]) -> tuple[str, ...] | None:
    """What the labels of all splits index: they begin alike, but test images may be of more classes."""
    return max((source.class_names for source in splits if source.class_names), key=len, default=None)


@dataclass(frozen=True)
class ImageData:
    """A data set as a run uses it: images to train on, and others to test the features with where there are any.

    `why_untested` says why there are none of these though there is a place for them.
    """

    name: str
    train: ImageSource
    test: ImageSource | None = None
    why_untested: str = ""
