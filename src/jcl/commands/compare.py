"""Compare networks on the same images and views: `jcl distribution` (Figure 3) and `jcl compare` (without labels)."""

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import nn

from jcl.commands.inputs import distinct_names, open_chosen_data
from jcl.commands.run import open_trained
from jcl.console import STDERR, ProgressCallback, plain_names, warn_skipped
from jcl.data import ImageSource
from jcl.distributed.device import choose_device, to_device
from jcl.errors import DataError, RunError, SettingsError
from jcl.evaluate.quality import RESAMPLES, Quality, rank_correlation
from jcl.export.loading import checkpoint_run, open_backbone
from jcl.paths import expand_user
from jcl.runs.folder import RunFolder
from jcl.runs.json_object import is_number
from jcl.runs.metrics import read_metrics
from jcl.settings.commands import CompareOptions, DistributionOptions, NetworksOptions
from jcl.settings.resolved import ResolvedSettings
from jcl.studies import distribution
from jcl.studies.distribution import DistributionReport, NamedNetwork
from jcl.train.build import recipe_changes, run_view_recipe
from jcl.views import view_recipe
from jcl.views.recipe import canvas_side

CLEAR = 0.975  # a network is clearly better if it is better on at least this share of the halves of the images
MIN_IMAGES = 8  # halves of fewer images hardly differ
_ROUNDING = 1e-4  # of a measure, relative to it
_DEFAULT_VIEWS = "moco-v2"  # the paper's, for weights files
RunSettings = Mapping[Path, ResolvedSettings]


class Networks(NamedTuple):
    """Networks with the views they see, and the images."""

    paths: Sequence[Path]
    networks: Sequence[NamedNetwork]
    source: ImageSource
    canvas: int
    trained: Sequence[Path]  # the runs on these images, unless others are given


def open_networks(
    options: NetworksOptions, device: torch.device, *, of: str = "backbone", split: str = "train"
) -> Networks:
    """Open networks, which all see the same views; images and view recipe default to those of the first run."""
    paths, location = split_arguments(options.weights)
    folders = {path: RunFolder(checkpoint_run(path) or path) for path in paths}
    settings = {path: folder.settings() for path, folder in folders.items() if folder.settings_file.is_file()}
    networks = _load_networks(paths, settings, options.views, of, device)
    first = next(iter(settings.values()), None)
    data = open_chosen_data(location, first, paths[-1], STDERR, len(networks[0].recipe.mean))
    source = data.train if split == "train" else data.test
    if source is None:
        raise DataError(f"{data.train.description} has no test images; use --split train.")
    # The size at which images are decoded in training.
    sizes = {network.recipe.size for network, path in zip(networks, paths, strict=True) if path not in settings}
    canvas = max([run.data.canvas for run in settings.values()] + [canvas_side(size, 0.2) for size in sizes])
    images = None if first is None or location else (first.data.location, first.data.subset)
    trained = [path for path, run in settings.items() if (run.data.location, run.data.subset) == images]
    return Networks(paths, networks, source, canvas, trained)


def split_arguments(texts: Sequence[str]) -> tuple[list[Path], str | None]:
    """The runs and weights, and the data: the last of several arguments, if it holds no weights."""
    paths = [expand_user(text) for text in texts]
    if len(texts) > 1 and not _holds_weights(paths[-1]):
        return paths[:-1], texts[-1]
    return paths, None


def _holds_weights(path: Path) -> bool:
    if path.is_dir():
        return RunFolder(path).holds_run() or any(path.glob("*.safetensors"))
    return path.is_file() and path.suffix.lower() not in (".npz", ".npy", ".tar")


def _load_networks(
    paths: Sequence[Path], settings: RunSettings, wanted: str | None, of: str, device: torch.device
) -> list[NamedNetwork]:
    """The networks with one view recipe for all: the one named, or that of the first run."""
    recipe, changes = wanted or _DEFAULT_VIEWS, dict[str, Any]()
    if wanted is None and settings:
        first = next(iter(settings.values())).views
        recipe, changes = first.recipe, recipe_changes(first)
    networks: list[NamedNetwork] = []
    for name, path in zip(distinct_names(paths), paths, strict=True):
        if of == "projection":
            run = open_trained(path)
            module: nn.Module = run.learner(run.checkpoints[-1], device)[0].query_encoder
            own = run_view_recipe(run.settings)
            size, mean, std = own.size, own.mean, own.std
        else:
            found = open_backbone(path)
            module, size = to_device(found.network, device), found.info.image_size
            mean, std = found.info.mean, found.info.std
        if networks and len(mean) != len(networks[0].recipe.mean):
            raise SettingsError("The networks take different numbers of channels; compare those of one kind.")
        own_changes = {"color": len(mean) == 3, **changes}
        networks.append(NamedNetwork(name, module, view_recipe(recipe, size, mean=mean, std=std, **own_changes)))
    return networks


def compare_views(options: DistributionOptions, progress: ProgressCallback) -> DistributionReport:
    """Figure 3 for several networks."""
    started = time.perf_counter()
    device = choose_device(options.device)
    _, networks, source, canvas, _ = open_networks(options, device, of=options.of, split=options.split)
    sampler = distribution.view_sampler(options, device, canvas, progress)
    rows = distribution.sample_rows(source, options.images, options.seed)
    spreads, readable = distribution.view_spreads(networks, source, rows, sampler, options.views_per_image)
    warn_skipped(STDERR, sampler.skipped)
    summary = {
        "images": len(readable),
        "views_per_image": options.views_per_image,
        "feature": options.of,
        "view_recipe": networks[0].recipe.name,
        "min_scale": networks[0].recipe.min_scale,
        "seed": options.seed,
        "skipped": len(sampler.skipped),
        "seconds": time.perf_counter() - started,
    }
    by_name = {network.name: spread for network, spread in zip(networks, spreads, strict=True)}
    return DistributionReport(by_name, [source.name_of(row) for row in readable.tolist()], summary)


@dataclass(frozen=True)
class Compared:
    """The measures of one network on all images and on random halves of them, and its recorded kNN accuracy."""

    name: str
    quality: Quality
    halves: Sequence[Quality]
    knn_top1: float | None

    def share_above(self, other: Self, measure: str) -> float:
        """The share of the halves in which this one is better; ties, also up to rounding, count half."""
        pairs = zip(self.halves, other.halves, strict=True)
        scores = [(own.score(measure), their.score(measure)) for own, their in pairs]
        wins = (0.5 if math.isclose(*both, rel_tol=_ROUNDING) else float(both[0] > both[1]) for both in scores)
        return sum(wins) / len(scores)


@dataclass(frozen=True)
class Comparison:
    """Networks compared on the same images, in the order given."""

    runs: Sequence[Compared]
    images: int

    def best(self, measure: str) -> tuple[Compared, dict[str, float]] | None:
        """The best of several networks, and the share of the halves in which it is above each of the others."""
        known = [run for run in self.runs if is_number(run.quality.score(measure))]
        halves = [half.score(measure) for run in known for half in run.halves]  # NaN with too few images
        if len(known) < 2 or self.images < MIN_IMAGES or not all(map(is_number, halves)):
            return None
        best = max(known, key=lambda run: run.quality.score(measure))
        return best, {run.name: best.share_above(run, measure) for run in known if run is not best}

    def correlation(self, measure: str) -> float | None:
        """The rank correlation of a measure with kNN, over at least three networks whose accuracy is recorded."""
        pairs = [(run.quality.score(measure), run.knn_top1) for run in self.runs]
        known = [(score, top1) for score, top1 in pairs if is_number(score) and top1 is not None]
        found = rank_correlation(*zip(*known, strict=True)) if len(known) > 2 else None
        return found if is_number(found) else None  # all equal

    def as_dict(self) -> dict[str, Any]:
        """A flat object for JSON; with several networks, names start with the name of the network."""
        found: dict[str, Any] = {"images": self.images, "halves": RESAMPLES}
        keys = plain_names(["best", *(run.name for run in self.runs)])[1:]  # `best_rankme` is no value of a run
        for run, key in zip(self.runs, keys, strict=True):
            values = run.quality._asdict() | ({} if run.knn_top1 is None else {"knn_top1": run.knn_top1})
            found |= {name if len(self.runs) == 1 else f"{key}_{name}": value for name, value in values.items()}
        for measure in Quality._fields:
            if (best := self.best(measure)) is not None:
                found[f"best_{measure}"] = keys[self.runs.index(best[0])]
                found[f"best_{measure}_share"] = min(best[1].values())
            if (correlation := self.correlation(measure)) is not None:
                found[f"rank_correlation_{measure}_knn"] = correlation
        return found


def compare_quality(options: CompareOptions, progress: ProgressCallback) -> Comparison:
    """Measure all networks without labels."""
    device = choose_device(options.device)
    paths, networks, source, canvas, trained = open_networks(options, device)
    sampler = distribution.ViewSampler(0, device, canvas=canvas, workers=options.worker_count)
    found, images = [], 0
    for path, network in zip(paths, networks, strict=True):
        features = distribution.quality_features(network, source, sampler, options.images, options.views_per_image)
        quality, images = features.measure(), len(features.crops)
        halves = features.resample(quality) if len(paths) > 1 else []
        found.append(Compared(network.name, quality, halves, _recorded_knn(path) if path in trained else None))
        progress(len(found), len(paths))
    warn_skipped(STDERR, sampler.skipped)
    return Comparison(found, images)


def _recorded_knn(path: Path) -> float | None:
    """The kNN accuracy that a run recorded last, or at the step of one of its checkpoints."""
    run, lines = checkpoint_run(path), []
    with contextlib.suppress(RunError):
        lines = [line for line in read_metrics(RunFolder(run or path).metrics_file) if line["kind"] == "knn"]
    step = int(path.resolve().stem.removeprefix("step-")) if run is not None else None
    found = [line.get("knn_top1") for line in lines if line["step"] and step in (None, line["step"])]
    return found[-1] if found else None
