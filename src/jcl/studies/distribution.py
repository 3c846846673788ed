"""How similar the views of an image are to a frozen network: the paper's Figure 3.

V views of an image become unit features f_1..f_V of dimension d, which are summarized by

    similarity = (1/V²) Σ_a Σ_b f_a·f_b     over all V × V pairs, self-pairs included, as in the paper
    variance   = (1/d) Σ_c var_v f_vc       the mean of the diagonal of their covariance (biased, 1/V)

With S = Σ_v f_v the first is |S|²/V², and for unit features the second is (1 - |S|²/V²)/d. Hence variance =
(1 - similarity)/d, and the two histograms mirror each other.
"""

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from jcl.console import ProgressCallback, no_progress, plain_names, pluralize
from jcl.data import ImageBatch, ImageSource, read_all
from jcl.data.source import select_images
from jcl.distributed.device import autocast, choose_precision
from jcl.errors import DataError, RunError
from jcl.evaluate.features import FeatureSettings, evaluation_mode
from jcl.evaluate.quality import QualityFeatures
from jcl.random import IMAGE_CHOICE, permutation
from jcl.runs.atomic import write_atomically
from jcl.settings.commands import ViewOptions
from jcl.settings.resolved import ResolvedSettings
from jcl.train.build import run_view_recipe
from jcl.views import ViewMaker, ViewRecipe, center_views

_IMAGES, _VIEWS = 1000, 4  # for the quality without labels during training: images, and views of each
_STEP = 0  # views are drawn as in the first training step
_MEASURES = ("similarity", "similarity_of_different_views", "variance")  # of a `ViewSpread`


def sample_rows(source: ImageSource, count: int, seed: int) -> Tensor:
    """Sorted row numbers of `count` random images, or of all; a smaller count gives a subset of a larger one."""
    found = min(count, len(source))
    if found < 2:
        raise DataError(f"At least two images are needed for a comparison, but got {found} ({source.description}).")
    return permutation(seed, IMAGE_CHOICE, 0, len(source))[:count].sort().values


@dataclass(frozen=True)
class ViewSampler:
    """Makes views that depend only on seed, image and view number, and encodes up to `batch_size` of them at a time."""

    seed: int
    device: torch.device
    precision: torch.dtype = torch.float32
    batch_size: int = 512
    canvas: int = 320
    workers: int = 0
    progress: ProgressCallback = no_progress  # of images
    skipped: dict[str, str] = field(default_factory=dict)  # unreadable images and the reasons

    def batches(self, source: ImageSource, rows: Tensor, views: int) -> Iterator[ImageBatch]:
        """The images `rows`, in batches so small that `views` views of each fit into one forward pass."""
        batches = read_all(
            select_images(source, rows),
            canvas=self.canvas,
            batch_size=max(1, self.batch_size // views),
            device=self.device,
            workers=self.workers,
            skipped=self.skipped,
        )
        done, samples = 0, rows.to(self.device)
        for batch in batches:
            # Sample numbers of the whole source, so that an image has the same views in every subset.
            yield ImageBatch(batch.pixels, batch.sizes, samples[batch.samples])
            done += len(batch)
            self.progress(done, len(rows))

    def features(self, network: nn.Module, recipe: ViewRecipe, batch: ImageBatch, numbers: range) -> Tensor:
        """Features (n, v, d) of these v views of n images, with as many views in a pass as fit."""
        maker = ViewMaker(recipe, self.seed, _STEP, batch.pixels, batch.sizes, batch.samples, self.precision)
        parts = []
        for chunk in torch.split(torch.tensor(numbers), max(1, self.batch_size // len(batch))):
            rows = torch.arange(len(batch), device=self.device).repeat_interleave(len(chunk))
            views = maker(rows, chunk.to(self.device).repeat(len(batch)))
            parts.append(self.encode(network, views).view(len(batch), len(chunk), -1))
        return torch.cat(parts, dim=1)

    def encode(self, network: nn.Module, images: Tensor) -> Tensor:
        """Features (n, d) of n images, in the network's precision."""
        with torch.inference_mode(), autocast(self.device, self.precision):
            features: Tensor = network(images)
        return features


def view_sampler(options: ViewOptions, device: torch.device, canvas: int, progress: ProgressCallback) -> ViewSampler:
    """The sampler that a command's options ask for."""
    precision = choose_precision(options.precision, device)
    return ViewSampler(options.seed, device, precision, options.batch_size, canvas, options.worker_count, progress)


@dataclass(frozen=True, eq=False)
class NamedNetwork:
    """A network, its name in tables and plots, and the recipe of its views."""

    name: str
    module: nn.Module
    recipe: ViewRecipe


@dataclass(frozen=True, eq=False)
class ViewSpread:
    """Similarity and variance (n,) of n images to one network, in float64 on the CPU."""

    similarity: Tensor
    variance: Tensor
    views: int
    width: int  # of the features, d

    @property
    def similarity_of_different_views(self) -> Tensor:
        """The mean over pairs of two different views, without the V self-pairs, which are all 1."""
        return (self.views * self.similarity - 1) / (self.views - 1)


def spread_of(features: Tensor) -> tuple[Tensor, Tensor]:
    """Similarity and variance (n,) of the features (n, V, d) of n images, in float64."""
    features = features.double()
    units = features / features.norm(dim=2, keepdim=True)  # unlike in F.normalize, rows of zeros become NaN
    mean = units.mean(dim=1, keepdim=True)
    return mean.square().sum(dim=(1, 2)), (units - mean).square().mean(dim=(1, 2))


def view_spreads(
    networks: Sequence[NamedNetwork], source: ImageSource, rows: Tensor, sampler: ViewSampler, views: int
) -> tuple[list[ViewSpread], Tensor]:
    """The spread of `views` views of the images `rows`, the same for each network, and the rows that were read."""
    found: list[list[Tensor]] = [[] for _ in networks]
    samples, widths = [], [0] * len(networks)
    with evaluation_mode(nn.ModuleList(network.module for network in networks)):
        for batch in sampler.batches(source, rows, views):
            for number, network in enumerate(networks):
                features = sampler.features(network.module, network.recipe, batch, range(views))
                found[number].append(torch.stack(spread_of(features)))
                widths[number] = features.shape[2]
            samples.append(batch.samples)
    spreads = []
    for network, parts, width in zip(networks, found, widths, strict=True):
        similarity, variance = torch.cat(parts, dim=1).cpu()
        if bad := int((~similarity.isfinite()).sum()):  # checked last, because it waits for the device
            images = f"{bad:,} of {pluralize(len(similarity), 'image')}"
            raise RunError(f"{network.name} gives zero or non-finite features for {images}; it may have diverged.")
        spreads.append(ViewSpread(similarity, variance, views, width))
    return spreads, torch.cat(samples).cpu()


def quality_features(
    network: NamedNetwork, source: ImageSource, sampler: ViewSampler, images: int, views: int
) -> QualityFeatures:
    """Features of the center crops and of views of random images, the same for every network."""
    recipe, found = network.recipe, []
    crop_ratio = FeatureSettings(recipe.size).crop_ratio
    with evaluation_mode(network.module.to(sampler.device)):
        for batch in sampler.batches(source, sample_rows(source, images, 0), views):
            crops = center_views(batch.pixels, batch.sizes, recipe.size, crop_ratio, recipe.mean, recipe.std)
            views_of_batch = sampler.features(network.module, recipe, batch, range(views))
            found.append(torch.cat([sampler.encode(network.module, crops)[:, None], views_of_batch], dim=1))
    features = torch.cat(found).double()
    return QualityFeatures(features[:, 0], features[:, 1:])


def online_quality(
    source: ImageSource,
    backbone: nn.Module,
    settings: ResolvedSettings,
    device: torch.device,
    skipped: dict[str, str],
    progress: ProgressCallback,
) -> Callable[[], dict[str, float]]:
    """A function that measures `backbone` during training, each time it is called. Every rank measures it all."""
    precision, data = choose_precision(settings.train.precision, device), settings.data
    network = NamedNetwork("the network", backbone, run_view_recipe(settings))
    sampler = ViewSampler(
        0, device, precision, canvas=data.canvas, workers=data.workers, progress=progress, skipped=skipped
    )
    return lambda: quality_features(network, source, sampler, _IMAGES, _VIEWS).measure()._asdict()


def share_more_similar(first: ViewSpread, other: ViewSpread) -> float:
    """The percentage of images on which the first has the higher similarity."""
    return 100 * float((first.similarity > other.similarity).double().mean())


@dataclass(frozen=True, eq=False)
class DistributionReport:
    """The spread of the same images and views for each network, in the order given."""

    spreads: Mapping[str, ViewSpread]  # by the networks' names
    image_names: Sequence[str]
    summary: dict[str, Any]

    def metrics(self) -> dict[str, Any]:
        """One flat object, with the networks' names in the keys."""
        found: dict[str, Any] = dict(self.summary)
        (first_name, first), *others = self.by_key().items()
        for name, spread in self.by_key().items():
            for what in _MEASURES:
                values: Tensor = getattr(spread, what)
                found[f"{name}_{what}_median"] = float(values.quantile(0.5))
                found[f"{name}_{what}_mean"] = float(values.mean())
            found[f"{name}_feature_width"] = spread.width
        for name, spread in others:
            found[f"{first_name}_more_alike_than_{name}_percent"] = share_more_similar(first, spread)
        return found

    def describe(self) -> str:
        summary = self.summary
        images, views = pluralize(summary["images"], "image"), pluralize(summary["views_per_image"], "view")
        return f"{images} with {views} each ({summary['view_recipe']}), unit {summary['feature']} features"

    def write_values(self, path: Path) -> None:
        """Write one row per image, with its name, similarity and variance for each network, as CSV."""
        columns: dict[str, Sequence[Any]] = {"image": self.image_names}
        for name, spread in self.by_key().items():
            columns |= {f"{name}_{what}": getattr(spread, what).tolist() for what in _MEASURES}
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([list(columns), *zip(*columns.values(), strict=True)])
        write_atomically(path, text.getvalue().encode(), follow_links=True)

    def by_key(self) -> dict[str, ViewSpread]:
        """The spreads by names of lower-case letters, digits and underscores."""
        return dict(zip(plain_names(list(self.spreads)), self.spreads.values(), strict=True))
