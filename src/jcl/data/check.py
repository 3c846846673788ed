"""A look at every image before a long run: what there is, what cannot be read, what is there twice."""

import hashlib
import statistics
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, NamedTuple

from jcl.cores import cpu_cores
from jcl.data.decode import open_image
from jcl.data.folder import FolderImages
from jcl.data.shard_reading import ShardImages
from jcl.data.source import UNLABELLED, ImageData, ImageSource, UnreadableImage

SMALL_SIDE: Final = 32
"""Images with a side below this are reported as very small."""

_LOOKED_AT_TOGETHER: Final = 1024  # images that wait for a thread: all of them would take gigabytes
_DECODED_SIDE: Final = 256  # damage shows at reduced size too, and most photographs take a fraction of the time


@dataclass(frozen=True)
class SplitReport:
    """What was found in one split.

    `widths` and `heights` are (least, median, greatest) of the readable images as stored; `kinds` counts file formats
    and colour modes; `unreadable` maps names to reasons; each group of `duplicates` has the same content; `foreign`
    counts files that are no part of the data because their kind cannot be decoded; `loose` images lie beside folders
    that would be classes without them; `unlisted` maps folders that could not be looked into to the reason; `damage`
    does so for shards of which a part is lost; `folders_inside` are folders in shards, which are no classes.
    """

    images: int
    labelled: int
    class_counts: dict[str, int]
    widths: tuple[int, int, int]
    heights: tuple[int, int, int]
    kinds: dict[str, int]
    unreadable: dict[str, str]
    small: tuple[str, ...]
    duplicates: tuple[tuple[str, ...], ...]
    seconds_per_image: float
    foreign: dict[str, int]
    loose: tuple[str, ...]
    unlisted: dict[str, str]
    damage: dict[str, str]
    folders_inside: tuple[str, ...]


@dataclass(frozen=True)
class DataReport:
    """What was found in a data set; `shared` names test images whose content is among the training images too.

    `why_untested` says why there are no test images though there is a place for them.
    """

    name: str
    splits: dict[str, SplitReport]
    shared: tuple[str, ...]
    why_untested: str

    def as_dict(self) -> dict[str, object]:
        """The figures as one flat object of plain names, such as `train_images` and `train_unreadable`."""
        flat: dict[str, object] = {"name": self.name, "shared_between_splits": len(self.shared)}
        if self.why_untested:
            flat["why_untested"] = self.why_untested
        for split, report in self.splits.items():
            flat |= {f"{split}_{key}": value for key, value in _figures(report).items()}
        return flat


def _figures(report: SplitReport) -> dict[str, object]:
    figures: dict[str, object] = {
        "images": report.images,
        "readable": report.images - len(report.unreadable),
        "unreadable": len(report.unreadable),
        "unreadable_names": sorted(report.unreadable),
        "labelled": report.labelled,
        "classes": len(report.class_counts),
        "small": len(report.small),
        "duplicates": sum(len(group) - 1 for group in report.duplicates),
        "passed_over": sum(report.foreign.values()),
        "loose": len(report.loose),
        "unlisted_folders": len(report.unlisted),
        "unlisted_folder_names": sorted(report.unlisted),
        "damaged_shards": len(report.damage),
        "damaged_shard_names": sorted(report.damage),
        "folders_in_shards": len(report.folders_inside),
        "milliseconds_per_image": round(report.seconds_per_image * 1000, 3),
    }
    for side, values in (("width", report.widths), ("height", report.heights)):
        figures |= {f"{side}_{which}": value for which, value in zip(("min", "median", "max"), values, strict=True)}
    return figures


def check_data(
    data: ImageData, threads: int | None = None, progress: Callable[[int, int], None] = lambda done, total: None
) -> DataReport:
    """Read every image of a data set, with as many threads as there are cores unless told otherwise.

    `progress` is told how many of how many images have been looked at.
    """
    sources = {"train": data.train} | ({} if data.test is None else {"test": data.test})
    done, total = 0, sum(map(len, sources.values()))
    splits, digests = {}, {}
    for split, source in sources.items():
        started = time.perf_counter()
        with ThreadPoolExecutor(threads or cpu_cores()) as pool:
            looks = []
            for start in range(0, len(source), _LOOKED_AT_TOGETHER):
                rows = range(start, min(start + _LOOKED_AT_TOGETHER, len(source)))
                for look in pool.map(lambda index, source=source: _look(source, index), rows):
                    looks.append(look)
                    done += 1
                    progress(done, total)
        splits[split] = _report(source, looks, (time.perf_counter() - started) / len(source))
        digests[split] = [(look.digest, look.name) for look in looks if look.reason is None]
    trained_on = {digest for digest, _ in digests["train"]}
    shared = [name for digest, name in digests.get("test", []) if digest in trained_on]
    return DataReport(data.name, splits, tuple(sorted(shared)), data.why_untested)


class _Look(NamedTuple):
    """What one image is, or the reason why it cannot be read."""

    name: str
    digest: bytes = b""
    width: int = 0
    height: int = 0
    kind: str = ""
    reason: str | None = None


def _look(source: ImageSource, index: int) -> _Look:
    name = source.name_of(index)
    try:
        if isinstance(source, FolderImages | ShardImages):
            return _look_at_file(source, index, name)
        pixels = source.read(index)
    except UnreadableImage as error:
        return _Look(name, reason=error.reason)
    return _Look(name, _digest(pixels.numpy().tobytes()), pixels.shape[2], pixels.shape[1], "array RGB")


def _look_at_file(source: FolderImages | ShardImages, index: int, name: str) -> _Look:
    source.read(index, _DECODED_SIDE)  # raises with the reason
    content = source.content_of(index)
    with open_image(content) as image:
        return _Look(name, _digest(content), image.width, image.height, f"{image.format} {image.mode}")


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def _report(source: ImageSource, looks: list[_Look], seconds_per_image: float) -> SplitReport:
    good = [look for look in looks if look.reason is None]
    groups: dict[bytes, list[str]] = {}
    for look in good:
        groups.setdefault(look.digest, []).append(look.name)
    labels = [] if source.labels is None else [label for label in source.labels.tolist() if label != UNLABELLED]
    names = source.class_names
    counts = Counter(str(label) if names is None else names[label] for label in sorted(labels))
    return SplitReport(
        images=len(looks),
        labelled=len(labels),
        class_counts=dict(counts),
        widths=_spread([look.width for look in good]),
        heights=_spread([look.height for look in good]),
        kinds=dict(Counter(look.kind for look in good).most_common()),
        unreadable={look.name: look.reason for look in looks if look.reason is not None},
        small=tuple(look.name for look in good if min(look.width, look.height) < SMALL_SIDE),
        duplicates=tuple(tuple(group) for group in groups.values() if len(group) > 1),
        seconds_per_image=seconds_per_image,
        foreign=source.foreign if isinstance(source, FolderImages) else {},
        loose=tuple(source.loose()) if isinstance(source, FolderImages) else (),
        unlisted=source.unlisted if isinstance(source, FolderImages) else {},
        damage=source.damage if isinstance(source, ShardImages) else {},
        folders_inside=source.folders_inside() if isinstance(source, ShardImages) else (),
    )


def _spread(values: list[int]) -> tuple[int, int, int]:
    """Least, median and greatest; zeros where there is nothing."""
    return (min(values), statistics.median_low(values), max(values)) if values else (0, 0, 0)
