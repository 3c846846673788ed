"""Images looked up in a feature file: which of its images are nearest to one's own."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from jcl.commands.embed import PRECISIONS
from jcl.data import UNLABELLED, ImageSource, open_data
from jcl.data.decode import decode
from jcl.data.named import KNOWN_SETS
from jcl.distributed.device import choose_device
from jcl.errors import DataError, RunError, SettingsError
from jcl.evaluate.feature_file import FeatureTable, read_feature_file
from jcl.evaluate.neighbours import Neighbours, nearest_neighbours
from jcl.export.backbone_file import weights_digest
from jcl.export.loading import open_backbone
from jcl.paths import home_expanded
from jcl.report.pictures import draw_neighbours

DRAWN: Final = 16
"""A picture shows at most so many queries, and neighbours of each."""

_CANVAS: Final = 256  # pixels of an image in a picture, whose cells are smaller


@dataclass(frozen=True)
class Query:
    """An image that was asked about: a file, or a row of the index."""

    name: str
    row: int | None


@dataclass(frozen=True, eq=False)
class Matches:
    """The rows of an index that are nearest to each query, nearest first: `found` holds (q, k)."""

    table: FeatureTable
    queries: tuple[Query, ...]
    found: Neighbours

    def as_dict(self) -> dict[str, list[Any]]:
        """Columns of equal length, a line for each neighbour of each query."""
        lines: dict[str, list[Any]] = {
            key: [] for key in ("query", "rank", "similarity", "row", "name", "class", "split")
        }
        neighbours = zip(self.queries, self.found.similarities.tolist(), self.found.rows.tolist(), strict=True)
        for query, similarities, rows in neighbours:
            for rank, (similarity, row) in enumerate(zip(similarities, rows, strict=True), start=1):
                own = (self.table.rows.names[row], self.table.class_of(row), self.table.rows.splits[row])
                for column, value in zip(lines.values(), (query.name, rank, similarity, row, *own), strict=True):
                    column.append(value)
        return lines


def find_neighbours(
    index: Path,
    images: Sequence[str] = (),
    rows: Sequence[int] = (),
    *,
    weights: Path | None = None,
    k: int = 8,
    device: str = "auto",
) -> Matches:
    """The k images of a feature file that are most similar to each query, by exact search.

    Queries are `images`, each a file or the name of an image in the index, then `rows` of the index. Files are shown to
    `weights`, by default those that the index says its features are from.
    """
    table = read_feature_file(index)
    queries = (*(_query(table, image) for image in images), *(_row_query(table, row) for row in rows))
    if not queries:
        raise SettingsError("Neighbours of what? Give an image, or a row of the index with --row.")
    values = torch.empty(len(queries), table.rows.features.shape[1])
    files = [place for place, query in enumerate(queries) if query.row is None]
    if files:
        values[files] = _features_of([queries[place].name for place in files], table, index, weights, device)
    bank = torch.from_numpy(table.rows.features)
    for place, query in enumerate(queries):
        if query.row is not None:
            values[place] = bank[query.row]
    return Matches(table, queries, nearest_neighbours(values, bank, k))


def _query(table: FeatureTable, image: str) -> Query:
    if home_expanded(image).is_file():
        return Query(str(home_expanded(image)), None)
    rows = [row for row, name in enumerate(table.rows.names) if name == image]
    if len(rows) > 1:
        raise SettingsError(f"The index has several images called {image}; choose one with --row {rows[0]} or another.")
    if not rows:
        close = difflib.get_close_matches(image, table.rows.names[:20_000], n=1)
        hint = f"; did you mean {close[0]}?" if close else "."
        raise DataError(f"There is neither a file {image} nor an image of this name in the index{hint}")
    return Query(image, rows[0])


def _row_query(table: FeatureTable, row: int) -> Query:
    if not 0 <= row < len(table):
        raise SettingsError(f"The index has no row {row}; its rows are numbered from 0 to {len(table) - 1}.")
    return Query(table.rows.names[row], row)


def _features_of(files: Sequence[str], table: FeatureTable, index: Path, weights: Path | None, device: str) -> Tensor:
    """Features (n, d) of image files, shown to the network as the images of the index were."""
    path = weights or Path(table.info.weights)
    if weights is None and not path.exists():
        raise RunError(f"The features in {index} are from {path}, which is not there; say where it is with --weights.")
    found = open_backbone(path)
    backbone, info = found.network, found.info
    width = table.rows.features.shape[1]
    if info.feature_width != width:
        raise RunError(
            f"{path} gives features of width {info.feature_width}, but those in {index} have width {width}; use the "
            f"weights they are from, or write them anew with `jcl embed`."
        )
    if weights_digest(backbone) != table.info.weights_digest:
        raise RunError(
            f"The features in {index} are from other weights than those now in {path}, so they do not compare; use the "
            f"weights they are from, or write them anew with `jcl embed`."
        )
    return info.shown.extract(
        backbone,
        _ImageFiles(tuple(files)),
        device=choose_device(device),
        precision=PRECISIONS.get(table.info.precision, torch.float32),
        strict=True,
    ).values


@dataclass(frozen=True)
class _ImageFiles:
    """Image files given one by one."""

    files: tuple[str, ...]
    labels: Tensor | None = None
    class_names: tuple[str, ...] | None = None
    description: str = "image files"

    def __len__(self) -> int:
        return len(self.files)

    def read(self, index: int, canvas: int | None = None) -> Tensor:
        return decode(Path(self.files[index]), canvas, self.files[index])

    def name_of(self, index: int) -> str:
        return self.files[index]


def draw_matches(matches: Matches, path: Path) -> Path:
    """A picture of the first queries beside their neighbours; `DataError` where the images can no longer be read."""
    table, queries = matches.table, matches.queries[:DRAWN]
    rows = matches.found.rows[:DRAWN, :DRAWN].tolist()
    asked = {query.row for query in queries if query.row is not None}
    images = _read_back(table, asked.union(*rows))
    labelled = bool((table.rows.labels != UNLABELLED).any())

    def caption(row: int) -> str | None:
        return table.class_of(row) if labelled else Path(table.rows.names[row]).name

    return draw_neighbours(
        [decode(Path(query.name), _CANVAS) if query.row is None else images[query.row] for query in queries],
        [[images[row] for row in own] for own in rows],
        path,
        query_labels=[None if query.row is None or not labelled else caption(query.row) for query in queries],
        neighbour_labels=[[caption(row) for row in own] for own in rows],
        similarities=matches.found.similarities.tolist(),
    )


def _read_back(table: FeatureTable, rows: set[int]) -> dict[int, Tensor]:
    """The images of some rows of an index, from where they were when it was made."""
    location = table.info.data
    # Of what a file says, only paths and sets known by name are opened: an address could be a command to run.
    if location not in KNOWN_SETS and not Path(location).is_absolute():
        raise DataError(f"The images of the index are from {location}, which is not fetched again.")
    data = open_data(location, download=False)
    sources = {"train": data.train, "test": data.test}
    names = {row: (table.rows.splits[row], table.rows.names[row]) for row in rows}
    places = {
        (split, name): sample
        for split, source in sources.items()
        for name, sample in _places(source, {name for own, name in names.values() if own == split}).items()
    }
    images = {}
    for row, (split, name) in names.items():
        source = sources.get(split)
        if source is None or (split, name) not in places:
            raise DataError(f"The image {name} of the index is no longer in {location}.")
        images[row] = source.read(places[split, name], _CANVAS)
    return images


def _places(source: ImageSource | None, names: set[str]) -> dict[str, int]:
    """Where the images of these names stand in a source."""
    if source is None or not names:
        return {}
    return {name: sample for sample in range(len(source)) if (name := source.name_of(sample)) in names}
