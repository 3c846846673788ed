"""Decode an image file into an RGB tensor.

- The format is detected from the content, not from the file name.
- Transparent pixels are blended over white.
- 16-bit gray is scaled from 0..65535 to 0..255, not clipped. Integers within 0..65535 and floats within 0..1 are scaled
  from that range, others from their minimum and maximum.
- The EXIF orientation is applied; of an animation the first frame is used.
- Truncated files are refused: the missing part would be gray.
"""

import io
import warnings
from pathlib import Path
from typing import Final

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from jcl.data.source import UnreadableImage

PIXEL_LIMIT: Final = 128_000_000
"""Images with more pixels than this are refused before any of them is decoded."""

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


def decode(file: Path | bytes, canvas: int | None = None, name: str | None = None) -> Tensor:
    """Decode an image file, or its bytes, into (3, h, w) uint8 RGB; raises `UnreadableImage` with `name`.

    With a canvas the image is scaled down, antialiased and with its aspect ratio kept, until its longer side is at most
    `canvas`; it is never enlarged. A JPEG much larger than the canvas is decoded at reduced size, which is faster.
    """
    name = name or (str(file) if isinstance(file, Path) else "in memory")
    try:
        with open_image(file) as image:
            orientation = _orientation(image)
            if canvas is not None:
                # JPEG only: decode at the smallest of 1/1, 1/2, 1/4, 1/8 that is large enough.
                image.draft(None, _fitted(image.size, canvas))
            picture = _to_rgb(image)
        if canvas is not None and max(picture.size) > canvas:
            picture = picture.resize(_fitted(picture.size, canvas), Image.Resampling.BILINEAR)
        if orientation in _TRANSPOSE:
            picture = picture.transpose(_TRANSPOSE[orientation])
    except Exception as error:  # decoders raise anything for damaged files
        raise UnreadableImage(name, _reason(error)) from error
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous()


def open_image(file: Path | bytes) -> Image.Image:
    """Open an image without decoding its pixels, for its size, mode and format; raises any exception."""
    content = file if isinstance(file, bytes) else file.read_bytes()
    if not content:
        raise ValueError("the file is empty")
    Image.init()
    known = tuple(name for name in _FORMATS if name in Image.OPEN)  # some builds of Pillow cannot read all of them
    image = Image.open(io.BytesIO(content), formats=known)
    if image.width * image.height > PIXEL_LIMIT:
        raise ValueError(_too_large(f"{image.width} x {image.height} pixels"))
    return image


def _fitted(size: tuple[int, int], canvas: int) -> tuple[int, int]:
    """The size (width, height) of an image on a canvas, rounded down so that half of an odd side is enough."""
    longer = max(size)
    return size if longer <= canvas else (max(1, size[0] * canvas // longer), max(1, size[1] * canvas // longer))


def _orientation(image: Image.Image) -> int:
    """The EXIF orientation, 1 (upright) if it is missing or damaged."""
    try:
        return int(image.getexif().get(_ORIENTATION_TAG, 1))
    except Exception:  # the pixels may still be fine
        return 1


def _to_rgb(image: Image.Image) -> Image.Image:
    """Decode the pixels and convert any mode to 8-bit RGB."""
    if image.mode.startswith("I") or image.mode == "F":
        image = Image.fromarray(_to_bytes(image))
    elif image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    if image.mode != "RGB":
        return image.convert("RGB")
    image.load()
    return image


def _to_bytes(image: Image.Image) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Scale gray values of more than 8 bits to 0..255."""
    values = np.nan_to_num(np.asarray(image).astype(np.float64))
    least, greatest = float(values.min()), float(values.max())
    natural = 1.0 if image.mode == "F" else 65535.0
    if least >= 0 and greatest <= natural:
        least, greatest = 0.0, natural
    scaled = (values - least) * (255 / max(greatest - least, 1e-12))
    return scaled.round().astype(np.uint8)


def _too_large(size: str) -> str:
    return f"it has {size}, more than the limit of {PIXEL_LIMIT:,}; scale it down or cut it into tiles first"


def _reason(error: Exception) -> str:
    if isinstance(error, Image.DecompressionBombError):
        return _too_large("far too many pixels")
    if isinstance(error, UnidentifiedImageError):
        return "it is not an image of a known format"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
