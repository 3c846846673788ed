"""Evaluation for a report, on a sample of the images that takes a few seconds."""

import contextlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from jcl.commands.inputs import data_facts, open_run_data, refuse_inside_data
from jcl.core.registry import METHODS
from jcl.data import UNLABELED, ArrayImages, ImageData, ImageSource, read_all
from jcl.data.source import RGB, class_name, pixel_format, select_images
from jcl.distributed.device import choose_precision
from jcl.errors import DataError
from jcl.evaluate.features import Features, evaluation_mode
from jcl.evaluate.knn import KnnResult, knn_accuracy
from jcl.evaluate.linear import ProbeGrid, linear_probe
from jcl.evaluate.neighbours import nearest_neighbours, unit_rows
from jcl.export.loading import open_backbone, read_initial
from jcl.random import REPORT_SAMPLE, permutation
from jcl.report.contents import ExampleViews, FeatureMap, NamedImage, NeighbourRow, SampleResults
from jcl.report.figures import draw_views
from jcl.report.page import IMAGE_SIDE, view_names
from jcl.settings.resolve import resolve
from jcl.settings.resolved import ResolvedSettings
from jcl.settings.schema import Settings
from jcl.studies.distribution import NamedNetwork, ViewSampler, view_spreads
from jcl.train.build import run_view_recipe
from jcl.views import ViewMaker, ViewRecipe, as_rgb, denormalize

_FLOPS: Final = {"cpu": 4e11, "cuda": 2e14}  # a few seconds of work
_FLOPS_PER_PIXEL: Final = 6000  # the time it takes to make a view, in FLOPs
_MAX_IMAGES, _MAX_FILES, _MIN_IMAGES = 1500, 600, 60  # files take longer because they have to be decoded
_MAX_SPREAD, _MIN_SPREAD, _VIEWS = 256, 12, 16
_MAP_IMAGES, _QUERIES, _NEIGHBOURS, _VIEW_ROWS = 320, 6, 8, 6
_K: Final = (1, 5, 20, 200)
_PROBE: Final = ProbeGrid((0.1, 1.0, 3.0), (1e-4, 1e-2))
_PROBE_EPOCHS, _PROBE_BATCH = 60, 1024
_MAX_PROBE_WEIGHTS: Final = 2_000_000


def evaluate_sample(weights: Path, settings: ResolvedSettings, data: ImageData, device: torch.device) -> SampleResults:
    """Evaluate the backbone of a run on a sample of `data`, whose size depends on the network and kind of device."""
    found = open_backbone(weights)
    backbone, preprocessing = found.network, found.info.preprocessing
    precision = choose_precision(settings.train.precision, device)
    test = data.test if data.train.labels is None else data.labeled_test
    bank_images, query_images, spread_images = _draw_sample(
        data.train, test, _affordable_views(backbone, found.info.channels, preprocessing.image_size, device)
    )
    bank, queries = (
        preprocessing.extract(backbone, source, device=device, precision=precision)
        for source in (bank_images, query_images)
    )
    if not (bank.values.isfinite().all() and queries.values.isfinite().all()):
        raise DataError("its features hold NaN or infinite values; training has probably diverged.")
    knn, linear_top1 = _accuracies(bank, queries, device)
    spread = None
    with contextlib.suppress(DataError):  # none of the images can be read
        network = NamedNetwork("the network", backbone, run_view_recipe(settings))
        sampler = ViewSampler(seed=0, device=device, precision=precision, canvas=settings.data.canvas)
        (spread,), _ = view_spreads([network], spread_images, torch.arange(len(spread_images)), sampler, _VIEWS)
    return SampleResults(
        bank=len(bank),
        queries=len(queries),
        from_test_set=test is not None,
        knn=knn,
        linear_top1=linear_top1,
        spread=spread,
        feature_map=_feature_map(queries, query_images),
        neighbours=neighbour_rows(queries, query_images, bank, bank_images, _distinct(queries.labels)[:_QUERIES]),
    )


def neighbour_rows(
    queries: Features, query_images: ImageSource, bank: Features, bank_images: ImageSource, rows: Sequence[int]
) -> list[NeighbourRow]:
    """The nearest neighbors of some queries, with their images."""
    found = nearest_neighbours(queries.values[list(rows)], bank.values, _NEIGHBOURS)
    return [
        NeighbourRow(
            _image(query_images, int(queries.samples[row])),
            [_image(bank_images, int(bank.samples[other])) for other in others],
            similarities,
        )
        for row, others, similarities in zip(rows, found.rows.tolist(), found.similarities.tolist(), strict=True)
    ]


def example_views(settings: ResolvedSettings, data: ImageData) -> ExampleViews:
    """Training images of as many classes as possible, with the views they have in the first step."""
    rows = permutation(0, REPORT_SAMPLE, 2, len(data.train))[:_MAX_FILES]
    if data.train.labels is not None:
        rows = rows[_distinct(data.train.labels[rows])]
    source, recipe = select_images(data.train, rows), run_view_recipe(settings)
    method = settings.method
    batch = next(read_all(source, canvas=settings.data.canvas, batch_size=_VIEW_ROWS))

    def make(recipe: ViewRecipe, numbers: list[int]) -> Tensor:
        maker = ViewMaker(recipe, settings.train.seed, 0, batch.pixels, batch.sizes, rows[batch.samples])
        images = torch.arange(len(batch)).repeat_interleave(len(numbers))
        views, plain = maker(images, torch.tensor(numbers).repeat(len(batch))), pixel_format(source) == RGB
        unit = [[value] * len(recipe.mean) for value in (0.0, 1.0)]
        views = denormalize(views, recipe.mean, recipe.std) if plain else as_rgb(views, *unit)
        return views.reshape(len(batch), len(numbers), *views.shape[1:])

    # The learner numbers the first query 0, then the keys, further queries and local queries.
    first_local = method.num_keys + method.num_queries
    numbers = [0, *range(method.num_keys + 1, first_local), *range(1, method.num_keys + 1)]
    if METHODS[method.name].symmetric:
        numbers = [0, 1, 1, 0]  # two queries, and the keys they are compared with
    views = [list(row) for row in make(recipe, numbers)]
    if method.num_local_queries:
        numbers = list(range(first_local, first_local + method.num_local_queries))
        views = [[*whole, *local] for whole, local in zip(views, make(recipe.local(), numbers), strict=True)]
    images = [_image(source, sample, recipe) for sample in batch.samples.tolist()]
    return list(zip(images, views, strict=True))


def draw_run_views(settings: Settings, path: Path, console: Console) -> dict[str, Any]:
    """Draw views of some images as a run with these settings would make them; returns the settings of the views."""
    data = open_run_data(settings, console)
    refuse_inside_data(path.parent, settings.data.location)
    resolved, _ = resolve(settings, data_facts(data.train, read_initial(settings)))
    made = asdict(run_view_recipe(resolved))
    draw_views(example_views(resolved, data), view_names(resolved), path, title=f"Views of {data.name}")
    return {name: made[name] if value is None else value for name, value in resolved.views.model_dump().items()}


def _affordable_views(backbone: nn.Module, channels: int, image_size: int, device: torch.device) -> int:
    with evaluation_mode(backbone.cpu()), torch.no_grad(), FlopCounterMode(display=False) as counter:
        backbone(torch.zeros(1, channels, image_size, image_size))
    flops = counter.get_total_flops() + _FLOPS_PER_PIXEL * image_size**2
    return int(_FLOPS.get(device.type, _FLOPS["cpu"]) / flops)


def _draw_sample(
    train: ImageSource, test: ImageSource | None, affordable: int
) -> tuple[ImageSource, ImageSource, ImageSource]:
    """Images for the bank (two thirds), for the queries (test images if there are any), and for the view spread."""
    most = _MAX_IMAGES if isinstance(train, ArrayImages) else _MAX_FILES
    images = max(_MIN_IMAGES, min(most, affordable // 2))
    order = permutation(0, REPORT_SAMPLE, 0, len(train))
    spread = select_images(train, order[: max(_MIN_SPREAD, min(_MAX_SPREAD, affordable // 2 // _VIEWS))])
    if test is not None:
        rows = permutation(0, REPORT_SAMPLE, 1, len(test))[: images // 3]
        return select_images(train, order[: images * 2 // 3]), select_images(test, rows), spread
    few = max(1, min(images, len(order)) // 3)
    return select_images(train, order[few:images]), select_images(train, order[:few]), spread


def _accuracies(bank: Features, queries: Features, device: torch.device) -> tuple[Sequence[KnnResult], float | None]:
    """kNN accuracies, and that of a quick linear probe unless it has nothing to learn or is too large."""
    if not ((bank.labels != UNLABELED).any() and (queries.labels != UNLABELED).any()):
        return (), None
    inputs = (bank.values, bank.labels, queries.values, queries.labels)
    knn = knn_accuracy(*inputs, k=[k for k in _K if k <= len(bank)])
    counts = torch.unique(bank.labels[bank.labels >= 0], return_counts=True)[1]
    weights = len(_PROBE.cells) * len(counts) * bank.values.shape[1]
    if len(counts) < 2 or counts.max() < 2 or weights > _MAX_PROBE_WEIGHTS:
        return knn, None
    found = linear_probe(*inputs, grid=_PROBE, epochs=_PROBE_EPOCHS, batch_size=_PROBE_BATCH, device=device)
    return knn, found.scores.top1


def _feature_map(features: Features, source: ImageSource) -> FeatureMap | None:
    if len(features) < 3:
        return None
    values, samples = features.values[:_MAP_IMAGES], features.samples[:_MAP_IMAGES].tolist()
    names, labels = [source.name_of(sample) for sample in samples], [_label(source, sample) for sample in samples]
    layouts = {"tsne": tsne(values), "principal": principal_components(values)}
    return FeatureMap({name: found for name, found in layouts.items() if found is not None}, names, labels)


def _distinct(labels: Tensor) -> list[int]:
    """The rows of `labels` (n,), the first of each class before all others."""
    first = set({label: row for row, label in reversed(list(enumerate(labels.tolist())))}.values())
    return sorted(range(len(labels)), key=lambda row: (row not in first, row))


def _image(source: ImageSource, sample: int, recipe: ViewRecipe | None = None) -> NamedImage:
    pixels = source.read(sample, IMAGE_SIDE * 2)
    pixels = as_rgb(pixels, recipe.mean, recipe.std) if recipe else pixels
    return NamedImage(pixels, source.name_of(sample), _label(source, sample))


def _label(source: ImageSource, sample: int) -> str | None:
    label = UNLABELED if source.labels is None else int(source.labels[sample])
    return None if label == UNLABELED else class_name(source, label)


def principal_components(features: Tensor) -> Tensor:
    """The first two principal components (n > 1, 2) of unit rows (n, d) in float64; their largest entry is positive."""
    rows = unit_rows(features.cpu())
    centered = rows - rows.mean(0)
    _, _, directions = torch.linalg.svd(centered, full_matrices=False)
    components: Tensor = centered @ directions[:2].T
    largest = components.gather(0, components.abs().argmax(0, keepdim=True))
    return components * torch.where(largest < 0, -1.0, 1.0)


def tsne(features: Tensor) -> Tensor | None:
    """Exact t-SNE (n, 2) of unit rows (n, d); None without scikit-learn or with fewer than five rows."""
    try:
        from sklearn.manifold import TSNE
    except ImportError:
        return None
    count, start = len(features), principal_components(features)
    if count < 5:
        return None
    start *= 1e-4 / max(float(start[:, 0].std()), 1e-12)  # scikit-learn's own start is NaN if all rows are equal
    perplexity = min(30.0, (count - 1) / 3)
    model = TSNE(perplexity=perplexity, init=start.numpy(), method="exact", max_iter=400, random_state=0)
    return torch.from_numpy(model.fit_transform(unit_rows(features.cpu()).numpy()))
