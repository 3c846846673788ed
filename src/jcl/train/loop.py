"""The training loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.nn import functional as F

from jcl.core.method import ContrastiveLearner, StepFigures
from jcl.data import BatchLoader, ImageBatch
from jcl.distributed.group import LostContact, Ranks, SilentRank, fail_together
from jcl.distributed.heartbeat import Heartbeat
from jcl.errors import CollectiveDataError, DataError, Interrupted, JclError, OtherRankFailed, RunError
from jcl.runs.checkpoint import Progress, newest_checkpoint
from jcl.runs.folder import RunFolder
from jcl.runs.metrics import NullRecord, Record
from jcl.runs.saver import CheckpointSaver, NullSaver
from jcl.settings.schema import Settings
from jcl.train.clock import TrainingClock
from jcl.train.nonfinite import MOST_IN_A_ROW
from jcl.train.schedule import covariance_scale, learning_rate
from jcl.train.step import TrainingStep
from jcl.train.stop import StopRequest

STEPS_BETWEEN_TALKS = 10


class Display(Protocol):
    """Whatever shows a person how far the run is."""

    def start(self, step: int, total_steps: int, steps_per_epoch: int) -> None: ...
    def advance(self, step: int) -> None: ...
    def show(self, line: dict[str, Any]) -> None: ...
    def look(self, step: int) -> None: ...
    def warn(self, text: str) -> None: ...
    def stopping(self) -> None: ...


@dataclass
class Training:
    """A run in progress. `measure` is called every few epochs and at the end; its figures are recorded."""

    settings: Settings
    folder: RunFolder
    learner: ContrastiveLearner
    optimiser: torch.optim.Optimizer
    loader: BatchLoader
    step: TrainingStep
    saver: CheckpointSaver | NullSaver
    record: Record | NullRecord
    display: Display
    heartbeat: Heartbeat
    measure: Callable[[], dict[str, float]] | None = None
    progress: Progress = field(default_factory=Progress)
    saved_at: float = 0.0  # when a checkpoint was last begun

    def __post_init__(self) -> None:
        self.clock = TrainingClock(self.progress)
        if self.progress.window_steps:
            # Since the checkpoint somebody may have changed `on_nan`, and with it whether skipped steps are counted.
            missing = len(self.step.figures) - len(self.progress.window)
            self.progress.window = F.pad(self.progress.window, (0, missing))  # a negative number cuts off

    def run(self) -> None:
        """Train from where `progress` stands to the last epoch."""
        epochs, steps = self.settings.train.epochs, self.loader.steps_per_epoch
        self.display.start(self.progress.step, epochs * steps, steps)
        self.saved_at = time.perf_counter()
        self.clock.go_on()
        try:
            with StopRequest(self.display.stopping) as stop:
                self.measure_if_due()  # a run may have been stopped between an epoch's last step and this
                for epoch in range(self.progress.step // steps, epochs):
                    self.train_epoch(epoch, stop)
                    self.finish_epoch(epoch + 1)
                    if epoch + 1 < epochs and self.ranks.any(stop.requested):
                        self.leave(stop.signal_name)
        except KeyboardInterrupt:  # asked a second time
            raise self.about_stopping_at_once() from None
        except LostContact as error:
            raise self.about_lost_contact(error) from error
        except DataError as error:
            raise self.saved_before(error) from None
        except (RunError, Interrupted) as error:
            if self.ranks.first:
                raise
            elsewhere = OtherRankFailed()  # all ranks have the same figures and wishes, and the first one tells
            elsewhere.exit_code = error.exit_code
            raise elsewhere from None

    def train_epoch(self, epoch: int, stop: StopRequest) -> None:
        """The rest of an epoch, with what may be asked for between its steps."""
        steps = self.loader.steps_per_epoch
        scale = covariance_scale(self.settings.method, epoch, self.settings.train.epochs)
        self.heartbeat.at(f"reading the images of step {self.progress.step}")
        for batch in self.loader.epoch(epoch, start=self.progress.step % steps):
            self.heartbeat.at(f"in step {self.progress.step}")
            self.advance(batch, scale)
            self.heartbeat.at(f"reading the images of step {self.progress.step}")
            self.saver.report()
            if self.progress.step % steps == 0:
                continue  # the epoch's end has its own
            if self.asked_to_stop(stop):
                self.leave(stop.signal_name)
            if self.minutes_are_over() and not self.saver.busy:
                self.save()

    @property
    def ranks(self) -> Ranks:
        return self.learner.ranks

    def asked_to_stop(self, stop: StopRequest) -> bool:
        """Whether any rank was asked to; on GPUs, which the hosts run ahead of, they confer only now and then."""
        if self.ranks.count == 1:
            return stop.requested
        together = self.step.options.device.type == "cpu" or self.progress.step % STEPS_BETWEEN_TALKS == 0
        return together and self.ranks.any(stop.requested)

    def advance(self, batch: ImageBatch, scale: float) -> None:
        """One step; its figures are added up on the device and only every `log_every` steps fetched and written."""
        progress, record = self.progress, self.settings.record
        lr = learning_rate(self.settings.train, progress.step, self.loader.steps_per_epoch)
        figures = self.step(batch, progress.step, lr, scale)
        progress.window = figures.clone() if progress.window_steps == 0 else progress.window.add_(figures)
        progress.window_steps += 1
        progress.step += 1
        last = progress.step == self.settings.train.epochs * self.loader.steps_per_epoch
        if progress.window_steps == record.log_every or last:
            self.write_window(lr, scale)
        self.display.advance(progress.step)

    def write_window(self, lr: float, scale: float) -> None:
        progress = self.progress
        count = len(StepFigures._fields)
        skipped = int(progress.window[count:].sum())  # nothing is there unless bad steps are skipped
        means = StepFigures(*(progress.window[:count] / (progress.window_steps - skipped)).tolist())
        progress.skipped_steps += skipped
        pace = self.clock.steps_per_second()
        figures = {
            "loss": means.loss,
            "contrastive_accuracy": 100.0 * means.contrastive_accuracy,
            "feature_std": means.feature_std,
            "positive_similarity": means.positive_similarity,
            "key_variance": means.key_variance,
            "queue_filled": float(self.learner.queue.filled()),
            "lr": lr,
            "covariance_scale": scale,
            "images_per_second": pace * self.loader.batch_size,
            "seconds": progress.seconds,
        }
        if self.settings.train.on_nan == "skip":
            figures["skipped_steps"] = progress.skipped_steps
        progress.window_steps = 0
        self.display.show(self.record.write("train", progress.step, self.epoch_now(), figures))
        self.stop_unless_finite()
        self.stop_if_all_are_skipped()

    def finish_epoch(self, epoch: int) -> None:
        """After epoch `epoch` (from 1): measure and save when it is time to, and always after the last."""
        self.share_skipped()
        self.measure_if_due()
        last = epoch == self.settings.train.epochs
        if last:
            self.save_for_good()
        elif epoch % self.settings.record.checkpoint_every == 0 or self.minutes_are_over():
            self.save()

    def share_skipped(self) -> None:
        """Each rank learns which images others could not read, so that the first can list them all."""
        for skipped in self.ranks.from_all(self.loader.skipped):
            self.loader.skipped.update(skipped)

    def measure_if_due(self) -> None:
        """After the epochs that are to be measured and after the last, once."""
        epoch, within = divmod(self.progress.step, self.loader.steps_per_epoch)
        every, last = self.settings.record.knn_every, self.settings.train.epochs
        if within or not epoch or not (epoch == last or (every and epoch % every == 0)):
            return
        if self.measure is None:  # nothing to vote on without labels, but people want to know how the run is doing
            self.display.look(self.progress.step)
            return
        measured = self.record.newest.get("knn", {}).get("step") == self.progress.step
        if self.ranks.any(self.ranks.first and measured):
            return
        self.clock.lap()
        try:
            figures = self.measure()
        except DataError as error:
            # All ranks meet it, as all hold the features. Training needs neither labels nor test images.
            self.measure = None
            self.display.warn(f"kNN cannot be measured, and training goes on without: {error}")
            self.display.look(self.progress.step)
        else:
            self.display.show(self.record.write("knn", self.progress.step, self.epoch_now(), figures))
        self.clock.go_on()

    def minutes_are_over(self) -> bool:
        """Whether it is time for a checkpoint by the clock."""
        minutes = self.settings.record.checkpoint_minutes
        return minutes > 0 and time.perf_counter() - self.saved_at >= 60 * minutes

    def save(self) -> None:
        """Have a checkpoint written while training goes on."""
        self.saved_at = time.perf_counter()
        self.clock.lap()
        self.saver.start(self.learner, self.optimiser, self.progress)

    def save_for_good(self) -> None:
        """Write the checkpoint that a run ends with, for whatever reason; no rank ends before it is written."""
        fail_together(self.ranks, self.finish_saving)

    def finish_saving(self) -> None:
        """What cannot be saved is said."""
        self.stop_unless_finite()
        self.clock.lap()
        try:
            self.saver.finish(self.learner, self.optimiser, self.progress)
        except RunError as error:
            raise RunError(
                f"{error} The run stopped after step {self.progress.step}, and {self.last_good()}; once that is "
                f"mended, continue it with `{self.folder.how_to_resume}`."
            ) from None

    def saved_before(self, error: DataError) -> JclError:
        """Lose no step to data that went away, and give what to end with.

        Where only one rank knows of it the others may wait for it in the next step, so that it saves alone if it is the
        first, and else not at all.
        """
        of_all = isinstance(error, CollectiveDataError)
        if self.progress.step > 0 and (of_all or self.ranks.first):
            if of_all:
                self.save_for_good()
            else:
                self.finish_saving()
            error = DataError(
                f"{error} The run stopped after step {self.progress.step} and is saved; "
                f"once the data is mended, continue it with `{self.folder.how_to_resume}`."
            )
        return OtherRankFailed() if of_all and not self.ranks.first else error

    def epoch_now(self) -> float:
        return self.progress.step / self.loader.steps_per_epoch

    def leave(self, signal_name: str) -> None:
        self.share_skipped()
        self.save_for_good()
        raise Interrupted(
            f"{signal_name or 'A signal was'} received: the run stopped after step {self.progress.step} and is saved; "
            f"continue it with `{self.folder.how_to_resume}`."
        )

    def about_stopping_at_once(self) -> Interrupted:
        return Interrupted(
            f"Ctrl-C received twice: the run stopped at once, in step {self.progress.step}, and "
            f"{self.newest_good()}; continue it with `{self.folder.how_to_resume}`."
        )

    def about_lost_contact(self, error: LostContact) -> LostContact:
        """What became of the other ranks and of the run."""
        silent = "timed out" in str(error).lower()
        others = self.heartbeat.whereabouts() if silent else "Another rank has ended."
        return (SilentRank if silent else LostContact)(
            f"{error} {others} The run stopped in step {self.progress.step}, and {self.last_good()}; "
            f"continue it with `{self.folder.how_to_resume}`."
        )

    def stop_unless_finite(self) -> None:
        """A sum that is not finite stays so, hence looking at the window's loss now and then misses nothing."""
        if bool(torch.isfinite(self.progress.window[0])):
            return
        raise RunError(
            f"the loss is not finite after step {self.progress.step}, so training stopped; {self.last_good()}. "
            "A lower --lr or a higher --temperature usually helps; --on-nan skip leaves out single steps."
        )

    def stop_if_all_are_skipped(self) -> None:
        if self.step.skipped_in_a_row() < MOST_IN_A_ROW:
            return
        raise RunError(
            f"the last {MOST_IN_A_ROW} steps and more before step {self.progress.step} were skipped, because the loss "
            f"was not finite; {self.last_good()}. A lower --lr or a higher --temperature usually helps."
        )

    def last_good(self) -> str:
        self.saver.wait()
        return self.newest_good()

    def newest_good(self) -> str:
        good = newest_checkpoint(self.folder.checkpoints)
        return f"the last good checkpoint is {good}" if good else "there is no checkpoint yet"
