"""The bound of the paper on a trained run, along its training: what `jcl bound RUN` calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from jcl.commands.run_data import open_own_data, open_with_warnings
from jcl.commands.trained import TrainedRun, open_trained
from jcl.console import StderrConsole
from jcl.core.method import ContrastiveLearner
from jcl.cores import usual_workers
from jcl.data import ImageSource
from jcl.distributed.device import choose_device, choose_precision
from jcl.errors import RunError, SettingsError
from jcl.evaluate.features import evaluation_mode
from jcl.evaluate.image_views import ViewedImages, ViewPasses, chosen_rows
from jcl.studies.bound import sampled_row
from jcl.studies.normality import LEAST_VALUES, gaussian_reference, normality
from jcl.studies.run_bound import RunBounds, StepBound
from jcl.train.build import run_view_recipe
from jcl.views import ViewRecipe


def bound_along_training(
    path: Path,
    location: str | None = None,
    *,
    scales: Sequence[float] = (),
    images: int = 256,
    keys: int = 256,
    batch_size: int = 512,
    workers: int | None = None,
    seed: int = 0,
    device: str = "auto",
    precision: str = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> RunBounds:
    """Eq. 4, 7 and 8 with `keys` views of each of `images` images as keys, at every checkpoint of a run.

    The query is one more view of the image; the negatives are the queue that the checkpoint holds. Both encoders run
    in evaluation mode, so that a key depends on its own view alone. Eq. 8 is taken at a scale of 1, at the run's own
    and at `scales`.
    """
    if keys < LEAST_VALUES:
        raise SettingsError(f"to judge a distribution takes at least {LEAST_VALUES} keys an image; --keys is {keys}.")
    run = open_trained(path)
    target = choose_device(device)
    settings = run.settings
    console = StderrConsole()
    data = open_with_warnings(location, console) if location is not None else open_own_data(settings, console)
    rows = chosen_rows(data.train, images, seed)
    passes = ViewPasses(
        seed=seed,
        device=target,
        precision=choose_precision(precision, target),
        batch_size=batch_size,
        canvas=settings.data.canvas,
        workers=usual_workers() if workers is None else workers,
    )
    own_scale = float(settings.method.covariance_scale)
    wanted = sorted({1.0, own_scale, *scales})
    steps = []
    for number, (learner, step) in enumerate(run.along_training(target)):
        steps.append(_step_bound(learner, step, data.train, rows, passes, run, keys, wanted))
        if progress is not None:
            progress(number + 1, len(run.checkpoints))
    count = len(steps[0].normality.p_value)
    return RunBounds(
        steps=tuple(steps),
        reference=gaussian_reference(max(count, 2000), keys, seed),
        temperature=float(settings.method.temperature),
        own_scale=own_scale,
        images=count,
        keys=keys,
    )


def _step_bound(
    learner: ContrastiveLearner,
    step: int,
    source: ImageSource,
    rows: Tensor,
    passes: ViewPasses,
    run: TrainedRun,
    keys: int,
    scales: Sequence[float],
) -> StepBound:
    recipe, temperature = run_view_recipe(run.settings), learner.temperature
    similarities, negative = [], []
    with evaluation_mode(learner):
        for images in passes.over(source, rows, keys):
            query, own = _query_and_similarities(learner, images, recipe, keys)
            similarities.append(own / temperature)
            negative.append(torch.logsumexp(query @ learner.queue.rows.double().T / temperature, dim=1))
    scores = torch.cat(similarities).cpu()
    if bool((scores.std(dim=1) < 1e-9).any()):
        raise RunError(
            f"all keys of an image are the same at step {step} of {run.path}, so there is no distribution to look at: "
            "the features have collapsed, or the run's views do not vary."
        )
    return StepBound(
        step=step,
        row=sampled_row(scores, torch.cat(negative).cpu(), scales),
        normality=normality(scores),
        queue_filled=float(learner.queue.filled()),
    )


def _query_and_similarities(
    learner: ContrastiveLearner, images: ViewedImages, recipe: ViewRecipe, keys: int
) -> tuple[Tensor, Tensor]:
    """The queries (n, d) of some images and q·k for each of their keys (n, keys), in float64."""
    # Where gradients pass through the keys, f encodes them too.
    encoder: nn.Module = learner.query_encoder if learner.method.gradient_through_keys else learner.key_encoder
    first = torch.cat(list(images.parts(recipe, range(1))))
    query = images.encoded(learner.query_encoder, first)[:, 0].double()
    parts = [
        torch.einsum("nd,nmd->nm", query, images.encoded(encoder, part).double())
        for part in images.parts(recipe, range(1, keys + 1))
    ]
    return query, torch.cat(parts, dim=1)
