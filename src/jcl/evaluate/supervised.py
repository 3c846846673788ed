"""Training a classifier on labeled, augmented views: the paper's linear probe, and fine-tuning.

The paper's probe (section 4.1; MoCo) is a linear layer on a frozen backbone: batches of 256, SGD with momentum 0.9 and
no weight decay, learning rate 30 (10 in the ablation), divided by ten after 60 % and 80 % of 100 epochs. The only
difference: the last incomplete batch of an epoch is dropped.

Fine-tuning trains the last part of the backbone with `lr`, each part before it with `layer_decay` times the rate of its
successor, and the new linear layer, which starts from random weights, with its own `head_lr`.

Everything random is a function of the seed and the step, so a stopped and resumed training continues bit for bit on a
CPU. No epoch is selected: the network after the last one is evaluated.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

from jcl.console import print_line, warn_skipped
from jcl.core.encoder import backbone_parts
from jcl.data import BatchLoader, ImageBatch
from jcl.distributed.device import autocast, choose_precision
from jcl.errors import RunError
from jcl.evaluate.classification import ClassificationTask, Scores, class_positions, scores
from jcl.evaluate.features import FeatureSettings
from jcl.evaluate.folders import ClassifierFolder
from jcl.paths import keep_compiled_code
from jcl.random import CLASSIFIER_INIT, RANDOM_LAYERS, generator, hash_words
from jcl.runs.checkpoint import Progress, checkpoint_to_resume, load_checkpoint
from jcl.runs.folder import read_skipped
from jcl.settings.resolve import power_of_two_below
from jcl.settings.schema import Fraction, Positive, Section, TrainSettings
from jcl.settings.values import validated
from jcl.train.display import Display
from jcl.train.schedule import learning_rate
from jcl.train.step import StepOptions, explain_compiler_errors, view_function
from jcl.train.trainer import Trainer, TrainingTask
from jcl.views import ViewRecipe

CHECKPOINT_SECONDS = 120.0
_PAPER_MILESTONES = (0.6, 0.8)  # of the epochs
_MAX_BATCH_SIZE = 128


class FinetuneSettings(Section):
    """Everything that defines a fine-tuning."""

    weights: str
    data: str | None = None  # None: what the run was trained on
    images: str = ""  # fingerprints of the training and test images, which must not change
    labels: str = "100%"
    from_scratch: bool = False
    head_lr: Positive
    label_smoothing: Fraction = 0.0
    jitter: bool = False
    train: TrainSettings


class Classifier(nn.Module):
    """A backbone and a linear layer on its pooled features: images (n, 3, S, S) -> logits (n, classes) in float32.

    A `frozen` backbone stays in evaluation mode and gets no gradients. The layer starts from N(0, 0.01) and bias 0, as
    in MoCo.
    """

    def __init__(self, backbone: nn.Module, feature_width: int, classes: int, *, frozen: bool, seed: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.fc = nn.Linear(feature_width, classes)
        self.frozen = frozen
        nn.init.normal_(self.fc.weight, mean=0.0, std=0.01, generator=generator(seed, CLASSIFIER_INIT))
        nn.init.zeros_(self.fc.bias)

    def forward(self, images: Tensor) -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            features = self.backbone(images)
        with torch.autocast(images.device.type, enabled=False):
            logits: Tensor = self.fc(features.float())
        return logits

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        if self.frozen:
            self.backbone.eval()
        return self


@dataclass(eq=False)
class ClassifierTask(TrainingTask):
    """Cross-entropy on augmented views, with everything needed to train a classifier on its device and to evaluate it.

    `title` is shown beside the progress bar. Each parameter group of the optimizer uses the learning rate times its own
    `lr_scale`.
    """

    title: str
    network: Classifier
    optimizer: torch.optim.Optimizer
    data: ClassificationTask
    preprocessing: FeatureSettings
    recipe: ViewRecipe
    train: TrainSettings
    device: torch.device
    workers: int
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        images, train = self.data.train, self.train
        self.loader = BatchLoader(  # decoded as large as test images
            images,
            batch_size=min(int(train.batch_size), len(images)),
            canvas=self.preprocessing.canvas,
            seed=train.seed,
            workers=self.workers,
            device=self.device,
        )
        self.module = self.network.fc if self.network.frozen else self.network  # the part that training changes
        self.epochs = train.epochs
        self.steps_per_epoch, self.batch_size = self.loader.steps_per_epoch, self.loader.batch_size
        self.targets = class_positions(self.data.labels, self.data.classes).to(self.device)
        self.precision, compiled = choose_precision(train.precision, self.device), train.compile is True
        options = StepOptions(self.device, self.precision, compiled, recorded=False)
        self._make_views = view_function(self.recipe, train.seed, options)
        self._step = torch.zeros((), dtype=torch.int64, device=self.device)  # a tensor avoids recompilation
        self.network.train()
        if compiled:
            keep_compiled_code()
            self.network.backbone.compile(dynamic=False)

    def batches(self, epoch: int, start: int) -> Iterator[ImageBatch]:
        return self.loader.epoch(epoch, start=start)

    def learning_rate(self, step: int) -> float:
        return learning_rate(self.train, step, self.steps_per_epoch)

    @explain_compiler_errors()
    def step(self, batch: ImageBatch, step: int, lr: float) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        # Dropout and stochastic depth draw by the step, so that a resumed training draws the same.
        torch.manual_seed(int(hash_words(self.train.seed, RANDOM_LAYERS, step)))
        self._step.fill_(step)
        rows = torch.arange(len(batch.samples), device=batch.samples.device)
        numbers = torch.zeros_like(rows)
        views = self._make_views(self._step, batch.pixels, batch.sizes, batch.samples, rows, numbers)
        targets = self.targets[batch.samples]
        with autocast(self.device, self.precision):
            logits = self.network(views)
        loss = F.cross_entropy(logits, targets, label_smoothing=self.label_smoothing)
        self.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        self.optimizer.step()
        return torch.stack([loss.detach(), (logits.detach().argmax(1) == targets).float().mean()])

    def metrics(self, progress: Progress) -> dict[str, float]:
        loss, accuracy = (progress.window / progress.window_steps).tolist()
        return {"loss": loss, "train_top1": 100 * accuracy}


def train_and_evaluate(
    task: ClassifierTask, console: Console, folder: ClassifierFolder | None = None, *, resumed: bool = False
) -> tuple[Scores, Progress, int]:
    """Train, writing only into `folder`, and evaluate; also returns the number of unreadable training images."""
    progress, test, loader = Progress(), task.data.test, task.loader
    if folder is not None and resumed:
        checkpoint = checkpoint_to_resume(folder.checkpoints, partial(print_line, console))
        if checkpoint is not None:
            progress = load_checkpoint(checkpoint, task.module, task.optimizer, task.device)
    with contextlib.ExitStack() as open_files, loader:
        trainer = Trainer(task, Display(console, task.title), progress)
        if folder is not None:
            open_files.enter_context(trainer.writing_to(folder))
            trainer.save_seconds = CHECKPOINT_SECONDS
            # However training ends: a resumed training may not read them again.
            open_files.callback(folder.list_skipped, loader.skipped, partial(print_line, console))
        trainer.run()
    warn_skipped(console, loader.skipped)
    logits = task.preprocessing.extract(
        task.network, test, device=task.device, precision=task.precision, workers=task.workers
    )
    warn_skipped(console, logits.skipped)
    if not logits.values.isfinite().all():
        raise RunError("Training diverged: the network gives NaN or infinite values. Start again with a lower --lr.")
    found = scores(logits.values, logits.labels, task.data.classes)
    skipped = loader.skipped if folder is None else read_skipped(folder.skipped_file)
    return found, progress, len(skipped)


def crop_and_flip(preprocessing: FeatureSettings, *, min_scale: float = 0.08, jitter: bool = False) -> ViewRecipe:
    """Training views as torchvision's defaults make them; with `jitter` the colors change as in MoCo v2."""
    return ViewRecipe(
        name="crop and flip",
        size=preprocessing.image_size,
        min_scale=min_scale,
        max_scale=1.0,
        color=len(preprocessing.mean) == 3,
        jitter_probability=0.8 if jitter else 0.0,
        gray_probability=0.0,
        blur_probability=0.0,
        mean=preprocessing.mean,
        std=preprocessing.std,
    )


def paper_settings(
    *, lr: float = 30.0, epochs: int = 100, batch_size: int = 256, seed: int = 0, compiled: bool = False
) -> TrainSettings:
    """The paper's probe as training settings; the milestones scale with the epochs."""
    values = {
        "epochs": epochs,
        "batch_size": batch_size,
        "lr": lr,
        "momentum": 0.9,
        "weight_decay": 0.0,
        "schedule": "step",
        "schedule_by": "epoch",
        "milestones": tuple(max(1, round(share * epochs)) for share in _PAPER_MILESTONES),
        "decay": 0.1,
        "seed": seed,
        "compile": compiled,
    }
    return validated(TrainSettings, values, "the linear probe")


def probe_optimizer(network: Classifier, train: TrainSettings) -> torch.optim.Optimizer:
    """SGD over the layer only."""
    group = {"params": list(network.fc.parameters()), "lr_scale": 1.0}
    return torch.optim.SGD([group], lr=float(train.lr), momentum=train.momentum, weight_decay=float(train.weight_decay))


def default_batch_size(images: int) -> int:
    """128, or less for few images, so that an epoch has eight steps; at least 8 if there are that many images."""
    return max(2, min(_MAX_BATCH_SIZE, images, max(8, power_of_two_below(images // 8))))


def finetune_optimizer(network: Classifier, settings: FinetuneSettings) -> torch.optim.Optimizer:
    """SGD with an `lr_scale` for each part, without weight decay on biases and the scales of norms."""
    lr, ratio = float(settings.train.lr), settings.train.layer_decay
    parts = backbone_parts(network.backbone)
    scaled = [(name, part, ratio**depth) for depth, (name, part) in enumerate(reversed(parts.items()))]
    groups = []
    for name, part, scale in [*scaled, ("fc", list(network.fc.parameters()), settings.head_lr / lr)]:
        for decay, vectors in ((settings.train.weight_decay, False), (0.0, True)):
            if parameters := [parameter for parameter in part if (parameter.ndim <= 1) == vectors]:
                groups.append({"params": parameters, "lr_scale": scale, "weight_decay": decay, "part": name})
    return torch.optim.SGD(groups, lr=lr, momentum=settings.train.momentum)
