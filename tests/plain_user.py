"""To be refused by the file system as anybody is, also where the tests run as root."""

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_VERSION_3 = 0x20080522  # of the structures that capget and capset take
_PASS_ANY_PERMISSION = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("thread", ctypes.c_int))


class _Capabilities(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint32) for name in ("effective", "permitted", "inheritable"))


@contextlib.contextmanager
def refused_like_anybody() -> Iterator[None]:
    """Permissions hold for this thread, and for those it starts meanwhile, whoever runs it."""
    if os.geteuid() != 0:
        yield
        return
    if sys.platform != "linux":
        pytest.skip("root is refused nothing here")
    header, found = _Header(_VERSION_3, 0), (_Capabilities * 2)()
    _call("capget", header, found)
    before = found[0].effective
    found[0].effective = before & ~_PASS_ANY_PERMISSION
    _call("capset", header, found)
    try:
        yield
    finally:
        found[0].effective = before
        _call("capset", header, found)


def _call(name: str, header: _Header, found: ctypes.Array[_Capabilities]) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(ctypes.byref(header), found):
        raise OSError(ctypes.get_errno(), f"{name} failed")


@contextlib.contextmanager
def unlistable(*folders: Path) -> Iterator[None]:
    """Nobody may look into these folders meanwhile."""
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0)
    try:
        with refused_like_anybody():
            yield
    finally:
        for folder in folders:
            folder.chmod(0o755)
