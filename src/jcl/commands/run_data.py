"""Opening the images of a run."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path

from rich.console import Console

from jcl.console import print_line
from jcl.data import ArrayImages, ImageData, ImageSource, UnreadableImage, open_data
from jcl.data.named import DEMO_SET, absolute_location, class_list, default_root
from jcl.data.shards.fetch import is_shard_location, without_secrets
from jcl.errors import DataError, RunError, SettingsError
from jcl.export.loading import LIBRARIES, initial_facts
from jcl.export.reading import WeightsFile
from jcl.paths import expand_user, hub_name, path_in
from jcl.settings.resolved import DataFacts
from jcl.settings.schema import Settings, with_values


def open_run_data(settings: Settings, console: Console) -> ImageData:
    """The images that the settings name."""
    data = settings.data
    if not data.location:
        raise SettingsError("Give the images to train on, for example: jcl pretrain photos/.")
    return open_data(
        data.location,
        root=expand_user(data.root) if data.root else None,
        download=data.download,
        classes=class_list(data.subset) if data.subset else None,
        strict=data.strict,
        progress=partial(print_line, console),
    )


def open_own_data(settings: Settings, console: Console) -> ImageData:
    """The images that a run was trained on, for a command that also takes others; `data.strict` is ignored."""
    require_data(settings, "give their new location after the run", console)
    return open_run_data(with_values(settings, {"data.strict": False}), console)


def require_data(settings: Settings, remedy: str, console: Console) -> None:
    """Raise if the images of a run have moved; print what will be downloaded, and to where.

    The run may be somebody else's, so its `data.root` is not created.
    """
    location, root = settings.data.location, expand_user(settings.data.root)
    if path_in(location).is_absolute():
        if not is_shard_location(location) and not path_in(location).exists():
            raise DataError(f"The images that the run was trained on are no longer at {location}; {remedy}.")
    elif hub_name(location):
        print_line(console, f"The images of the run are {location}.")
    elif location != DEMO_SET:
        stored = root if settings.data.root else default_root()
        print_line(console, f"The images of the run are {without_secrets(location)}, stored in {stored}.")
        if settings.data.root and not root.is_dir():
            raise DataError(f"The folder {root} (data.root of the run) does not exist; create it, or {remedy}.")


def open_with_warnings(location: str, console: Console) -> ImageData:
    """The images at a location; warnings are printed."""
    return open_data(location, progress=partial(print_line, console))


def with_absolute_location(settings: Settings) -> Settings:
    """The settings with absolute paths of images and initial weights, so that a run can be resumed from anywhere."""
    init = settings.model.init
    init = init if init in ("", *LIBRARIES) or hub_name(init) else str(expand_user(init).absolute())
    return with_values(settings, {"data.location": absolute_location(settings.data.location), "model.init": init})


def refuse_inside_data(folder: Path, location: str) -> None:
    """Raise if output would be written into the folder of the images, and be read as such next time."""
    data = path_in(location)
    if data.is_dir() and folder.resolve().is_relative_to(data.resolve()):
        raise RunError(f"The folder {folder} is inside the image folder {data}; choose another --out.")


def data_facts(source: ImageSource, init: WeightsFile | None = None) -> DataFacts:
    """The facts about a source, and about the weights to start from, that automatic settings depend on."""
    decoded = isinstance(source, ArrayImages)
    side = min(source.pixels.shape[2:]) if isinstance(source, ArrayImages) else _median_short_side(source)
    return DataFacts(len(source), side, decoded, init=initial_facts(init) if init else None)


def _median_short_side(source: ImageSource, probes: int = 32) -> int:
    """The median short side of a few images spread over the source, in pixels."""
    sides = []
    count = min(probes, len(source))
    for probe in range(count):
        with contextlib.suppress(UnreadableImage):
            sides.append(min(source.read(probe * len(source) // count).shape[1:]))
    if not sides:
        raise DataError(f"No image could be read ({source.description}); `jcl check` lists the reasons.")
    return sorted(sides)[len(sides) // 2]
