"""The loop that trains a detector, on one rank or several, and that can be stopped and resumed at any iteration.

What torchvision draws by itself (which regions a loss is computed on) comes from the global generator, which is set
anew by (seed, iteration, part, rank) before each pass, so there is no generator state to keep.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from jcl.distributed.device import autocast
from jcl.distributed.group import ALONE, Ranks, SharedGradients, average_statistics
from jcl.errors import DataError, Interrupted, RunError
from jcl.evaluate.detection.batching import DetectionBatch
from jcl.evaluate.detection.display import DetectionDisplay
from jcl.evaluate.detection.settings import DetectionSettings, learning_rate
from jcl.random import hash_words
from jcl.runs.checkpoint import Progress
from jcl.runs.metrics import NullRecord, Record
from jcl.runs.saver import CheckpointSaver, NullSaver
from jcl.train.clock import TrainingClock
from jcl.train.stop import StopRequest

LOG_ITERATIONS = 20  # between looks at the losses, for which the device is waited for
KEPT_CHECKPOINTS = 2
_REGION_STREAM = 0x726F6973

LOSSES = {
    "box": ("loss_classifier", "loss_box_reg", "loss_objectness", "loss_rpn_box_reg"),
    "mask": ("loss_classifier", "loss_box_reg", "loss_objectness", "loss_rpn_box_reg", "loss_mask"),
    "keypoint": ("loss_classifier", "loss_box_reg", "loss_objectness", "loss_rpn_box_reg", "loss_keypoint"),
}


@dataclass
class DetectionTraining:
    """A training in progress; `batches` gives the parts of this rank's batches from `progress.step` on."""

    detector: nn.Module
    optimiser: torch.optim.Optimizer
    batches: Iterator[DetectionBatch]
    settings: DetectionSettings
    device: torch.device
    precision: torch.dtype
    display: DetectionDisplay
    record: Record | NullRecord
    saver: CheckpointSaver | NullSaver
    how_to_resume: str
    progress: Progress
    ranks: Ranks = ALONE

    def __post_init__(self) -> None:
        self._gradients = SharedGradients(self.detector.parameters(), self.ranks)
        self._synchronised = any(isinstance(part, nn.SyncBatchNorm) for part in self.detector.modules())
        self._clock = TrainingClock(self.progress)

    def run(self) -> None:
        """Train from where `progress` stands to the last iteration, and save the state that this leads to."""
        self.detector.train()
        self._clock.go_on()
        with StopRequest(self.display.stopping) as stop, self.display:
            self.display.begin(self.progress.step, self.settings.iterations)
            try:
                self.train(stop)
            except DataError as error:
                self.save_unless_untrained(error)
                raise
        self.finish()

    def train(self, stop: StopRequest) -> None:
        while self.progress.step < self.settings.iterations:
            self.advance()
            self.saver.report()
            last = self.progress.step == self.settings.iterations
            if self.ranks.any(stop.requested) and not last:
                self.leave(stop.signal_name or "a signal")
            if self.progress.step % self.settings.checkpoint_every == 0 and not last:
                self.stop_unless_finite()
                self._clock.lap()
                self.saver.start(self.detector, self.optimiser, self.progress)

    def advance(self) -> None:
        """One iteration; losses are added up on the device and fetched now and then."""
        progress = self.progress
        lr = learning_rate(self.settings, progress.step)
        for group in self.optimiser.param_groups:
            group["lr"] = lr
        figures = self.ranks.average(self.learn())  # so that any rank's window may be resumed from
        progress.window = figures if progress.window_steps == 0 else progress.window + figures
        progress.window_steps += 1
        progress.step += 1
        self.display.advance(progress.step)
        if progress.window_steps == LOG_ITERATIONS or progress.step == self.settings.iterations:
            self.write_window(lr)

    def learn(self) -> Tensor:
        """Forward and backward for each part of the batch, then the optimiser; gives the whole loss and its terms."""
        parts = self.settings.accumulate
        batches = list(itertools.islice(self.batches, parts))  # before anything changes: an image may be unreadable
        self._gradients.clear()
        total = torch.zeros(1 + len(LOSSES[self.settings.task]), device=self.device)
        for part, batch in enumerate(batches):
            images, targets = batch.unpacked(self.device)
            words = (self.settings.seed, _REGION_STREAM, self.progress.step, part, self.ranks.rank)
            torch.manual_seed(int(hash_words(*words)))
            with autocast(self.device, self.precision):
                losses = self.detector(images, targets)
            terms = torch.stack([losses[name].float() for name in LOSSES[self.settings.task]])
            loss = terms.sum()
            torch.autograd.backward(loss / parts)
            total += torch.cat([loss.detach()[None], terms.detach()]) / parts
        self._gradients.average()
        self.optimiser.step()
        if not self._synchronised:
            average_statistics(self.detector, self.ranks)
        return total

    def write_window(self, lr: float) -> None:
        progress, settings = self.progress, self.settings
        losses = (progress.window / progress.window_steps).tolist()
        pace = self._clock.steps_per_second()
        figures = {
            "loss": losses[0],
            **dict(zip(LOSSES[settings.task], losses[1:], strict=True)),
            "lr": lr,
            "images_per_second": pace * settings.batch_size,
            "seconds": progress.seconds,
        }
        self.stop_unless_finite()
        progress.window_steps = 0
        self.record.write("train", progress.step, 0.0, figures)
        self.display.show(progress.step, figures)

    def finish(self) -> None:
        self.stop_unless_finite()
        self._clock.lap()
        self.saver.finish(self.detector, self.optimiser, self.progress)

    def save_unless_untrained(self, error: DataError) -> None:
        """Lose no iteration to an image that cannot be read; other ranks than the first leave it at the last save."""
        finite = self.progress.step > 0 and bool(torch.isfinite(self.progress.window[0]))
        if not finite or not self.ranks.first:
            return
        self._clock.lap()
        self.saver.finish(self.detector, self.optimiser, self.progress)
        raise DataError(
            f"{error} Training stopped after iteration {self.progress.step:,} and is saved; "
            f"once the data is mended, {self.how_to_resume}."
        ) from None

    def leave(self, signal_name: str) -> None:
        self.finish()
        raise Interrupted(
            f"{signal_name} received: training stopped after iteration {self.progress.step:,} and is saved; "
            f"{self.how_to_resume}."
        )

    def stop_unless_finite(self) -> None:
        """A sum that is not finite stays so, hence looking at the window's loss now and then misses nothing."""
        if not bool(torch.isfinite(self.progress.window[0])):  # the same on all ranks
            raise RunError(
                f"the loss is not finite after iteration {self.progress.step:,}, so training stopped; a lower --lr "
                "usually helps, from the newest checkpoint or anew."
            )
