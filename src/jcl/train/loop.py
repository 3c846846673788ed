"""The training loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from jcl.core.method import ContrastiveLearner, StepResult
from jcl.data import BatchLoader, ImageBatch
from jcl.errors import Interrupted, RunError
from jcl.settings import Settings
from jcl.train.checkpoint import Progress, newest_checkpoint, save_checkpoint
from jcl.train.folder import RunFolder
from jcl.train.record import Record
from jcl.train.schedule import covariance_scale, learning_rate
from jcl.train.step import TrainingStep
from jcl.train.stop import StopRequest


class Display(Protocol):
    """Whatever shows a person how far the run is."""

    def start(self, step: int, total_steps: int, steps_per_epoch: int) -> None: ...
    def advance(self, step: int) -> None: ...
    def show(self, line: dict[str, Any]) -> None: ...


@dataclass
class Training:
    """A run in progress. `measure` is called every few epochs and at the end; its figures are recorded."""

    settings: Settings
    folder: RunFolder
    learner: ContrastiveLearner
    optimiser: torch.optim.Optimizer
    loader: BatchLoader
    step: TrainingStep
    record: Record
    display: Display
    measure: Callable[[], dict[str, float]] | None = None
    progress: Progress = field(default_factory=Progress)
    clock: float = 0.0  # when time was last taken
    window_seconds: float = 0.0  # since the last line of metrics

    def run(self) -> None:
        """Train from where `progress` stands to the last epoch."""
        epochs, steps = self.settings.train.epochs, self.loader.steps_per_epoch
        self.display.start(self.progress.step, epochs * steps, steps)
        self.clock = time.perf_counter()
        with StopRequest() as stop:
            for epoch in range(self.progress.step // steps, epochs):
                scale = covariance_scale(self.settings.method, epoch, epochs)
                for batch in self.loader.epoch(epoch, start=self.progress.step % steps):
                    self.advance(batch, scale)
                    if stop.requested and self.progress.step % steps:
                        self.leave(stop.signal_name)
                # An epoch's last step belongs together with what follows it, or a resumed run would leave that out.
                self.finish_epoch(epoch + 1)
                if stop.requested and epoch + 1 < epochs:
                    self.leave(stop.signal_name)

    def advance(self, batch: ImageBatch, scale: float) -> None:
        """One step; its figures are added up on the device and only every `log_every` steps fetched and written."""
        progress, record = self.progress, self.settings.record
        lr = learning_rate(self.settings.train, progress.step, self.loader.steps_per_epoch)
        figures = self.step(batch, progress.step, lr, scale)
        progress.window = figures.clone() if progress.window_steps == 0 else progress.window.add_(figures)
        progress.window_steps += 1
        progress.step += 1
        self.display.advance(progress.step)
        last = progress.step == self.settings.train.epochs * self.loader.steps_per_epoch
        if progress.window_steps == record.log_every or last:
            self.write_window(lr, scale)

    def write_window(self, lr: float, scale: float) -> None:
        progress = self.progress
        means = StepResult(*(progress.window / progress.window_steps).tolist())
        self.lap()
        figures = {
            "loss": float(means.loss),
            "contrastive_accuracy": 100.0 * float(means.contrastive_accuracy),
            "feature_std": float(means.feature_std),
            "positive_similarity": float(means.positive_similarity),
            "key_variance": float(means.key_variance),
            "queue_filled": float(self.learner.queue.filled()),
            "lr": lr,
            "covariance_scale": scale,
            "images_per_second": progress.window_steps * self.loader.batch_size / max(self.window_seconds, 1e-9),
            "seconds": progress.seconds,
        }
        progress.window_steps, self.window_seconds = 0, 0.0
        self.display.show(self.record.write("train", progress.step, self.epoch_now(), figures))
        self.stop_unless_finite()

    def finish_epoch(self, epoch: int) -> None:
        """After epoch `epoch` (from 1): measure and save when it is time to, and always after the last."""
        record, last = self.settings.record, epoch == self.settings.train.epochs
        if self.measure is not None and (last or (record.knn_every and epoch % record.knn_every == 0)):
            self.lap()
            figures = self.measure()
            self.clock = time.perf_counter()  # measuring is not training time
            self.display.show(self.record.write("knn", self.progress.step, self.epoch_now(), figures))
        if last or epoch % record.checkpoint_every == 0:
            self.save()

    def save(self) -> None:
        self.stop_unless_finite()
        self.lap()
        save_checkpoint(self.folder.checkpoints, self.learner, self.optimiser, self.progress, self.settings.record.keep)

    def lap(self) -> None:
        """Add the time since the last lap to the run's and the window's training time."""
        now = time.perf_counter()
        self.progress.seconds += now - self.clock
        self.window_seconds += now - self.clock
        self.clock = now

    def epoch_now(self) -> float:
        return self.progress.step / self.loader.steps_per_epoch

    def leave(self, signal_name: str) -> None:
        self.save()
        raise Interrupted(
            f"{signal_name} received: the run stopped after step {self.progress.step} and is saved; "
            f"continue it with `jcl resume {self.folder.path}`."
        )

    def stop_unless_finite(self) -> None:
        """A sum that is not finite stays so, hence looking at the window's loss now and then misses nothing."""
        if bool(torch.isfinite(self.progress.window[0])):
            return
        good = newest_checkpoint(self.folder.checkpoints)
        way_out = f"the last good checkpoint is {good}" if good else "there is no checkpoint yet"
        raise RunError(
            f"the loss is not finite after step {self.progress.step}, so training stopped; {way_out}. "
            "A lower --lr or a higher --temperature usually helps."
        )
