"""Opening a backbone from wherever it lies."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from jcl.errors import RunError
from jcl.export.backbone_file import backbone_info
from jcl.export.hub_folder import is_hub_folder
from jcl.export.reading import read_weights
from jcl.export.recognising import Recognised, recognise
from jcl.export.weights import WeightsFile
from jcl.paths import home_expanded
from jcl.runs.checkpoint import newest_checkpoint, read_tensors
from jcl.runs.folder import RunFolder
from jcl.settings.schema import Settings


def load_backbone(path: str | Path, backbone: str | None = None) -> nn.Module:
    """The backbone of a run folder or of a weights file, in evaluation mode, giving pooled features (n, width).

    Opens what this tool writes (`jcl pretrain`, `jcl import` and every kind of `jcl export`) and what `jcl import`
    reads: files of torchvision, timm, detectron2, lightly, solo-learn and the released MoCo and JCL checkpoints. A run
    that has not finished gives the backbone of its newest checkpoint. `backbone` names the network where a file does
    not and its shapes do not tell. The network carries `info`, a `BackboneInfo` with the image size and normalisation
    it was trained with, or ImageNet's where the file does not say. Nothing in a file is ever run.
    """
    return open_backbone(Path(path), backbone).network


def open_backbone(path: Path, backbone: str | None = None, image_size: int | None = None) -> Recognised:
    """As `load_backbone`, with an account of what the file held."""
    path = home_expanded(path)
    if not path.exists():
        raise RunError(f"there is no run or weights file at {path}.")
    folder = RunFolder(path)
    if path.is_dir() and (folder.holds_run() or not is_hub_folder(path)):
        _demand_run(folder)
        settings = folder.settings()
        weights = read_weights(folder.backbone_file) if folder.backbone_file.exists() else _unfinished(folder, settings)
    else:
        weights = read_weights(path)
    return recognise(weights, backbone, image_size)


def _demand_run(folder: RunFolder) -> None:
    """A fine-tuning leaves a backbone too, but its folder is no run and names no images to measure it on."""
    if folder.backbone_file.is_file() and not folder.settings_file.is_file():
        raise RunError(f"{folder.path} holds no run but a backbone; give that file: {folder.backbone_file}.")


def _unfinished(folder: RunFolder, settings: Settings) -> WeightsFile:
    newest = newest_checkpoint(folder.checkpoints)
    if newest is None:
        raise RunError(f"the run in {folder.path} has no checkpoint yet; let it train for a while first.")
    prefix = "model.query_encoder.backbone."
    tensors, _ = read_tensors(newest)
    own = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    # The width of the features is measured once the network is built.
    return WeightsFile(newest, "checkpoint of a run", own, info=backbone_info(settings, feature_width=0))
