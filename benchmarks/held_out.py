"""Training images in two parts, the second in the place of a test set, which then has no part in a search."""

import os
from pathlib import Path

import numpy as np

HELD_OUT = 5000


def hold_out(data: Path, split: Path) -> Path:
    """Write the two parts of an npz file's training images, always the same ones, to `split`."""
    try:
        with np.load(data) as arrays:
            images, labels = arrays["x_train"], arrays["y_train"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{data} is no npz file with x_train and y_train: {error}") from None
    if len(images) <= HELD_OUT:
        raise SystemExit(
            f"{data} has {len(images):,} training images; more than {HELD_OUT:,} are needed to hold some out."
        )
    order = np.random.default_rng(0).permutation(len(images))
    held, kept = np.sort(order[:HELD_OUT]), np.sort(order[HELD_OUT:])
    split.parent.mkdir(parents=True, exist_ok=True)
    half = split.with_name(f"half-{os.getpid()}.npz")  # nobody is to see a file that is still being written
    np.savez(half, x_train=images[kept], y_train=labels[kept], x_test=images[held], y_test=labels[held])
    return half.replace(split)
