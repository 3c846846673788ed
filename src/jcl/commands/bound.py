"""The paper's bound for Gaussian keys, or for the keys of a trained run along its training."""

import itertools
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from jcl.commands.inputs import open_chosen_data
from jcl.commands.run import open_trained
from jcl.console import STDERR, ProgressCallback, warn_skipped
from jcl.core.method import ContrastiveLearner
from jcl.core.registry import METHODS
from jcl.data import ImageBatch
from jcl.distributed.device import choose_device
from jcl.errors import RunError, SettingsError
from jcl.evaluate.features import evaluation_mode
from jcl.settings.commands import BoundOptions
from jcl.settings.values import with_values
from jcl.studies import bound as study
from jcl.studies.bound import BoundRow, GaussianCase, RunBounds
from jcl.studies.distribution import ViewSampler, sample_rows, view_sampler
from jcl.train.build import run_view_recipe
from jcl.views import ViewRecipe


def bound_of_gaussian_keys(options: BoundOptions) -> list[tuple[GaussianCase, BoundRow]]:
    """Eq. 4, 7 and 8 for every combination of dimension, spread and temperature."""
    values = itertools.product(options.dimensions, options.spreads, options.temperatures)
    cases = list(itertools.starmap(GaussianCase, values))
    counts = {"draws": options.draws, "images": options.images or 16, "negatives": options.negatives}
    return list(study.gaussian_rows(cases, options.scales, **counts, seed=options.seed))


def bound_along_training(options: BoundOptions, run: Path, progress: ProgressCallback) -> RunBounds:
    """Eq. 4, 7 and 8 with views of images as keys, at every checkpoint of a run.

    The query is one more view of the image, and the negatives are the checkpoint's queue. Both encoders are in
    evaluation mode, so that a key depends only on its view. Scales 1 and the run's own are always included.
    """
    if options.keys < study.MIN_SAMPLES:
        raise SettingsError(f"--keys must be at least {study.MIN_SAMPLES}, but got {options.keys}.")
    trained, device = open_trained(run), choose_device(options.device)
    if "temperatures" in options.model_fields_set:  # the file of an imported checkpoint does not state it
        if trained.imported is None or len(options.temperatures) > 1:
            raise SettingsError("--temperatures takes one value for an imported checkpoint; a run has its own.")
        values = {"method.temperature": options.temperatures[0]}
        trained = replace(trained, settings=with_values(trained.settings, values))
    settings = trained.settings
    own = settings if trained.imported is None else None
    source = open_chosen_data(options.data, own, trained.path, STDERR, settings.data.channels).train
    rows = sample_rows(source, options.images or 256, options.seed)
    steps: list[study.StepBound] = []
    total = len(rows) * len(trained.checkpoints)
    sampler = view_sampler(
        options, device, settings.data.canvas, lambda done, _: progress(len(steps) * len(rows) + done, total)
    )
    has_scale = trained.imported is None and METHODS[settings.method.name].uses_covariance
    own_scale = float(settings.method.covariance_scale) if has_scale else None
    scales = sorted({1.0, *([] if own_scale is None else [own_scale]), *options.scales})
    for checkpoint in trained.checkpoints:
        learner, step = trained.learner(checkpoint, device)
        with evaluation_mode(learner):
            batches = [
                _scores(learner, sampler, batch, run_view_recipe(settings), options.keys)
                for batch in sampler.batches(source, rows, options.keys)
            ]
        similarities, negatives = (torch.cat(parts).cpu() for parts in zip(*batches, strict=True))
        if bool((similarities.std(dim=1) < 1e-9).any()):
            raise RunError(f"All keys of an image are identical at step {step} of {run}: the features have collapsed.")
        row = study.bound_row(similarities, negatives, scales)
        steps.append(study.StepBound(step, row, study.normality(similarities), float(learner.queue.filled())))
    warn_skipped(STDERR, sampler.skipped)
    count = len(similarities)
    reference = study.gaussian_reference(max(count, 2000), options.keys, options.seed)
    return RunBounds(steps, reference, float(settings.method.temperature), own_scale, count, options.keys)


def _scores(
    learner: ContrastiveLearner, sampler: ViewSampler, batch: ImageBatch, recipe: ViewRecipe, keys: int
) -> tuple[Tensor, Tensor]:
    """q·k/t of each of the keys (n, keys), and the logsumexp of q·n/t over the negatives (n,), in float64."""
    # With gradients through the keys, the query encoder encodes them too.
    encoder: nn.Module = learner.query_encoder if learner.method.gradient_through_keys else learner.key_encoder
    query = sampler.features(learner.query_encoder, recipe, batch, range(1))[:, 0].double()
    key_features = sampler.features(encoder, recipe, batch, range(1, keys + 1)).double()
    negatives = torch.logsumexp(query @ learner.queue.rows.double().T / learner.temperature, dim=1)
    return torch.einsum("nd,nmd->nm", query, key_features) / learner.temperature, negatives
