"""The views that a run is trained on."""

from __future__ import annotations

import torch
from torch import Tensor

from jcl.data import ImageSource, read_all
from jcl.errors import DataError
from jcl.settings.schema import Settings, known
from jcl.views import ViewMaker, ViewRecipe, denormalise

SHOWN_IMAGES = 6


def example_views(settings: Settings, source: ImageSource, recipe: ViewRecipe) -> tuple[Tensor, Tensor]:
    """The first readable images of a source (n,), and their query and key views of the first step as pictures.

    Views are (n, queries + keys, 3, S, S) uint8, the queries first.
    """
    canvas, keys, queries = (
        known(value) for value in (settings.data.canvas, settings.method.num_keys, settings.method.num_queries)
    )
    batch = next(iter(read_all(source, canvas=canvas, batch_size=SHOWN_IMAGES)), None)
    if batch is None:
        raise DataError(f"none of the images can be read ({source.description}).")
    maker = ViewMaker(recipe, settings.train.seed, 0, batch.pixels, batch.sizes, batch.samples)
    further_queries = range(keys + 1, keys + queries)  # as the learner numbers views
    numbers = torch.tensor([0, *further_queries, *range(1, keys + 1)])
    rows = torch.arange(len(batch)).repeat_interleave(len(numbers))
    views = denormalise(maker(rows, numbers.repeat(len(batch))), recipe.mean, recipe.std)
    return batch.samples, views.reshape(len(batch), len(numbers), *views.shape[1:])
