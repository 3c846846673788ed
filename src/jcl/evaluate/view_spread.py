"""How alike the views of one image are to a network: the similarities and variances of the paper's Fig. 3."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jcl.data import ImageSource, read_all
from jcl.evaluate.features import evaluation_mode
from jcl.train.runtime import autocast
from jcl.views import ViewMaker, ViewRecipe

_VIEWS_AT_ONCE = 256


@dataclass(frozen=True, eq=False)
class ViewSpread:
    """One figure for each image that could be read, both (n,) float32 on the CPU.

    similarities: the mean cosine similarity of all pairs of its views, a view with itself included, as the paper has
    it; variances: the mean over the coordinates of the variance of its views' unit features.
    """

    similarities: Tensor
    variances: Tensor
    views: int


def view_spread(
    backbone: nn.Module,
    source: ImageSource,
    recipe: ViewRecipe,
    *,
    canvas: int,
    views: int = 16,
    seed: int = 0,
    device: torch.device | str = "cpu",
    precision: torch.dtype = torch.float32,
) -> ViewSpread:
    """The spread of `views` random views of every image of a source.

    The sum over all pairs of the products of V unit rows is the square of the length of their sum, so the mean
    similarity is |sum|² / V² and no pair is ever looked at.
    """
    target = torch.device(device)
    similarities, variances = [torch.empty(0)], [torch.empty(0)]
    batches = read_all(source, canvas=canvas, batch_size=max(1, _VIEWS_AT_ONCE // views), device=target)
    with evaluation_mode(backbone.to(target)):
        for batch in batches:
            maker = ViewMaker(recipe, seed, 0, batch.pixels, batch.sizes, batch.samples)
            rows = torch.arange(len(batch), device=target).repeat_interleave(views)
            numbers = torch.arange(views, device=target).repeat(len(batch))
            with torch.inference_mode(), autocast(target, precision):
                found = backbone(maker(rows, numbers))
            units = F.normalize(found.float(), dim=1).view(len(batch), views, -1)
            middle = units.mean(1)
            similarities.append(middle.square().sum(1).cpu())
            variances.append((units - middle[:, None]).square().mean((1, 2)).cpu())
    return ViewSpread(torch.cat(similarities), torch.cat(variances), views)
