"""The images of a run: from its settings to the data, and what automatic choices need to know about them."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path

from rich.console import Console

from jcl.console import print_line
from jcl.data import ArrayImages, ImageData, ImageSource, UnreadableImage, open_data
from jcl.data.named import absolute_location
from jcl.data.shards.fetch import is_shard_location
from jcl.data.subset import class_list
from jcl.errors import DataError, RunError, SettingsError
from jcl.paths import home_expanded
from jcl.settings.resolve import DataFacts
from jcl.settings.schema import Settings, with_values


def open_run_data(settings: Settings, console: Console) -> ImageData:
    """The images that the settings name; with `data.strict` all folders and shards of them can be read."""
    data = settings.data
    if not data.location:
        raise SettingsError("say which images to train on, for example: jcl pretrain photos/.")
    return open_data(
        data.location,
        root=home_expanded(data.root) if data.root else None,
        download=data.download,
        classes=class_list(data.subset) if data.subset else None,
        strict=data.strict,
        progress=partial(print_line, console),
    )


def open_own_data(settings: Settings, console: Console) -> ImageData:
    """The images that a run was trained on, for a command that takes others too; strict was its training alone."""
    demand_in_place(settings, "give their place after the run")
    return open_run_data(with_values(settings, {"data.strict": False}), console)


def demand_in_place(settings: Settings, remedy: str) -> None:
    """Whoever names a run alone may not know where its images were; a folder that has moved is told with a remedy."""
    location = settings.data.location
    if Path(location).is_absolute() and not is_shard_location(location) and not Path(location).exists():
        raise DataError(f"The images that the run was trained on are no longer at {location}; {remedy}.")


def open_told(location: str, console: Console) -> ImageData:
    """The images at a place of their own; what people want to know of them is told."""
    return open_data(location, progress=partial(print_line, console))


def with_whole_path(settings: Settings) -> Settings:
    """With the images' whole path, so that a run can be resumed from anywhere."""
    return with_values(settings, {"data.location": absolute_location(settings.data.location)})


def keep_apart(folder: Path, location: str) -> None:
    """What is written inside the images' folder would be among the images the next time."""
    data = Path(location)
    if data.is_dir() and folder.resolve().is_relative_to(data.resolve()):
        raise RunError(f"the folder {folder} lies inside the images' folder {data}; choose another --out.")


def data_facts(source: ImageSource) -> DataFacts:
    """What automatic settings need to know; of a large folder a few images tell the typical size."""
    if isinstance(source, ArrayImages):
        return DataFacts(images=len(source), short_side=min(source.pixels.shape[2:]), decoded=True)
    return DataFacts(images=len(source), short_side=_typical_short_side(source), decoded=False)


def _typical_short_side(source: ImageSource, probes: int = 32) -> int:
    """The median short side in pixels of a few images spread over the source."""
    sides = []
    for probe in range(min(probes, len(source))):
        with contextlib.suppress(UnreadableImage):
            sides.append(min(source.read(probe * len(source) // min(probes, len(source))).shape[1:]))
    if not sides:
        raise DataError(f"none of the images tried can be read ({source.description}); `jcl check` lists the reasons.")
    return sorted(sides)[len(sides) // 2]
