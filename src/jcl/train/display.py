"""Progress for people: a bar in a terminal, a line now and then in a log file."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from jcl.settings import Settings
from jcl.speech import duration, tell
from jcl.train.health import health

LOG_SECONDS = 30.0  # between lines where there is no terminal to draw a bar in
MOST_LOG_SECONDS = 600.0


def speed(images_per_second: float) -> str:
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


class RunDisplay:
    """Shows loss, images per second and time left, and says in words how the run is doing."""

    def __init__(self, console: Console, settings: Settings, label: str) -> None:
        self.console = console
        self.settings = settings
        self.label = label
        self.newest: dict[str, Any] = {}
        self._pace = LogPace(console)
        self._figures = BarFigures()
        self._bar = progress_bar(console, self._figures)
        self._task = self._bar.add_task(label, total=None)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def start(self, step: int, total_steps: int, steps_per_epoch: int) -> None:
        self._total, self._steps_per_epoch = total_steps, steps_per_epoch
        self._first_step, self._started = step, time.monotonic()
        self._bar.update(self._task, completed=step, total=total_steps)

    def advance(self, step: int) -> None:
        epoch = min(step // self._steps_per_epoch + 1, self.settings.train.epochs)
        self._bar.update(
            self._task, completed=step, description=f"{self.label} epoch {epoch}/{self.settings.train.epochs}"
        )
        if self._pace.due():
            self._print_progress(step)

    def show(self, line: dict[str, Any]) -> None:
        """A new line of metrics."""
        self.newest.update(line)
        if self.newest.get("loss") is not None:
            self._figures.text = f"loss {self.newest['loss']:.3f}  {speed(self.newest['images_per_second'])}"
        if line["kind"] == "knn":
            self._print(line["step"], f"kNN top-1 {line['knn_top1']:.1f} %; {self.health()}")
        elif self._pace.due():
            self._print_progress(line["step"])

    def stopping(self) -> None:
        """The run is asked to stop; whoever asked should see that it was heard, for a step may take long."""
        self._figures.stopping = True

    def warn(self, text: str) -> None:
        """A sentence about something that went wrong and does not end the run."""
        tell(self.console, text)

    def health(self) -> str:
        queue = self.settings.method.queue_size
        assert isinstance(queue, int)
        return health(self.newest, queue_size=queue, embedding_dim=self.settings.model.embedding_dim)

    def _print_progress(self, step: int) -> None:
        each = (time.monotonic() - self._started) / (step - self._first_step)
        left = f", about {duration(each * (self._total - step))} left" if step < self._total else ""
        figures = f"; {speed(self.newest['images_per_second'])}; {self.health()}" if "loss" in self.newest else ""
        self._print(step, f"step {step:,} of {self._total:,}{left}{figures}")

    def _print(self, step: int, text: str) -> None:
        self._pace.written()
        tell(self.console, f"{self.label} epoch {step / self._steps_per_epoch:.3g}: {text}")
