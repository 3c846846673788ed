"""Figures as TensorBoard events."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any


class EventFile:
    """TensorBoard's file of a run: a convenience, so where it cannot be written, that is said and training goes on."""

    def __init__(self, folder: Path, resumed_at: int, warn: Callable[[str], None]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder, self._warn = folder, warn
        self._writer: Any = None
        self._print_thread_error = threading.excepthook
        threading.excepthook = self._except_for_ours
        try:
            self._writer = SummaryWriter(str(folder), purge_step=resumed_at + 1)
        except OSError as error:
            self._give_up(error)

    def write(self, kind: str, step: int, figures: dict[str, float]) -> None:
        if self._writer is None:
            return
        try:
            for name, value in figures.items():
                self._writer.add_scalar(f"{kind}/{name}", value, step)
            self._writer.flush()
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # said when it happened
            if self._writer is not None:
                self._writer.close()
        self._writer = None
        threading.excepthook = self._print_thread_error

    def _give_up(self, error: OSError) -> None:
        self._warn(
            f"TensorBoard events in {self._folder} could not be written: {error.strerror or error}. Training goes on "
            "without them; metrics.jsonl has the same figures."
        )
        self._writer = None

    def _except_for_ours(self, failure: threading.ExceptHookArgs) -> None:
        """TensorBoard writes in a thread, whose error reaches the next call as well: a trace of it says no more."""
        ours = type(failure.thread).__module__.startswith("tensorboard.")
        if not (ours and isinstance(failure.exc_value, OSError)):
            self._print_thread_error(failure)
