"""What each target of an export is given: the content of its files, and what to know when it is used."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save
from torch import nn

from jcl.errors import RunError, SettingsError
from jcl.export.backbone_file import FORMAT, BackboneInfo, weights_of
from jcl.export.counterparts import in_timm, in_torchvision, same_features
from jcl.export.detectron2_file import detectron2_configuration, detectron2_content, detectron2_name
from jcl.export.hub_folder import CARD, CONFIG, WEIGHTS, hub_config
from jcl.export.model_card import model_card
from jcl.export.onnx_file import OPSET, check_onnx, onnx_content
from jcl.export.torch_file import torch_file_content
from jcl.export.weights import INFO_KEY

_EVERYWHERE = "--to safetensors and --to onnx carry every backbone"


@dataclass(frozen=True)
class Parcel:
    """A backbone on its way."""

    network: nn.Module
    info: BackboneInfo
    source: Path  # the run folder or weights file it came from
    out: Path


@dataclass(frozen=True)
class Packed:
    """The content of each file by its name inside the folder `out`, or under "" of the file `out`; and hints."""

    files: dict[str, bytes]
    hints: tuple[str, ...]


def for_torchvision(parcel: Parcel) -> Packed:
    """torchvision's names; everything but the classifier is found."""
    info = parcel.info
    name = in_torchvision(parcel.network, info)
    if name is None:
        raise SettingsError(f"torchvision has no network that is the same as {info.backbone}; {_EVERYWHERE}.")
    lines = [f"model = torchvision.models.{name}({f'image_size={info.image_size}' if name.startswith('vit_') else ''})"]
    if info.stem == "small":
        lines += ["model.conv1 = torch.nn.Conv2d(3, 64, 3, 1, 1, bias=False)", "model.maxpool = torch.nn.Identity()"]
    lines.append(f"model.load_state_dict({_reader(parcel.out)}, strict=False)  # only the classifier is missing")
    return Packed({"": _state_dict(parcel)}, ("\n".join(lines), _shown(info)))


def for_timm(parcel: Parcel) -> Packed:
    """timm's names, which for ResNets are torchvision's."""
    name = _timm_name(parcel)
    size = f", img_size={parcel.info.image_size}" if _has_fixed_size(name) else ""
    hint = f"timm.create_model({name!r}, checkpoint_path={str(parcel.out)!r}, num_classes=0{size})"
    return Packed({"": _state_dict(parcel)}, (hint, _shown(parcel.info)))


def for_detectron2(parcel: Parcel) -> Packed:
    """A pickle of arrays under detectron2's names."""
    name = detectron2_name(parcel.network, parcel.info)
    content = detectron2_content(parcel.network, parcel.info)
    return Packed({"": content}, (detectron2_configuration(name, parcel.network, parcel.info, parcel.out),))


def for_this_tool(parcel: Parcel) -> Packed:
    """A backbone file as `jcl pretrain` leaves it."""
    content = save(weights_of(parcel.network), {"format": FORMAT, "info": parcel.info.to_text()})
    return Packed({"": content}, (f"jcl.load_backbone({str(parcel.out)!r})", _shown(parcel.info)))


def for_onnx(parcel: Parcel) -> Packed:
    """A program, tried with onnxruntime where that is there."""
    content = onnx_content(parcel.network, parcel.info)
    checked = check_onnx(content, parcel.network, parcel.info)
    said = "gives the same features as PyTorch" if checked else "is not installed, so the program was not tried"
    size, width = parcel.info.image_size, parcel.info.feature_width
    hint = f"images (batch, 3, {size}, {size}) -> features (batch, {width}), opset {OPSET}; onnxruntime {said}"
    return Packed({"": content}, (hint, _shown(parcel.info)))


def for_hub(parcel: Parcel) -> Packed:
    """A folder that `timm.create_model("local-dir:...")` opens, tried with timm before it is written."""
    name, info = _timm_name(parcel), parcel.info
    config = hub_config(name, info, info.shown.crop_ratio)
    files = {
        WEIGHTS: _as_safetensors(parcel),
        CARD: model_card(name, info, parcel.source).encode(),
        CONFIG: json.dumps(config, indent=2).encode() + b"\n",  # last: with it the folder can be opened
    }
    _try_with_timm(files, parcel)
    return Packed(files, (f"timm.create_model({f'local-dir:{parcel.out}'!r}, pretrained=True)", _shown(info)))


TARGETS: dict[str, Callable[[Parcel], Packed]] = {
    "torchvision": for_torchvision,
    "timm": for_timm,
    "detectron2": for_detectron2,
    "safetensors": for_this_tool,
    "onnx": for_onnx,
    "hub-folder": for_hub,
}


def _timm_name(parcel: Parcel) -> str:
    name = in_timm(parcel.network, parcel.info)
    if name is not None:
        return name
    if parcel.info.stem == "small":
        raise SettingsError(
            f"timm builds ResNets with a 7×7 stem only and could not open this {parcel.info.backbone} with the small "
            "stem; --to torchvision, safetensors or onnx can carry it."
        )
    raise SettingsError(f"timm has no network that is the same as {parcel.info.backbone}; {_EVERYWHERE}.")


def _has_fixed_size(name: str) -> bool:
    import timm

    known = timm.get_pretrained_cfg(name)
    return bool(known and known.fixed_input_size)


def _try_with_timm(files: dict[str, bytes], parcel: Parcel) -> None:
    import timm

    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        opened = timm.create_model(f"local-dir:{folder}", pretrained=True)
    if not same_features(parcel.network, opened, parcel.info.image_size):
        raise RunError(
            f"timm gives other features for this {parcel.info.backbone}, so no folder was written; "
            "--to safetensors and --to onnx carry every backbone."
        )


def _state_dict(parcel: Parcel) -> bytes:
    if parcel.out.suffix == ".safetensors":
        return _as_safetensors(parcel)
    return torch_file_content(parcel.network, parcel.info)


def _as_safetensors(parcel: Parcel) -> bytes:
    return save(weights_of(parcel.network), {"format": "pt", INFO_KEY: parcel.info.to_text()})


def _reader(out: Path) -> str:
    if out.suffix == ".safetensors":
        return f"safetensors.torch.load_file({str(out)!r})"
    return f"torch.load({str(out)!r}, weights_only=True)"


def _shown(info: BackboneInfo) -> str:
    return f"images of {info.image_size} px, RGB in [0, 1], normalised with mean {info.mean} and std {info.std}"
