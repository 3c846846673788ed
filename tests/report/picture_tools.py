"""What a picture shows, by the colors of its pixels."""

from pathlib import Path

import numpy as np
from matplotlib.colors import to_rgb
from numpy.typing import NDArray
from PIL import Image


def pixels(path: Path) -> NDArray[np.uint8]:
    """(height, width, 3)"""
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def count(picture: Path | NDArray[np.uint8], color: tuple[int, ...] | str) -> int:
    """Pixels of exactly this color."""
    wanted = np.round(np.array(to_rgb(color)) * 255) if isinstance(color, str) else np.array(color)
    found = pixels(picture) if isinstance(picture, Path) else picture
    return int((found == wanted.astype(np.uint8)).all(axis=2).sum())
