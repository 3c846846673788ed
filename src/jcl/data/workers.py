"""Worker processes that decode batches ahead of the training loop."""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import types
from collections.abc import Generator, Iterator, Sequence
from typing import Any, Final

from torch.utils.data import DataLoader

from jcl.data.reading import Decoded, ImageReader
from jcl.errors import DataError

_BATCHES_AHEAD: Final = 3  # per worker: enough to even out images that take long, little enough for shared memory


class DecodingPool:
    """Decodes lists of indices in order, in this process (no workers) or in worker processes kept from pass to pass.

    Workers start from a clean process (forkserver) and not as copies of this one, whose other threads a copy would lack
    while holding their locks.
    """

    def __init__(self, reader: ImageReader, workers: int, pinned: bool) -> None:
        self._reader = reader
        self._requests = _Requests()
        self._loader: DataLoader[Decoded] | None = None
        self._batches: Any = None  # DataLoader's own iterator, which holds the workers
        self._pass: Generator[Decoded, None, None] | None = None
        if workers:
            self._loader = DataLoader(
                reader,  # type: ignore[arg-type]  # DataLoader asks for no more than __getitem__
                batch_size=None,  # the reader makes whole batches
                sampler=self._requests,
                num_workers=workers,
                prefetch_factor=_BATCHES_AHEAD,
                persistent_workers=True,
                pin_memory=pinned,
                worker_init_fn=_follow_parent,
                multiprocessing_context=_process_context(),
            )

    def decode(self, requests: Sequence[list[int]]) -> Iterator[Decoded]:
        """Decode each list of indices, in order. A pass that was not finished ends when the next one starts."""
        self._end_pass()
        self._requests.lists = requests
        self._pass = self._in_workers(self._loader) if self._loader else self._here()
        return self._pass

    def _here(self) -> Generator[Decoded, None, None]:
        for indices in self._requests:
            yield self._reader[indices]

    def _in_workers(self, loader: DataLoader[Decoded]) -> Generator[Decoded, None, None]:
        with _without_main_module(self._reader):
            self._batches = iter(loader)  # starts the workers, or readies them for another pass
        try:
            yield from self._batches
        except RuntimeError as error:
            if "exited unexpectedly" not in str(error):
                raise
            raise DataError(
                "A worker process that decodes images ended unexpectedly, which most often means that the memory ran "
                "out; use fewer workers, a smaller batch or no workers."
            ) from error

    def _end_pass(self) -> None:
        if self._pass is not None:
            self._pass.close()
            self._pass = None

    def close(self) -> None:
        """End the worker processes and wait until they are gone."""
        self._end_pass()
        self._loader = None
        if self._batches is not None:
            # DataLoader does this when nothing refers to it any more, but after Ctrl-C the trace still does.
            self._batches._shutdown_workers()
            self._batches = None


class _Requests:
    """The lists of indices of the coming pass; DataLoader keeps this object and iterates it anew for each pass."""

    lists: Sequence[list[int]] = ()

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.lists)

    def __len__(self) -> int:
        return len(self.lists)


def _follow_parent(worker: int) -> None:
    """Set up a worker: Ctrl-C, which reaches every process, is the parent's to answer, and no worker outlives it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.excepthook = _say_nothing_of_lost_connections
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _say_nothing_of_lost_connections(
    kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
) -> None:
    """A parent interrupted while it takes over a batch hangs up; multiprocessing would print a trace of that."""
    if not issubclass(kind, ConnectionError | EOFError):
        sys.__excepthook__(kind, error, trace)


def _end_with_parent() -> None:
    """Wait for the parent's end. DataLoader watches the process that forked it, here a server that waits in turn."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


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


def _process_context() -> "multiprocessing.context.BaseContext":
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([ImageReader.__module__])  # import torch once, not in every worker
    return context
