"""Worker processes that decode batches ahead of the training loop, into a ring of shared memory."""

from __future__ import annotations

import contextlib
import errno
import mmap
import multiprocessing
import multiprocessing.connection
import multiprocessing.reduction
import os
import resource
import signal
import sys
import tempfile
import threading
import types
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from typing import Any, Final, NamedTuple

import torch

from jcl.cores import start_forkserver
from jcl.data.batch import Decoded, ImageBatch, ImageReader, readable_rows
from jcl.data.source import PixelFormat, pixel_format
from jcl.errors import DataError, JclError
from jcl.signals import STOP_SIGNALS, signals_blocked

_IMAGES_PER_TASK: Final = 8  # a batch is split into tasks, so that all workers decode the batch that is needed next
_BATCHES_AHEAD: Final = 3  # at least; evens out images that take long
_ALIGNMENT: Final = 4096
_OPEN_FILES: Final = 24  # besides three per worker


class _Report(NamedTuple):
    """What a worker reports about a task, a part of the batch in a slot of the ring."""

    number: int  # of the pass
    slot: int
    skipped: dict[str, str]
    error: Exception | None


class DecodingPool:
    """Decodes lists of indices in order, in this process (no workers) or in worker processes kept from pass to pass.

    A result of `decode` is valid until the next one is requested: with workers its memory is reused. All workers take
    tasks from one queue, so none is idle while there are tasks. Each reports through its own pipe, so a dead worker
    does not block the others. Workers start from a clean process (forkserver), because a fork of this one would copy
    locks that its other threads hold.
    """

    def __init__(self, reader: ImageReader, workers: int, batch_size: int, pinned: bool) -> None:
        # A daemon, such as a process of a multiprocessing.Pool, may not start processes.
        self._workers = 0 if multiprocessing.current_process().daemon else workers
        self._reader, self._batch_size, self._pinned = reader, batch_size, pinned
        self._rows_per_task = max(_IMAGES_PER_TASK, batch_size // max(1, 4 * workers))
        self._pass: Generator[Decoded, None, None] | None = None
        self._number = 0  # of the pass
        self._unfinished = 0  # tasks submitted and not reported
        self._ring: Any = None  # this and the following only while there are workers
        self._tasks: Any = None
        self._reports: list[multiprocessing.connection.Connection] = []
        self._processes: list[Any] = []

    def decode(self, requests: Iterable[list[int]]) -> Iterator[Decoded]:
        """Decode each list of indices, in order. An unfinished pass ends when the next one starts."""
        self._end_pass()
        if self._workers:
            if not self._processes:
                self._start()
            self._pass = self._decode(iter(requests))
        else:
            self._pass = (self._reader.read(indices) for indices in requests)
        return self._pass

    def _end_pass(self) -> None:
        if self._pass is not None:
            self._pass.close()

    def close(self) -> None:
        """End the worker processes and wait until they are gone."""
        self._end_pass()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
            process.close()
        for pipe in self._reports:
            pipe.close()
        if self._tasks is not None:
            self._tasks.close()
        self._processes, self._reports, self._tasks, self._ring, self._unfinished = [], [], None, None, 0

    def _start(self) -> None:
        tasks_ahead = -(-2 * self._workers * self._rows_per_task // self._batch_size)
        slots = max(_BATCHES_AHEAD, tasks_ahead) + 1
        context = multiprocessing.get_context("forkserver")
        try:
            self._ring = BatchRing(slots, self._batch_size, self._reader.canvas, pixel_format(self._reader.source))
            if self._pinned:
                self._ring.pin()
            if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < _OPEN_FILES + 3 * self._workers:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))  # here, not with a traceback of a new process
            with _without_main_module(self._reader), signals_blocked():
                start_forkserver()
                self._tasks = context.SimpleQueue()
                for _ in range(self._workers):
                    receiver, sender = context.Pipe(duplex=False)
                    arguments = (self._reader, self._ring, self._tasks, sender)
                    process = context.Process(target=_work, args=arguments, daemon=True)
                    process.start()
                    sender.close()
                    self._reports.append(receiver)
                    self._processes.append(process)
        except BaseException as error:  # also Ctrl-C, once signals are unblocked
            self.close()
            if isinstance(error, OSError):
                problem = f"The image decoding processes could not be started: {error.strerror or error}"
                raise DataError(f"{problem}. Use data.workers=0, or raise the limit (`ulimit -n`, /dev/shm).") from None
            raise

    def _decode(self, requests: Iterator[list[int]]) -> Generator[Decoded, None, None]:
        """One pass: every slot except the one in use is being filled."""
        self._number += 1
        self._ring.current_pass.fill_(self._number)  # cancels the tasks of the pass before
        while self._unfinished:
            self._receive()
        free = deque(range(self._ring.slots))
        pending: deque[tuple[int, int]] = deque()  # the slots of the batches being decoded, and their sizes
        tasks_left = [0] * self._ring.slots
        skipped: list[dict[str, str]] = [{} for _ in tasks_left]
        while True:
            while free and (indices := next(requests, None)) is not None:
                slot, count = free.popleft(), len(indices)
                self._ring.wanted[slot, :count] = torch.tensor(indices)
                starts = range(0, count, self._rows_per_task)
                for start in starts:  # the pipe holds them all, so `put` never blocks
                    self._tasks.put((self._number, slot, start, min(self._rows_per_task, count - start)))
                self._unfinished += len(starts)
                tasks_left[slot], skipped[slot] = len(starts), {}
                pending.append((slot, count))
            if not pending:
                return
            slot, count = pending.popleft()
            while tasks_left[slot]:
                for report in self._receive():
                    tasks_left[report.slot] -= 1
                    skipped[report.slot] |= report.skipped
            yield readable_rows(self._ring.batch(slot, 0, count), skipped[slot])
            free.append(slot)

    def _receive(self) -> list[_Report]:
        """Wait for at least one report; return those on tasks of this pass."""
        sentinels = [process.sentinel for process in self._processes]
        ready = multiprocessing.connection.wait([*self._reports, *sentinels])
        try:
            if any(sentinel in ready for sentinel in sentinels):
                raise EOFError
            reports: list[_Report] = [pipe.recv() for pipe in self._reports if pipe in ready]
        except (EOFError, OSError):
            problem = "A worker process ended, probably because memory ran out"
            raise DataError(f"{problem}; use fewer workers or a smaller batch.") from None
        self._unfinished -= len(reports)
        current = [report for report in reports if report.number == self._number]
        for report in current:
            if report.error is not None:
                raise report.error
        return current


def _work(reader: ImageReader, ring: BatchRing, tasks: Any, reports: multiprocessing.connection.Connection) -> None:
    """Run a worker: take a task, fill its rows, report."""
    for number in STOP_SIGNALS:  # may reach every process; the parent handles them
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    while True:
        number, slot, first, count = tasks.get()
        skipped: dict[str, str] = {}
        error: Exception | None = None
        if number == int(ring.current_pass):  # else the task was canceled
            try:
                wanted = ring.wanted[slot, first : first + count].tolist()
                skipped = reader.read_into(wanted, ring.batch(slot, first, count))
            except JclError as raised:
                error = raised
            except Exception as raised:  # it may not pickle
                error = RuntimeError(f"{type(raised).__name__}: {raised}")
        reports.send(_Report(number, slot, skipped, error))


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextlib.contextmanager
def _without_main_module(reader: ImageReader) -> Iterator[None]:
    """Keep multiprocessing from importing the user's script in new processes, unless it defines the source.

    Scripts without an `if __name__ == "__main__"` guard, or read from standard input, then work too.
    """
    main = sys.modules["__main__"]
    if type(reader.source).__module__ == main.__name__:
        yield
        return
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


class BatchRing:
    """Shared memory for `slots` batches of `rows` images on canvases of C x C pixels.

    pixels (slots, rows, channels, C, C); sizes (slots, rows, 2); wanted (slots, rows), the requested indices; samples
    (slots, rows), the indices of what was read; current_pass (1,), a number that all processes see. Workers write
    pixels where the copy to the GPU reads them, so nothing is sent through pipes, and memory use is constant. The block
    is an anonymous file rather than a part of /dev/shm, which containers often keep too small. A ring sent to a process
    that is being started maps the same memory there.
    """

    def __init__(self, slots: int, rows: int, canvas: int, stored: PixelFormat, shared: Any = None) -> None:
        self.slots, self.rows, self.canvas, self.stored = slots, rows, canvas, stored
        images = slots * rows
        pixels_at = -(-8 * (1 + 4 * images) // _ALIGNMENT) * _ALIGNMENT
        size = pixels_at + images * stored.channels * stored.dtype.itemsize * canvas * canvas
        self._file = _anonymous_file(size) if shared is None else shared.detach()
        weakref.finalize(self, os.close, self._file)
        self._block = torch.frombuffer(mmap.mmap(self._file, size), dtype=torch.uint8)
        self.pixels = self._block[pixels_at:].view(stored.dtype).view(slots, rows, stored.channels, canvas, canvas)
        numbers = self._block[:pixels_at].view(torch.int64)
        self.current_pass = numbers[:1]
        self.sizes = numbers[1 : 1 + 2 * images].view(slots, rows, 2)
        self.wanted, self.samples = numbers[1 + 2 * images : 1 + 4 * images].view(2, slots, rows)

    def batch(self, slot: int, first: int, count: int) -> ImageBatch:
        """A view of some rows of a slot."""
        rows = (slot, slice(first, first + count))
        return ImageBatch(self.pixels[rows], self.sizes[rows], self.samples[rows])

    def pin(self) -> None:
        """Page-lock the memory, so that copies to the GPU are asynchronous; without it they are only slower."""
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address = self._block.data_ptr()
        if int(runtime.cudaHostRegister(address, self._block.numel(), 0)) == 0:
            weakref.finalize(self, runtime.cudaHostUnregister, address)

    def __reduce__(self) -> tuple[type[BatchRing], tuple[Any, ...]]:
        shared = multiprocessing.reduction.DupFd(self._file)
        return BatchRing, (self.slots, self.rows, self.canvas, self.stored, shared)


def _anonymous_file(size: int) -> int:
    """A file without a name, deleted when the last process closes it."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("jcl-batches")
    else:
        with tempfile.TemporaryFile() as temporary:
            file = os.dup(temporary.fileno())
    os.truncate(file, size)
    return file
