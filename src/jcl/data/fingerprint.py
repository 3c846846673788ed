"""A few letters that tell one set of images from another, without reading all of it."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator

from jcl.data.source import ImageSource, UnreadableImage

_NAMES, _IMAGES = 1024, 16  # looked at, evenly spaced


def fingerprint(source: ImageSource) -> str:
    """A hash of the number of images, all labels, up to 1,024 names and the pixels of up to 16 images."""
    return _hashed(itertools.chain(_listing(source), _content(source)))


def fingerprint_of_listing(source: ImageSource) -> str:
    """The same without the pixels, for which no image has to be read."""
    return _hashed(_listing(source))


def fingerprint_of_content(source: ImageSource) -> str:
    """The pixels of up to 16 images; another version of a decoder may see others in the same files."""
    return _hashed(_content(source))


def _hashed(parts: Iterable[bytes]) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()[:16]


def _listing(source: ImageSource) -> Iterator[bytes]:
    yield str(len(source)).encode()
    if source.labels is not None:
        yield source.labels.numpy().tobytes()
    for index in _spaced(len(source), _NAMES):
        yield source.name_of(index).encode("utf-8", "surrogateescape") + b"\0"


def _content(source: ImageSource) -> Iterator[bytes]:
    for index in _spaced(len(source), _IMAGES):
        try:
            yield source.read(index).contiguous().numpy().tobytes()
        except UnreadableImage as error:
            yield error.reason.encode()


def _spaced(count: int, most: int) -> list[int]:
    return list(range(0, count, max(1, -(-count // most))))
