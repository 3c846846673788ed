"""Images that the tests draw themselves, and a loader of them."""

from pathlib import Path

import numpy as np
from PIL import Image

from jcl.data import BatchLoader, FolderImages, ImageSource, open_data


def noise_image(width: int, height: int, seed: int = 0) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def smooth_image(width: int, height: int) -> Image.Image:
    """Slow changes of color, which survive JPEG and scaling: red grows to the right, green downwards."""
    across, down = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(np.stack([across, down, np.full_like(across, 128)], axis=2).round().astype(np.uint8))


def write_images(folder: Path, count: int, width: int = 12, height: int = 8, first_seed: int = 0) -> list[Path]:
    """Write `count` different images with lossless content into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{number:03}.png" for number in range(count)]
    for number, file in enumerate(files):
        noise_image(width, height, first_seed + number).save(file)
    return files


def folder_of_sizes(root: Path, count: int) -> FolderImages:
    """Images of different sizes, some larger than the canvas of 16, none longer than 2:1."""
    root.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        noise_image(10 + number % 12, 11 + number % 9, seed=number).save(root / f"{number:03}.png")
    train = open_data(str(root)).train
    assert isinstance(train, FolderImages)
    return train


def loader_for(source: ImageSource, **changes: object) -> BatchLoader:
    options = {"batch_size": 4, "canvas": 16, "seed": 5} | changes
    return BatchLoader(source, **options)  # type: ignore[arg-type]
