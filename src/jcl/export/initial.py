"""Weights that pre-training starts from: torchvision's or timm's by name, a run, or a weights file."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from jcl.console import pluralize
from jcl.core.encoder import torchvision_networks
from jcl.errors import RunError, SettingsError
from jcl.export.hub import library_errors
from jcl.export.loading import load_network, network_name, open_weights, stem_of
from jcl.export.reading import WeightsFile
from jcl.settings.resolved import InitialWeights, ResolvedSettings
from jcl.settings.schema import Settings

LIBRARIES = ("imagenet", "timm")  # values of `model.init` that are not paths
_ADVICE = " Without a network, give --init a weights file."


def read_initial(settings: Settings) -> WeightsFile | None:
    """The weights that `model.init` names, or None if it is empty; torchvision and timm download theirs."""
    init, name = settings.model.init, settings.model.backbone
    if init == "imagenet":
        return _torchvision_weights(name)
    if init == "timm":
        return _timm_weights(name)
    return open_weights(Path(init)) if init else None


def initial_facts(weights: WeightsFile) -> InitialWeights:
    """What automatic settings depend on."""
    described = weights.info or weights
    return InitialWeights(stem_of(weights), described.image_size, described.mean, described.std)


def initial_tensors(
    weights: WeightsFile, settings: ResolvedSettings, backbone: nn.Module
) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors that the backbone of a run takes from a file, and lines on what was loaded and what was not."""
    name, stem = settings.model.backbone, settings.model.stem
    try:
        loaded = load_network(weights, name, settings.views.image_size)
    except RunError:
        with contextlib.suppress(RunError):  # other networks cannot be told from their shapes
            if _plain(found := network_name(weights)) != _plain(name):
                problem = f"{weights.path} holds a {found}, but the backbone is {name}; use --backbone {found}."
                raise SettingsError(problem) from None
        raise
    tensors, expected = loaded.network.state_dict(), backbone.state_dict()
    fresh = {part for part, value in expected.items() if tensors[part].shape != value.shape}
    kept = {part: value.contiguous() for part, value in tensors.items() if part not in fresh}
    lines = [
        f"model.init = {settings.model.init}: loaded {pluralize(loaded.loaded - len(fresh), 'tensor')} of {name} "
        f"({loaded.source})"
    ]
    new = ["the projection head"]
    if fresh:
        new.append(f"{', '.join(sorted(fresh))}, because the weights have the {loaded.info.stem} stem, not {stem}")
    unused = ", ".join(f"{part} ({count:,})" for part, count in loaded.unused.items())
    lines.append(f"new: {' and '.join(new)}; not used from the weights: {unused or 'nothing'}")
    return kept, lines + [f"note: {note}" for note in loaded.notes if not note.startswith("ignored")]


def _plain(name: str) -> str:
    """The name of an architecture without its library and the tag of its weights."""
    return name.removeprefix("timm/").partition(".")[0]


def _torchvision_weights(name: str) -> WeightsFile:
    from torchvision import models

    if name not in torchvision_networks():
        raise SettingsError(f"torchvision has no {name}; use --init timm or a weights file, or another --backbone.")
    weights = models.get_model_weights(name).DEFAULT
    with library_errors(f"torchvision's weights {weights} could not be downloaded", _ADVICE):
        tensors = weights.get_state_dict(progress=False, check_hash=True, weights_only=True)
    transforms = weights.transforms()
    size = transforms.crop_size[0] if name.startswith("vit_") else None
    mean, std = map(tuple, (transforms.mean, transforms.std))
    return WeightsFile(Path(str(weights)), "torchvision", tensors, None, name, size, mean, std)


def _timm_weights(name: str) -> WeightsFile:
    try:
        import timm
    except ImportError:
        raise SettingsError("--init timm needs timm: pip install 'joint-contrastive-learning[timm]'.") from None
    plain = name.removeprefix("timm/")
    if not timm.is_model(plain) or not timm.is_model_pretrained(plain):
        raise SettingsError(f"timm has no weights of {name}; use a weights file or another --backbone.")
    with library_errors(f"timm's weights of {plain} could not be downloaded", _ADVICE):
        network = timm.create_model(plain, pretrained=True, num_classes=0)
    known: Any = network.pretrained_cfg
    size = known["input_size"][-1] if known.get("fixed_input_size") else None
    mean, std = tuple(known["mean"]), tuple(known["std"])
    return WeightsFile(Path(f"timm/{plain}"), "timm", network.state_dict(), None, plain, size, mean, std)
