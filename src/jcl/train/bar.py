"""The bar that long work shows in a terminal, and the pace of the lines that a log gets instead."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from jcl.train.step import STEPS_BEFORE_RECORDING

LOG_SECONDS = 30.0  # between lines where there is no terminal to draw a bar in
MOST_LOG_SECONDS = 600.0
# How long these take, from wherever a run begins or resumes, tells nothing about the others: they compile, choose
# kernels, create the optimiser's state and are recorded, and the ones after that may still wait for their device.
FIRST_STEPS = STEPS_BEFORE_RECORDING + 3
PLAIN_STEPS = 2  # to be seen after those before the time left is told


def speed(images_per_second: float) -> str:
    """`1,234 images/s`, with a decimal where there are few."""
    return f"{images_per_second:,.{0 if images_per_second >= 10 else 1}f} images/s"


class LogPace:
    """When the next line of a log is due: often at first, when people look, and seldom in runs of days."""

    def __init__(self, console: Console) -> None:
        self._silent = console.is_terminal  # a bar is there
        self._begun = self._last = time.monotonic()

    def due(self) -> bool:
        now = time.monotonic()
        wait = min(MOST_LOG_SECONDS, max(LOG_SECONDS, (now - self._begun) / 20))
        return not self._silent and now - self._last > wait

    def written(self) -> None:
        self._last = time.monotonic()


class BarFigures(ProgressColumn):
    """What stands beside a bar: the newest figures, or that a wish to stop was heard."""

    def __init__(self) -> None:
        super().__init__(Column(no_wrap=True))
        self.text = ""
        self.stopping = False

    def render(self, task: Task) -> Text:
        return Text("stopping; Ctrl-C again: at once" if self.stopping else self.text)


def progress_bar(console: Console, *figures: ProgressColumn) -> Progress:
    """A bar for long work that takes what room its words, figures and the time left leave; there in terminals only.

    It stays on one line: where a terminal is narrow the bar gives way first.
    """
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None, table_column=Column(ratio=1)),
        *figures,
        TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
        console=console,
        transient=True,
        disable=not console.is_terminal,
        expand=True,
    )


class BarDisplay:
    """A bar with a label for as long as a `with` block lasts, and the newest figures beside it."""

    def __init__(self, console: Console, label: str) -> None:
        self.console, self.label = console, label
        self._pace = LogPace(console)
        self._figures = BarFigures()
        self._bar = progress_bar(console, self._figures)
        self._task = self._bar.add_task(label, total=None)
        self._total, self._counted_from, self._counted_since = 0, FIRST_STEPS, time.monotonic()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def begin_at(self, step: int, total: int) -> None:
        """The work starts, or goes on, after so many steps."""
        self._total, self._counted_from, self._counted_since = total, step + FIRST_STEPS, time.monotonic()
        self._bar.reset(self._task, completed=step, total=total)

    def reach(self, step: int, description: str) -> None:
        """So many steps are done; the time that is left is told by those after the first ones."""
        if step > self._counted_from:
            self._bar.update(self._task, completed=step, description=description)
        else:
            self._counted_since = time.monotonic()
            self._bar.reset(self._task, completed=step, description=description)

    def seconds_left(self, step: int) -> float | None:
        """How long the steps after `step` take, once enough steps have been seen to tell."""
        seen = step - self._counted_from
        if seen < PLAIN_STEPS:
            return None
        return (time.monotonic() - self._counted_since) / seen * (self._total - step)

    def stopping(self) -> None:
        """The work is asked to stop; whoever asked should see that it was heard, for a step may take long."""
        self._figures.stopping = True
