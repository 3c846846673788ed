"""Progress for people: a bar in a terminal, a line now and then in a log file."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from jcl.settings import Settings
from jcl.speech import tell
from jcl.train.health import health

LOG_SECONDS = 30.0  # between lines where there is no terminal to draw a bar in


class RunDisplay:
    """Shows loss, images per second and time left, and says in words how the run is doing."""

    def __init__(self, console: Console, settings: Settings, label: str) -> None:
        self.console = console
        self.settings = settings
        self.label = label
        self.newest: dict[str, Any] = {}
        self._last_line = time.monotonic()
        self._total = 0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            _Figures(self.newest),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
            disable=not console.is_terminal,
            expand=True,
        )
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
        self._bar.update(self._task, completed=step, total=total_steps)

    def advance(self, step: int) -> None:
        epoch = min(step // self._steps_per_epoch + 1, self.settings.train.epochs)
        self._bar.update(
            self._task, completed=step, description=f"{self.label} epoch {epoch}/{self.settings.train.epochs}"
        )

    def show(self, line: dict[str, Any]) -> None:
        """A new line of metrics."""
        self.newest.update(line)
        if line["kind"] == "knn":
            self._print(f"kNN top-1 {line['knn_top1']:.1f} %; {self.health()}")
        elif not self.console.is_terminal and time.monotonic() - self._last_line > LOG_SECONDS:
            self._print(f"{line['images_per_second']:,.0f} images/s; {self.health()}")

    def warn(self, text: str) -> None:
        """A sentence about something that went wrong and does not end the run."""
        tell(self.console, text)

    def health(self) -> str:
        queue = self.settings.method.queue_size
        assert isinstance(queue, int)
        return health(self.newest, queue_size=queue, embedding_dim=self.settings.model.embedding_dim)

    def _print(self, text: str) -> None:
        self._last_line = time.monotonic()
        self.console.print(f"{self.label} epoch {self.newest['epoch']:.3g}: {text}", highlight=False, markup=False)


class _Figures(ProgressColumn):
    """The newest loss and speed beside the bar."""

    def __init__(self, newest: dict[str, Any]) -> None:
        super().__init__()
        self.newest = newest

    def render(self, task: Task) -> Text:
        if self.newest.get("loss") is None:
            return Text("")
        return Text(f"loss {self.newest['loss']:.3f}  {self.newest['images_per_second']:,.0f} images/s")
