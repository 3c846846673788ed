"""Image files of more than 8 bits or other than three channels, written with the libraries that people use."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

KINDS = {  # name of the kind: (channels, type of the values)
    "png": (1, np.uint16),
    "tiff": (1, np.uint16),
    "tiff-rgb": (3, np.uint16),
    "tiff-channels": (5, np.uint16),
    "tiff-samples": (4, np.uint8),
    "tiff-float": (2, np.float32),
    "dicom": (1, np.uint16),
    "dicom-ct": (1, np.int16),
    "npy": (16, np.float32),
}


def cells(kind: str, seed: int, size: tuple[int, int] = (24, 20)) -> NDArray[Any]:
    """Bright spots on a dark ground: (height, width, channels) of the kind's type."""
    channels, dtype = KINDS[kind]
    draw = np.random.default_rng(seed)
    rows, columns = np.mgrid[: size[0], : size[1]]
    image = 0.02 + 0.01 * draw.random((*size, channels))
    for _ in range(6):
        row, column, radius = draw.uniform(0, size[0]), draw.uniform(0, size[1]), draw.uniform(1, 4)
        spot = np.exp(-((rows - row) ** 2 + (columns - column) ** 2) / radius**2)
        image += spot[..., None] * draw.uniform(0, 0.5, channels)
    scale = {np.uint8: 255, np.uint16: 40_000, np.int16: 3000, np.float32: 1000.0}[dtype]
    return (np.minimum(image, 1) * scale).astype(dtype)


def dicom(values: NDArray[Any], **tags: Any) -> bytes:
    """A DICOM file of values (height, width) or (height, width, 3)."""
    pydicom = pytest.importorskip("pydicom")
    meta = pydicom.dataset.FileMetaDataset()
    meta.MediaStorageSOPClassUID = "1.2.840.10008.5.1.4.1.1.7"
    meta.MediaStorageSOPInstanceUID = "1.2.3"
    meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    data = pydicom.dataset.FileDataset(None, {}, file_meta=meta, preamble=bytes(128))
    data.Rows, data.Columns = values.shape[:2]
    data.SamplesPerPixel = 1 if values.ndim == 2 else 3
    data.PhotometricInterpretation = "MONOCHROME2" if values.ndim == 2 else "RGB"
    if values.ndim == 3:
        data.PlanarConfiguration = 0
    data.BitsAllocated = data.BitsStored = values.dtype.itemsize * 8
    data.HighBit, data.PixelRepresentation = data.BitsStored - 1, int(values.dtype.kind == "i")
    for name, value in tags.items():
        setattr(data, name, value)
    data.PixelData = values.tobytes()
    stream = io.BytesIO()
    data.save_as(stream, enforce_file_format=True)
    return stream.getvalue()


def write_image(file: Path, kind: str, values: NDArray[Any]) -> None:
    """Write values (height, width, channels) as a file of this kind; the suffix is added."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if kind == "png":
        Image.fromarray(values[..., 0]).save(f"{file}.png")
    elif kind == "npy":
        np.save(f"{file}.npy", values)
    elif kind.startswith("dicom"):
        tags = {"RescaleSlope": 1, "RescaleIntercept": -1024} if kind == "dicom-ct" else {}
        Path(f"{file}.dcm").write_bytes(dicom(values[..., 0], **tags))
    else:
        tifffile = pytest.importorskip("tifffile")
        if kind in ("tiff-rgb", "tiff-samples"):
            photometric = "rgb" if kind == "tiff-rgb" else "minisblack"
            tifffile.imwrite(f"{file}.tif", values, photometric=photometric, planarconfig="contig", compression="zlib")
        elif kind == "tiff":
            tifffile.imwrite(f"{file}.tif", values[..., 0])
        else:
            tifffile.imwrite(f"{file}.tif", values.transpose(2, 0, 1), metadata={"axes": "CYX"})


def as_stored(kind: str, values: NDArray[Any]) -> NDArray[np.float32]:
    """What the file of these values should be read as, (channels, height, width)."""
    scale = {np.uint8: 255, np.uint16: 65_535}.get(KINDS[kind][1], 1)
    return (values.transpose(2, 0, 1).astype(np.float64) - (1024 if kind == "dicom-ct" else 0)) / scale


def write_folder(root: Path, kind: str, count: int, classes: tuple[str, ...] = ("a", "b")) -> Path:
    for number in range(count):
        write_image(root / classes[number % len(classes)] / f"{number:03}", kind, cells(kind, number))
    return root
