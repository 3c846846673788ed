"""CIFAR-10, CIFAR-100 and STL-10 by name, fetched and checked by torchvision."""

import os
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from jcl.data.source import ArrayImages, ImageData
from jcl.errors import DataError

DOWNLOADED_SETS: Final = ("cifar10", "cifar100", "stl10")


def default_root() -> Path:
    """Where downloaded sets are kept: `$JCL_DATA`, or a folder in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("JCL_DATA") or cache / "jcl" / "data")


def open_downloaded(name: str, root: Path | None = None, download: bool = True) -> ImageData:
    """Open one of `DOWNLOADED_SETS` from `root`, downloading it first where it is not there yet.

    STL-10 is trained on all of its images that are not test images: 5,000 with a label and 100,000 without.
    """
    root = root or default_root()
    return ImageData(
        name,
        _as_arrays(name, _split(name, root, download, True)),
        _as_arrays(name, _split(name, root, download, False)),
    )


def _split(name: str, root: Path, download: bool, train: bool) -> Any:
    from torchvision import datasets  # takes a second to import, which most runs and every worker can spare

    try:
        root.mkdir(parents=True, exist_ok=True)
        if name == "stl10":
            return datasets.STL10(root, split="train+unlabeled" if train else "test", download=download)
        kind = datasets.CIFAR10 if name == "cifar10" else datasets.CIFAR100
        return kind(root, train=train, download=download)
    except (OSError, RuntimeError) as error:  # URLError is an OSError; torchvision raises RuntimeError for bad files
        what = "could not be downloaded to" if download else "is not in"
        raise DataError(
            f"The data set {name} {what} {root} ({_first_line(error)}); place its files there by hand, or give a .npz "
            f"file or a folder of images instead."
        ) from error


def _first_line(error: Exception) -> str:
    cause = getattr(error, "reason", None)  # of a URLError, whose own words are no sentence
    error = cause if isinstance(cause, OSError) else error
    text = (getattr(error, "strerror", None) or str(error)).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__


def _as_arrays(name: str, dataset: Any) -> ArrayImages:
    """torchvision keeps CIFAR as (n, h, w, 3) with `targets`, STL-10 as (n, 3, h, w) with `labels`."""
    if name == "stl10":
        pixels, labels = torch.from_numpy(np.ascontiguousarray(dataset.data)), dataset.labels
    else:
        pixels, labels = torch.from_numpy(dataset.data).permute(0, 3, 1, 2).contiguous(), dataset.targets
    labels = torch.as_tensor(np.asarray(labels), dtype=torch.int64)
    return ArrayImages(pixels, labels, tuple(dataset.classes), f"{name}, {len(pixels):,} images")
