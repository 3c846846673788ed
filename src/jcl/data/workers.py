"""Worker processes that decode batches ahead of the training loop."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.resource_tracker
import os
import pickle
import signal
import sys
import threading
import types
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch

from jcl.data.reading import Decoded, ImageReader, decoded_rows
from jcl.data.ring import BatchRing
from jcl.errors import DataError

_IMAGES_PER_TASK: Final = 8  # a batch is shared out in pieces, so that all workers are at the batch that is needed next
_FOR_GROUPS: Final = (signal.SIGTERM, signal.SIGINT)  # what terminals and schedulers send to all processes of a program
_BATCHES_AHEAD: Final = 3  # at least; enough to even out images that take long


class DecodingPool:
    """Decodes lists of indices in order, in this process (no workers) or in worker processes kept from pass to pass.

    What `decode` gives is valid until the next one is asked for: with workers it lies in memory that is used again.
    Workers start from a clean process (forkserver) and not as copies of this one, whose other threads a copy would lack
    while holding their locks.
    """

    def __init__(self, reader: ImageReader, workers: int, batch_size: int, pinned: bool) -> None:
        self._reader, self._workers, self._batch_size, self._pinned = reader, workers, batch_size, pinned
        self._team: _Team | None = None
        self._pass: Generator[Decoded, None, None] | None = None

    def decode(self, requests: Iterable[list[int]]) -> Iterator[Decoded]:
        """Decode each list of indices, in order. A pass that was not finished ends when the next one starts."""
        self._end_pass()
        self._pass = self._in_workers(iter(requests)) if self._workers else self._here(requests)
        return self._pass

    def _here(self, requests: Iterable[list[int]]) -> Generator[Decoded, None, None]:
        for indices in requests:
            yield self._reader[indices]

    def _in_workers(self, requests: Iterator[list[int]]) -> Generator[Decoded, None, None]:
        if self._team is None:
            self._team = _Team(self._reader, self._workers, self._batch_size, self._pinned)
        yield from self._team.decode(requests)

    def _end_pass(self) -> None:
        if self._pass is not None:
            self._pass.close()
            self._pass = None

    def close(self) -> None:
        """End the worker processes and wait until they are gone."""
        self._end_pass()
        if self._team is not None:
            self._team.close()
            self._team = None


# A piece of a batch: the number of its pass, the slot of the ring, the first row and the number of rows. Small, so that
# the pipe holds all that are ever waiting and handing out never blocks.
_Task = tuple[int, int, int, int]


class _Done(NamedTuple):
    """What a worker reports about a task."""

    number: int
    slot: int
    skipped: dict[str, str]
    error: BaseException | None


@dataclass
class _Order:
    """A batch that is being decoded."""

    slot: int
    count: int
    tasks_left: int
    skipped: dict[str, str] = field(default_factory=dict)


class _Team:
    """The worker processes, the ring they fill, the tasks they take and what they report.

    Tasks wait in one queue, so that no worker is idle while there are any; reports come through a pipe of each worker's
    own, so that one that dies holds up nothing.
    """

    def __init__(self, reader: ImageReader, workers: int, batch_size: int, pinned: bool) -> None:
        self._rows_per_task = max(_IMAGES_PER_TASK, batch_size // (4 * workers))
        pieces_ahead = -(-2 * workers * self._rows_per_task // batch_size)
        self._ring = BatchRing(max(_BATCHES_AHEAD, pieces_ahead) + 1, batch_size, reader.canvas)
        if pinned:
            self._ring.pin()
        self._number = 0
        self._unfinished = 0  # tasks handed out and not reported
        context = _process_context()
        self._tasks: Any = context.SimpleQueue()
        self._reports: list[multiprocessing.connection.Connection] = []
        self._processes: list[Any] = []
        try:
            with _without_main_module(reader), _deaf_to_signals():
                for _ in range(workers):
                    report, into = context.Pipe(duplex=False)
                    arguments = (reader, self._ring, self._tasks, into)
                    process = context.Process(target=_work, args=arguments, daemon=True)  # type: ignore[attr-defined]
                    process.start()
                    into.close()
                    self._reports.append(report)
                    self._processes.append(process)
        except BaseException:  # Ctrl-C comes as soon as signals are heard again; nobody else knows of the workers yet
            self.close()
            raise

    def decode(self, requests: Iterator[list[int]]) -> Generator[Decoded, None, None]:
        """One pass: every slot but the one in use is always being filled."""
        self._begin_pass()
        free = deque(range(self._ring.slots))
        orders: deque[_Order] = deque()
        while True:
            while free and (indices := next(requests, None)) is not None:
                orders.append(self._hand_out(indices, free.popleft()))
            if not orders:
                return
            order = orders.popleft()
            while order.tasks_left:
                for done in self._receive():
                    finished = next(each for each in (order, *orders) if each.slot == done.slot)
                    finished.tasks_left -= 1
                    finished.skipped |= done.skipped
            ring, rows = self._ring, (order.slot, slice(order.count))
            yield decoded_rows(ring.pixels[rows], ring.sizes[rows], ring.samples[rows], order.skipped)
            free.append(order.slot)

    def _hand_out(self, indices: list[int], slot: int) -> _Order:
        self._ring.wanted[slot, : len(indices)] = torch.tensor(indices)
        starts = range(0, len(indices), self._rows_per_task)
        for start in starts:
            self._tasks.put((self._number, slot, start, min(self._rows_per_task, len(indices) - start)))
        self._unfinished += len(starts)
        return _Order(slot, len(indices), len(starts))

    def _begin_pass(self) -> None:
        """Tasks of the pass before are taken back by saying that it is over; those at work are waited for."""
        self._number += 1
        self._ring.current_pass = self._number
        while self._unfinished:
            self._receive()

    def _receive(self) -> list[_Done]:
        """Reports on tasks of this pass, waiting for at least one report."""
        ends = [process.sentinel for process in self._processes]
        ready = multiprocessing.connection.wait([*self._reports, *ends])
        if any(end in ready for end in ends):
            raise _lost_worker()
        try:
            reports: list[_Done] = [report.recv() for report in self._reports if report in ready]
        except (EOFError, OSError):
            raise _lost_worker() from None
        self._unfinished -= len(reports)
        current = [done for done in reports if done.number == self._number]
        for done in current:
            if done.error is not None:
                raise done.error
        return current

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
            process.close()
        for report in self._reports:
            report.close()
        self._tasks.close()


def _lost_worker() -> DataError:
    return DataError(
        "A worker process that decodes images ended unexpectedly, which most often means that the memory ran out; use "
        "fewer workers, a smaller batch or no workers."
    )


def _work(reader: ImageReader, ring: BatchRing, tasks: Any, reports: multiprocessing.connection.Connection) -> None:
    """What a worker does: take a task, fill its rows, report."""
    _follow_parent()
    while True:
        task: _Task = tasks.get()
        number, slot, first, count = task
        skipped: dict[str, str] = {}
        error: BaseException | None = None
        if number == ring.current_pass:  # a pass that is over needs nothing any more
            rows = (slot, slice(first, first + count))
            try:
                skipped = reader.read_into(
                    ring.wanted[rows].tolist(), ring.pixels[rows], ring.sizes[rows], ring.samples[rows]
                )
            except Exception as raised:
                error = _portable(raised)
        reports.send(_Done(number, slot, skipped, error))


def _portable(error: Exception) -> Exception:
    """The error as it reaches the main process; of one that cannot be sent or rebuilt, its kind and words do."""
    try:
        pickle.loads(pickle.dumps(error))  # our own, and rebuilt where nothing depends on it
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _follow_parent() -> None:
    """Set up a worker: Ctrl-C, which reaches every process, is the parent's to answer, and no worker outlives it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Wait for the parent's end, whatever it was."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextlib.contextmanager
def _deaf_to_signals() -> Iterator[None]:
    """Have processes that start here inherit blocked signals.

    They are for the parent to answer, who may need further images up to the end of a step. One that comes meanwhile
    reaches it afterwards; the process that all workers are forked from would die of Ctrl-C while it imports torch.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    multiprocessing.resource_tracker.ensure_running()  # or the first process starts it, which unblocks the signal
    with _answered_later():
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_GROUPS)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)


@contextlib.contextmanager
def _answered_later() -> Iterator[None]:
    """Answer signals at the end: a thread that does not block them may take one, and the main thread has to answer."""
    if threading.current_thread() is not threading.main_thread():  # which is where signals are answered
        yield
        return
    taken: list[int] = []
    handlers = {number: signal.getsignal(number) for number in _FOR_GROUPS}
    answered = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in answered:
        signal.signal(number, lambda number, _: taken.append(number))
    try:
        yield
    finally:
        for number, handler in answered.items():
            signal.signal(number, handler)
        for late in taken:
            signal.raise_signal(late)


@contextlib.contextmanager
def _without_main_module(reader: ImageReader) -> Iterator[None]:
    """Keep new processes from running the user's script again, as multiprocessing has them do to find its classes.

    Workers need nothing of it, unless it defines the source; a script without an `if __name__ == "__main__"` guard, or
    one read from standard input, then works too.
    """
    main = sys.modules["__main__"]
    if reader.source_module == main.__name__:
        yield
        return
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _process_context() -> multiprocessing.context.BaseContext:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([ImageReader.__module__])  # import torch once, not in every worker
    return context
