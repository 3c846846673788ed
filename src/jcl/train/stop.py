"""Stopping a training by a signal without losing a step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self


class StopRequest:
    """Turns SIGINT and SIGTERM into a request that the training loop honours after the current step.

    A second SIGINT interrupts at once. Outside the main thread signals cannot be caught, and nothing changes.
    """

    def __init__(self, on_request: Callable[[], None] = lambda: None) -> None:
        """`on_request` is called from within the signal handler, so it may only set a flag."""
        self.signal_name = ""
        self._on_request = on_request
        self._previous: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        return bool(self.signal_name)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal_name = signal.Signals(number).name
        self._on_request()
