"""Decode an image file into an 8-bit RGB tensor; `encoded.py` keeps other images as they are.

- The format is detected from the content, not from the file name.
- Transparent pixels are blended over white.
- Values of 16-bit files are scaled to 0..255 from the bits in use, floats within 0..1 from that range, and all other
  numbers from their minimum and maximum.
- Images longer than 2:1 and larger than the canvas are cut to a window, so that they do not shrink to a stripe.
- The EXIF orientation is applied; of an animation the first frame is used.
- Truncated files are refused: the missing part would be gray.
"""

import contextlib
import io
import logging
import sys
import warnings
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import ExifTags, Image, UnidentifiedImageError
from torch import Tensor

from jcl.data.source import Refused, UnreadableImage
from jcl.errors import SettingsError

PIXEL_LIMIT: Final = 128_000_000
"""Images with more pixels are refused before they are decoded. The limit is lower for pixels of more than 3 bytes."""

MAX_ASPECT: Final = 2  # images longer than this, and than the canvas, are cut to a window
_WINDOW_ASPECT: Final = 1.5  # a little more than that of the longest crops, 4:3
_BITS_PER_SAMPLE: Final = 258  # a TIFF tag
_DEPTHS: Final = (8, 10, 12, 14, 16)  # bits of cameras and microscopes; 16-bit files often hold values of 12

# Not EPS and the like, which Pillow passes to another program.
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "MPO", "JPEG2000", "AVIF", "TGA", "ICO", "PCX")

# Warnings about metadata and large images (we have our own limit). Filtered globally, because a filter around
# each image is neither thread-safe nor free.
warnings.filterwarnings("ignore", category=UserWarning, module=r"(PIL|pydicom)\.")
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)

logging.getLogger("PIL").setLevel(logging.CRITICAL)  # errors are reported by us

_TRANSPOSE: Final = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decode(file: Path | bytes, canvas: int | None = None, name: str = "", window: float | None = 0.5) -> Tensor:
    """Decode an image file, or its bytes, into (3, h, w) uint8 RGB; raises `UnreadableImage` with `name`.

    With a canvas the image is scaled down, antialiased and with its aspect ratio kept, until its longer side is at most
    `canvas`; it is never enlarged. A JPEG much larger than the canvas is decoded at reduced size, which is faster.
    An image longer than `MAX_ASPECT` is cut to a window at the position `window`, from 0 (start) to 1 (end); None
    scales the whole image.
    """
    name = name or (str(file) if isinstance(file, Path) else "in memory")
    try:
        with open_image(file) as image:
            high_depth, orientation = has_high_depth(image), orientation_of(image)  # reading EXIF may load the pixels
            full, box = image.size, _window(image.size, canvas, window)
            if canvas is not None:  # JPEG only: decode at the smallest of 1/1, 1/2, 1/4, 1/8 that is large enough
                image.draft(None, _fitted_size(full, canvas, max(box[2] - box[0], box[3] - box[1])))
            picture = fit_to_canvas(_to_rgb(image, high_depth, file), full, canvas, window, orientation)
    except Exception as error:  # decoders raise anything for damaged files
        raise UnreadableImage(name, describe_failure(error, file)) from error
    return to_planes(picture)


def to_planes(picture: Image.Image) -> Tensor:
    """The pixels of an RGB picture, (3, h, w) uint8; faster than a transposed array."""
    planes = b"".join(picture.tobytes("raw", channel) for channel in "RGB")
    return torch.frombuffer(bytearray(planes), dtype=torch.uint8).view(3, picture.height, picture.width)


def fit_to_canvas(
    picture: Image.Image, full: tuple[int, int], canvas: int | None, window: float | None, orientation: int
) -> Image.Image:
    """Cut a picture of an image of size `full` to its window, scale it down to the canvas and turn it upright."""
    box = _window(full, canvas, window)
    if box != (0, 0, *full):
        across, down = picture.width / full[0], picture.height / full[1]
        left, top, right, bottom = box
        picture = picture.crop((round(left * across), round(top * down), round(right * across), round(bottom * down)))
    if canvas is not None and max(picture.size) > canvas:
        picture = picture.resize(_fitted_size(picture.size, canvas, max(picture.size)), Image.Resampling.BILINEAR)
    return picture.transpose(_TRANSPOSE[orientation]) if orientation in _TRANSPOSE else picture


def open_image(file: Path | bytes) -> Image.Image:
    """Open an image without decoding its pixels, for its size, mode and format; raises any exception."""
    if not (file if isinstance(file, bytes) else file.stat().st_size):
        raise Refused("the file is empty")
    image = Image.open(io.BytesIO(file) if isinstance(file, bytes) else file, formats=_known_formats())
    high_depth = has_high_depth(image)
    if image.mode == "RGB" and not high_depth and 16 in getattr(image, "tag_v2", {}).get(_BITS_PER_SAMPLE, ()):
        raise Refused("Pillow cannot read its separate color planes of 16 bits; convert it to interleaved RGB")
    size = 6 if image.mode == "RGB" and high_depth else 4 if image.mode in ("I", "F") else 3
    limit = 3 * PIXEL_LIMIT // size  # so that images of more bits take no more memory
    if image.width * image.height > limit:
        raise Refused(too_large(f"{image.width} x {image.height} pixels", limit))
    return image


@cache
def _known_formats() -> tuple[str, ...]:
    """Those that this Pillow can read; HEIC needs pillow-heif."""
    Image.init()
    with contextlib.suppress(ImportError):
        import pillow_heif

        pillow_heif.register_heif_opener()
    return tuple(name for name in (*_FORMATS, "HEIF") if name in Image.OPEN)


def _window(size: tuple[int, int], canvas: int | None, place: float | None) -> tuple[int, int, int, int]:
    """The box (left, top, right, bottom) of an image to use: all of it unless it is long and larger than the canvas."""
    width, height = size
    if canvas is None or place is None:
        return 0, 0, width, height
    is_long = max(size) > max(canvas, MAX_ASPECT * min(size))
    length = max(canvas, round(_WINDOW_ASPECT * min(size))) if is_long else max(size)
    left, top = (round(place * max(0, side - length)) for side in size)
    return left, top, left + min(width, length), top + min(height, length)


def _fitted_size(size: tuple[int, int], canvas: int, longer: int) -> tuple[int, int]:
    """The size (width, height) scaled so that `longer` pixels fit the canvas, rounded down."""
    return size if longer <= canvas else (max(1, size[0] * canvas // longer), max(1, size[1] * canvas // longer))


def orientation_of(image: Image.Image) -> int:
    """The EXIF orientation that loading leaves to us, 1 (upright) if it is missing or damaged."""
    if image.format == "TIFF":  # Pillow turns these as it loads them
        return 1
    try:
        return int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # the pixels may still be fine
        return 1


def _to_rgb(image: Image.Image, high_depth: bool, file: Path | bytes) -> Image.Image:
    """Decode the pixels and convert any mode to 8-bit RGB."""
    if image.mode == "F":
        image = Image.fromarray(to_bytes(np.asarray(image), 1.0))
    elif high_depth:
        values = high_depth_values(image, file)
        depth = next((bits for bits in _DEPTHS if values.max() < 1 << bits), _DEPTHS[-1])
        image = Image.fromarray(to_bytes(values, 2.0**depth - 1))
    elif image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    if image.mode != "RGB":
        return image.convert("RGB")
    image.load()
    return image


def has_high_depth(image: Image.Image) -> bool:
    """Whether an opened image, whose pixels are not loaded, has integers of more than 8 bits."""
    return image.mode.startswith("I") or "'RGB;16" in str(getattr(image, "tile", ""))


def loses_bits(image: Image.Image) -> bool:
    """Whether Pillow decodes an opened image of more than 8 bits with 8: 16-bit color with transparency, or PPM."""
    arguments = [part.args for part in getattr(image, "tile", [])]  # a PPM of other than 255 values has ("RGB", most)
    deep_ppm = image.format == "PPM" and any(isinstance(each, tuple) and each[-1] > 255 for each in arguments)
    return deep_ppm or ";16" in str(arguments)


def high_depth_values(image: Image.Image, file: Path | bytes) -> NDArray[Any]:
    """The values of an image of more than 8 bits, gray (h, w) or RGB (h, w, 3)."""
    values = np.asarray(image)
    if image.mode == "RGB":  # Pillow reads the high bytes
        low = _low_bytes(file)
        values = values.astype(np.uint16)
        values *= 256
        values += low
    return values


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


def to_bytes(values: NDArray[Any], natural: float) -> NDArray[np.uint8]:
    """Scale values from 0..natural to 0..255; if they exceed that range, from their minimum and maximum."""
    refuse_not_finite(values)
    least, greatest = float(values.min()), float(values.max())
    if least >= 0 and greatest <= natural:
        least, greatest = 0.0, natural
    scale, scaled = 255 / max(greatest - least, 1e-12), np.empty(values.shape, dtype=np.uint8)
    for row, out in zip(values, scaled, strict=True):  # to save memory
        out[...] = ((row.astype(np.float64) - least) * scale).round()
    return scaled


def refuse_not_finite(values: NDArray[Any]) -> None:
    if values.size and not np.isfinite([values.min(), values.max()]).all():  # both are NaN if any value is
        raise Refused("it has NaN or infinite values, or values too large for float32")


def too_large(size: str, limit: int = PIXEL_LIMIT) -> str:
    return f"it has {size}, more than the limit of {limit:,}; scale it down or cut it into tiles first"


def describe_failure(error: Exception, file: Path | bytes = b"") -> str:
    """Why an image cannot be read."""
    if isinstance(error, Image.DecompressionBombError):
        return too_large("far too many pixels")
    if isinstance(error, UnidentifiedImageError):
        if isinstance(file, bytes) and file.startswith((b"II", b"MM")) and not find_spec("tifffile"):
            return "this TIFF needs tifffile, run: pip install 'joint-contrastive-learning[scientific]'"
        return "it is not an image of a known format"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    missing_library = "requires the" in text or "missing dependencies" in text
    return text if missing_library or isinstance(error, Refused | SettingsError) else f"it is damaged ({text})"
