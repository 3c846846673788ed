"""The figures of every single image, in a file for other programs."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from jcl.errors import JclError, SettingsError
from jcl.evaluate.distribution import ViewSpread

SUFFIXES = (".csv", ".npz")


def check_values_file(path: Path) -> None:
    """Refuse a file of a kind that is not written, before anything is measured."""
    if path.suffix.lower() not in SUFFIXES:
        raise SettingsError(f"{path} should end in {' or '.join(SUFFIXES)}, the two forms in which values are written.")


def write_values(path: Path, images: Sequence[str], spreads: Mapping[str, ViewSpread]) -> None:
    """One row an image: its name, and the similarity and variance of its views to each network."""
    columns = {"image": np.array(images, dtype=np.str_)}
    for name, spread in spreads.items():
        columns[f"{name}_similarity"] = spread.similarity.numpy()
        columns[f"{name}_similarity_of_different_views"] = spread.similarity_of_different_views.numpy()
        columns[f"{name}_variance"] = spread.variance.numpy()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix.lower() == ".npz":
            np.savez(path, **columns)  # type: ignore[arg-type]
            return
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows(zip(*(column.tolist() for column in columns.values()), strict=True))
    except OSError as error:
        raise JclError(f"the values could not be written to {path}: {error.strerror}.") from None
