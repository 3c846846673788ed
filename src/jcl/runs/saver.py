"""Checkpoints written in the background."""

import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch
from torch import nn

from jcl.errors import RunError
from jcl.runs.atomic import remove_partial_files
from jcl.runs.checkpoint import Progress, Snapshot, take_snapshot, write_snapshot


class CheckpointSaver(contextlib.AbstractContextManager["CheckpointSaver"]):
    """Writes checkpoints to a folder in a thread; training waits only for the snapshot.

    At most one write is in progress. A write that fails (a full or read-only disk) does not stop training: `warn` is
    called once, and the next checkpoint is tried again. Only `finish` raises. Call all methods from the training
    thread.
    """

    def __init__(self, folder: Path, keep: int, warn: Callable[[str], None]) -> None:
        self._folder, self._keep, self._warn = folder, keep, warn
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._written: Future[Path] | None = None  # until `report` has looked at it
        self._snapshot: Snapshot | None = None
        self._failing = False
        remove_partial_files(folder)

    @property
    def busy(self) -> bool:
        return self._written is not None and not self._written.done()

    def start(self, learner: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
        """Save the current state in the background, once the previous write has ended."""
        self.wait()
        self._snapshot = take_snapshot(learner, optimizer, progress, self._snapshot)
        self._written = self._pool.submit(write_snapshot, self._folder, self._snapshot, self._keep)

    def finish(self, learner: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
        """Save the current state, wait for it, and raise if it cannot be written."""
        self.start(learner, optimizer, progress)
        written, self._written = self._written, None
        assert written is not None
        written.result()

    def wait(self) -> None:
        """Wait for the write in progress, and report on it."""
        if self._written is not None:
            wait([self._written])
        self.report()

    def report(self) -> None:
        """Warn, once each, when checkpoints cannot be written and when they can be written again."""
        if self._written is None or self.busy:
            return
        written, self._written = self._written, None
        error = written.exception()
        if error is not None and not isinstance(error, RunError):
            raise error
        if error is not None and not self._failing:
            self._warn(f"{error} Training continues and tries again at the next checkpoint.")
        if error is None and self._failing:
            self._warn(f"Checkpoints can be written again: {written.result()}.")
        self._failing = error is not None

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown()  # completes a write in progress, also after an error


class NullSaver:
    """A saver that saves nothing, for ranks other than the first, whose state is the same."""

    busy = False

    def start(self, *_state: object) -> None:
        """Do nothing."""

    finish = wait = report = start
