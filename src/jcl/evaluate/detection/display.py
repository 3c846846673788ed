"""How far the training of a detector is: a bar in a terminal, a line now and then in a log file."""

from __future__ import annotations

from jcl.evaluate.supervised_display import SupervisedDisplay
from jcl.train.bar import speed


class DetectionDisplay(SupervisedDisplay):
    """Counts iterations, for schedules of detectors do."""

    def begin(self, iteration: int, iterations: int) -> None:
        self.start(iteration, iterations, 1)
        self._iterations = iterations

    def advance(self, step: int) -> None:
        self.reach(step, f"{self.label} {step:,}/{self._iterations:,}")

    def show(self, epoch: float, figures: dict[str, float]) -> None:
        """New figures, after so many iterations."""
        text = f"loss {figures['loss']:.3f}  {speed(figures['images_per_second'])}"
        self._figures.text = text
        if self._pace.due():
            self._pace.written()
            self.say(f"{self.label} {epoch:,.0f}/{self._iterations:,}: {text}")
