"""Checkpoints written in the background."""

import contextlib
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch
from torch import nn

from jcl.console import format_bytes
from jcl.errors import RunError
from jcl.runs.atomic import remove_partial_files
from jcl.runs.checkpoint import Progress, Snapshot, list_checkpoints, take_snapshot, write_snapshot
from jcl.runs.folder import RUN_ID


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
        self._id_file = folder.parent / RUN_ID
        self._identified = self._id_file.exists()
        remove_partial_files(folder)

    @property
    def moved(self) -> bool:
        """Whether the run folder, which `folder` is in, was moved, removed or emptied since training began."""
        try:
            self._id_file.stat()
        except OSError as error:  # another error: a network file system may be unavailable for a while
            return self._identified and isinstance(error, FileNotFoundError | NotADirectoryError)
        return False

    def warn_of_full_disk(self, learner: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Warn if there is no space for two checkpoints, one of which may exist already."""
        trained = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        moments = trained * (2 if "betas" in optimizer.defaults else 1)
        size = sum(tensor.nbytes for tensor in [*learner.state_dict().values(), *moments])
        needed, disk = size * (1 if list_checkpoints(self._folder) else 2), shutil.disk_usage(self._folder.parent)
        if disk.free < needed and disk.total:
            space = f"{format_bytes(disk.free)} are free, checkpoints need about {format_bytes(needed)}"
            problem = f"The disk of {self._folder.parent} is nearly full: {space}"
            self._warn(f"{problem}. Free some space, or training may not be saved.")

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
        if self.moved:
            problem = f"The folder {self._folder.parent} was moved or removed; step {progress.step:,} is not saved"
            raise RunError(f"{problem}. Resume from its newest checkpoint.")
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

    busy = moved = False

    def start(self, *_state: object) -> None:
        """Do nothing."""

    finish = wait = report = start
