"""Compares how similar the views of an image are to several networks (Figure 3)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from jcl.commands.run import open_trained
from jcl.commands.run_data import open_own_data, open_with_warnings
from jcl.console import StderrConsole, plain_names, pluralize, told_apart
from jcl.core.registry import METHODS
from jcl.data import ImageSource
from jcl.distributed.device import choose_device, choose_precision, on_device
from jcl.errors import DataError, RunError, SettingsError
from jcl.export.loading import open_backbone
from jcl.paths import home_expanded
from jcl.runs.folder import RunFolder
from jcl.settings.resolve import ResolvedSettings
from jcl.settings.studies import DistributionOptions
from jcl.studies.distribution import Viewer, ViewSampler, ViewSpread, paired_shares, sample_rows, view_spreads
from jcl.train.build import run_view_recipe
from jcl.views import ViewRecipe, view_recipe

_DEFAULT_VIEWS = "moco-v2"  # the paper's, for weights files

# Builds the recipe of a network's views from its image size, mean and std.
RecipeFactory = Callable[[int, tuple[float, float, float], tuple[float, float, float]], ViewRecipe]


@dataclass(frozen=True, eq=False)
class DistributionReport:
    """The spread of the same images and views for each network, in the order given."""

    names: tuple[str, ...]
    spreads: tuple[ViewSpread, ...]
    image_names: tuple[str, ...]
    summary: dict[str, Any]
    notes: tuple[str, ...]

    def metrics(self) -> dict[str, Any]:
        """One flat object, with the networks' names in the keys."""
        found: dict[str, Any] = dict(self.summary)
        first, *others = self.by_key().items()
        for name, spread in (first, *others):
            measured = {"similarity": spread.similarity, "variance": spread.variance}
            measured["similarity_of_different_views"] = spread.similarity_of_different_views
            for what, values in measured.items():
                found[f"{name}_{what}_median"] = float(values.quantile(0.5))
                found[f"{name}_{what}_mean"] = float(values.mean())
            found[f"{name}_feature_width"] = spread.width
        for name, spread in others:
            shares = paired_shares(first[1], spread)
            found[f"{first[0]}_more_alike_than_{name}_percent"] = shares.more_alike
            found[f"{first[0]}_less_varied_than_{name}_percent"] = shares.less_varied
        return found

    def describe(self) -> str:
        summary = self.summary
        return (
            f"{pluralize(summary['images'], 'image')} with {pluralize(summary['views_per_image'], 'view')} each "
            f"({summary['view_recipe']}), unit {summary['feature']} features"
        )

    def by_key(self) -> dict[str, ViewSpread]:
        """The spreads by names of lower-case letters, digits and underscores."""
        return dict(zip(plain_names(self.names), self.spreads, strict=True))


def compare_views(
    options: DistributionOptions, progress: Callable[[int, int], None] | None = None
) -> DistributionReport:
    """Figure 3 for runs, weights files or exported backbones, which all see the same views.

    The images default to the training data of the first run, and the view recipe to the first run's. Each network
    sees views of its own image size.
    """
    started = time.perf_counter()
    if options.views is not None and options.views.isdecimal():
        raise SettingsError(f"--views takes a view recipe; for {options.views} views use --views-per-image.")
    paths, location = split_arguments(options.weights)
    if len({path.resolve() for path in paths}) < len(paths):
        raise SettingsError("a run is given twice; give each run or file once.")
    device = choose_device(options.device)
    settings = {path: RunFolder(path).settings() for path in paths if RunFolder(path).settings_file.is_file()}
    make_recipe, notes = _recipe_factory(settings, options.views)
    names = _names(paths, settings)
    viewers = [
        Viewer(name, *_network(path, options.of, make_recipe, device)) for name, path in zip(names, paths, strict=True)
    ]
    source = _source(paths, settings, location, options.split)
    canvases = [_canvas(viewer.recipe, settings.get(path)) for viewer, path in zip(viewers, paths, strict=True)]
    sampler = ViewSampler(
        seed=options.seed,
        device=device,
        precision=choose_precision(options.precision, device),
        batch_size=options.batch_size,
        canvas=max(canvases),
        workers=options.worker_count,
        progress=progress,
    )
    rows = sample_rows(source, options.images, options.seed)
    spreads, readable = view_spreads(viewers, source, rows, sampler, options.views_per_image)
    summary = {
        "images": len(readable),
        "views_per_image": options.views_per_image,
        "feature": options.of,
        "view_recipe": viewers[0].recipe.name,
        "min_scale": viewers[0].recipe.min_scale,
        "seed": options.seed,
        "skipped": len(sampler.skipped),
        "seconds": time.perf_counter() - started,
    }
    image_names = tuple(source.name_of(row) for row in readable.tolist())
    return DistributionReport(tuple(names), tuple(spreads), image_names, summary, notes)


def split_arguments(texts: Sequence[str]) -> tuple[list[Path], str | None]:
    """The runs and weights, and the data: the last of several arguments, if it holds no weights."""
    paths = [home_expanded(text) for text in texts]
    if len(texts) > 1 and not _holds_weights(paths[-1]):
        return paths[:-1], texts[-1]
    return paths, None


def _holds_weights(path: Path) -> bool:
    if path.is_dir():
        return RunFolder(path).holds_run() or any(path.glob("*.safetensors"))
    return path.is_file() and path.suffix.lower() not in (".npz", ".tar")


def _recipe_factory(
    settings: Mapping[Path, ResolvedSettings], wanted: str | None
) -> tuple[RecipeFactory, tuple[str, ...]]:
    """One view recipe for all networks, so that they can be compared, and notes about runs trained on others."""
    if wanted is not None or not settings:
        return lambda size, mean, std: view_recipe(wanted or _DEFAULT_VIEWS, size, mean=mean, std=std), ()
    first, chosen = next((path, own.views) for path, own in settings.items())

    def make_recipe(size: int, mean: tuple[float, float, float], std: tuple[float, float, float]) -> ViewRecipe:
        return view_recipe(chosen.recipe, size, min_scale=chosen.min_scale, mean=mean, std=std)

    return make_recipe, tuple(
        f"{path} was trained on other views; all networks see the views of {first} (change this with --views)."
        for path, own in settings.items()
        if (own.views.recipe, own.views.min_scale) != (chosen.recipe, chosen.min_scale)
    )


def _network(path: Path, of: str, make_recipe: RecipeFactory, device: torch.device) -> tuple[nn.Module, ViewRecipe]:
    if of == "projection":
        run = open_trained(path)
        own = run_view_recipe(run.settings)
        network: nn.Module = run.newest(device).query_encoder
        return network, make_recipe(own.size, own.mean, own.std)
    found = open_backbone(path)
    return on_device(found.network, device), make_recipe(found.info.image_size, found.info.mean, found.info.std)


def _source(
    paths: Sequence[Path], settings: Mapping[Path, ResolvedSettings], location: str | None, split: str
) -> ImageSource:
    if location is not None:
        data = open_with_warnings(location, StderrConsole())
    elif settings:
        data = open_own_data(next(iter(settings.values())), StderrConsole())
    else:
        raise RunError(f"{paths[-1]} is a weights file; give the data after it.")
    if split not in ("train", "test"):
        raise SettingsError(f"invalid value {split!r} for --split; use train or test.")
    if split == "train":
        return data.train
    if data.test is None:
        raise DataError(f"{data.train.description} has no test images; use --split train.")
    return data.test


def _canvas(recipe: ViewRecipe, settings: ResolvedSettings | None) -> int:
    """The size at which images are decoded, as in training."""
    return settings.data.canvas if settings is not None else max(32, round(recipe.size * 10 / 7))


def _names(paths: Sequence[Path], settings: Mapping[Path, ResolvedSettings]) -> list[str]:
    """The methods if they differ, else the names of the folders or files."""
    methods = [settings[path].method.name if path in settings else "" for path in paths]
    if all(methods) and len(set(methods)) == len(paths):
        return [METHODS[method].title for method in methods]
    return told_apart([_file_name(path.resolve()) for path in paths], " ")


def _file_name(path: Path) -> str:
    if not path.is_file():
        return path.name or str(path)  # not the stem: temperature-0.2 is a folder
    return path.parent.name if path.stem in ("backbone", "model") else path.stem
