"""What commands read: the images of a run or at a location, and the backbone to evaluate on them."""

import contextlib
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from rich.console import Console
from torch import Tensor, nn

from jcl.console import pluralize, print_line, warn_skipped
from jcl.core.encoder import build_backbone
from jcl.data import ArrayImages, ImageData, ImageSource, open_data
from jcl.data.encoded import EncodedImages
from jcl.data.named import DEMO_SET, KNOWN_SETS, absolute_location, class_list, default_root
from jcl.data.shards.fetch import is_shard_location, without_secrets
from jcl.data.source import RGB, NoReadableImages, UnreadableImage, fingerprint, pixel_format, sample_images
from jcl.distributed.device import choose_device
from jcl.distributed.group import ALONE, Ranks
from jcl.errors import DataError, RunError, SettingsError
from jcl.evaluate.baselines import baseline_figures
from jcl.evaluate.classification import Scores
from jcl.evaluate.features import Features
from jcl.evaluate.knn import KnnResult
from jcl.export.backbone_file import BackboneInfo
from jcl.export.loading import checkpoint_run, initial_facts, open_backbone
from jcl.export.reading import WeightsFile
from jcl.paths import cache_folder, expand_user, hub_name, location_path
from jcl.runs.folder import RunFolder
from jcl.runs.json_object import is_number, read_object, write_object
from jcl.settings.resolved import DataFacts, ResolvedRecordSettings
from jcl.settings.schema import LIBRARIES, Settings
from jcl.settings.values import with_values


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
        channels=None if data.channels == "auto" else data.channels,
        progress=partial(print_line, console),
    )


def require_data(settings: Settings, remedy: str, console: Console) -> None:
    """Raise if the images of a run have moved; print what will be downloaded, and to where."""
    location, root = settings.data.location, expand_user(settings.data.root)
    if location_path(location).is_absolute():
        if not is_shard_location(location) and not location_path(location).exists():
            raise DataError(f"The images that the run was trained on are no longer at {location}; {remedy}.")
    elif location != DEMO_SET:
        stored = "" if hub_name(location) else f", stored in {root if settings.data.root else default_root()}"
        print_line(console, f"The images of the run are {without_secrets(location)}{stored}.")
        if settings.data.root and not root.is_dir():  # the settings may come from somebody else
            raise DataError(f"The folder {root} (data.root of the run) does not exist; create it, or {remedy}.")


def open_chosen_data(
    location: str | None, settings: Settings | None, weights: Path, console: Console, channels: int
) -> ImageData:
    """The images at `location`, or by default those of the run that the weights are from, without `data.strict`.

    Of a folder that has the classes of the run's `data.subset`, only these classes.
    """
    if location is not None:
        progress = partial(print_line, console)
        if settings is not None and settings.data.subset:
            with contextlib.suppress(DataError):  # other data without these classes, or the list of classes has moved
                subset = class_list(settings.data.subset)
                data = open_data(location, classes=subset, channels=channels, progress=progress)
                classes = pluralize(len(subset), "class", "classes")
                print_line(console, f"Only images of the run's data.subset are used; it has {classes}.")
                return data
        return open_data(location, channels=channels, progress=progress)
    if settings is None:
        raise RunError(f"{weights} is a weights file; give the data after it.")
    require_data(settings, "give their new location after the run", console)
    return open_run_data(with_values(settings, {"data.strict": False}), console)


def with_absolute_paths(settings: Settings) -> Settings:
    """The settings with absolute paths, so that a run can be resumed from anywhere."""
    data, init = settings.data, settings.model.init
    paths = {"data.root": data.root, "data.subset": data.subset if data.subset != "imagenet100" else ""}
    paths["model.init"] = "" if init in LIBRARIES or hub_name(init) else init
    absolute = {name: str(expand_user(path).absolute()) for name, path in paths.items() if path}
    return with_values(settings, {"data.location": absolute_location(data.location)} | absolute)


def refuse_inside_data(folder: Path, location: str) -> None:
    """Raise if output would be written into the folder of the images, where it would be read as images next time."""
    data = location_path(location)
    if location not in KNOWN_SETS and data.is_dir() and folder.resolve().is_relative_to(data.resolve()):
        raise RunError(f"The folder {folder} is inside the image folder {data}; choose another --out.")


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """The names of runs or weights files, with as many parent folders as needed to make them distinct."""
    whole = [expand_user(path).resolve() for path in paths]
    if len(set(whole)) < len(whole):
        raise SettingsError("The same run or file is given twice.")
    depth = 1
    while len({path.parts[-depth:] for path in whole}) < len(whole):
        depth += 1
    return ["/".join(path.parts[-depth:]) for path in whole]


def data_facts(source: ImageSource, init: WeightsFile | None = None) -> DataFacts:
    """The facts about a source, and about the weights to start from, that automatic settings depend on."""
    stored, start = pixel_format(source), initial_facts(init) if init else None
    sides, moments = [], []
    for image in sample_images(source, 32):
        sides.append(min(image.shape[1:]))
        if stored == RGB and isinstance(source, EncodedImages):  # decoding large photographs would take seconds
            sides = [min(header.height, header.width) for header in source.headers().values()] or sides
            break
        if stored != RGB:
            values = (image if image.is_floating_point() else image / 255).double()
            moments.append(torch.stack((values.mean(dim=(1, 2)), values.square().mean(dim=(1, 2)))))
    try:
        sides = sides or [min(source.read(0).shape[1:])]
    except UnreadableImage as error:
        raise NoReadableImages(source.description, {error.name: error.reason}) from None
    mean, std = _normalization(moments) if moments else (None, None)
    side, decoded = sorted(sides)[len(sides) // 2], isinstance(source, ArrayImages)  # the median
    return DataFacts(len(source), side, decoded, stored.channels, stored.color, mean, std, init=start)


def _normalization(moments: list[Tensor]) -> list[tuple[float, ...]]:
    """The mean and standard deviation of each channel, from the means of values and squares in a few images."""
    mean, square = torch.stack(moments).mean(dim=0)
    std = (square - mean.square()).clamp_min(0).sqrt()
    std = torch.where(std > 1e-6 * mean.abs(), std, 1.0)  # of a constant channel
    return [tuple(float(f"{value:.6g}") for value in values.tolist()) for values in (mean, std)]


@dataclass(frozen=True)
class EvaluationTarget:
    """A backbone, the data to evaluate it on, and the device."""

    backbone: nn.Module
    info: BackboneInfo
    data: ImageData
    device: torch.device
    location: str = ""  # of the data
    seed: int = 0  # that the training of the backbone started from, if known
    record: ResolvedRecordSettings | None = None  # of the run, for the same data
    origin: dict[str, Any] = field(default_factory=dict)  # for JSON: the data, whether a run has finished, the epoch

    def untrained(self, measure: Callable[[Self], list[float]], ranks: Ranks = ALONE, **about: Any) -> list[float]:
        """What `measure` gives for the untrained network, kept in a cache; `about` is what else it depends on."""
        key = json.dumps([self.info.to_text(), self.seed, [*map(fingerprint, self.data.splits.values())], about])
        file = cache_folder() / "untrained" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
        with contextlib.suppress(RunError):
            stored = read_object(file).get("found") if ranks.count == 1 else None
            if isinstance(stored, list) and all(map(is_number, stored)):
                return stored
        found = measure(replace(self, backbone=untrained_backbone(self.info, self.seed)))
        with contextlib.suppress(RunError):
            if ranks.first:
                write_object(file, {"found": found}, follow_links=True)
        return found

    def features(self, source: ImageSource, *, console: Console, **options: Any) -> Features:
        """What `FeatureSettings.extract` gives with these options; unreadable images are reported to the console."""
        found = self.info.preprocessing.extract(self.backbone, source, device=self.device, **options)
        warn_skipped(console, found.skipped)
        return found


def accuracy_figures(name: str, scores: Scores | KnnResult, untrained: float | None = None) -> dict[str, Any]:
    """Accuracies, their baselines and the number of test images, with plain names for JSON."""
    return {
        f"{name}_top1": scores.top1,
        f"{name}_top5": scores.top5,
        **baseline_figures(f"{name}_top1", scores.top1, scores.images, scores.chance_top1, untrained),
        "test_images": scores.images,
        "unseen_class_images": scores.unseen_class_images,
    }


def untrained_backbone(info: BackboneInfo, seed: int) -> nn.Module:
    """A network of the same architecture as training starts from, with this seed."""
    torch.manual_seed(seed)
    return build_backbone(info.backbone, stem=info.stem, image_size=info.image_size, channels=info.channels)[0]


def _values_warning(source: ImageSource, info: BackboneInfo) -> str | None:
    """A sentence about images that are not 8-bit RGB and have values far from those of the backbone's training."""
    found = data_facts(source).mean if pixel_format(source) != RGB else None
    if found is None or all(abs(a - b) <= 10 * std for a, b, std in zip(found, info.mean, info.std, strict=True)):
        return None
    means = [", ".join(f"{value:.3g}" for value in mean) for mean in (found, info.mean)]
    return f"The values of the images (mean {means[0]}) are far from those of training ({means[1]}); scale them alike."


def open_target(weights: Path, location: str | None, device: str, console: Console) -> EvaluationTarget:
    """The backbone of a run or file with the data at `location` (default: the data of the run)."""
    loaded, run = open_backbone(weights), RunFolder(checkpoint_run(weights) or weights)
    settings = run.settings() if run.settings_file.is_file() or (location is None and weights.is_dir()) else None
    data = open_chosen_data(location, settings, weights, console, loaded.info.channels)
    if warning := _values_warning(data.train, loaded.info):
        print_line(console, f"Warning: {warning}")
    own = "" if settings is None else settings.data.location
    place = own if location is None else absolute_location(location)
    origin: dict[str, Any] = {"data": without_secrets(place)}
    if loaded.epoch is not None:
        origin["epoch"] = loaded.epoch
    seed, record = 0, None
    if settings is not None:
        seed, record = settings.train.seed, settings.record if place == own else None
        if weights.is_dir():
            origin["finished"] = loaded.epoch is None
    return EvaluationTarget(loaded.network, loaded.info, data, choose_device(device), place, seed, record, origin)
