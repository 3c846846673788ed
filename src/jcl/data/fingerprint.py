"""A few letters that tell one set of images from another, without reading all of it."""

from __future__ import annotations

import hashlib

from jcl.data.source import ImageSource, UnreadableImage

_NAMES, _IMAGES = 1024, 16  # looked at, evenly spaced


def fingerprint(source: ImageSource) -> str:
    """A hash of the number of images, all labels, up to 1,024 names and the pixels of up to 16 images."""
    count, found = len(source), hashlib.sha256()
    found.update(str(count).encode())
    if source.labels is not None:
        found.update(source.labels.numpy().tobytes())
    for index in _spaced(count, _NAMES):
        found.update(source.name_of(index).encode("utf-8", "surrogateescape") + b"\0")
    for index in _spaced(count, _IMAGES):
        try:
            found.update(source.read(index).contiguous().numpy().tobytes())
        except UnreadableImage as error:
            found.update(error.reason.encode())
    return found.hexdigest()[:16]


def _spaced(count: int, most: int) -> list[int]:
    return list(range(0, count, max(1, -(-count // most))))
