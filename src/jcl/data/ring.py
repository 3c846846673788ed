"""A few batches in memory that worker processes fill and the training process reads, taken from the system once.

Workers write pixels to where the copy to the GPU reads them, so nothing is sent through pipes or copied in between, and
the memory stays the same however long a run is. The block is an anonymous file rather than a part of /dev/shm, which
containers often keep too small.
"""

from __future__ import annotations

import mmap
import multiprocessing.reduction
import os
import tempfile
import weakref
from collections.abc import Callable
from typing import Any

import torch

_ALIGNMENT = 4096


class BatchRing:
    """Room for `slots` batches of `rows` images on canvases of C x C pixels.

    pixels (slots, rows, 3, C, C) uint8; sizes (slots, rows, 2); wanted (slots, rows), the indices asked for; samples
    (slots, rows), the indices of what was read. `current_pass` is a number that all processes see. Sent to another
    process while that is being started, a ring arrives as the same memory.
    """

    def __init__(self, slots: int, rows: int, canvas: int) -> None:
        self._attach(_anonymous_file(_bytes_needed(slots, rows, canvas)), slots, rows, canvas)

    def _attach(self, file: int, slots: int, rows: int, canvas: int) -> None:
        self.slots, self.rows, self.canvas = slots, rows, canvas
        self._file = file
        self._memory = mmap.mmap(file, _bytes_needed(slots, rows, canvas))
        block = torch.frombuffer(self._memory, dtype=torch.uint8)
        places = slots * rows
        pixel_bytes = places * 3 * canvas * canvas
        self.pixels = block[_ALIGNMENT : _ALIGNMENT + pixel_bytes].view(slots, rows, 3, canvas, canvas)
        numbers = block[_ALIGNMENT + _aligned(pixel_bytes) :].view(torch.int64)
        self.sizes = numbers[: 2 * places].view(slots, rows, 2)
        self.wanted = numbers[2 * places : 3 * places].view(slots, rows)
        self.samples = numbers[3 * places :].view(slots, rows)
        self._pass = block[:8].view(torch.int64)
        self._block = block
        weakref.finalize(self, os.close, file)

    @property
    def current_pass(self) -> int:
        return int(self._pass)

    @current_pass.setter
    def current_pass(self, number: int) -> None:
        self._pass.fill_(number)

    def pin(self) -> None:
        """Tell CUDA that this memory stays in place, so that copies from it run beside everything else.

        Where the system refuses, copies are slower and just as right.
        """
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address = self._block.data_ptr()
        if int(runtime.cudaHostRegister(address, self._block.numel(), 0)) == 0:
            weakref.finalize(self, runtime.cudaHostUnregister, address)

    def __reduce__(self) -> tuple[Callable[..., BatchRing], tuple[Any, int, int, int]]:
        return _arrived, (multiprocessing.reduction.DupFd(self._file), self.slots, self.rows, self.canvas)


def _arrived(file: Any, slots: int, rows: int, canvas: int) -> BatchRing:
    ring = BatchRing.__new__(BatchRing)
    ring._attach(file.detach(), slots, rows, canvas)
    return ring


def _bytes_needed(slots: int, rows: int, canvas: int) -> int:
    return _ALIGNMENT + _aligned(slots * rows * 3 * canvas * canvas) + slots * rows * 4 * 8


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _anonymous_file(size: int) -> int:
    """A file without a name, which is gone when the last process that has it open is."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("jcl-batches")
    else:
        with tempfile.TemporaryFile() as temporary:
            file = os.dup(temporary.fileno())
    os.truncate(file, size)
    return file
