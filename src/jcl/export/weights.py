"""What any weights file comes to once it is read: named tensors and what the file says about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from jcl.export.backbone_file import BackboneInfo
from jcl.views import IMAGENET_MEAN, IMAGENET_STD

INFO_KEY = "jcl"  # under which a file for another library says what network it is of
# Under these names training programs keep the weights beside other things. An average over training comes last:
# where the weights themselves are there, they are what was asked for.
_INNER = ("state_dict", "model", "model_state_dict", "state_dict_ema", "model_ema")


@dataclass(frozen=True, eq=False)
class WeightsFile:
    """Tensors as a file names them; `info` where this tool wrote it, and otherwise what can be told."""

    path: Path
    kind: str  # of file, for people
    tensors: dict[str, Tensor]
    info: BackboneInfo | None = None
    architecture: str | None = None  # as the file names its network
    image_size: int | None = None
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    ignored: tuple[str, ...] = field(default=())  # what lies beside the weights: optimiser, epoch


def weights_within(content: object) -> tuple[Mapping[object, object], Mapping[object, object]] | None:
    """The mapping that holds the weights, and the one around it; None where there is none."""
    if not isinstance(content, Mapping):
        return None
    for name in _INNER:
        inner = content.get(name)
        if isinstance(inner, Mapping):
            return inner, content
    return content, {}
