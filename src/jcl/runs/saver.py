"""Checkpoints written beside training."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import nn

from jcl.errors import RunError
from jcl.runs.atomic import remove_partial_files
from jcl.runs.checkpoint import Progress, Snapshot, take_snapshot, write_snapshot


class CheckpointSaver:
    """Writes checkpoints into a folder in a thread of its own; training waits only for the snapshot.

    There is never more than one write in flight. A write that fails (a full disk, one that became read-only) does not
    end training: it is said once, through `warn`, and the next checkpoint is tried as if nothing had been. Only
    `finish` insists. All methods are for the thread that trains.
    """

    def __init__(self, folder: Path, keep: int, warn: Callable[[str], None]) -> None:
        self._folder, self._keep, self._warn = folder, keep, warn
        self._thread: threading.Thread | None = None
        self._snapshot: Snapshot | None = None
        self._written: Path | None = None
        self._error: BaseException | None = None
        self._failing = False
        remove_partial_files(folder)

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, learner: nn.Module, optimiser: torch.optim.Optimizer, progress: Progress) -> None:
        """Save the state as it is now, once the write before is over."""
        self.wait()
        self._snapshot = take_snapshot(learner, optimiser, progress, self._snapshot)
        self._written, self._error = None, None
        self._thread = threading.Thread(target=self._write, args=(self._snapshot,), name="checkpoint", daemon=True)
        self._thread.start()

    def finish(self, learner: nn.Module, optimiser: torch.optim.Optimizer, progress: Progress) -> None:
        """Save the state as it is now, wait for it and raise if it cannot be written."""
        self.start(learner, optimiser, progress)
        self._join()
        self._thread = None
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Wait for the write in flight, and say what came of it."""
        self._join()
        self.report()

    def report(self) -> None:
        """Say, once, that checkpoints cannot be written, and that they can be again."""
        if self._thread is None or self.busy:
            return
        self._thread = None
        if self._error is not None and not isinstance(self._error, RunError):
            raise self._error
        if self._error is not None and not self._failing:
            self._warn(f"{self._error} Training goes on and tries again at the next checkpoint.")
        if self._error is None and self._failing:
            self._warn(f"Checkpoints can be written again: {self._written}.")
        self._failing = self._error is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._join()  # whatever ended training, what was begun is completed

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _write(self, snapshot: Snapshot) -> None:
        try:
            self._written = write_snapshot(self._folder, snapshot, self._keep)
        except BaseException as error:
            self._error = error
