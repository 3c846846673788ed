"""Splits training images in two, so that a search does not use the test set."""

from pathlib import Path

import numpy as np

from jcl.runs.atomic import atomic_open

HELD_OUT = 5000  # images of an npz file
HELD_OUT_EVERY = 6  # images of a class in a folder


def hold_out(data: Path, out: Path) -> Path:
    """Training images, some of which, always the same ones, are the test set: below `out`, as an npz file or folder."""
    return hold_out_folder(data, out / "held-out") if data.is_dir() else hold_out_array(data, out / "held-out.npz")


def hold_out_folder(data: Path, split: Path) -> Path:
    """Links to the images, `HELD_OUT_EVERY`-th of a class for testing."""
    train = data / "train" if (data / "train").is_dir() else data
    for folder in sorted(path for path in train.iterdir() if path.is_dir()):
        for number, file in enumerate(sorted(folder.iterdir())):
            place = split / ("train" if number % HELD_OUT_EVERY else "val") / folder.name / file.name
            place.parent.mkdir(parents=True, exist_ok=True)
            if not place.is_symlink():
                place.symlink_to(file.resolve())
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
