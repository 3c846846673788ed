"""How long training takes: in all, and by the step."""

from __future__ import annotations

import time

from jcl.runs.checkpoint import Progress


class TrainingClock:
    """Adds the time spent training to `progress`, and knows the pace since the last line of metrics.

    A line may sum up steps from before a stop. How long those took is not known any more, so the pace is that of the
    steps that were taken since.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._last = time.perf_counter()
        self._window_start, self._window_seconds = progress.step, 0.0

    def go_on(self) -> None:
        """What lies between the last lap and now was no training."""
        self._last = time.perf_counter()

    def lap(self) -> None:
        """Add the time since the last lap."""
        now = time.perf_counter()
        self._progress.seconds += now - self._last
        self._window_seconds += now - self._last
        self._last = now

    def steps_per_second(self) -> float:
        """The pace since this was last asked, up to now."""
        self.lap()
        pace = (self._progress.step - self._window_start) / max(self._window_seconds, 1e-9)
        self._window_start, self._window_seconds = self._progress.step, 0.0
        return pace
