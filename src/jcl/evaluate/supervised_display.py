"""How far a training with labels is: a bar in a terminal, a line now and then in a log file."""

from __future__ import annotations

from rich.console import Console

from jcl.console import print_line, tell_left_out
from jcl.train.bar import BarDisplay, speed


class SupervisedDisplay(BarDisplay):
    """Shows epoch, loss, accuracy on the training views, speed and time left."""

    def __init__(self, console: Console, label: str) -> None:
        super().__init__(console, label)
        self._steps, self._epochs = 1, 1

    def start(self, step: int, steps_per_epoch: int, epochs: int) -> None:
        self._steps, self._epochs = steps_per_epoch, epochs
        self.begin_at(step, steps_per_epoch * epochs)

    def advance(self, step: int) -> None:
        epoch = min(step // self._steps + 1, self._epochs)
        self.reach(step, f"{self.label} epoch {epoch}/{self._epochs}")

    def show(self, epoch: float, figures: dict[str, float]) -> None:
        """New figures."""
        text = f"loss {figures['loss']:.3f}  {speed(figures['images_per_second'])}"
        self._figures.text = text
        if self._pace.due():
            self._pace.written()
            self.say(f"{self.label} epoch {epoch:.3g}/{self._epochs}: {text}")

    def say_skipped(self, skipped: dict[str, str]) -> None:
        """Which training images could not be read, if any."""
        tell_left_out(self.console, skipped)

    def say(self, text: str) -> None:
        """A plain line: names may hold brackets, which are no markup, and are copied best unbroken."""
        print_line(self.console, text)
