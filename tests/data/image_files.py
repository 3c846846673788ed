"""Images that the tests draw themselves."""

from pathlib import Path

import numpy as np
from PIL import Image


def noise_image(width: int, height: int, seed: int = 0) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def smooth_image(width: int, height: int) -> Image.Image:
    """Slow changes of colour, which survive JPEG and scaling: red grows to the right, green downwards."""
    across, down = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(np.stack([across, down, np.full_like(across, 128)], axis=2).round().astype(np.uint8))


def write_images(folder: Path, count: int, width: int = 12, height: int = 8, first_seed: int = 0) -> list[Path]:
    """Write `count` different images with lossless content into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{number:03}.png" for number in range(count)]
    for number, file in enumerate(files):
        noise_image(width, height, first_seed + number).save(file)
    return files
