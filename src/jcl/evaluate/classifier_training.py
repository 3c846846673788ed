"""A classifier from labelled images to its scores, from wherever its folder says that it stopped."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import NamedTuple

import torch
from rich.console import Console

from jcl.console import print_line
from jcl.data import BatchLoader, ImageSource
from jcl.errors import Interrupted, RunError
from jcl.evaluate.classification import ClassificationTask, Scores, class_positions
from jcl.evaluate.features import FeatureSettings
from jcl.evaluate.labelled_views import judge, look_at_test_images, training_batches
from jcl.evaluate.supervised import KEPT_CHECKPOINTS, Classifier, SupervisedFiles, SupervisedTraining
from jcl.evaluate.supervised_display import SupervisedDisplay
from jcl.evaluate.training_folder import TrainingFolder
from jcl.runs.checkpoint import Progress, checkpoint_to_resume, load_checkpoint
from jcl.runs.folder import add_skipped, read_skipped
from jcl.runs.metrics import Record
from jcl.runs.saver import CheckpointSaver
from jcl.settings.schema import TrainSettings
from jcl.views import ViewRecipe


@dataclass(frozen=True)
class ClassifierTraining:
    """A classifier on its device, and all that its training takes; `title` is what is shown meanwhile.

    It learns from `labelled`, some or all of the task's training images, and is judged by the task's test images.
    """

    title: str
    network: Classifier
    optimiser: torch.optim.Optimizer
    task: ClassificationTask
    labelled: ImageSource
    shown: FeatureSettings
    recipe: ViewRecipe
    train: TrainSettings
    device: torch.device
    workers: int
    label_smoothing: float = 0.0


class Judged(NamedTuple):
    """What became of a training; `unreadable` of the images it was to learn from could not be read."""

    scores: Scores
    progress: Progress
    unreadable: int


def train_and_judge(
    training: ClassifierTraining, console: Console, folder: TrainingFolder | None = None, *, resumed: bool = False
) -> Judged:
    """Train to the last epoch, then judge; without a folder nothing is written and nothing can be resumed."""
    network, train, device = training.network, training.train, training.device
    progress = _restored(training, folder, console) if folder is not None and resumed else Progress()
    if progress.step == 0:
        look_at_test_images(training.task, workers=training.workers, console=console)
    assert training.labelled.labels is not None, "a task's training images are labelled"
    with contextlib.ExitStack() as open_files:
        files = None
        if folder is not None:
            record = Record(folder.path, resumed_at=progress.step, tensorboard=False)
            saver = CheckpointSaver(folder.checkpoints, KEPT_CHECKPOINTS, warn=lambda text: print_line(console, text))
            files = SupervisedFiles(folder, open_files.enter_context(record), open_files.enter_context(saver))
        loader = open_files.enter_context(
            training_batches(training.labelled, training.shown, train, device=device, workers=training.workers)
        )
        if folder is not None:
            open_files.callback(_list_skipped, folder, loader, console)
        SupervisedTraining(
            network=network,
            optimiser=training.optimiser,
            loader=loader,
            targets=class_positions(training.labelled.labels, training.task.classes).to(device),
            recipe=training.recipe,
            train=train,
            display=SupervisedDisplay(console, training.title),
            label_smoothing=training.label_smoothing,
            files=files,
            progress=progress,
        ).run()
    try:
        scores = judge(
            network, training.task, training.shown, train, device=device, workers=training.workers, console=console
        )
    except KeyboardInterrupt:
        if folder is None:
            raise
        raise Interrupted(
            f"Ctrl-C received: training is done and saved, but not yet measured; {folder.how_to_resume}."
        ) from None
    return Judged(scores, progress, len(loader.skipped if folder is None else read_skipped(folder.skipped_file)))


def _list_skipped(folder: TrainingFolder, loader: BatchLoader, console: Console) -> None:
    """However training ended: what was met before it is resumed may not be met again."""
    try:
        add_skipped(folder.skipped_file, loader.skipped)
    except RunError as error:
        print_line(console, str(error))


def _restored(training: ClassifierTraining, folder: TrainingFolder, console: Console) -> Progress:
    checkpoint = checkpoint_to_resume(folder.checkpoints, lambda text: print_line(console, text))
    if checkpoint is None:
        return Progress()
    return load_checkpoint(checkpoint, training.network.learned, training.optimiser, training.device)
