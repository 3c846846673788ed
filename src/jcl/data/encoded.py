"""Image files with 1 to 16 channels of 8 bits, 16 bits or floats, and the base of sources of image files.

8-bit photographs are decoded by `decode.py`. Other files keep their values, except that 16-bit integers are divided by
65,535. TIFFs are read by tifffile, DICOM by pydicom, `.npy` by NumPy, the others by Pillow.
"""

import contextlib
import io
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from jcl.console import pluralize
from jcl.core import MAX_CHANNELS
from jcl.data import decode
from jcl.data.source import RGB, PixelFormat, Refused, UnreadableImage, convert_pixels, evenly_spaced
from jcl.errors import DataError, import_extra

_PROBED_IMAGES: Final = 64
_CHECKED_SIDE: Final = 256  # finds damage too, and decodes a photograph in a fraction of the time
_NUMPY, _DICOM, _TIFF = b"\x93NUMPY", b"DICM", (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")  # how files begin


class ImageFile(NamedTuple):
    """The header of an image file. Photographs have no `read`, because `decode.py` reads them."""

    kind: str  # "PNG RGB", "DICOM uint16 x 1"
    height: int
    width: int
    channels: int
    color: bool = True  # three channels are red, green and blue
    high_depth: bool = False  # values have more than 8 bits, of which `decode.py` keeps 8
    read: Callable[[], NDArray[Any]] | None = None  # the values (height, width, channels)
    orientation: int = 1  # of EXIF
    pages: int = 1

    @property
    def format(self) -> PixelFormat:
        """The format that keeps every value; 8-bit RGB for photographs, gray ones too."""
        dtype = torch.float32 if self.high_depth else torch.uint8
        return PixelFormat(self.channels, dtype, self.color) if self.read else RGB


def open_file(file: Path | bytes) -> ImageFile:
    """Read the header of an image file or its bytes; raises any exception."""
    with io.BytesIO(file) if isinstance(file, bytes) else file.open("rb") as stream:
        start = stream.read(132)
    if start.startswith(_NUMPY):
        return _open_numpy(file)
    if start[128:] == _DICOM:
        return _open_dicom(file)
    return _open_tiff(file) if start.startswith(_TIFF) else _open_with_pillow(file)


def decode_as(content: bytes, wanted: PixelFormat, canvas: int | None, name: str, window: float | None = 0.5) -> Tensor:
    """Decode an image file of any kind into (channels, h, w) of a format; the other arguments are those of `decode`."""
    try:
        found = open_file(content) if wanted != RGB or not _pillow_opens(content) else None
        if found is None or found.read is None:
            pixels = decode.decode(content, canvas, name, window)
        else:  # 8-bit planes by Pillow's mode L, others by F
            planes = to_tensor(found.read().transpose(2, 0, 1)).numpy()
            if wanted.dtype == torch.uint8 and planes.dtype != np.uint8:
                planes = decode.to_bytes(planes, 0.0)
            full, placed = (planes.shape[2], planes.shape[1]), (canvas, window, found.orientation)
            pictures = [Image.fromarray(np.ascontiguousarray(plane)) for plane in planes]
            fitted = [np.asarray(decode.fit_to_canvas(picture, full, *placed)) for picture in pictures]
            pixels = torch.from_numpy(np.stack(fitted))
        return convert_pixels(pixels, wanted)
    except UnreadableImage:
        raise
    except Exception as error:  # decoders raise anything for damaged files
        raise UnreadableImage(name, decode.describe_failure(error, content)) from error


def _pillow_opens(content: bytes) -> bool:
    if content.startswith(_TIFF):
        with contextlib.suppress(UnidentifiedImageError):
            decode.open_image(content).close()
            return True
        return False
    return not content.startswith(_NUMPY) and content[128:132] != _DICOM


def to_tensor(values: NDArray[Any]) -> Tensor:
    """Values as uint8 or float32; unsigned 16-bit integers are scaled to 0..1, other numbers stay as they are."""
    if values.dtype.kind not in "buif":
        raise Refused(f"its values are {values.dtype}, not real numbers")
    if values.dtype == np.bool_:
        values = values * np.uint8(255)
    elif values.dtype != np.uint8:
        largest = 65_535 if values.dtype.kind == "u" and values.dtype.itemsize == 2 else 1
        values = values.astype(np.float32)
        values /= largest
        decode.refuse_not_finite(values)
    return torch.from_numpy(values)


def channels_last(values: NDArray[Any]) -> NDArray[Any]:
    """Move the channels last: (..., h, w), (..., c, h, w) or (..., h, w, c) becomes (..., h, w, c), where c <= h."""
    if values.ndim < 3:
        return values[..., None]
    return values if values.shape[-1] <= values.shape[-3] else np.moveaxis(values, -3, -1)


def _stream(file: Path | bytes) -> Any:
    return io.BytesIO(file) if isinstance(file, bytes) else file


def _array_file(
    kind: str, shape: tuple[int, ...], dtype: np.dtype[Any], read: Callable[[], NDArray[Any]], **more: Any
) -> ImageFile:
    if len(shape) != 3 or 0 in shape or shape[2] > MAX_CHANNELS:
        raise Refused(f"its shape is {shape}, not (h, w, channels) with 1 to {MAX_CHANNELS} channels")
    if math.prod(shape) * dtype.itemsize > 3 * decode.PIXEL_LIMIT:
        raise Refused(decode.too_large(f"{shape[1]} x {shape[0]} pixels of {pluralize(shape[2], 'channel')}"))
    if dtype not in (np.uint8, np.uint16):
        more["color"] = False  # views of colors need values from 0 to 1
    high_depth = dtype not in (np.uint8, np.bool_)
    return ImageFile(f"{kind} {dtype.name} x {shape[2]}", *shape, high_depth=high_depth, read=read, **more)


def _open_numpy(file: Path | bytes) -> ImageFile:
    mapped: Any = None if isinstance(file, bytes) else "r"
    values = channels_last(np.load(_stream(file), mmap_mode=mapped, allow_pickle=False))
    return _array_file("NPY", values.shape, values.dtype, lambda: np.asarray(values), color=values.dtype == np.uint8)


def _open_dicom(file: Path | bytes) -> ImageFile:
    """The first frame, with the modality's slope and intercept; MONOCHROME1 is inverted, so that white is high."""
    pydicom = import_extra("pydicom", "scientific", "DICOM")
    data = pydicom.dcmread(_stream(file), stop_before_pixels=True)
    if data.get("PhotometricInterpretation") == "PALETTE COLOR":  # the values are numbers of colors
        raise Refused("its colors are in a palette; convert it to RGB")
    if any(name not in data for name in ("Rows", "Columns", "SamplesPerPixel", "BitsAllocated", "PixelRepresentation")):
        raise Refused("it holds no image")  # a report or a plan
    slope, intercept = float(data.get("RescaleSlope") or 1), float(data.get("RescaleIntercept") or 0)
    scaled = (slope, intercept) != (1, 0)

    def read() -> NDArray[Any]:
        values: NDArray[Any] = import_extra("pydicom.pixels", "scientific", "DICOM").pixel_array(_stream(file), index=0)
        if data.PhotometricInterpretation == "MONOCHROME1":
            values = (0 if data.PixelRepresentation else 1 << int(data.BitsStored)) - 1 - values
        values = values * np.float32(slope) + np.float32(intercept) if scaled else values
        return values if values.ndim == 3 else values[..., None]

    dtype = np.dtype(np.float32 if scaled else f"{'' if data.PixelRepresentation else 'u'}int{data.BitsAllocated}")
    shape, pages = (int(data.Rows), int(data.Columns), int(data.SamplesPerPixel)), int(data.get("NumberOfFrames") or 1)
    return _array_file("DICOM", shape, dtype, read, pages=pages)


def _open_tiff(file: Path | bytes) -> ImageFile:
    """A TIFF by tifffile; by Pillow if it is a photograph, or if tifffile is not installed.

    Channels are the samples of a pixel, the axis C of ImageJ and OME, or up to 16 pages that tifffile wrote as one
    array. Along other axes, such as depth and time, the first slice is used.
    """
    try:
        import tifffile
    except ImportError:
        return _open_with_pillow(file)
    logging.getLogger("tifffile").setLevel(logging.CRITICAL)  # errors are reported by us
    try:
        with tifffile.TiffFile(_stream(file)) as tiff:
            series, page = tiff.series[0], tiff.pages.first
            sizes, turned = dict(zip(series.axes, series.shape, strict=True)), page.tags.get("Orientation")
    except Exception:  # damaged metadata, which Pillow does not read
        return _open_with_pillow(file)
    if len(sizes) < len(series.axes):
        raise Refused(f"the axes of its shape {series.shape} are unknown; write it with axes, such as 'ZCYX'")
    stacked = "S" not in sizes and sizes.get("Q", MAX_CHANNELS + 1) <= MAX_CHANNELS
    channels = [axis for axis in sizes if axis in "CS" or (axis == "Q" and stacked)]
    others = [axis for axis in sizes if axis not in (*channels, "Y", "X")]
    shape = (sizes["Y"], sizes["X"], math.prod(sizes[axis] for axis in channels))
    plain = channels in ([], ["S"])
    if plain and series.dtype in (np.uint8, np.bool_) and 0 not in page.extrasamples:  # samples of no known meaning
        return _open_with_pillow(file)
    if plain and shape[2] in (1, 3) and page.compression not in tifffile.TIFF.DECOMPRESSORS:  # without imagecodecs
        with contextlib.suppress(UnidentifiedImageError):
            return _open_with_pillow(file)

    def read() -> NDArray[Any]:
        with tifffile.TiffFile(_stream(file)) as tiff:
            stack = tiff.series[0]
            if stack.dataoffset is None:  # compressed: decode only the pages of the first slice
                over_pages = series.axes.removesuffix(page.axes)
                numbers = np.arange(len(stack)).reshape([sizes[axis] for axis in over_pages])
                numbers = numbers[tuple(slice(1 if axis in others else None) for axis in over_pages)]
                values = tiff.asarray(key=numbers.ravel().tolist(), series=0).reshape(*numbers.shape, *page.shape)
            else:
                values = stack.asarray()
        order = [series.axes.index(axis) for axis in (*others, "Y", "X", *channels)]
        return values.transpose(order)[(0,) * len(others)].reshape(shape)  # type: ignore[no-any-return]

    color, orientation = plain and page.photometric == tifffile.PHOTOMETRIC.RGB, int(turned.value) if turned else 1
    pages = math.prod(sizes[axis] for axis in others)
    return _array_file("TIFF", shape, series.dtype, read, color=color, orientation=orientation, pages=pages)


def _open_with_pillow(file: Path | bytes) -> ImageFile:
    with decode.open_image(file) as image:
        color = image.mode in ("P", "PA") or Image.getmodebase(image.mode) == "RGB"
        high_depth, (width, height) = decode.has_high_depth(image), image.size
        found = ImageFile(f"{image.format} {image.mode}", height, width, 3 if color else 1, color)
        found = found._replace(pages=getattr(image, "n_frames", 1) if image.format == "TIFF" else 1)
        if not high_depth and image.mode != "F":
            return found._replace(high_depth=decode.loses_bits(image))
        orientation = decode.orientation_of(image)

    def read() -> NDArray[Any]:
        with decode.open_image(file) as image:
            values = decode.high_depth_values(image, file) if high_depth else np.asarray(image)
        values = values if values.ndim == 3 else values[..., None]
        return values.astype(np.uint16) if image.format in ("PNG", "PPM") else values  # some versions read int32

    return found._replace(high_depth=True, read=read, orientation=orientation)


@runtime_checkable
class EncodedImages(Protocol):
    """Base of sources of image files. Their common format is that of 64 of them, with `channels` channels if set."""

    channels: int | None = None
    stored: PixelFormat | None = None  # once it is known

    def __len__(self) -> int: ...
    def name_of(self, index: int) -> str: ...
    def content_of(self, index: int) -> bytes: ...

    def warnings(self) -> list[str]:
        return []

    def header_of(self, index: int) -> ImageFile:
        """The opened image, whose pixels are not decoded; raises any exception."""
        return open_file(self.content_of(index))

    def checked_content_of(self, index: int) -> bytes:
        """The bytes of an image file that can be decoded; raises `UnreadableImage`."""
        content = self.content_of(index)
        decode_as(content, self.pixel_format(), _CHECKED_SIDE, self.name_of(index))
        return content

    def read(self, index: int, canvas: int | None = None, window: float | None = 0.5) -> Tensor:
        return decode_as(self.content_of(index), self.pixel_format(), canvas, self.name_of(index), window)

    def pixel_format(self) -> PixelFormat:
        """The format of all images; raises `DataError` if they have different numbers of channels."""
        if self.stored is None:
            self.stored = _common_format(self.headers(), self.channels)
        return self.stored

    def headers(self) -> dict[str, ImageFile]:
        """Up to 64 opened images by name, evenly spaced in the source."""
        found: dict[str, ImageFile] = {}
        for index in evenly_spaced(len(self), _PROBED_IMAGES):
            with contextlib.suppress(Exception):  # reported when it is read
                found[self.name_of(index)] = self.header_of(index)
        return found


def _common_format(found: dict[str, ImageFile], wanted: int | None) -> PixelFormat:
    """The format for all of these files. If one is a photograph, all become 8-bit RGB, also those of more bits."""
    formats = {file.format: name for name, file in reversed(found.items())}  # the first name
    channels = wanted or (RGB if RGB in formats else next(iter(formats), RGB)).channels
    allowed = {1, 3} if channels in (1, 3) and (wanted or RGB in formats) else {channels}
    for format, name in formats.items():
        if format.channels not in allowed:
            others = [f"{name} has {channels}" for format, name in formats.items() if format.channels == channels]
            needed = f"data.channels or the weights need {wanted}" if wanted else f"{others[0]}; use one kind at a time"
            raise DataError(f"{name} has {pluralize(format.channels, 'channel')}, but {needed}.")
    if channels == 3 and (RGB in formats or not formats):
        return RGB
    high_depth = any(format.dtype != torch.uint8 for format in formats)
    return PixelFormat(channels, torch.float32 if high_depth else torch.uint8, all(format.color for format in formats))
