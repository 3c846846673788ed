"""Splits training images in two, so that a search does not use the test set."""

from pathlib import Path

import numpy as np

from jcl.runs.atomic import atomic_open

HELD_OUT = 5000  # images of an npz file
HELD_OUT_EVERY = 6  # images of a class in a folder


def hold_out(data: Path, out: Path) -> Path:
    """Training images, some of them as the test set, in `out`: an npz file or folder, the same for the same images."""
    return hold_out_folder(data, out / "held-out") if data.is_dir() else hold_out_array(data, out / "held-out.npz")


def hold_out_folder(data: Path, split: Path) -> Path:
    """A folder of links to the images, every `HELD_OUT_EVERY`-th of a class for testing."""
    train = data / "train" if (data / "train").is_dir() else data
    links = {}
    for folder in sorted(path for path in train.iterdir() if path.is_dir()):
        for number, file in enumerate(sorted(folder.iterdir())):
            links[split / ("train" if number % HELD_OUT_EVERY else "val") / folder.name / file.name] = file.resolve()
    if not links:
        raise SystemExit(f"{data} has no class folders with images.")
    for link in list(split.glob("*/*/*")):
        if link.readlink() != links.get(link):  # of other images, or of these before some were added
            link.unlink()
    for link, file in links.items():
        if not link.is_symlink():
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file)
    return split


def hold_out_array(data: Path, split: Path) -> Path:
    """An npz file with `HELD_OUT` training images as test images."""
    try:
        with np.load(data) as arrays:
            images, labels = arrays["x_train"], arrays["y_train"]
    except Exception as error:  # NumPy raises many kinds for damaged files
        raise SystemExit(f"{data} is not an npz file with x_train and y_train: {error}") from None
    if len(images) != len(labels) or len(images) <= HELD_OUT:
        raise SystemExit(
            f"{data} has {len(images):,} images and {len(labels):,} labels; more than {HELD_OUT:,} of both are needed."
        )
    order = np.random.default_rng(0).permutation(len(images))
    held, kept = np.sort(order[:HELD_OUT]), np.sort(order[HELD_OUT:])
    with atomic_open(split, follow_links=True) as file:
        np.savez(file, x_train=images[kept], y_train=labels[kept], x_test=images[held], y_test=labels[held])
    return split
