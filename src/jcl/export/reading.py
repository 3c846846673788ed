"""Read weights files of any kind that this package or the libraries around it write. No file is ever executed.

The first bytes of a file decide what it is rather than its name: `.pth`, `.ckpt`, `.bin` and `.pkl` say little.
"""

import errno
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jcl.errors import RunError
from jcl.export.backbone_file import FORMAT, INFO_KEY, BackboneInfo
from jcl.export.hub import TORCH_WEIGHTS, WEIGHTS, read_hub_config
from jcl.runs.checkpoint import read_tensors
from jcl.views import IMAGENET_MEAN, IMAGENET_STD

_LEGACY_START = bytes.fromhex("80028a0a6cfc9c46f9206aa85019")  # torch.save before PyTorch 1.6
# Keys under which training programs keep the weights. Averaged weights come last, except DINO's teacher.
_WEIGHTS_KEYS = ("state_dict", "model", "model_state_dict", "state_dict_ema", "model_ema", "teacher", "student")


@dataclass(frozen=True, eq=False)
class WeightsFile:
    """The tensors of a file under their names in it. `info` if this package wrote it, else what the file states."""

    path: Path
    kind: str  # "torch file", "hub folder", ...
    tensors: dict[str, Tensor]
    info: BackboneInfo | None = None
    architecture: str | None = None
    image_size: int | None = None
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    ignored: tuple[str, ...] = ()  # other entries of the file: optimizer, epoch, ...
    epoch: float | None = None  # of a checkpoint


def read_weights(path: Path) -> WeightsFile:
    """All tensors of a weights file or hub folder."""
    if path.is_dir():
        return _read_hub_folder(path)
    if path.exists() and not path.is_file():
        raise RunError(f"{path} cannot be read: not a regular file.")  # opening a pipe would block
    try:
        with path.open("rb") as file:
            start = file.read(16)
        if path.suffix == ".safetensors" or start[8:9] == b"{":
            return _read_safetensors(path)
        if start.startswith(b"\x80") and not start.startswith(_LEGACY_START):
            raise RunError(
                f"{path} is a pickle, which jcl never executes. If you trust its source, convert it: torch.save({{"
                "name: torch.from_numpy(value) for name, value in pickle.load("
                f"open({path.name!r}, 'rb'), encoding='latin1')['model'].items()}}, 'weights.pth')."
            )
        content = _load_torch_file(path)
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}.") from None
    return _find_weights(path, content)


def _read_safetensors(path: Path) -> WeightsFile:
    tensors, metadata = read_tensors(path)
    if metadata.get("format", "").startswith("jcl-checkpoint"):
        raise RunError(f"{path} is a training checkpoint, not a backbone; give the run folder instead.")
    if metadata.get("format") == FORMAT:
        info = BackboneInfo.from_text(metadata.get("info"))
        if info is None:
            raise RunError(f"{path} is damaged: it does not describe its network.")
        return WeightsFile(path, "backbone file", tensors, info)
    return WeightsFile(path, "safetensors file", tensors, BackboneInfo.from_text(metadata.get(INFO_KEY)))


def _read_hub_folder(path: Path) -> WeightsFile:
    config = read_hub_config(path)
    file = next((file for name in (WEIGHTS, TORCH_WEIGHTS) if (file := path / name).is_file()), None)
    if file is None:
        raise RunError(f"{path} has a config.json but no {WEIGHTS}; copy the whole folder.")
    weights = replace(read_weights(file), path=path, kind="hub folder", ignored=(), **config)
    if weights.info is None:
        return weights
    # `config.json` may have been edited, and timm follows it.
    size = weights.image_size or weights.info.image_size
    return replace(weights, info=replace(weights.info, image_size=size, mean=weights.mean, std=weights.std))


def _load_torch_file(path: Path) -> Any:
    """What `torch.save` wrote, if it is tensors and plain containers."""
    try:
        with warnings.catch_warnings(action="ignore"):  # about the age of the file
            return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        if error.errno != errno.EINVAL:  # which PyTorch meets in files cut below 64 KB
            raise
    except Exception as error:  # depends on where the file was truncated or damaged
        if named := re.search(r"GLOBAL (\S+)", str(error)):
            raise RunError(
                f"{path} was not opened: it holds more than tensors, and unpickling it would run {named[1]}. If you "
                "trust its source, save the weights alone where it was made: torch.save(torch.load("
                f"{path.name!r}, map_location='cpu', weights_only=False)['state_dict'], 'weights.pth'). In place of "
                "['state_dict'] use ['teacher'] for DINO, ['model'] for others, and .state_dict() for a whole model."
            ) from None
    raise RunError(
        f"{path} cannot be read as a torch.save file: damaged, truncated, ONNX, TorchScript or another format."
    )


def _is_plain(value: object) -> bool:
    """Whether this is a tensor with values that are no sparse, quantized or complex."""
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return False
    return not (value.is_quantized or value.is_meta or value.is_complex())


def _find_weights(path: Path, content: object) -> WeightsFile:
    """The weights in whatever dictionary a training program saved."""
    outer = content if isinstance(content, Mapping) else {}
    inner = next((outer[key] for key in _WEIGHTS_KEYS if isinstance(outer.get(key), Mapping)), outer)
    around = {} if inner is outer else outer
    tensors = {name: value for name, value in inner.items() if isinstance(name, str) and _is_plain(value)}
    if not tensors:
        raise RunError(f"{path} holds no weights: there are no named tensors in it.")
    metadata, architecture = getattr(inner, "_metadata", None), around.get("arch")
    note = metadata.get(INFO_KEY) if isinstance(metadata, dict) else None  # as `jcl export` writes state dicts
    return WeightsFile(
        path,
        "torch file",
        tensors,
        info=BackboneInfo.from_text(note.get("info")) if isinstance(note, dict) else None,
        architecture=architecture if isinstance(architecture, str) else None,
        ignored=tuple(str(name) for name, value in around.items() if value is not inner),
    )
