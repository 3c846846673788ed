"""The members of a tar file, found by its headers alone: nothing is unpacked and no name becomes a path.

Read here and not with `tarfile`, which takes several times as long for each member, reads headers of any declared
length into memory and does not say where a damaged file stops being good.
"""

import os
import re
import zlib
from collections.abc import Iterator
from typing import Final, NamedTuple

_BLOCK: Final = 512
_WINDOW: Final = 8192  # read at once: a header, the small label file before it and the header before that
_HEADER_LIMIT: Final = 1 << 20  # bytes of a long name or of extended attributes

_REGULAR: Final = frozenset(b"0\x007")
_WITHOUT_CONTENT: Final = frozenset(b"123456")  # links, devices, folders, pipes
_LONG_NAME, _LONG_LINK, _EXTENDED, _EXTENDED_FOR_ALL, _SPARSE = b"LKxgS"
_RECORD: Final = re.compile(rb"(\d{1,7}) ([^=]+)=")  # of an extended header
_CHECKSUM_FIELD: Final = slice(148, 156)


class DamagedTar(Exception):
    """The tar cannot be read any further; the message is a clause that says why."""


class Member(NamedTuple):
    """One entry: its stored name, where its content begins, and how many bytes it says it has.

    `regular` is False for links, devices and folders, which have no content to read.
    """

    name: str
    offset: int
    size: int
    regular: bool


def tar_members(descriptor: int) -> Iterator[Member]:
    """Give the members of an open tar file in order; raises `DamagedTar` where it cannot go on.

    A member that the file's end cuts off is given before that is raised.
    """
    window = _Window(descriptor)
    position, long_name, extended = 0, None, _Extended(None, None)
    while True:
        header = window.read(position, _BLOCK)
        if header.count(0) == _BLOCK:
            return
        _check(header, position)
        kind, size = header[156], _number(header[124:136])
        content = position + _BLOCK
        if kind in (_LONG_NAME, _LONG_LINK, _EXTENDED, _EXTENDED_FOR_ALL):
            if size > _HEADER_LIMIT:
                raise DamagedTar(f"the header at byte {position:,} claims {size:,} bytes for a name or attributes")
            text = window.read(content, size)
            if kind == _LONG_NAME:
                long_name = text.partition(b"\0")[0]
            elif kind == _EXTENDED:
                extended = _extended(text)
        elif kind == _SPARSE:
            raise DamagedTar(f"the member at byte {position:,} is stored as a sparse file, which is not supported")
        else:
            name = extended.name or long_name or _stored_name(header)
            size = size if extended.size is None else extended.size
            regular = kind in _REGULAR and not name.endswith(b"/")
            yield Member(os.fsdecode(name), content, size, regular)
            long_name, extended = None, _Extended(None, None)
            if kind in _WITHOUT_CONTENT:
                size = 0  # a link's header may give the size of what it points to
        position = content + -(-size // _BLOCK) * _BLOCK
        if content + size > window.file_size:
            raise DamagedTar("its end is cut off")


class _Window:
    """Small reads near each other out of one larger one."""

    def __init__(self, descriptor: int) -> None:
        self.file_size = os.fstat(descriptor).st_size
        self._descriptor = descriptor
        self._start = 0
        self._bytes = b""

    def read(self, position: int, length: int) -> bytes:
        start = position - self._start
        if start < 0 or start + length > len(self._bytes):
            if position >= self.file_size:
                raise DamagedTar("it has no end mark, so images may be missing")
            self._bytes = os.pread(self._descriptor, max(length, _WINDOW), position)
            self._start, start = position, 0
        if start + length > len(self._bytes):
            raise DamagedTar("its end is cut off")
        return self._bytes[start : start + length]


class _Extended(NamedTuple):
    """What an extended (PAX) header says about the member after it, where it says so."""

    name: bytes | None
    size: int | None


def _check(header: bytes, position: int) -> None:
    """Compare the sum of the header's bytes, its own field taken as blanks, with the sum stored there.

    The lower half of an Adler checksum is one more than the sum of the bytes, modulo a prime, and ten times as fast.
    """
    field = header[_CHECKSUM_FIELD]
    stored = _number(field) + sum(field) - 8 * ord(" ")
    if zlib.adler32(header) & 0xFFFF != (stored + 1) % 65521:
        raise DamagedTar(f"there is no tar header at byte {position:,}")


def _number(field: bytes) -> int:
    """A number as tar stores it: octal digits, or for large ones binary with the highest bit set."""
    if field[0] == 0x80 and not any(field[1:-8]) and field[-8] < 0x40:  # below 2^62, to stay so when added up
        return int.from_bytes(field[1:], "big")
    digits = field.strip(b"\0 ") or b"0"
    if not digits.isdigit() or b"8" in digits or b"9" in digits:
        raise DamagedTar("a header holds no number where one must be")
    return int(digits, 8)


def _stored_name(header: bytes) -> bytes:
    name = header[:100].partition(b"\0")[0]
    if header[257:263] != b"ustar\0":  # GNU's own format has other things where POSIX has the first part of the name
        return name
    first = header[345:500].partition(b"\0")[0]
    return first + b"/" + name if first else name


def _extended(text: bytes) -> _Extended:
    """Read the records "LENGTH KEY=VALUE\\n" that matter here; what is malformed says nothing."""
    name, size, position = None, None, 0
    while match := _RECORD.match(text, position):
        end = position + int(match[1])
        if end <= match.end() or end > len(text):
            break
        value = text[match.end() : end - 1]
        if match[2] == b"path":
            name = value
        elif match[2] == b"size" and re.fullmatch(rb"\d{1,18}", value):
            size = int(value)
        position = end
    return _Extended(name, size)
