"""Training images in two parts, the second in the place of a test set, which then has no part in a search."""

from pathlib import Path

import numpy as np

from jcl.data.arrays import NPZ_ERRORS
from jcl.errors import RunError
from jcl.runs.atomic import replacing

HELD_OUT = 5000


def hold_out(data: Path, split: Path) -> Path:
    """Write the two parts of an npz file's training images, always the same ones, to `split`."""
    try:
        with np.load(data) as arrays:
            images, labels = arrays["x_train"], arrays["y_train"]
    except (*NPZ_ERRORS, KeyError, TypeError) as error:
        raise SystemExit(f"{data} is no npz file with x_train and y_train: {error}") from None
    if len(images) != len(labels):
        raise SystemExit(f"{data} has {len(images):,} images in x_train, but {len(labels):,} labels in y_train.")
    if len(images) <= HELD_OUT:
        raise SystemExit(
            f"{data} has {len(images):,} training images; more than {HELD_OUT:,} are needed to hold some out."
        )
    order = np.random.default_rng(0).permutation(len(images))
    held, kept = np.sort(order[:HELD_OUT]), np.sort(order[HELD_OUT:])
    try:
        with replacing(split) as file:  # nobody is to see one that is still being written
            np.savez(file, x_train=images[kept], y_train=labels[kept], x_test=images[held], y_test=labels[held])
    except RunError as error:
        raise SystemExit(f"Error: {error}") from None
    return split
