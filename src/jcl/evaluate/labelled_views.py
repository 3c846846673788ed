"""What a classifier sees: random crops of the training images, centred views of the test images."""

from __future__ import annotations

import torch
from rich.console import Console
from torch import nn

from jcl.console import tell_left_out
from jcl.data import BatchLoader, ImageSource, read_all
from jcl.distributed.device import choose_precision
from jcl.evaluate.classification import ClassificationTask, Scores, scores
from jcl.evaluate.features import FeatureSettings
from jcl.settings.schema import TrainSettings
from jcl.views import ViewRecipe

USUAL_LEAST_CROP = 0.08
"""The least part of an image's area that torchvision's crops keep, made for photographs."""

_LOOKED_AT = 32  # pixels a side: a large JPEG is read in a fraction of the time, and all of it


def crop_and_flip(shown: FeatureSettings, *, least_crop: float = USUAL_LEAST_CROP, jitter: bool = False) -> ViewRecipe:
    """Training views as torchvision's defaults make them: 8 % to 100 % of the area, flipped half of the time.

    With `jitter` the colours change too, as MoCo v2's do.
    """
    return ViewRecipe(
        name="crop and flip",
        size=shown.image_size,
        min_scale=least_crop,
        max_scale=1.0,
        jitter_probability=0.8 if jitter else 0.0,
        gray_probability=0.0,
        blur_probability=0.0,
        mean=shown.mean,
        std=shown.std,
    )


def training_batches(
    source: ImageSource, shown: FeatureSettings, train: TrainSettings, *, device: torch.device, workers: int
) -> BatchLoader:
    """The images decoded as large as test images are, in batches of the size asked for or of all images there are."""
    assert isinstance(train.batch_size, int), "the batch size of a training with labels is always given"
    return BatchLoader(
        source,
        batch_size=min(train.batch_size, len(source)),
        canvas=2 * round(shown.image_size / shown.crop_ratio),
        seed=train.seed,
        workers=workers,
        device=device,
    )


def look_at_test_images(task: ClassificationTask, *, workers: int, console: Console) -> None:
    """Tell before a long training, not after it, which of the test images cannot be read; raise if none can."""
    skipped: dict[str, str] = {}
    for _ in read_all(task.test, canvas=_LOOKED_AT, batch_size=256, workers=workers, skipped=skipped):
        pass
    tell_left_out(console, skipped, "To be left out of the test")


def judge(
    classifier: nn.Module,
    task: ClassificationTask,
    shown: FeatureSettings,
    train: TrainSettings,
    *,
    device: torch.device,
    workers: int,
    console: Console,
) -> Scores:
    """The classifier's accuracy on the task's test images; what of them cannot be read is told."""
    precision = choose_precision(train.precision, device)
    logits = shown.extract(classifier, task.test, device=device, precision=precision, workers=workers)
    tell_left_out(console, logits.skipped)
    assert logits.labels is not None, "a task's test images are labelled"
    return scores(logits.values, logits.labels, task.classes)
