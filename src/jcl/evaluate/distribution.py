"""How alike the views of an image are to a frozen network: the paper's Figure 3.

V views of an image become unit features f_1..f_V of dimension d. Two figures say how far they lie apart:

    similarity = (1/V²) Σ_a Σ_b f_a·f_b     all V × V pairs, each view with itself too, as the paper averages them
    variance   = (1/d) Σ_c var_v f_vc       the mean of the diagonal of their covariance (biased, 1/V)

With S = Σ_v f_v the first is |S|²/V². For unit features the mean of |f_v|² is 1, so the second is (1 - |S|²/V²)/d:
the two are one figure in two units, variance = (1 - similarity)/d, and their histograms mirror each other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from jcl.console import pluralize
from jcl.data import ImageSource
from jcl.errors import DataError, RunError, SettingsError
from jcl.evaluate.features import evaluation_mode
from jcl.evaluate.image_views import ViewedImages, ViewPasses
from jcl.views import ViewRecipe

PAPER_VIEWS = 32
PAPER_IMAGES = 32_768


@dataclass(frozen=True, eq=False)
class Viewer:
    """A network under the name it has in figures, and the views it is shown."""

    name: str
    network: nn.Module
    recipe: ViewRecipe


@dataclass(frozen=True, eq=False)
class ViewSpread:
    """What one network makes of n images with V views each; similarity and variance (n,) in float64, on the CPU."""

    similarity: Tensor
    variance: Tensor
    views: int
    width: int  # of the features, d

    @property
    def similarity_of_different_views(self) -> Tensor:
        """The mean over pairs of two different views: without the V pairs of a view with itself, which are all 1."""
        return (self.views * self.similarity - 1) / (self.views - 1)


class SpreadSums:
    """Mean and squared deviations of the unit features of n images, from as many parts as the views come in.

    Everything is in float64, and deviations are taken from the mean of their own part and then moved to the common one
    (Chan, Golub and LeVeque): views that are nearly alike lose no digits in a difference of large sums.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = torch.zeros(())
        self.deviations = torch.zeros(())

    def add(self, features: Tensor) -> None:
        """Take in the features (n, v, d) of some more views, of any length."""
        features = features.double()
        # Without the usual safeguard against rows of zeros, which have no direction: NaN must come of them, not 0.
        units = features / features.norm(dim=2, keepdim=True)
        mean = units.mean(dim=1)
        deviations = (units - mean[:, None]).square().sum(dim=(1, 2))
        before, new = self.count, units.shape[1]
        self.count = before + new
        if before == 0:
            self.mean, self.deviations = mean, deviations
            return
        step = mean - self.mean
        self.deviations = self.deviations + deviations + step.square().sum(dim=1) * (before * new / self.count)
        self.mean = self.mean + step * (new / self.count)

    def similarity(self) -> Tensor:
        """The mean over all pairs, (n,)."""
        return self.mean.square().sum(dim=1)

    def variance(self) -> Tensor:
        """The mean of the diagonal of the covariance, (n,)."""
        return self.deviations / (self.count * self.mean.shape[1])


def view_spreads(
    viewers: Sequence[Viewer], source: ImageSource, rows: Tensor, passes: ViewPasses, views: int = PAPER_VIEWS
) -> tuple[list[ViewSpread], Tensor]:
    """The spread of `views` views of the images `rows`, to every viewer, and the rows that could be read.

    All viewers are shown the same draws, so their figures can be compared image by image. Nothing but sums is kept.
    """
    if views < 2:
        raise SettingsError(
            f"the spread of views needs at least two of them per image, but --views-per-image is {views}."
        )
    found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in viewers]
    samples, width = [], [0] * len(viewers)
    with contextlib.ExitStack() as modes:
        for viewer in viewers:
            modes.enter_context(evaluation_mode(viewer.network))
        for images in passes.over(source, rows, views):
            for place, sums in enumerate(_sums(viewers, images, views)):
                found[place].append((sums.similarity(), sums.variance()))
                width[place] = sums.mean.shape[1]
            samples.append(images.batch.samples)
    if not samples:
        raise DataError(f"none of {pluralize(len(rows), 'image')} could be read ({source.description}).")
    spreads = []
    for viewer, parts, wide in zip(viewers, found, width, strict=True):
        similarity, variance = (torch.cat(values).cpu() for values in zip(*parts, strict=True))
        _demand_directions(viewer, similarity)
        spreads.append(ViewSpread(similarity, variance, views, wide))
    return spreads, torch.cat(samples).cpu()


def _sums(viewers: Sequence[Viewer], images: ViewedImages, views: int) -> list[SpreadSums]:
    """The sums of a few images for every viewer; viewers that are shown equal views share them."""
    sums = [SpreadSums() for _ in viewers]
    for recipe in dict.fromkeys(viewer.recipe for viewer in viewers):
        for part in images.parts(recipe, range(views)):
            for viewer, own in zip(viewers, sums, strict=True):
                if viewer.recipe == recipe:
                    own.add(images.encoded(viewer.network, part))
    return sums


def _demand_directions(viewer: Viewer, similarity: Tensor) -> None:
    """Asked once all is done, since asking waits for the device."""
    bad = int((~similarity.isfinite()).sum())
    if bad:
        raise RunError(
            f"{viewer.name} gives features that are zero or not finite for {bad:,} of "
            f"{pluralize(len(similarity), 'image')}, so their similarities mean nothing; has its training diverged?"
        )


class PairedShares(NamedTuple):
    """Of the same images shown to two networks: the share in percent on which the first has its views ..."""

    more_alike: float  # with the higher similarity
    less_varied: float  # with the lower variance; the same share, where both have features of one width
    images: int


def paired_shares(first: ViewSpread, other: ViewSpread) -> PairedShares:
    """Compare two networks image by image; an image on which they tie counts for neither."""
    images = len(first.similarity)
    alike = int((first.similarity > other.similarity).sum())
    varied = int((first.variance < other.variance).sum())
    return PairedShares(100 * alike / images, 100 * varied / images, images)
