"""How a pre-training is doing, for people: a bar in a terminal, a line now and then in a log file."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from jcl.console import duration, print_line
from jcl.settings.schema import Settings
from jcl.train.bar import BarDisplay, speed
from jcl.train.health import health


class RunDisplay(BarDisplay):
    """Shows loss, images per second and time left, and says in words how the run is doing."""

    def __init__(self, console: Console, settings: Settings, label: str) -> None:
        super().__init__(console, label)
        self.settings = settings
        self.newest: dict[str, Any] = {}

    def start(self, step: int, total_steps: int, steps_per_epoch: int) -> None:
        self._steps_per_epoch = steps_per_epoch
        self.begin_at(step, total_steps)

    def advance(self, step: int) -> None:
        epoch = min(step // self._steps_per_epoch + 1, self.settings.train.epochs)
        self.reach(step, f"{self.label} epoch {epoch}/{self.settings.train.epochs}")
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

    def look(self, step: int) -> None:
        """Say how the run is doing, once there are figures to tell it from."""
        if "loss" in self.newest:
            self._print(step, self.health())

    def warn(self, text: str) -> None:
        """A sentence about something that went wrong and does not end the run."""
        print_line(self.console, text)

    def health(self) -> str:
        queue = self.settings.method.queue_size
        assert isinstance(queue, int)
        return health(self.newest, queue_size=queue, embedding_dim=self.settings.model.embedding_dim)

    def _print_progress(self, step: int) -> None:
        seconds = self.seconds_left(step)
        left = f", about {duration(seconds)} left" if seconds is not None and step < self._total else ""
        figures = f"; {speed(self.newest['images_per_second'])}; {self.health()}" if "loss" in self.newest else ""
        self._print(step, f"step {step:,} of {self._total:,}{left}{figures}")

    def _print(self, step: int, text: str) -> None:
        self._pace.written()
        print_line(self.console, f"{self.label} epoch {step / self._steps_per_epoch:.3g}: {text}")
