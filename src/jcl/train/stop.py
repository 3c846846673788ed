"""Stopping a run from outside without losing a step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self


class StopRequest:
    """Turns SIGINT and SIGTERM into a wish that the loop grants after the step it is in.

    A second SIGINT interrupts at once, for people who do not want to wait; the newest checkpoint is still there.
    Outside the main thread signals cannot be caught, and nothing changes.
    """

    def __init__(self, heard: Callable[[], None] = lambda: None) -> None:
        """`heard` is called from within the signal handler, so it may note the wish and no more."""
        self.signal_name = ""
        self._heard = heard
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
        self._heard()
