"""Read every image before a long run: sizes, formats, classes, unreadable images and duplicates."""

import contextlib
import hashlib
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, NamedTuple

from jcl.console import ProgressCallback, no_progress, pluralize
from jcl.cores import cpu_cores
from jcl.data.decode import MAX_ASPECT, describe_failure
from jcl.data.encoded import EncodedImages, ImageFile, open_file
from jcl.data.folder import FolderImages
from jcl.data.listing import Listing
from jcl.data.shards.read import ShardImages
from jcl.data.source import RGB, UNLABELED, ImageData, ImageSource, UnreadableImage, evenly_spaced, pixel_format
from jcl.paths import printable

SMALL_SIDE: Final = 32  # images with a side below this are reported as very small

_CHUNK: Final = 1024  # images submitted to the threads at a time, to bound memory
_HEADERS_READ: Final = 1000  # at the start of a run
_UNUSUAL: Final = ("sixteen_bit", "long", "multi_page", "gray")


class _CheckedImage(NamedTuple):
    name: str
    digest: bytes = b""
    width: int = 0
    height: int = 0
    kind: str = ""
    unusual: Sequence[str] = ()
    reason: str | None = None  # why it cannot be read


class SplitReport:
    """What was found in one split; `figures` is all of it in numbers and names, for JSON."""

    def __init__(self, source: ImageSource, checked: list[_CheckedImage], seconds_per_image: float) -> None:
        readable = [image for image in checked if image.reason is None]
        groups: dict[bytes, list[str]] = {}
        for image in readable:
            groups.setdefault(image.digest, []).append(image.name)
        labels = [] if source.labels is None else [label for label in source.labels.tolist() if label != UNLABELED]
        names = source.class_names
        self.images, self.seconds_per_image = len(checked), seconds_per_image
        self.class_counts = dict(Counter(str(label) if names is None else names[label] for label in sorted(labels)))
        self.widths = _min_median_max([image.width for image in readable])
        self.heights = _min_median_max([image.height for image in readable])
        self.kinds = dict(Counter(image.kind for image in readable).most_common())
        self.unreadable = {image.name: image.reason for image in checked if image.reason is not None}
        self.small = tuple(image.name for image in readable if min(image.width, image.height) < SMALL_SIDE)
        self.duplicates = tuple(tuple(group) for group in groups.values() if len(group) > 1)
        self.warnings = source.warnings() if isinstance(source, EncodedImages) else []
        unusual = Counter(name for image in readable for name in image.unusual)
        self.warnings += _describe_unusual(unusual, source, len(readable))
        listing = source.listing if isinstance(source, FolderImages) else Listing([])
        damage = source.damage if isinstance(source, ShardImages) else {}
        self.figures: dict[str, object] = {
            "images": self.images,
            "readable": len(readable),
            "unreadable": len(self.unreadable),
            "unreadable_names": sorted(self.unreadable),
            "labeled": len(labels),
            "classes": len(self.class_counts),
            "small": len(self.small),
            "duplicates": sum(len(group) - 1 for group in self.duplicates),
            **{kind: unusual[kind] for kind in _UNUSUAL},
            "unsupported": len(listing.unsupported),
            "outside_class_folders": len(source.stray_images()) if isinstance(source, FolderImages) else 0,
            "unlisted_folders": len(listing.unlisted),
            "unlisted_folder_names": sorted(map(printable, listing.unlisted)),
            "damaged_shards": len(damage),
            "damaged_shard_names": sorted(damage),
            "folders_in_shards": len(source.folders_inside()) if isinstance(source, ShardImages) else 0,
            "milliseconds_per_image": round(seconds_per_image * 1000, 3),
        }
        for side, values in (("width", self.widths), ("height", self.heights)):
            for which, value in zip(("min", "median", "max"), values, strict=True):
                self.figures[f"{side}_{which}"] = value or None


@dataclass(frozen=True)
class DataReport:
    """What was found in a data set; `shared` names test images whose content is also among the training images."""

    data: ImageData
    splits: dict[str, SplitReport]
    shared: tuple[str, ...]

    def as_dict(self) -> dict[str, object]:
        """The figures as one flat object with keys such as `train_images` and `train_unreadable`."""
        flat: dict[str, object] = {"name": self.data.name, "shared_between_splits": len(self.shared)}
        flat |= {key: note for key in ("why_untested", "unused") if (note := getattr(self.data, key))}
        for split, report in self.splits.items():
            flat |= {f"{split}_{key}": value for key, value in report.figures.items()}
        return flat


def check_data(data: ImageData, progress: ProgressCallback = no_progress) -> DataReport:
    """Read every image of a data set, with one thread per core."""
    done, total = 0, sum(map(len, data.splits.values()))
    splits, digests = {}, {}
    for split, source in data.splits.items():
        pixel_format(source)  # raises if numbers of channels differ
        started = time.perf_counter()
        checked: list[_CheckedImage] = []
        with ThreadPoolExecutor(cpu_cores()) as pool:
            for start in range(0, len(source), _CHUNK):
                rows = range(start, min(start + _CHUNK, len(source)))
                for image in pool.map(lambda index, source=source: _check_image(source, index), rows):
                    checked.append(image)
                    done += 1
                    progress(done, total)
        splits[split] = SplitReport(source, checked, (time.perf_counter() - started) / len(source))
        digests[split] = [(image.digest, image.name) for image in checked if image.reason is None]
    trained_on = {digest for digest, _ in digests["train"]}
    shared = [name for digest, name in digests.get("test", []) if digest in trained_on]
    return DataReport(data, splits, tuple(sorted(shared)))


def _check_image(source: ImageSource, index: int) -> _CheckedImage:
    name = source.name_of(index)
    try:
        if not isinstance(source, EncodedImages):
            pixels, stored = source.read(index), pixel_format(source)
            kind = "array RGB" if stored == RGB else f"array {pixels.numpy().dtype} x {stored.channels}"
            return _CheckedImage(name, _digest(pixels.numpy().tobytes()), pixels.shape[2], pixels.shape[1], kind)
        content = source.checked_content_of(index)
        image = open_file(content)
    except Exception as error:  # also of a TIFF of which Pillow can decode the first page
        return _CheckedImage(
            name, reason=error.reason if isinstance(error, UnreadableImage) else describe_failure(error)
        )
    return _CheckedImage(name, _digest(content), image.width, image.height, image.kind, _unusual(image))


def survey_headers(source: ImageSource, windows: bool) -> list[str]:
    """Notes on how unusual images are treated, from the headers of up to 1,000 evenly spaced images."""
    if not isinstance(source, EncodedImages):
        return []
    found: Counter[str] = Counter()
    rows = evenly_spaced(len(source), _HEADERS_READ)
    for row in rows:
        with contextlib.suppress(Exception):  # unreadable ones are reported later
            found.update(_unusual(source.header_of(row)))
    sampled = f" (of {len(rows):,} checked)" if len(rows) < len(source) else ""
    return _describe_unusual(found if windows else found - Counter(long=len(rows)), source, len(rows), sampled)


def _unusual(image: ImageFile) -> list[str]:
    long = max(image.width, image.height) > MAX_ASPECT * min(image.width, image.height)
    holds = (image.high_depth, long, image.pages > 1, image.read is None and image.channels == 1)
    return [kind for kind, held in zip(_UNUSUAL, holds, strict=True) if held]


def _describe_unusual(found: Counter[str], source: ImageSource, images: int, sampled: str = "") -> list[str]:
    stored, lines, notes = pixel_format(source), {}, []
    if stored == RGB:
        lines["sixteen_bit"] = "with more than 8 bits: reduced to 8 bits, because others have 8 or Pillow reads only 8."
    lines["long"] = "longer than 2:1: if larger than data.canvas, cut to random windows (in evaluation to the center)."
    lines["multi_page"] = "in TIFF or DICOM files of several pages: only the first page is used."
    if stored == RGB and found["gray"] == images > 0:
        lines["gray"] = "in gray: converted to RGB; --set data.channels=1 keeps one channel."
    if stored != RGB:
        kept = "with 8 bits each" if stored.dtype == RGB.dtype else "in floats (uint16 divided by 65,535)"
        notes.append(f"Images are kept as they are: {pluralize(stored.channels, 'channel')} {kept}.")
    return notes + [f"{pluralize(found[kind], 'image')}{sampled} {line}" for kind, line in lines.items() if found[kind]]


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def _min_median_max(values: list[int]) -> tuple[int, int, int]:
    return (min(values), statistics.median_low(values), max(values)) if values else (0, 0, 0)
