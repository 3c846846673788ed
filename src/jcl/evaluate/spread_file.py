"""The figures of every single image, in a file for other programs."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from jcl.errors import SettingsError
from jcl.evaluate.distribution import ViewSpread
from jcl.runs.atomic import replacing

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
    with replacing(path) as file:
        if path.suffix.lower() == ".npz":
            np.savez(file, **columns)  # type: ignore[arg-type]
            return
        text = io.TextIOWrapper(file, newline="", encoding="utf-8")
        writer = csv.writer(text)
        writer.writerow(columns)
        writer.writerows(zip(*(column.tolist() for column in columns.values()), strict=True))
        text.detach()  # writes the rest; the file is closed by whoever opened it
