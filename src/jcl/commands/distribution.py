"""Runs and weights files compared by how alike they make the views of an image: what `jcl distribution` calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from jcl.commands.run_data import open_own_data, open_with_warnings
from jcl.commands.trained import open_trained
from jcl.console import StderrConsole, plain_names, pluralize, told_apart
from jcl.core.registry import METHODS
from jcl.cores import usual_workers
from jcl.data import ImageSource
from jcl.distributed.device import choose_device, choose_precision, on_device
from jcl.errors import DataError, RunError, SettingsError
from jcl.evaluate.distribution import (
    PAPER_IMAGES,
    PAPER_VIEWS,
    Viewer,
    ViewSpread,
    paired_shares,
    view_spreads,
)
from jcl.evaluate.image_views import ViewPasses, chosen_rows
from jcl.export.loading import open_backbone
from jcl.paths import home_expanded
from jcl.runs.folder import RunFolder
from jcl.settings.resolve import ResolvedSettings
from jcl.train.build import run_view_recipe
from jcl.views import ViewRecipe, view_recipe

FeatureOf = Literal["backbone", "projection"]
_USUAL_VIEWS = "moco-v2"  # the paper's, for weights that do not say what they were trained on


@dataclass(frozen=True, eq=False)
class DistributionReport:
    """What each network makes of the same images and views, in the order in which the networks were given."""

    names: tuple[str, ...]
    spreads: tuple[ViewSpread, ...]
    source: ImageSource
    rows: Tensor  # the images that were looked at, by their index in the source
    about: dict[str, Any]
    notes: tuple[str, ...]

    def figures(self) -> dict[str, Any]:
        """One flat object of plain names, those of a network behind its own."""
        found: dict[str, Any] = dict(self.about)
        for name, spread in zip(self.keys(), self.spreads, strict=True):
            pairs = {"similarity": spread.similarity, "variance": spread.variance}
            pairs["similarity_of_different_views"] = spread.similarity_of_different_views
            for what, values in pairs.items():
                found[f"{name}_{what}_median"] = float(values.quantile(0.5))
                found[f"{name}_{what}_mean"] = float(values.mean())
            found[f"{name}_feature_width"] = spread.width
        first = self.keys()[0]
        for name, spread in zip(self.keys()[1:], self.spreads[1:], strict=True):
            shares = paired_shares(self.spreads[0], spread)
            found[f"{first}_more_alike_than_{name}_percent"] = shares.more_alike
            found[f"{first}_less_varied_than_{name}_percent"] = shares.less_varied
        return found

    def described(self) -> str:
        """What was looked at, in a few words."""
        about = self.about
        return (
            f"{pluralize(about['images'], 'image')} with {pluralize(about['views_per_image'], 'view')} each "
            f"({about['view_recipe']}), {about['feature']} features of unit length"
        )

    def keys(self) -> list[str]:
        """The names as they stand in files: small letters, digits and underscores."""
        return plain_names(self.names)


def compare_views(
    paths: Sequence[Path],
    location: str | None,
    *,
    of: FeatureOf = "backbone",
    views: str | None = None,
    views_per_image: int = PAPER_VIEWS,
    images: int = PAPER_IMAGES,
    split: str = "train",
    batch_size: int = 512,
    workers: int | None = None,
    seed: int = 0,
    device: str = "auto",
    precision: str = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> DistributionReport:
    """Figure 3 of the paper for runs, weights files or exported backbones, all shown the same views.

    The images are those at `location` (default: what the first run was trained on), a seeded choice of `images` of
    them. Views are drawn by the recipe `views` (default: the first run's own), at each network's own image size.
    """
    started = time.perf_counter()
    if len({path.resolve() for path in paths}) < len(paths):
        raise SettingsError("a run is named twice; give each run or file once.")
    target = choose_device(device)
    settings = {path: RunFolder(path).settings() for path in paths if RunFolder(path).settings_file.is_file()}
    draw, notes = _view_drawing(paths, settings, views)
    viewers = [
        Viewer(name, *_network(path, of, draw, target))
        for name, path in zip(_names(paths, settings), paths, strict=True)
    ]
    source = _source(paths, settings, location, split)
    rows = chosen_rows(source, images, seed)
    passes = ViewPasses(
        seed=seed,
        device=target,
        precision=choose_precision(precision, target),
        batch_size=batch_size,
        canvas=max([_canvas(viewer.recipe, settings.get(path)) for viewer, path in zip(viewers, paths, strict=True)]),
        workers=usual_workers() if workers is None else workers,
        progress=progress,
    )
    spreads, read = view_spreads(viewers, source, rows, passes, views_per_image)
    about = {
        "images": len(read),
        "views_per_image": views_per_image,
        "feature": of,
        "view_recipe": viewers[0].recipe.name,
        "min_scale": viewers[0].recipe.min_scale,
        "seed": seed,
        "skipped": len(passes.skipped),
        "seconds": time.perf_counter() - started,
    }
    return DistributionReport(tuple(one.name for one in viewers), tuple(spreads), source, read, about, notes)


def split_arguments(texts: Sequence[str]) -> tuple[list[Path], str | None]:
    """Runs and weights, and behind them perhaps the data: the last of several that holds no weights itself."""
    paths = [home_expanded(text) for text in texts]
    if len(texts) > 1 and not _holds_weights(paths[-1]):
        return paths[:-1], texts[-1]
    return paths, None


def _holds_weights(path: Path) -> bool:
    if path.is_dir():
        return RunFolder(path).holds_run() or any(path.glob("*.safetensors"))
    return path.is_file() and path.suffix.lower() not in (".npz", ".tar")


# From a network's own image size and normalisation to the views it is shown.
_Draw = Callable[[int, tuple[float, float, float], tuple[float, float, float]], ViewRecipe]


def _view_drawing(
    paths: Sequence[Path], settings: dict[Path, ResolvedSettings], wanted: str | None
) -> tuple[_Draw, tuple[str, ...]]:
    """One way of drawing views for all, since figures from different views could not be compared."""
    if wanted is not None or not settings:
        return lambda size, mean, std: view_recipe(wanted or _USUAL_VIEWS, size, mean=mean, std=std), ()
    first = next(path for path in paths if path in settings)
    chosen = settings[first].views

    def draw(size: int, mean: tuple[float, float, float], std: tuple[float, float, float]) -> ViewRecipe:
        return view_recipe(chosen.recipe, size, min_scale=chosen.min_scale, mean=mean, std=std)

    others = [
        path
        for path, own in settings.items()
        if (own.views.recipe, own.views.min_scale) != (chosen.recipe, chosen.min_scale)
    ]
    return draw, tuple(
        f"{path} was trained on other views than {first}; all are shown those of {first} (choose with --views)."
        for path in others
    )


def _network(path: Path, of: FeatureOf, draw: _Draw, device: torch.device) -> tuple[nn.Module, ViewRecipe]:
    if of == "projection":
        run = open_trained(path)
        own = run_view_recipe(run.settings)
        network: nn.Module = run.newest(device).query_encoder
        return network, draw(own.size, own.mean, own.std)
    found = open_backbone(path)
    return on_device(found.network, device), draw(found.info.image_size, found.info.mean, found.info.std)


def _source(
    paths: Sequence[Path], settings: dict[Path, ResolvedSettings], location: str | None, split: str
) -> ImageSource:
    if location is not None:
        data = open_with_warnings(location, StderrConsole())
    elif settings:
        data = open_own_data(next(settings[path] for path in paths if path in settings), StderrConsole())
    else:
        raise RunError(f"{paths[-1]} is a weights file; say which images to show it: give the data after the weights.")
    if split not in ("train", "test"):
        raise SettingsError(f"there is no split called {split!r}; use train or test.")
    if split == "test" and data.test is None:
        raise DataError(f"{data.train.description} has no test images; leave --split away to use those to train on.")
    return data.train if split == "train" or data.test is None else data.test


def _canvas(recipe: ViewRecipe, settings: ResolvedSettings | None) -> int:
    """The size at which images are decoded: as in training, or as training would choose it."""
    return settings.data.canvas if settings is not None else max(32, round(recipe.size * 10 / 7))


def _names(paths: Sequence[Path], settings: dict[Path, ResolvedSettings]) -> list[str]:
    """The methods, where they tell the networks apart, else the names of the folders or files."""
    methods = [settings[path].method.name if path in settings else "" for path in paths]
    if all(methods) and len(set(methods)) == len(paths):
        return [METHODS[method].title for method in methods]
    return told_apart([_folder_name(path) for path in paths], " ")


def _folder_name(path: Path) -> str:
    whole = path.resolve()
    if not whole.is_file():
        return whole.name or str(whole)  # what follows a dot belongs to a folder's name, as in temperature-0.2
    return whole.parent.name if whole.stem in ("backbone", "model") else whole.stem
