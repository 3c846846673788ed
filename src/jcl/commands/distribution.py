"""Compares networks by the similarity of the views of an image (Figure 3)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from jcl.commands.run import open_trained
from jcl.commands.run_data import open_own_data, open_with_warnings
from jcl.console import StderrConsole, join_words, unique_names
from jcl.core.registry import METHODS
from jcl.data import ImageSource
from jcl.distributed.device import choose_device, to_device
from jcl.errors import DataError, RunError, SettingsError
from jcl.export.loading import checkpoint_run, open_backbone
from jcl.paths import expand_user
from jcl.runs.folder import RunFolder
from jcl.settings.commands import DistributionOptions
from jcl.settings.resolve import canvas_side
from jcl.settings.resolved import ResolvedSettings
from jcl.studies.distribution import DistributionReport, Viewer, sample_rows, view_sampler, view_spreads
from jcl.train.build import recipe_changes, run_view_recipe
from jcl.views import view_recipe

_DEFAULT_VIEWS = "moco-v2"  # the paper's, for weights files
RunSettings = Mapping[Path, ResolvedSettings]


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
        raise SettingsError("A run is given twice; give each run or file once.")
    device = choose_device(options.device)
    settings = settings_of(paths)
    viewers, notes = open_viewers(paths, settings, options.views, options.of, device)
    source = open_source(paths, settings, location, options.split)
    sampler = view_sampler(options, device, canvas_of(viewers, paths, settings), progress)
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
    by_name = {viewer.name: spread for viewer, spread in zip(viewers, spreads, strict=True)}
    return DistributionReport(by_name, [source.name_of(row) for row in readable.tolist()], summary, notes)


def split_arguments(texts: Sequence[str]) -> tuple[list[Path], str | None]:
    """The runs and weights, and the data: the last of several arguments, if it holds no weights."""
    paths = [expand_user(text) for text in texts]
    if len(texts) > 1 and not _holds_weights(paths[-1]):
        return paths[:-1], texts[-1]
    return paths, None


def settings_of(paths: Sequence[Path]) -> RunSettings:
    """The settings of those that are runs or checkpoints."""
    folders = {path: RunFolder(checkpoint_run(path) or path) for path in paths}
    return {path: folder.settings() for path, folder in folders.items() if folder.settings_file.is_file()}


def canvas_of(viewers: Sequence[Viewer], paths: Sequence[Path], settings: RunSettings) -> int:
    """The size at which images are decoded: that of training."""
    sizes = {viewer.recipe.size for viewer, path in zip(viewers, paths, strict=True) if path not in settings}
    return max([own.data.canvas for own in settings.values()] + [canvas_side(size, 0.2) for size in sizes])


def _holds_weights(path: Path) -> bool:
    if path.is_dir():
        return RunFolder(path).holds_run() or any(path.glob("*.safetensors"))
    return path.is_file() and path.suffix.lower() not in (".npz", ".tar")


def open_viewers(
    paths: Sequence[Path], settings: RunSettings, wanted: str | None, of: str, device: torch.device
) -> tuple[list[Viewer], list[str]]:
    """The networks with one view recipe for all, and notes about runs that were trained on other views."""
    recipe, changes, notes = wanted or _DEFAULT_VIEWS, dict[str, Any](), []
    if wanted is None and settings:
        first, views = next((path, own.views) for path, own in settings.items())
        recipe, changes = views.recipe, recipe_changes(views)
        others = [
            str(path)
            for path, own in settings.items()
            if (own.views.recipe, recipe_changes(own.views)) != (recipe, changes)
        ]
        if others:
            were = join_words(others) if len(others) < 3 else f"{others[0]} and {len(others) - 1} others"
            notes = [f"Trained on other views than {first}, which all networks see: {were} (change this with --views)."]
    viewers = []
    for name, path in zip(_names(paths, settings), paths, strict=True):
        if of == "projection":
            run = open_trained(path)
            own = run_view_recipe(run.settings)
            network: nn.Module = run.learner(run.checkpoints[-1], device)[0].query_encoder
            size, mean, std = own.size, own.mean, own.std
        else:
            found = open_backbone(path)
            network, size = to_device(found.network, device), found.info.image_size
            mean, std = found.info.mean, found.info.std
        viewers.append(Viewer(name, network, view_recipe(recipe, size, mean=mean, std=std, **changes)))
    return viewers, notes


def open_source(paths: Sequence[Path], settings: RunSettings, location: str | None, split: str) -> ImageSource:
    if location is not None:
        data = open_with_warnings(location, StderrConsole())
    elif settings:
        data = open_own_data(next(iter(settings.values())), StderrConsole())
    else:
        raise RunError(f"{paths[-1]} is a weights file; give the data after it.")
    if split not in ("train", "test"):
        raise SettingsError(f"Invalid value {split!r} for --split; use train or test.")
    if split == "train":
        return data.train
    if data.test is None:
        raise DataError(f"{data.train.description} has no test images; use --split train.")
    return data.test


def _names(paths: Sequence[Path], settings: RunSettings) -> list[str]:
    """The methods if they differ, else the names of the folders or files."""
    methods = [settings[path].method.name if path in settings else "" for path in paths]
    if all(methods) and len(set(methods)) == len(paths):
        return [METHODS[method].title for method in methods]
    return unique_names([_file_name(path.resolve()) for path in paths], " ")


def _file_name(path: Path) -> str:
    if (run := checkpoint_run(path)) is not None:
        return f"{run.name} {path.stem}"
    if not path.is_file():
        return path.name or str(path)  # not the stem: temperature-0.2 is a folder
    return path.parent.name if path.stem in ("backbone", "model") else path.stem
