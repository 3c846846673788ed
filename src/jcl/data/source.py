"""Image sources: the protocol, images in memory, subsets, data sets and fingerprints."""

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor

from jcl.errors import DataError
from jcl.views.color import GRAY_WEIGHTS

UNLABELED = -1  # the label of an image without one, in a source where others have one

_HASHED_NAMES, _HASHED_IMAGES = 1024, 16  # evenly spaced


class PixelFormat(NamedTuple):
    """How the decoded images of a source are stored; in floats, 8-bit and 16-bit integers are scaled to 0..1."""

    channels: int = 3
    dtype: torch.dtype = torch.uint8  # or float32
    color: bool = True  # three channels are red, green and blue


RGB = PixelFormat()


class Refused(ValueError):
    """An image that is not decoded; the text says why."""


class UnreadableImage(DataError):
    """One image cannot be read; `reason` does not name the image."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"The image {name} cannot be read: {reason}.")
        self.name = name
        self.reason = reason

    def __reduce__(self) -> tuple[type[Self], tuple[str, str]]:
        """Workers send this error to the main process."""
        return type(self), (self.name, self.reason)


class NoReadableImages(DataError):
    """No image of a source can be read; `skipped` has the reason for each."""

    def __init__(self, description: str, skipped: Mapping[str, str]) -> None:
        name, reason = next(iter(skipped.items()))
        super().__init__(f"None of the images can be read ({description}); the first is {name}: {reason}.")
        self.skipped = dict(skipped)


class ImageSource(Protocol):
    """A list of images in a fixed order. It is sent to worker processes, so it must pickle in little space."""

    @property
    def description(self) -> str:
        """What it is and where, for messages."""

    @property
    def labels(self) -> Tensor | None:
        """Class of each image, (n,) int64, `UNLABELED` if unknown; None if no image has one."""

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """The names of the labels."""

    def __len__(self) -> int: ...

    def read(self, index: int, canvas: int | None = None, window: float | None = 0.5) -> Tensor:
        """Read one image, (channels, h, w); with a canvas, its longer side scaled down to at most that.

        It is 8-bit RGB unless the source has a method `pixel_format`. An image longer than 2:1 is cut to a window at
        the position `window`, from 0 (start) to 1 (end); None scales the whole image. Raises `UnreadableImage`.
        """

    def name_of(self, index: int) -> str:
        """The name of the image in messages."""


@dataclass(frozen=True, eq=False)
class ArrayImages:
    """Images of one size: pixels (n, channels, h, w) uint8 or float32, labels (n,), and `numbers` (n,) to name them."""

    pixels: Tensor
    labels: Tensor | None = None
    class_names: tuple[str, ...] | None = None
    description: str = "images in memory"
    numbers: Tensor | None = None

    def __post_init__(self) -> None:
        if self.pixels.dtype not in (torch.uint8, torch.float32) or self.pixels.ndim != 4:
            found = f"{self.pixels.dtype} of shape {tuple(self.pixels.shape)}"
            raise DataError(f"Images must be a uint8 or float32 tensor (n, channels, height, width), got {found}.")
        if self.pixels.numel() == 0:
            raise DataError(f"There are no images in {self.description}.")
        if self.labels is not None and self.labels.shape != (len(self.pixels),):
            found = f"{len(self.pixels)} images and labels of shape {tuple(self.labels.shape)}"
            raise DataError(f"Expected one label for each image, got {found} in {self.description}.")

    def __len__(self) -> int:
        return len(self.pixels)

    def pixel_format(self) -> PixelFormat:
        return PixelFormat(self.pixels.shape[1], self.pixels.dtype, self.pixels.dtype == torch.uint8)

    def read(self, index: int, canvas: int | None = None, window: float | None = 0.5) -> Tensor:
        """Return the stored pixels; arrays are never scaled, their size is the canvas."""
        return self.pixels[index]

    def name_of(self, index: int) -> str:
        return f"number {index if self.numbers is None else int(self.numbers[index])}"


def pixel_format(source: ImageSource) -> PixelFormat:
    """The format of all images of a source."""
    return getattr(source, "pixel_format", lambda: RGB)()


def convert_pixels(pixels: Tensor, wanted: PixelFormat) -> Tensor:
    """Convert images (..., channels, h, w) to a format: gray to RGB and back, uint8 to floats; or raise `Refused`."""
    channels = pixels.shape[-3]
    if channels == 1 and wanted.channels == 3:
        pixels = pixels.expand(*pixels.shape[:-3], 3, -1, -1)
    elif channels == 3 and wanted.channels == 1:
        gray = (pixels.movedim(-3, -1).float() @ torch.tensor(GRAY_WEIGHTS)).unsqueeze(-3)
        pixels = gray if pixels.is_floating_point() else gray.round().to(torch.uint8)
    elif channels != wanted.channels:
        raise Refused(f"it has {channels} channels, not {wanted.channels}")
    return pixels / 255 if wanted.dtype != pixels.dtype else pixels


def class_name(source: ImageSource, label: int) -> str:
    """The name of a class, or its number if classes have no names."""
    names = source.class_names or ()
    return names[label] if label < len(names) else f"class {label}"


def sample_images(
    source: ImageSource, limit: int, canvas: int | None = None, window: float | None = 0.5
) -> Iterator[Tensor]:
    """Up to `limit` readable images, evenly spaced in the source."""
    count = min(limit, len(source))
    for number in range(count):
        with contextlib.suppress(UnreadableImage):
            yield source.read(number * len(source) // count, canvas, window)


def select_images(source: ImageSource, rows: Tensor) -> ImageSource:
    """The images `rows` (m,) of a source as a source, in that order; each image keeps its name."""
    if torch.equal(rows, torch.arange(len(source))):
        return source
    labels = None if source.labels is None else source.labels[rows]
    description = f"{len(rows):,} of {source.description}"
    if isinstance(source, ArrayImages):
        numbers = rows if source.numbers is None else source.numbers[rows]
        return ArrayImages(source.pixels[rows], labels, source.class_names, description, numbers)
    return SourceSubset(source, rows, labels, description)


@dataclass(frozen=True, eq=False)
class SourceSubset:
    """Some images of another source, by their index there."""

    whole: ImageSource
    rows: Tensor
    labels: Tensor | None
    description: str

    @property
    def class_names(self) -> tuple[str, ...] | None:
        return self.whole.class_names

    def pixel_format(self) -> PixelFormat:
        return pixel_format(self.whole)

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, index: int, canvas: int | None = None, window: float | None = 0.5) -> Tensor:
        return self.whole.read(int(self.rows[index]), canvas, window)

    def name_of(self, index: int) -> str:
        return self.whole.name_of(int(self.rows[index]))


def all_class_names(splits: Iterable[ImageSource]) -> tuple[str, ...] | None:
    """The class names of all splits: they start alike, but the test images may have more classes."""
    return max((source.class_names for source in splits if source.class_names), key=len, default=None)


@dataclass(frozen=True)
class ImageData:
    """A data set: images to train on, and images to test with if there are any.

    `why_untested` is the reason if a test folder exists but has no images; `unused` names images in neither split.
    """

    name: str
    train: ImageSource
    test: ImageSource | None = None
    why_untested: str = ""
    unused: str = ""

    @property
    def splits(self) -> dict[str, ImageSource]:
        """What there is of "train" and "test"."""
        return {"train": self.train} | ({} if self.test is None else {"test": self.test})

    @property
    def labeled_test(self) -> ImageSource | None:
        """The test images if they have labels; without them, some training images are held out."""
        return None if self.test is None or self.test.labels is None else self.test


def fingerprint(source: ImageSource, *, content: bool = True) -> str:
    """A hash of the number of images, all labels and up to 1,024 names, and of the pixels of up to 16 images.

    The pixels, at 512 px or less, may change with the decoder's version. Without `content` no image is read.
    """
    parts = [str(len(source)).encode()]
    if source.labels is not None:
        parts.append(source.labels.numpy().tobytes())
    names = (source.name_of(index) for index in evenly_spaced(len(source), _HASHED_NAMES))
    parts += [name.encode("utf-8", "surrogateescape") + b"\0" for name in names]
    for index in evenly_spaced(len(source), _HASHED_IMAGES) if content else ():
        try:
            parts.append(source.read(index, 512).contiguous().numpy().tobytes())
        except UnreadableImage as error:
            parts.append(error.reason.encode())
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def evenly_spaced(count: int, limit: int) -> range:
    """Up to `limit` of `count` indices."""
    return range(0, count, max(1, -(-count // limit)))
