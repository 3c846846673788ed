"""Opening a weights file of any kind this tool or the libraries around it write. Nothing in a file is ever run.

What a file is, is told from how it begins rather than from its name, since `.pth`, `.ckpt`, `.bin` and `.pkl` say
little.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jcl.errors import RunError
from jcl.export import onnx_file
from jcl.export.array_pickle import DamagedPickle, RefusedPickle, load_arrays
from jcl.export.backbone_file import FORMAT, BackboneInfo
from jcl.export.hub_folder import WEIGHTS, read_hub_config
from jcl.export.torch_file import LEGACY_START, noted_info, read_torch_file
from jcl.export.weights import INFO_KEY, WeightsFile, weights_within
from jcl.runs.checkpoint import read_tensors


def read_weights(path: Path) -> WeightsFile:
    """All tensors of a weights file or hub folder under the names it gives them, with what it says about them."""
    if path.is_dir():
        return _read_hub_folder(path)
    start = _first_bytes(path)
    if path.suffix == ".safetensors" or start[8:9] == b"{":
        return _read_safetensors(path)
    if path.suffix == ".onnx":
        return onnx_file.read_onnx(path)
    if start.startswith(b"\x80") and not start.startswith(LEGACY_START):
        return _read_array_pickle(path)
    content = read_torch_file(path)
    return _weights(path, "torch file", content, _tensors_only)


def _first_bytes(path: Path, count: int = 16) -> bytes:
    if path.exists() and not path.is_file():
        raise RunError(f"{path} cannot be read: it is no file.")  # a pipe would keep its reader waiting for ever
    try:
        with path.open("rb") as file:
            return file.read(count)
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}.") from None


def _read_safetensors(path: Path) -> WeightsFile:
    tensors, metadata = read_tensors(path)
    if metadata.get("format", "").startswith("jcl-checkpoint"):
        raise RunError(
            f"{path} is a checkpoint of a run and not a backbone written by this tool; give the run's folder instead."
        )
    if metadata.get("format") == FORMAT:
        info = BackboneInfo.from_text(metadata.get("info"))
        if info is None:
            raise RunError(f"{path} does not say which network its weights are for; it is damaged.")
        return WeightsFile(path, "backbone file of this tool", tensors, info=info)
    note = BackboneInfo.from_text(metadata.get(INFO_KEY))
    return WeightsFile(path, "safetensors file", tensors, info=note)


def _read_array_pickle(path: Path) -> WeightsFile:
    try:
        content = load_arrays(path.read_bytes())
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}.") from None
    except RefusedPickle as refused:
        raise RunError(
            f"{path} is a pickle that holds more than arrays: opening it would run {refused}, so it was not opened and "
            "nothing in it ran; export the weights again as arrays or with torch.save(model.state_dict(), ...)."
        ) from None
    except DamagedPickle:
        raise RunError(f"{path} cannot be read as a pickle of arrays; it is damaged or cut short.") from None
    return _weights(path, "pickle of arrays", content, _arrays_as_tensors)


def _read_hub_folder(path: Path) -> WeightsFile:
    described = read_hub_config(path)
    files = [path / name for name in (WEIGHTS, "pytorch_model.bin")]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        raise RunError(f"{path} has a config.json but no {WEIGHTS} beside it; copy the whole folder.")
    weights = read_weights(file)
    return WeightsFile(
        path,
        "hub folder",
        weights.tensors,
        info=weights.info,
        architecture=described.architecture,
        image_size=described.image_size,
        mean=described.mean,
        std=described.std,
    )


def _weights(path: Path, kind: str, content: object, pick: Any) -> WeightsFile:
    """Weights among whatever else a training program keeps in a dictionary."""
    found = weights_within(content)
    tensors = pick(found[0]) if found else {}
    if found is None or not tensors:
        raise RunError(f"{path} holds no weights: there are no tensors under names in it.")
    inner, around = found
    architecture = around.get("arch")
    note = around.get(INFO_KEY)
    return WeightsFile(
        path,
        kind,
        tensors,
        info=noted_info(inner) or BackboneInfo.from_text(note),
        architecture=architecture if isinstance(architecture, str) else None,
        ignored=tuple(str(name) for name, value in around.items() if value is not inner),
    )


def _tensors_only(content: Mapping[object, object]) -> dict[str, Tensor]:
    return {name: value for name, value in content.items() if isinstance(name, str) and isinstance(value, Tensor)}


def _arrays_as_tensors(content: Mapping[object, object]) -> dict[str, Tensor]:
    return {
        name: torch.from_numpy(value)
        for name, value in content.items()
        if isinstance(name, str) and isinstance(value, np.ndarray)
    }
