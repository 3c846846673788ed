"""Splits training images in two, so that a search does not use the test set."""

from pathlib import Path

import numpy as np

from jcl.runs.atomic import atomic_open

HELD_OUT = 5000


def hold_out(data: Path, split: Path) -> Path:
    """Write an npz file in which `HELD_OUT` training images, always the same ones, are the test set."""
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
