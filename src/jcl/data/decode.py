"""Decode an image file into an RGB tensor.

- The format is detected from the content, not from the file name.
- Transparent pixels are blended over white.
- Values of 16-bit files are scaled to 0..255 from their real range (see `EncodedImages`), floats within 0..1 from that
  range, and all other numbers from their minimum and maximum.
- Images longer than 2:1 and larger than the canvas are cut to a window, so that they do not shrink to a stripe.
- The EXIF orientation is applied; of an animation the first frame is used.
- Truncated files are refused: the missing part would be gray.
"""

import contextlib
import io
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from jcl.data.source import UnreadableImage

PIXEL_LIMIT: Final = 128_000_000
"""Images with more pixels than this, or fewer of more than 3 bytes, are refused before any of them is decoded."""

MAX_ASPECT: Final = 2
"""Images longer than this, and than the canvas, are cut to a window."""
_WINDOW_ASPECT: Final = 1.5  # a little more than that of the longest crops, 4:3
_DEPTHS: Final = (8, 10, 12, 14, 16)  # bits of cameras and microscopes that write 16-bit files
_PROBED_IMAGES: Final = 64
_CHECKED_SIDE: Final = 256  # finds damage too, and decodes a photograph in a fraction of the time
_STRIP_VALUES: Final = 1 << 18
_BITS_TAG, _LARGEST_VALUE_TAG = 258, 341  # BitsPerSample and SMaxSampleValue of TIFF

# Not EPS and the like, which Pillow passes to another program.
_FORMATS: Final = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "MPO", "JPEG2000", "AVIF", "TGA", "ICO", "PCX")

# Pillow's warnings about metadata and large images (we have our own limit). Filtered globally, because a filter around
# each image is neither thread-safe nor free.
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)

_ORIENTATION_TAG: Final = 0x0112
_TRANSPOSE: Final = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decode(
    file: Path | bytes,
    canvas: int | None = None,
    name: str | None = None,
    window: float | None = 0.5,
    common_peak: Callable[[], int] = lambda: 0,
) -> Tensor:
    """Decode an image file, or its bytes, into (3, h, w) uint8 RGB; raises `UnreadableImage` with `name`.

    With a canvas the image is scaled down, antialiased and with its aspect ratio kept, until its longer side is at most
    `canvas`; it is never enlarged. A JPEG much larger than the canvas is decoded at reduced size, which is faster.
    An image longer than `MAX_ASPECT` is cut to a window, from its start (`window` 0) to its end (1); None scales the
    whole image. `common_peak` is the largest value of 16-bit files in the data set, 0 if unknown.
    """
    name = name or (str(file) if isinstance(file, Path) else "in memory")
    try:
        with open_image(file) as image:
            deep, orientation = is_deep(image), _orientation(image)  # reading EXIF may load the pixels
            full, box = image.size, (0, 0, *image.size)
            if canvas is not None:
                if window is not None:
                    box = _window(full, canvas, window)
                # JPEG only: decode at the smallest of 1/1, 1/2, 1/4, 1/8 that is large enough.
                image.draft(None, _fitted(full, canvas, max(box[2] - box[0], box[3] - box[1])))
            picture = _to_rgb(image, deep, file, common_peak)
        if box != (0, 0, *full):
            across, down = picture.width / full[0], picture.height / full[1]
            left, top, right, bottom = box
            picture = picture.crop(
                (round(left * across), round(top * down), round(right * across), round(bottom * down))
            )
        if canvas is not None and max(picture.size) > canvas:
            picture = picture.resize(_fitted(picture.size, canvas, max(picture.size)), Image.Resampling.BILINEAR)
        if orientation in _TRANSPOSE:
            picture = picture.transpose(_TRANSPOSE[orientation])
    except Exception as error:  # decoders raise anything for damaged files
        raise UnreadableImage(name, _reason(error)) from error
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous()


def open_image(file: Path | bytes) -> Image.Image:
    """Open an image without decoding its pixels, for its size, mode and format; raises any exception."""
    if not (file if isinstance(file, bytes) else file.stat().st_size):
        raise _Refused("the file is empty")
    Image.init()
    known = tuple(name for name in _FORMATS if name in Image.OPEN)  # some builds of Pillow cannot read all of them
    image = Image.open(io.BytesIO(file) if isinstance(file, bytes) else file, formats=known)
    size = 6 if image.mode == "RGB" and is_deep(image) else 4 if image.mode in ("I", "F") else 3
    limit = 3 * PIXEL_LIMIT // size  # so that images of more bits take no more memory
    if image.width * image.height > limit:
        raise _Refused(_too_large(f"{image.width} x {image.height} pixels", limit))
    return image


def _window(size: tuple[int, int], canvas: int, place: float) -> tuple[int, int, int, int]:
    """The box (left, top, right, bottom) of an image to use: all of it unless it is long and larger than the canvas."""
    width, height = size
    is_long = max(size) > max(canvas, MAX_ASPECT * min(size))
    length = max(canvas, round(_WINDOW_ASPECT * min(size))) if is_long else max(size)
    left, top = (round(place * max(0, side - length)) for side in size)
    return left, top, left + min(width, length), top + min(height, length)


def _fitted(size: tuple[int, int], canvas: int, longer: int) -> tuple[int, int]:
    """The size (width, height) at which `longer` pixels fit, rounded down so that half of an odd side is enough."""
    return size if longer <= canvas else (max(1, size[0] * canvas // longer), max(1, size[1] * canvas // longer))


def _orientation(image: Image.Image) -> int:
    """The EXIF orientation, 1 (upright) if it is missing or damaged."""
    try:
        return int(image.getexif().get(_ORIENTATION_TAG, 1))
    except Exception:  # the pixels may still be fine
        return 1


def _to_rgb(image: Image.Image, deep: bool, file: Path | bytes, common_peak: Callable[[], int]) -> Image.Image:
    """Decode the pixels and convert any mode to 8-bit RGB."""
    if image.mode == "F":
        image = Image.fromarray(_to_bytes(np.asarray(image), 1.0))
    elif deep:
        peak, values = _deep_values(image, file)
        image = Image.fromarray(_to_bytes(values, 2.0 ** real_bits(max(peak, common_peak())) - 1))
    elif image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    if image.mode != "RGB":
        return image.convert("RGB")
    image.load()
    return image


def is_deep(image: Image.Image) -> bool:
    """Whether an opened image, whose pixels are not loaded, has integers of more than 8 bits."""
    return image.mode.startswith("I") or "'RGB;16" in str(getattr(image, "tile", ""))


def real_bits(peak: int) -> int:
    """The bits of values up to `peak`: the least of 8, 10, 12, 14 and 16 that covers them.

    Files with 16 bits often hold 12-bit values. The sBIT of a PNG is ignored: by its standard, values use all 16 bits.
    """
    return next((bits for bits in _DEPTHS if peak < 1 << bits), _DEPTHS[-1])


def _deep_values(image: Image.Image, file: Path | bytes) -> tuple[int, NDArray[Any]]:
    """The largest value, or what a TIFF declares as such if that is more; the values, gray (h, w) or RGB (h, w, 3)."""
    tags = getattr(image, "tag_v2", {})
    declared = 4095 if tags.get(_BITS_TAG) == (12,) else tags.get(_LARGEST_VALUE_TAG, 0)
    values = np.asarray(image)
    if image.mode == "RGB":  # Pillow reads the high bytes, which are enough if all 16 bits are in use
        low = values if values.max() >= 64 else _low_bytes(file)
        values = values.astype(np.uint16)
        values *= 256
        values += low
    return int(max(np.max(declared), values.max())), values


def _low_bytes(file: Path | bytes) -> NDArray[np.uint8]:
    """The low bytes of 16-bit RGB: what Pillow takes for the high bytes if told the other byte order."""
    native = "L" if sys.byteorder == "little" else "B"
    with open_image(file) as image:
        parts: list[Any] = getattr(image, "tile", [])
        for place, part in enumerate(parts):
            own, *others = part.args if isinstance(part.args, tuple) else (part.args,)
            other_order = "RGB;16B" if own[-1].replace("N", native) == "L" else "RGB;16L"
            parts[place] = part._replace(args=(other_order, *others) if others else other_order)
        return np.asarray(image)


def _to_bytes(values: NDArray[Any], natural: float) -> NDArray[np.uint8]:
    """Scale values from 0..natural to 0..255; if they exceed that range, from their minimum and maximum.

    In strips, because an image of numbers of 8 bytes would be many times larger.
    """
    strips = np.array_split(values.reshape(-1), max(1, values.size // _STRIP_VALUES))

    def floats() -> Iterator[NDArray[np.float64]]:
        return (np.nan_to_num(strip.astype(np.float64)) for strip in strips)

    least, greatest = min(float(strip.min()) for strip in floats()), max(float(strip.max()) for strip in floats())
    if least >= 0 and greatest <= natural:
        least, greatest = 0.0, natural
    scale = 255 / max(greatest - least, 1e-12)
    scaled = [((strip - least) * scale).round().astype(np.uint8) for strip in floats()]
    return np.concatenate(scaled).reshape(values.shape)


def _too_large(size: str, limit: int = PIXEL_LIMIT) -> str:
    return f"it has {size}, more than the limit of {limit:,}; scale it down or cut it into tiles first"


class _Refused(ValueError):
    """An image that is not decoded; the text says why."""


def _reason(error: Exception) -> str:
    if isinstance(error, Image.DecompressionBombError):
        return _too_large("far too many pixels")
    if isinstance(error, UnidentifiedImageError):
        return "it is not an image of a known format"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    if isinstance(error, _Refused):
        return text
    return "it is truncated" if "truncated" in text.lower() else f"it is damaged ({text})"  # by Pillow's texts


@runtime_checkable
class EncodedImages(Protocol):
    """Base of sources of image files, folders and shards.

    16-bit files often hold values of fewer bits: `peak` is the largest value in up to 64 evenly spaced images, and all
    images are scaled from the bits that cover it, so that their brightness stays comparable. An image with larger
    values is scaled from the bits that cover its own.
    """

    _peak: int | None = None

    def __len__(self) -> int: ...
    def name_of(self, index: int) -> str: ...
    def content_of(self, index: int) -> bytes: ...
    def warnings(self) -> list[str]: ...

    def header_of(self, index: int) -> Image.Image:
        """The opened image, whose pixels are not decoded; raises any exception."""
        return open_image(self.content_of(index))

    def checked_content_of(self, index: int) -> bytes:
        """The bytes of an image file that can be decoded; raises `UnreadableImage`."""
        content = self.content_of(index)
        decode(content, _CHECKED_SIDE, self.name_of(index))
        return content

    def read(self, index: int, canvas: int | None = None, window: float | None = 0.5) -> Tensor:
        return decode(self.content_of(index), canvas, self.name_of(index), window, self.peak)

    def peak(self) -> int:
        """The largest value of 16-bit images; 0 if there are none among those looked at."""
        if self._peak is None:
            peak = 0
            for index in range(0, len(self), -(-len(self) // _PROBED_IMAGES)):
                with contextlib.suppress(Exception), self.header_of(index) as image:  # reported when it is read
                    peak = max(peak, _deep_values(image, self.content_of(index))[0]) if is_deep(image) else peak
            self._peak = peak
        return self._peak

    def share_peak(self, other: "EncodedImages") -> None:
        """Scale the 16-bit images of two splits alike."""
        self._peak = other._peak = max(self.peak(), other.peak())
