"""Detection as a task of the trainer, on one rank or several.

torchvision samples the regions of a loss from the global generator, which is seeded by (seed, iteration, part, rank)
before each pass, so there is no generator state to keep.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from jcl.distributed.device import autocast
from jcl.distributed.group import GradientBuffer, average_statistics
from jcl.evaluate.detection.batches import DetectionBatch, Hardware
from jcl.random import DETECTION_REGIONS, hash_words
from jcl.runs.checkpoint import Progress
from jcl.settings.detection import DetectionSettings, learning_rate
from jcl.train.trainer import TrainingTask

_BOX_LOSSES = ("loss_classifier", "loss_box_reg", "loss_objectness", "loss_rpn_box_reg")
LOSSES = {"box": _BOX_LOSSES, "mask": (*_BOX_LOSSES, "loss_mask"), "keypoint": (*_BOX_LOSSES, "loss_keypoint")}


class DetectionTask(TrainingTask):
    """A detector on COCO; `parts` are those of this rank's batches, from the iteration on at which training starts."""

    epochs = 1  # schedules of detectors count iterations

    def __init__(
        self,
        detector: nn.Module,
        optimizer: torch.optim.Optimizer,
        parts: Iterator[DetectionBatch],
        settings: DetectionSettings,
        hardware: Hardware,
    ) -> None:
        self.module, self.optimizer, self.settings = detector, optimizer, settings
        self.steps_per_epoch, self.batch_size = settings.iterations, settings.batch_size
        self._parts, self._hardware = parts, hardware
        self._gradients = GradientBuffer(detector.parameters(), hardware.ranks)
        self._synchronized = any(isinstance(part, nn.SyncBatchNorm) for part in detector.modules())
        detector.train()

    def batches(self, epoch: int, start: int) -> Iterator[list[DetectionBatch]]:
        for _ in range(start, self.steps_per_epoch):
            # All parts are read before anything changes: an image may be unreadable.
            yield list(itertools.islice(self._parts, self.settings.accumulate))

    def learning_rate(self, step: int) -> float:
        return learning_rate(self.settings, step)

    def epoch_at(self, step: int) -> float:
        return 0.0

    def step(self, batch: list[DetectionBatch], step: int, lr: float) -> Tensor:
        """Forward and backward for each part of the batch, then the optimizer; return the loss and its terms."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self._gradients.clear()
        device, ranks, names = self._hardware.device, self._hardware.ranks, LOSSES[self.settings.task]
        total = torch.zeros(1 + len(names), device=device)
        for part, content in enumerate(batch):
            images, targets = content.unpack(device)
            torch.manual_seed(int(hash_words(self.settings.seed, DETECTION_REGIONS, step, part, ranks.rank)))
            with autocast(device, self._hardware.precision):
                losses = self.module(images, targets)
            terms = torch.stack([losses[name].float() for name in names])
            loss = terms.sum()
            torch.autograd.backward(loss / len(batch))
            total += torch.cat([loss.detach()[None], terms.detach()]) / len(batch)
        self._gradients.average()
        self.optimizer.step()
        if not self._synchronized:
            average_statistics(self.module, ranks)
        return ranks.average(total)  # any rank's window can be resumed from

    def figures(self, progress: Progress) -> dict[str, float]:
        means = (progress.window / progress.window_steps).tolist()
        return {"loss": means[0], **dict(zip(LOSSES[self.settings.task], means[1:], strict=True))}
