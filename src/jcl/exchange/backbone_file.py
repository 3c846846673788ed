"""The backbone of a run as a file of its own, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors.torch import save
from torch import Tensor, nn

from jcl.core.encoder import build_backbone
from jcl.errors import RunError
from jcl.settings import Settings
from jcl.train.checkpoint import newest_checkpoint, read_tensors, write_atomically
from jcl.train.folder import RunFolder

FORMAT = "jcl-backbone-1"


@dataclass(frozen=True)
class BackboneInfo:
    """What is needed to build the network again and to feed it."""

    backbone: str
    stem: str
    image_size: int
    feature_width: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


def backbone_info(settings: Settings, feature_width: int) -> BackboneInfo:
    image_size = settings.views.image_size
    assert isinstance(image_size, int), "settings of a run are resolved"
    return BackboneInfo(
        backbone=settings.model.backbone,
        stem=settings.model.stem,
        image_size=image_size,
        feature_width=feature_width,
        mean=settings.views.mean,
        std=settings.views.std,
    )


def save_backbone(backbone: nn.Module, info: BackboneInfo, path: Path) -> None:
    """Write the weights with what is needed to rebuild the network; nothing in the file can run."""
    tensors = {name: value.detach().cpu().contiguous() for name, value in backbone.state_dict().items()}
    write_atomically(path, save(tensors, {"format": FORMAT, "info": json.dumps(asdict(info))}))


def load_backbone(path: str | Path) -> nn.Module:
    """The backbone of a run folder or of an exported file, in eval mode, giving pooled features (n, width).

    A run that has not finished gives the backbone of its newest checkpoint. The network carries `info`, a
    `BackboneInfo` with the image size and normalisation it was trained with.
    """
    path = Path(path)
    if not path.exists():
        raise RunError(f"there is no run or weights file at {path}.")
    if path.is_dir():
        folder = RunFolder(path)
        settings = folder.settings()
        if not folder.backbone_file.exists():
            return _from_checkpoint(folder, settings)
        path = folder.backbone_file
    tensors, metadata = read_tensors(path)
    if metadata.get("format") != FORMAT:
        raise RunError(f"{path} is a safetensors file, but not a backbone written by this tool.")
    try:
        values = json.loads(metadata["info"])
        info = BackboneInfo(**(values | {"mean": tuple(values["mean"]), "std": tuple(values["std"])}))
    except (ValueError, KeyError, TypeError):
        raise RunError(f"{path} does not say which network its weights are for; it is damaged.") from None
    return _rebuild(info, tensors, path)


def _from_checkpoint(folder: RunFolder, settings: Settings) -> nn.Module:
    newest = newest_checkpoint(folder.checkpoints)
    if newest is None:
        raise RunError(f"the run in {folder.path} has no checkpoint yet; let it train for a while first.")
    prefix = "model.query_encoder.backbone."
    tensors, _ = read_tensors(newest)
    own = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    _, width = build_backbone(settings.model.backbone)
    return _rebuild(backbone_info(settings, width), own, newest)


def _rebuild(info: BackboneInfo, tensors: Mapping[str, Tensor], path: Path) -> nn.Module:
    network, _ = build_backbone(info.backbone, stem=info.stem, image_size=info.image_size)  # type: ignore[arg-type]
    try:
        network.load_state_dict(tensors)
    except RuntimeError as error:
        raise RunError(f"the weights in {path} do not fit {info.backbone}: {' '.join(str(error).split())}") from None
    network.info = info  # type: ignore[assignment]
    return network.eval()
