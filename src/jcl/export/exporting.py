"""Export of backbones for other libraries, and import of backbones that other programs trained."""

import io
import json
import pickle
import re
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from jcl.core.encoder import OWN_BACKBONES, build_backbone, torchvision_networks
from jcl.errors import JclError, RunError, SettingsError, import_extra
from jcl.export.backbone_file import INFO_KEY, BackboneInfo, backbone_bytes, same_features, save_backbone, weights_of
from jcl.export.hub import CARD, CONFIG, WEIGHTS, hub_config, model_card, upload_repository
from jcl.export.layouts import resnet_name, to_detectron2
from jcl.export.loading import LoadedBackbone, open_backbone
from jcl.export.onnx_file import OPSET, check_onnx, onnx_bytes
from jcl.paths import expand_user, hub_name
from jcl.runs.atomic import make_folder, refuse_overwrite, write_atomically
from jcl.runs.checkpoint import to_safetensors
from jcl.runs.folder import RunFolder

_ALWAYS = "use --to safetensors or --to onnx, which take every backbone"
_SMALL_STEM = "use --to torchvision, safetensors or onnx, or pre-train with --set model.stem=imagenet"
_SUFFIXES = {"detectron2": ".pkl", "mmdetection": ".pth", "ultralytics": ".pth"}
_ANY_BACKBONE = ("safetensors", "onnx")  # targets that take every backbone, and the suffixes of their files


@dataclass(frozen=True)
class Exported:
    """What was written, and hints on how to use it."""

    path: Path
    info: BackboneInfo
    tensors: int
    bytes: int
    hints: tuple[str, ...]


def export_backbone(
    source: str | Path, target: str, out: str | Path, *, force: bool = False, backbone: str | None = None
) -> Exported:
    """Write the backbone of a run folder or weights file for `target`, one of `TARGETS`.

    `out` is overwritten only with `force`; for "hf" it is a model repository of Hugging Face, `USER/NAME`. `backbone`
    names the network as in `load_backbone`.
    """
    source, out = expand_user(source), expand_user(out)
    suffix = f".{target}" if target in _ANY_BACKBONE else _SUFFIXES.get(target)
    if suffix and out.suffix != suffix:
        raise SettingsError(f"{out} must end in {suffix} for {target}.")
    if target == "hf":
        name = hub_name(out) or str(out)
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
            raise SettingsError(f"-o: {name} is not the name of a repository; give USER/NAME.")
        out = Path(f"hf:{name}")
    elif target != "hub-folder":
        refuse_overwrite(out, force=force)
    elif out.is_file() or RunFolder(out).holds_run() or (out.exists() and any(out.iterdir()) and not force):
        raise RunError(f"{out} is not an empty folder; choose another with -o, or use --force to overwrite a model.")
    loaded = open_backbone(source, backbone)
    if loaded.info.channels != 3 and target not in _ANY_BACKBONE:
        raise SettingsError(f"{target} needs 3 input channels, this network has {loaded.info.channels}; {_ALWAYS}.")
    content, *hints = TARGETS[target](ExportJob(loaded.network, loaded.info, source, out))
    files = content if isinstance(content, dict) else {"": content}
    exported = Exported(out, loaded.info, len(loaded.network.state_dict()), sum(map(len, files.values())), tuple(hints))
    if target == "hf":
        return replace(exported, hints=(upload_repository(hub_name(out), files, force=force), *hints))
    if target == "hub-folder":
        make_folder(out)
    for name, file in files.items():
        write_atomically(out / name, file, follow_links=not name)
    return exported


def import_backbone(
    source: str | Path,
    out: str | Path,
    *,
    backbone: str | None = None,
    image_size: int | None = None,
    force: bool = False,
) -> LoadedBackbone:
    """Convert a weights file to a backbone file, bit for bit; give `backbone` and `image_size` if it lacks them."""
    source, out = expand_user(source), expand_user(out)
    if out.suffix != ".safetensors":
        raise SettingsError(f"{out} must end in .safetensors.")
    refuse_overwrite(out, force=force)
    loaded = open_backbone(source, backbone, image_size)
    save_backbone(loaded.network, loaded.info, out, follow_links=True)
    return loaded


@dataclass(frozen=True)
class ExportJob:
    """The backbone to export, the run folder or weights file it comes from, and the file or folder to write."""

    network: nn.Module
    info: BackboneInfo
    source: Path
    out: Path


# The file to write, or the files of a folder by name, and hints for its user.
Content = tuple[bytes | dict[str, bytes], *tuple[str, ...]]


def for_torchvision(job: ExportJob) -> Content:
    """A state dict with torchvision's names, without the classifier."""
    info = job.info
    name = torchvision_name(job.network, info)
    if name is None:
        raise SettingsError(f"torchvision has no network equal to {info.backbone}; {_ALWAYS}.")
    lines = [f"model = torchvision.models.{name}({f'image_size={info.image_size}' if name.startswith('vit_') else ''})"]
    if info.stem != "imagenet":
        stride = 1 if info.stem == "small" else 2
        lines.append(f"model.conv1 = torch.nn.Conv2d(3, 64, 3, {stride}, 1, bias=False)")
        lines.append("model.maxpool = torch.nn.Identity()")
    file = str(job.out)
    safe = job.out.suffix == ".safetensors"
    state = f"safetensors.torch.load_file({file!r})" if safe else f"torch.load({file!r}, weights_only=True)"
    lines.append(f"model.load_state_dict({state}, strict=False)  # only the classifier is missing")
    return _state_dict(job), "\n".join(lines), _preprocessing(info)


def for_timm(job: ExportJob) -> Content:
    """A state dict with timm's names, which for ResNets are torchvision's."""
    name = _require_timm_name(job)
    import timm

    known = timm.get_pretrained_cfg(name)
    size = f", img_size={job.info.image_size}" if known and known.fixed_input_size else ""
    hint = f"timm.create_model({name!r}, checkpoint_path={str(job.out)!r}, num_classes=0{size})"
    return _state_dict(job), hint, _preprocessing(job.info)


def for_detectron2(job: ExportJob) -> Content:
    """The file that detectron2's own converter makes of torchvision weights, and settings unlike its defaults."""
    weights, name = weights_of(job.network), _require_resnet(job, "detectron2")
    buffer, arrays = io.BytesIO(), {to_detectron2(part): value.numpy() for part, value in weights.items()}
    _ArrayPickler(buffer, protocol=4).dump({"model": arrays, "__author__": "jcl", "matching_heuristics": True})
    depth, groups, width = _resnet_shape(name, weights)
    mean, std = map(_scaled_to_255, (job.info.mean, job.info.std))
    config = f"""MODEL:
  WEIGHTS: {str(job.out)!r}
  PIXEL_MEAN: {mean}
  PIXEL_STD: {std}
  BACKBONE: {{FREEZE_AT: 0}}  # as in MoCo and JCL
  RESNETS:
    DEPTH: {depth}
    STRIDE_IN_1X1: False
    NORM: SyncBN
    NUM_GROUPS: {groups}
    WIDTH_PER_GROUP: {width}
    RES2_OUT_CHANNELS: {64 if depth in ("18", "34") else 256}
INPUT:
  FORMAT: RGB"""
    return buffer.getvalue(), config


def for_mmdetection(job: ExportJob) -> Content:
    """A checkpoint as mmdetection writes them, with torchvision's names after `backbone.`."""
    weights, name = weights_of(job.network), _require_resnet(job, "mmdetection")
    if name.startswith("wide"):
        raise SettingsError(f"mmdetection has no {name}; {_ALWAYS}.")
    depth, groups, width = _resnet_shape(name, weights)
    kind = "'ResNet'" if groups == 1 else f"'ResNeXt', groups={groups}, base_width={width}"
    mean, std = map(_scaled_to_255, (job.info.mean, job.info.std))
    neck = "" if job.info.feature_width > 512 else ",\n    neck=dict(in_channels=[64, 128, 256, 512])"
    config = f"""model = dict(
    data_preprocessor=dict(mean={mean}, std={std}, bgr_to_rgb=True),
    backbone=dict(
        type={kind}, depth={depth}, style='pytorch', frozen_stages=-1, norm_eval=False,
        norm_cfg=dict(type='SyncBN', requires_grad=True),
        init_cfg=dict(type='Pretrained', checkpoint={str(job.out)!r}, prefix='backbone.')){neck})"""
    state = {f"backbone.{part}": value for part, value in weights.items()}
    return _torch_bytes(state, job.info, "state_dict"), config


def _resnet_shape(name: str, weights: dict[str, Tensor]) -> tuple[str, int, int]:
    """The depth of a ResNet, the groups of its convolutions and the width of each."""
    outputs, inputs = weights["layer1.0.conv2.weight"].shape[:2]
    return str(re.findall(r"res(?:net|next)(\d+)", name)[0]), outputs // inputs, inputs


def _scaled_to_255(values: tuple[float, ...]) -> list[float]:
    return [round(255 * value, 3) for value in values]


def for_ultralytics(job: ExportJob) -> Content:
    """A state dict for ultralytics' module `TorchVision`, which numbers the layers of a ResNet or ConvNeXt.

    ultralytics does not normalize images, so the first convolution of the file does.
    """
    name, info, width = torchvision_name(job.network, job.info), job.info, job.info.feature_width
    if name is None or not name.startswith("convnext"):
        name = _require_resnet(job, "ultralytics")
    network = deepcopy(job.network)
    fold_normalization(network, info)
    numbers = {"conv1": "0.", "bn1": "1."} | {f"layer{stage}": f"{stage + 3}." for stage in (1, 2, 3, 4)}
    numbers["features"] = ""  # of a ConvNeXt; the norm after its pooling is not part of a pyramid
    parts = [(*part.partition("."), value) for part, value in weights_of(network).items()]
    state = {f"model.0.m.{numbers[first]}{rest}": value for first, _, rest, value in parts if first in numbers}
    places = (4, 6, 8) if name.startswith("convnext") else (6, 7, 8)
    levels = zip((width // 4, width // 2, width), places, strict=True)
    model = ["backbone:", f"  - [-1, 1, TorchVision, [{width}, {name}, null, True, 2, True]]"]
    model += [f"  - [0, 1, Index, [{channels}, {place}]]" for channels, place in levels]
    use = f"""yolo = ultralytics.YOLO('model.yaml')
yolo.model.load_state_dict(torch.load({str(job.out)!r}, weights_only=True), strict=False)
yolo.load(yolo.model)  # training then starts from these weights
# Images are padded with black instead of the mean color, which changes the features of images below about 224 px."""
    plain = replace(info, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    return _torch_bytes(state, plain), "\n".join(model), use


def fold_normalization(network: nn.Module, info: BackboneInfo) -> None:
    """Change the first convolution so that it takes images in [0, 1]; a padded border is then black, not gray."""
    first = next(module for module in network.modules() if isinstance(module, nn.Conv2d))
    mean, std = (torch.tensor(values)[:, None, None] for values in (info.mean, info.std))
    with torch.no_grad():
        shift = (first.weight * mean / std).sum(dim=(1, 2, 3))
        first.weight /= std
        if first.bias is not None:
            first.bias -= shift
        else:
            norm = next(module for module in network.modules() if isinstance(module, nn.BatchNorm2d))
            norm.get_buffer("running_mean").add_(shift)


class _ArrayPickler(pickle.Pickler):
    """Writes arrays for numpy 1 and 2; numpy's own pickles name functions that moved between them."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            # A bytearray rather than bytes keeps the array writable, which torch.from_numpy wants.
            return np.ndarray, (value.shape, value.dtype.str, bytearray(value.tobytes()))
        return NotImplemented


def for_safetensors(job: ExportJob) -> Content:
    """A backbone file as `jcl pretrain` writes it."""
    return backbone_bytes(job.network, job.info), f"jcl.load_backbone({str(job.out)!r})", _preprocessing(job.info)


def for_onnx(job: ExportJob) -> Content:
    """An ONNX file with which onnxruntime gives the same features as PyTorch."""
    content = onnx_bytes(job.network, job.info)
    check_onnx(content, job.network, job.info)
    shape = f"(batch, {job.info.channels}, {job.info.image_size}, {job.info.image_size})"
    features = f"features (batch, {job.info.feature_width})"
    hint = f"images {shape} -> {features}, opset {OPSET}; onnxruntime gives the same features as PyTorch"
    return content, hint, _preprocessing(job.info)


def for_hub(job: ExportJob) -> Content:
    """The files for `timm.create_model("local-dir:...")` or "hf-hub:...", opened with timm before they are written."""
    name, info, repository = _require_timm_name(job), job.info, hub_name(job.out)
    files = {
        WEIGHTS: _safetensors_bytes(job),
        CARD: model_card(name, info, job.source, repository).encode(),
        CONFIG: json.dumps(hub_config(name, info), indent=2).encode() + b"\n",  # last: it makes the folder loadable
    }
    import timm

    with tempfile.TemporaryDirectory() as folder:
        for file, content in files.items():
            (Path(folder) / file).write_bytes(content)
        opened = timm.create_model(f"local-dir:{folder}", pretrained=True)
    if not same_features(job.network, opened.eval(), info):
        raise RunError(f"timm gives other features for this {info.backbone}, so nothing was written; {_ALWAYS}.")
    address = f"hf-hub:{repository}" if repository else f"local-dir:{job.out}"
    return files, f"timm.create_model({address!r}, pretrained=True)", _preprocessing(info)


TARGETS: dict[str, Callable[[ExportJob], Content]] = {
    "torchvision": for_torchvision,
    "timm": for_timm,
    "detectron2": for_detectron2,
    "mmdetection": for_mmdetection,
    "ultralytics": for_ultralytics,
    "safetensors": for_safetensors,
    "onnx": for_onnx,
    "hub-folder": for_hub,
    "hf": for_hub,
}


def torchvision_name(network: nn.Module, info: BackboneInfo) -> str | None:
    """The name of torchvision's equal network, or None if it has none."""
    name, known = info.backbone.removeprefix("timm/").partition(".")[0], torchvision_networks()
    same = info.backbone in known or (name in known and _is_same_network(network, info, name))
    return name if same else None


def _require_resnet(job: ExportJob, library: str) -> str:
    """torchvision's name of the ResNet, for libraries that take its weights."""
    info, name = job.info, resnet_name(weights_of(job.network), "")
    if name is None or torchvision_name(job.network, info) != name:
        raise SettingsError(f"{library} does not have the network {info.backbone}; {_ALWAYS}.")
    if info.stem != "imagenet":
        raise SettingsError(f"{library} has no ResNet with the {info.stem} stem of this backbone; {_SMALL_STEM}.")
    return name


def _require_timm_name(job: ExportJob) -> str:
    """The name of timm's equal network."""
    timm = import_extra("timm", "timm", "Comparing with timm's networks")
    info, name = job.info, job.info.backbone.removeprefix("timm/")
    if info.stem != "imagenet":
        raise SettingsError(f"timm has no ResNet with the {info.stem} stem of this backbone; {_SMALL_STEM}.")
    known = name not in OWN_BACKBONES and timm.is_model(name)
    if known and info.backbone in torchvision_networks():
        known = _is_same_network(job.network, info, f"timm/{name}")
    if not known:
        raise SettingsError(f"timm has no network equal to {info.backbone}; {_ALWAYS}.")
    return name


def _is_same_network(network: nn.Module, info: BackboneInfo, name: str) -> bool:
    """Whether another library's network takes all weights and gives the same features.

    Equal names and shapes are not enough: strides, paddings and pooling do not show in the weights.
    """
    try:
        other, _ = build_backbone(name, stem=info.stem, image_size=info.image_size)
        other.load_state_dict(network.state_dict())
    except (JclError, RuntimeError):
        return False
    return same_features(network, other.eval(), info)


def _state_dict(job: ExportJob) -> bytes:
    """A plain state dict as safetensors or torch.save writes it, depending on the name of the file.

    The `BackboneInfo` goes into the metadata, where `load_state_dict` ignores it and `load_backbone` finds it.
    """
    if job.out.suffix == ".safetensors":
        return _safetensors_bytes(job)
    versions = getattr(job.network.state_dict(), "_metadata", {})  # MNASNet loads weights by them
    return _torch_bytes(weights_of(job.network), job.info, versions=versions)


def _torch_bytes(
    weights: dict[str, Tensor], info: BackboneInfo, key: str | None = None, versions: Mapping[str, Any] | None = None
) -> bytes:
    state: Any = OrderedDict(weights)
    state._metadata = OrderedDict({"": {"version": 1}, **(versions or {}), INFO_KEY: {"info": info.to_text()}})
    buffer = io.BytesIO()
    torch.save(state if key is None else {key: state}, buffer)
    return buffer.getvalue()


def _safetensors_bytes(job: ExportJob) -> bytes:
    return to_safetensors(weights_of(job.network), {"format": "pt", INFO_KEY: job.info.to_text()})


def _preprocessing(info: BackboneInfo) -> str:
    return f"images of {info.image_size} px, {info.values}, normalized with mean {info.mean} and std {info.std}"
