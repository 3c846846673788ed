"""Safetensors files that can tell whether they are whole: one flipped bit anywhere is found.

The file carries a SHA-256 among the text stored with its tensors. It is taken over every byte of the file, header and
all, with zeros where its own digits stand. Files without one (of other tools, or of earlier versions of this one) can
be read just the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from jcl.errors import RunError
from jcl.runs.atomic import replacing

CHECKSUM = "sha256"
_BLANK = b"0" * 64
_DIGITS = re.compile(rb'"sha256":"([0-9a-f]{64})"')  # quotes inside a value are escaped, so only the key matches
_LENGTH_BYTES = 8  # a safetensors file starts with the length of its header
_CHUNK = 1 << 20


def write_sealed(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write tensors and text with a checksum, read them back from the disk, and only then replace `path`."""
    content = memoryview(save(tensors, metadata | {CHECKSUM: _BLANK.decode()}))
    header_end = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
    place = _DIGITS.search(content, 0, header_end)
    assert place is not None, "safetensors writes its header as compact JSON"
    with replacing(path, check=_read_back) as file:
        file.write(content[: place.start(1)])
        file.write(hashlib.sha256(content).hexdigest().encode())
        file.write(content[place.end(1) :])


def verify_checksum(path: Path) -> bool:
    """Whether the file carries a checksum; raises if it does and the content does not match."""
    _refuse_unless_file(path)
    try:
        with path.open("rb") as file:
            length = file.read(_LENGTH_BYTES)
            header = file.read(min(int.from_bytes(length, "little"), path.stat().st_size))
            place = _DIGITS.search(header)
            if place is None:
                return False
            digest = hashlib.sha256(length + header[: place.start(1)] + _BLANK + header[place.end(1) :])
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}.") from None
    if digest.hexdigest().encode() != place[1]:
        raise RunError(f"{path} is damaged: its content does not match its checksum.")
    return True


def _read_back(path: Path) -> None:
    """Raise unless the file on the disk is what was written to it."""
    with contextlib.suppress(RunError):
        if verify_checksum(path):
            return
    raise RunError(f"{path} was written, but reading it back gave something else; the disk may be failing.")


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All tensors of a safetensors file and the text stored with them."""
    _refuse_unless_file(path)
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path} cannot be read as a safetensors file: {error}.") from None


def _refuse_unless_file(path: Path) -> None:
    """A pipe under the name of a file would keep its reader waiting for ever."""
    if not path.is_file():
        raise RunError(f"{path} cannot be read: {'it is no file' if path.exists() else 'there is no such file'}.")
