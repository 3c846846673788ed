"""Quality of features without labels: RankMe, alpha-ReQ and LiDAR.

All three summarize a spectrum of the features of the same images. RankMe and LiDAR are effective ranks,

    exp(-Σ p_i log p_i),   p_i = s_i / Σ s_j + 1e-7,

of different spectra s, so they lie between 1 (collapsed) and the number of images or coordinates; higher is better.
alpha-ReQ is the exponent of a power law, and best near 1. Values are comparable only on the same images and views.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jcl.data import ImageSource, read_all
from jcl.data.source import select_images
from jcl.distributed.device import autocast
from jcl.errors import DataError
from jcl.evaluate.features import FeatureSettings, evaluation_mode
from jcl.random import IMAGE_CHOICE, permutation
from jcl.settings.resolve import ResolvedSettings
from jcl.views import ViewMaker, ViewRecipe, centre_views, view_recipe

IMAGES, VIEWS = 1000, 4  # of each image, for LiDAR
RESAMPLES = 100
_EPSILON: Final = 1e-7
_WITHIN: Final = 1e-4  # added to the variance of an image's views, as in the LiDAR paper
_FITTED: Final = slice(5, 100)  # eigenvalues that alpha-ReQ is fitted to, as in its authors' code
_BATCH: Final = 250


class Quality(NamedTuple):
    """The three measures; NaN where they cannot be computed."""

    rankme: float
    alpha_req: float
    lidar: float

    def scores(self) -> Quality:
        """The same, with a higher value for the better features also for alpha-ReQ."""
        return self._replace(alpha_req=-abs(self.alpha_req - 1))


def rankme(features: Tensor) -> float:
    """The effective rank of features (n, d), from their singular values (Garrido et al. 2023)."""
    return _effective_rank(_spectrum(features).sqrt())


def alpha_req(features: Tensor) -> float:
    """The exponent a of the decay i^-a of the eigenvalues of the covariance of features (Agrawal et al. 2022).

    Fitted to the logarithms of the 6th to 100th eigenvalue, weighted by 1/i; NaN if there are fewer than two of them.
    """
    values = _spectrum(_centred(features))
    values = values[values > 1e-10 * values[0]]
    ranks = torch.arange(1, len(values) + 1, dtype=values.dtype, device=values.device)[_FITTED]
    if len(ranks) < 2:
        return float("nan")
    x, y, weights = ranks.log(), values[_FITTED].log(), 1 / ranks / (1 / ranks).sum()
    x = x - (weights * x).sum()
    return -float((weights * x * y).sum() / (weights * x * x).sum())


def lidar(views: Tensor) -> float:
    """The effective rank of linear discriminant analysis with images as classes (Thilak et al. 2024).

    `views` (n, v, d) are the features of v views of each image. Its spectrum are the eigenvalues of
    S_w^-1/2 S_b S_w^-1/2, with the covariance S_b of the images' means and S_w of the views around them, plus 1e-4 I.
    """
    return _lidar_of(_whitened_means(views))


def _whitened_means(views: Tensor) -> Tensor:
    """The images' mean features (n, d), in coordinates where the views of an image have unit covariance."""
    means = views.mean(dim=1)
    around = (views - means[:, None]).flatten(0, 1)
    within = around.T @ around / len(around)
    added = _WITHIN + 1e-9 * within.diagonal().mean()  # the second is for large features, which rounding makes singular
    within += added * torch.eye(len(within)).to(views)
    whitened: Tensor = torch.linalg.solve_triangular(torch.linalg.cholesky(within), means.T, upper=False)
    return whitened.T


def _lidar_of(whitened: Tensor) -> float:
    values = _spectrum(_centred(whitened))
    return _effective_rank(F.pad(values, (0, whitened.shape[1] - len(values))))


def _centred(rows: Tensor) -> Tensor:
    return rows - rows.mean(dim=0)


def _spectrum(rows: Tensor) -> Tensor:
    """The squared singular values of a matrix, largest first."""
    gram = rows @ rows.T if len(rows) < rows.shape[1] else rows.T @ rows
    values: Tensor = torch.linalg.eigvalsh(gram)
    return values.clamp_min(0).flip(0)


def _effective_rank(values: Tensor) -> float:
    shares = values / values.sum().clamp_min(torch.finfo(values.dtype).tiny) + _EPSILON
    return float((-shares * shares.log()).sum().exp())


@dataclass(frozen=True, eq=False)
class QualityFeatures:
    """Features of the same images: of centre crops (n, d) and of views (n, v, d), in float64."""

    crops: Tensor
    views: Tensor

    def measure(self) -> Quality:
        return Quality(rankme(self.crops), alpha_req(self.crops), lidar(self.views)) if self._usable else _UNKNOWN

    def resample(self, count: int = RESAMPLES) -> list[Quality]:
        """The measures of random halves of the images; equal numbers of images have equal halves.

        Halves without repetition vary as much as the whole does from sample to sample (delete-half jackknife). A
        bootstrap repeats images, which lowers the ranks. All halves share the covariance of the views.
        """
        if not self._usable:
            return [_UNKNOWN] * count
        whitened, found = _whitened_means(self.views), []
        for number in range(count):
            rows = permutation(number, IMAGE_CHOICE, 1, len(self.crops))[: max(2, len(self.crops) // 2)]
            rows = rows.to(whitened.device)
            crops = self.crops[rows]
            found.append(Quality(rankme(crops), alpha_req(crops), _lidar_of(whitened[rows])))
        return found

    @property
    def _usable(self) -> bool:
        return len(self.crops) > 1 and bool(self.crops.isfinite().all() and self.views.isfinite().all())


_UNKNOWN: Final = Quality(*[float("nan")] * 3)


def quality_features(
    backbone: nn.Module,
    source: ImageSource,
    preprocessing: FeatureSettings,
    recipe: ViewRecipe,
    *,
    canvas: int,
    device: torch.device,
    precision: torch.dtype = torch.float32,
    workers: int = 0,
    images: int = IMAGES,
    views: int = VIEWS,
    skipped: dict[str, str] | None = None,
) -> QualityFeatures:
    """Features of random images of a source, the same for every network; unreadable ones are added to `skipped`."""
    rows = permutation(0, IMAGE_CHOICE, 0, len(source))[:images].sort().values
    crop = (preprocessing.image_size, preprocessing.crop_ratio, preprocessing.mean, preprocessing.std)
    found: list[Tensor] = []
    batches = read_all(
        select_images(source, rows),
        canvas=max(canvas, preprocessing.canvas),
        batch_size=_BATCH,
        device=device,
        workers=workers,
        skipped=skipped,
    )
    with evaluation_mode(backbone.to(device)):
        for batch in batches:
            maker = ViewMaker(recipe, 0, 0, batch.pixels, batch.sizes, rows.to(device)[batch.samples])
            places = torch.arange(len(batch), device=device)
            with torch.inference_mode(), autocast(device, precision):
                made = [backbone(centre_views(batch.pixels, batch.sizes, *crop))]
                made += [backbone(maker(places, torch.full_like(places, number))) for number in range(views)]
            found.append(torch.stack(made, dim=1).double())
    if not found:
        raise DataError(f"None of the images can be read ({source.description}).")
    features = torch.cat(found)
    return QualityFeatures(features[:, 0], features[:, 1:])


def online_quality(
    source: ImageSource,
    backbone: nn.Module,
    settings: ResolvedSettings,
    device: torch.device,
    precision: torch.dtype,
    skipped: dict[str, str],
) -> Callable[[], dict[str, float]]:
    """A function that measures `backbone` during training, each time it is called. Every rank measures it all."""
    shown = settings.views
    recipe = view_recipe(shown.recipe, shown.image_size, min_scale=shown.min_scale, mean=shown.mean, std=shown.std)

    def measure() -> dict[str, float]:
        found = quality_features(
            *(backbone, source, FeatureSettings(shown.image_size, shown.mean, shown.std), recipe),
            canvas=settings.data.canvas,
            device=device,
            precision=precision,
            workers=settings.data.workers,
            skipped=skipped,
        )
        return found.measure()._asdict()

    return measure


def rank_correlation(first: list[float], second: list[float]) -> float:
    """Spearman's rank correlation of two lists of finite numbers; NaN if all numbers of one are equal."""
    ranks = torch.stack([_ranks(torch.tensor(values, dtype=torch.float64)) for values in (first, second)])
    return float(torch.corrcoef(ranks)[0, 1])


def _ranks(values: Tensor) -> Tensor:
    """Ranks from the lowest; equal values share the mean of theirs."""
    below = (values[:, None] > values).sum(dim=1)
    return below + ((values[:, None] == values).sum(dim=1) - 1) / 2
