"""Write the features of images to a file (`jcl embed`), and find the nearest images in it (`jcl neighbours`)."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from jcl.commands.inputs import open_target
from jcl.console import STDERR, ProgressCallback, no_progress
from jcl.data import UNLABELED, FolderImages, all_class_names, open_data
from jcl.data.listing import Listing
from jcl.data.named import KNOWN_SETS, absolute_location
from jcl.distributed.device import choose_device
from jcl.errors import DataError, RunError, SettingsError
from jcl.evaluate.feature_file import FeatureInfo, FeatureTable, check_writable, read_feature_file, write_feature_file
from jcl.evaluate.features import labels_of
from jcl.evaluate.neighbours import Neighbours, nearest_neighbours
from jcl.export.backbone_file import weights_digest
from jcl.export.loading import open_backbone
from jcl.paths import absolute_path, expand_user, location_path, printable
from jcl.report.contents import NamedImage, NeighbourRow
from jcl.report.figures import draw_neighbours
from jcl.settings.commands import EmbedOptions, NeighboursOptions

DRAWN: Final = 16  # queries in a picture at most, and neighbors of each
_CANVAS: Final = 256  # size in pixels at which images of a picture are decoded


def embed(options: EmbedOptions, *, progress: ProgressCallback = no_progress) -> tuple[dict[str, Any], dict[str, str]]:
    """Write the features of all readable images; returns the figures, and the unreadable images with the reasons."""
    started = time.perf_counter()
    check_writable(options.out, force=options.force)
    target = open_target(options.weights, options.data, options.device, STDERR)
    splits = target.data.splits
    if options.split not in (*splits, "all"):
        raise DataError(f"{options.data} has no split {options.split!r}; use --split {' or '.join(splits)} or all.")
    sources = splits if options.split == "all" else {options.split: splits[options.split]}
    info = FeatureInfo(
        weights=absolute_path(options.weights),
        weights_digest=weights_digest(target.backbone),
        backbone=target.info.backbone,
        image_size=target.info.image_size,
        feature_width=target.info.feature_width,
        data=absolute_location(options.data),
    )
    counts, skipped = dict.fromkeys(sources, 0), dict[str, str]()
    total, classes = sum(map(len, sources.values())), all_class_names(sources.values())
    if classes is not None:  # names of folders may hold bytes that are not UTF-8
        classes = tuple(printable(name) for name in classes)

    def tables() -> Iterator[FeatureTable]:
        for split, source in sources.items():
            unreadable: dict[str, str] = {}
            batches = target.info.preprocessing.batches(
                target.backbone,
                source,
                batch_size=options.batch_size,
                device=target.device,
                workers=options.worker_count,
                skipped=unreadable,
            )
            for values, samples in batches:
                if not values.isfinite().all():
                    raise RunError("The features are NaN or infinite; the training of the weights probably diverged.")
                names = [source.name_of(sample) for sample in samples.tolist()]
                labels = labels_of(source, samples.cpu()).numpy()
                yield FeatureTable(values.float().cpu().numpy(), names, labels, [split] * len(names), classes, info)
                counts[split] += len(names)
                progress(sum(counts.values()), total)
            suffix = f" ({split})" if len(sources) > 1 else ""  # both splits may have an image of the same name
            skipped.update({f"{name}{suffix}": reason for name, reason in unreadable.items()})

    write_feature_file(options.out, tables())
    count, seconds = sum(counts.values()), time.perf_counter() - started
    figures: dict[str, Any] = {"images": count, **{f"{split}_images": number for split, number in counts.items()}}
    figures |= {"feature_width": info.feature_width, "skipped": len(skipped), "skipped_names": sorted(skipped)}
    return figures | {"seconds": seconds, "images_per_second": count / seconds}, skipped


class Query(NamedTuple):
    """An image to find the neighbors of: a file, or a row of the index."""

    name: str
    row: int | None


@dataclass(frozen=True, eq=False)
class Matches:
    """The rows of an index nearest to each query, nearest first: `found` holds (q, k)."""

    table: FeatureTable
    queries: tuple[Query, ...]
    found: Neighbours

    def as_dict(self) -> dict[str, list[Any]]:
        """Columns with a line for each neighbor of each query."""
        count, k = self.found.rows.shape
        rows = self.found.rows.flatten().tolist()
        return {
            "query": [query.name for query in self.queries for _ in range(k)],
            "rank": [rank for _ in range(count) for rank in range(1, k + 1)],
            "similarity": self.found.similarities.flatten().tolist(),
            "row": rows,
            "name": [self.table.names[row] for row in rows],
            "class": [self.table.class_of(row) for row in rows],
            "split": [self.table.splits[row] for row in rows],
        }


def find_neighbours(options: NeighboursOptions) -> Matches:
    """The k images of a feature file most similar to each query, by exact search.

    Queries are images, each a file or the name of an image in the index, then rows of the index. The features of files
    are extracted with the weights that the index was made with.
    """
    table = read_feature_file(options.index)
    queries = tuple(_image_query(table, name) for name in options.images)
    for row in options.row:
        if not 0 <= row < len(table):
            raise SettingsError(f"The index has no row {row}; its rows are 0 to {len(table) - 1}.")
        queries += (Query(table.names[row], row),)
    if not queries:
        raise SettingsError("Nothing to search for; give an image, or a row of the index with --row.")
    bank = torch.from_numpy(table.features)
    values = bank[[query.row or 0 for query in queries]]
    files = [place for place, query in enumerate(queries) if query.row is None]
    if files:
        values[files] = _extract([queries[place].name for place in files], table, options)
    return Matches(table, queries, nearest_neighbours(values, bank, options.k, device=choose_device(options.device)))


def _image_query(table: FeatureTable, name: str) -> Query:
    if expand_user(name).is_file():
        return Query(str(expand_user(name)), None)
    rows = [row for row, known in enumerate(table.names) if known == name]
    if len(rows) > 1:
        raise SettingsError(f"The index has several images named {name}; choose one with --row, for example {rows[0]}.")
    if not rows:
        raise DataError(f"{name} is neither a file nor an image of the index.")
    return Query(name, rows[0])


def _extract(files: Sequence[str], table: FeatureTable, options: NeighboursOptions) -> Tensor:
    """Features (n, d) of image files, extracted like those of the index."""
    path = options.weights or Path(table.info.weights)
    if options.weights is None and not path.exists():
        raise RunError(f"{path}, which made {options.index}, is not found here; give the weights with --weights.")
    loaded = open_backbone(path)
    same_width = loaded.info.feature_width == table.features.shape[1]
    if not same_width or weights_digest(loaded.network) != table.info.weights_digest:
        raise RunError(f"{options.index} was made with other weights than {path}; write it again with `jcl embed`.")
    features = loaded.info.preprocessing.extract(
        loaded.network,
        FolderImages(Path(), Listing(files), class_names=None, channels=loaded.info.channels),
        device=choose_device(options.device),
        strict=True,
    )
    return features.values


def draw_matches(matches: Matches, path: Path) -> Path:
    """Draw the first queries beside their neighbors; `DataError` if the images can no longer be read."""
    table, queries = matches.table, matches.queries[:DRAWN]
    rows = matches.found.rows[:DRAWN, :DRAWN].tolist()
    query_rows = {query.row for query in queries if query.row is not None}
    pixels = _read_images(table, query_rows.union(*rows))
    labeled = bool((table.labels != UNLABELED).any())

    def image(row: int, *, query: bool = False) -> NamedImage:
        split, name = table.splits[row], table.names[row]
        return NamedImage(pixels[split, name], name, table.class_of(row) if labeled or query else Path(name).name)

    drawn = []
    for (name, query_row), own, similarities in zip(queries, rows, matches.found.similarities.tolist(), strict=False):
        file = FolderImages(Path(), Listing([name]), class_names=None)
        query = NamedImage(file.read(0, _CANVAS), name) if query_row is None else image(query_row, query=True)
        drawn.append(NeighbourRow(query, [image(row) for row in own], similarities))
    return draw_neighbours(drawn, path)


def _read_images(table: FeatureTable, rows: set[int]) -> dict[tuple[str, str], Tensor]:
    """The images of some rows of an index by split and name, read from the data it was made from."""
    location = table.info.data
    # The file may be untrusted, so URLs in it are not opened.
    if location not in KNOWN_SETS and not location_path(location).is_absolute():
        raise DataError(f"The images of the index are from {location}, which is not fetched again.")
    data = open_data(location, download=False)
    wanted = {(table.splits[row], table.names[row]) for row in rows}
    images = {}
    for split, source in data.splits.items():
        for sample in range(len(source)):
            if (image := (split, source.name_of(sample))) in wanted:
                images[image] = source.read(sample, _CANVAS)
    for _, name in wanted - images.keys():
        raise DataError(f"The image {name} of the index is no longer in {location}.")
    return images
