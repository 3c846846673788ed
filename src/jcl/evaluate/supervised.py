"""Training on labelled, augmented views: the one loop behind the paper's linear probe and fine-tuning.

Everything random is a function of the seed and the step, so a loop that was stopped and resumed continues bit for bit
on a CPU. There is no choosing among epochs: what counts is the network after the last one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jcl.data import BatchLoader, ImageBatch
from jcl.distributed.device import autocast, choose_precision
from jcl.errors import Interrupted, RunError
from jcl.evaluate.supervised_display import SupervisedDisplay
from jcl.evaluate.training_folder import TrainingFolder
from jcl.random import generator, hash_words
from jcl.runs.checkpoint import Progress
from jcl.runs.metrics import Record
from jcl.runs.saver import CheckpointSaver
from jcl.settings.schema import TrainSettings
from jcl.train.clock import TrainingClock
from jcl.train.schedule import learning_rate
from jcl.train.stop import StopRequest
from jcl.views import ViewMaker, ViewRecipe

LOG_STEPS = 100  # between looks at the loss, for which the device is waited for
CHECKPOINT_SECONDS = 120.0
KEPT_CHECKPOINTS = 2
_FC_STREAM = 0x6663  # streams of their own beside those that `jcl.random` names
_LAYER_STREAM = 0x64726F70


class Classifier(nn.Module):
    """A backbone and a linear layer on its pooled features: images (n, 3, S, S) -> logits (n, classes) in float32.

    A `frozen` backbone stays in evaluation mode and gets no gradients. The layer starts from N(0, 0.01) and bias 0, as
    MoCo's, by the seed.
    """

    def __init__(self, backbone: nn.Module, feature_width: int, classes: int, *, frozen: bool, seed: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.fc = nn.Linear(feature_width, classes)
        self.frozen = frozen
        nn.init.normal_(self.fc.weight, mean=0.0, std=0.01, generator=generator(seed, _FC_STREAM))
        nn.init.zeros_(self.fc.bias)

    def forward(self, images: Tensor) -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            features = self.backbone(images)
        with torch.autocast(images.device.type, enabled=False):
            logits: Tensor = self.fc(features.float())
        return logits

    @property
    def learned(self) -> nn.Module:
        """What training changes, and so what a checkpoint has to hold."""
        return self.fc if self.frozen else self

    def train(self, mode: bool = True) -> Classifier:
        super().train(mode)
        if self.frozen:
            self.backbone.eval()
        return self


@dataclass(frozen=True)
class SupervisedFiles:
    """Where a loop that can be resumed keeps its state, and its figures."""

    folder: TrainingFolder
    record: Record
    saver: CheckpointSaver


@dataclass
class SupervisedTraining:
    """A training in progress: `targets` (images,) are the classes of the loader's images, on the device.

    `train` holds the epochs, the learning rate's course and the seed; each of the optimiser's groups takes the
    learning rate times its own `lr_scale`. Without `files` nothing is written and signals do what they always do.
    """

    network: Classifier
    optimiser: torch.optim.Optimizer
    loader: BatchLoader
    targets: Tensor
    recipe: ViewRecipe
    train: TrainSettings
    display: SupervisedDisplay
    label_smoothing: float = 0.0
    files: SupervisedFiles | None = None
    progress: Progress = field(default_factory=Progress)

    def __post_init__(self) -> None:
        self.device = self.targets.device
        self.precision = choose_precision(self.train.precision, self.device)
        self._make_views: Callable[..., Tensor] = self._views
        self._step = torch.zeros((), dtype=torch.int64, device=self.device)  # a tensor, or each would be compiled for
        self._clock = TrainingClock(self.progress)
        self._saved_at = time.perf_counter()
        if self.train.compile is True:
            self.network.backbone.compile(dynamic=False)
            self._make_views = torch.compile(self._views, dynamic=False)

    def run(self) -> None:
        """Train from where `progress` stands to the last epoch."""
        steps, epochs = self.loader.steps_per_epoch, self.train.epochs
        self.network.train()
        self._saved_at = time.perf_counter()
        self._clock.go_on()
        heard = StopRequest(self.display.stopping)
        catching = heard if self.files is not None else contextlib.nullcontext(heard)
        with catching as stop, self.display:
            self.display.start(self.progress.step, steps, epochs)
            for epoch in range(self.progress.step // steps, epochs):
                for batch in self.loader.epoch(epoch, start=self.progress.step % steps):
                    self.advance(batch)
                    last = self.progress.step == steps * epochs
                    self.save_if_due(last=last)
                    if stop.requested and not last:
                        self.leave(stop.signal_name)
        self.display.say_skipped(self.loader.skipped)

    def advance(self, batch: ImageBatch) -> None:
        """One step; loss and accuracy are added up on the device and fetched now and then."""
        progress = self.progress
        lr = learning_rate(self.train, progress.step, self.loader.steps_per_epoch)
        for group in self.optimiser.param_groups:
            group["lr"] = lr * group["lr_scale"]
        # Layers that draw (dropout, stochastic depth) do so by the step, not by what was drawn before.
        torch.manual_seed(int(hash_words(self.train.seed, _LAYER_STREAM, progress.step)))
        figures = self.learn(batch)
        progress.window = figures if progress.window_steps == 0 else progress.window + figures
        progress.window_steps += 1
        progress.step += 1
        self.display.advance(progress.step)
        if progress.window_steps == LOG_STEPS or progress.step % self.loader.steps_per_epoch == 0:
            self.write_window(lr)

    def learn(self, batch: ImageBatch) -> Tensor:
        """Forward, backward, optimiser; gives loss and share of right answers, (2,) on the device."""
        self._step.fill_(self.progress.step)
        views = self._make_views(self._step, batch.pixels, batch.sizes, batch.samples)
        targets = self.targets[batch.samples]
        with autocast(self.device, self.precision):
            logits = self.network(views)
        loss = F.cross_entropy(logits, targets, label_smoothing=self.label_smoothing)
        self.optimiser.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        self.optimiser.step()
        return torch.stack([loss.detach(), (logits.detach().argmax(1) == targets).float().mean()])

    def _views(self, step: Tensor, pixels: Tensor, sizes: Tensor, samples: Tensor) -> Tensor:
        on_gpu = self.device.type == "cuda"
        rows = torch.arange(len(samples), device=self.device)
        return ViewMaker(
            self.recipe,
            self.train.seed,
            step,
            pixels,
            sizes,
            samples,
            dtype=self.precision,
            memory_format=torch.channels_last if on_gpu else torch.contiguous_format,
        )(rows, torch.zeros_like(rows))

    def write_window(self, lr: float) -> None:
        progress = self.progress
        loss, accuracy = (progress.window / progress.window_steps).tolist()
        pace = self._clock.steps_per_second()
        epoch = progress.step / self.loader.steps_per_epoch
        figures = {
            "loss": loss,
            "train_top1": 100 * accuracy,
            "lr": lr,
            "images_per_second": pace * self.loader.batch_size,
            "seconds": progress.seconds,
        }
        progress.window_steps = 0
        if self.files is not None:
            self.files.record.write("train", progress.step, epoch, figures)
        self.display.show(epoch, figures)
        self.stop_unless_finite()

    def save_if_due(self, *, last: bool) -> None:
        if self.files is None:
            return
        self.files.saver.report()
        if last:
            self.save_for_good(self.files)
        elif time.perf_counter() - self._saved_at > CHECKPOINT_SECONDS and not self.files.saver.busy:
            self.stop_unless_finite()
            self._clock.lap()
            self.files.saver.start(self.network.learned, self.optimiser, self.progress)
            self._saved_at = time.perf_counter()

    def save_for_good(self, files: SupervisedFiles) -> None:
        self.stop_unless_finite()
        self._clock.lap()
        files.saver.finish(self.network.learned, self.optimiser, self.progress)

    def leave(self, signal_name: str) -> None:
        assert self.files is not None, "only a loop with files catches signals"
        self.save_for_good(self.files)
        raise Interrupted(
            f"{signal_name} received: training stopped after step {self.progress.step} and is saved; "
            f"{self.files.folder.how_to_resume}."
        )

    def stop_unless_finite(self) -> None:
        """A sum that is not finite stays so, hence looking at the window's loss now and then misses nothing."""
        if not bool(torch.isfinite(self.progress.window[0])):
            raise RunError(
                f"the loss is not finite after step {self.progress.step}, so training stopped; "
                "a lower --lr usually helps."
            )
