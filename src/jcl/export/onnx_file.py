"""Backbones as ONNX programs: images (batch, 3, S, S), normalised by the caller, to pooled features (batch, width).

The program is written as it was traced, with each weight under its own name and nothing folded into another, so the
network can be had back from the file bit for bit; runtimes fold and fuse for themselves when they load it. What the
program does not need (counts of batches) travels in the file's text.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from jcl.errors import RunError, SettingsError
from jcl.export.backbone_file import BackboneInfo, weights_of
from jcl.export.weights import INFO_KEY, WeightsFile

OPSET = 18
_REST = "jcl_rest"
_TOLERANCE = 1e-4  # of features, relative to the largest


def onnx_content(network: nn.Module, info: BackboneInfo) -> bytes:
    """The network as the bytes of an ONNX file."""
    onnx = _onnx("writing ONNX files")
    _need_exporter()
    images = torch.zeros(2, 3, info.image_size, info.image_size)
    batch = torch.export.Dim("batch")
    try:
        with _quiet():
            program = torch.onnx.export(
                network,
                (images,),
                dynamo=True,
                optimize=False,
                verbose=False,
                opset_version=OPSET,
                input_names=["images"],
                output_names=["features"],
                dynamic_shapes=({0: batch},),
            )
    except torch.onnx.errors.OnnxExporterError as error:
        reason = str(error).strip().splitlines()[0]
        raise SettingsError(f"PyTorch cannot write {info.backbone} as ONNX ({reason}); choose another --to.") from None
    assert program is not None
    model = program.model_proto
    _forget_the_machine(model)
    for name, text in _described(info).items():
        model.metadata_props.add(key=name, value=text)
    model.metadata_props.add(key=_REST, value=_as_text(_rest(onnx, model, network)))
    onnx.checker.check_model(model)
    content: bytes = model.SerializeToString()
    return content


def check_onnx(content: bytes, network: nn.Module, info: BackboneInfo) -> bool:
    """Run the program on random images beside the network; False where there is no onnxruntime to run it."""
    try:
        import onnxruntime
    except ImportError:
        return False
    images = torch.randn(3, 3, info.image_size, info.image_size, generator=torch.Generator().manual_seed(0))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    (features,) = session.run(["features"], {"images": images.numpy()})
    with torch.inference_mode():
        wanted = network(images)
    apart = float((torch.from_numpy(features) - wanted).abs().max() / wanted.abs().max().clamp(min=1e-12))
    if not apart <= _TOLERANCE:
        raise RunError(f"onnxruntime gives other features than PyTorch ({apart:.1e} apart), so nothing was written.")
    return True


def read_onnx(path: Path) -> WeightsFile:
    """The weights in an ONNX file that this tool wrote."""
    onnx = _onnx(f"reading {path}")
    try:
        model = onnx.load(str(path), load_external_data=False)
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}.") from None
    except Exception:  # the errors of protocol buffers have no common name across its versions
        raise RunError(f"{path} cannot be read as an ONNX file; it is damaged or cut short.") from None
    texts = {entry.key: entry.value for entry in model.metadata_props}
    info = BackboneInfo.from_text(texts.get(INFO_KEY))
    if info is None:
        raise RunError(
            f"{path} is an ONNX program that this tool did not write, so its network cannot be built again from it; "
            "give the file of weights it was made from."
        )
    try:
        return WeightsFile(
            path, "ONNX file", _initial_values(onnx, model) | _from_text(texts.get(_REST, "")), info=info
        )
    except (ValueError, TypeError, LookupError, SafetensorError):
        raise RunError(f"the weights in {path} cannot be read; the file is damaged.") from None


def _onnx(purpose: str) -> Any:
    try:
        import onnx
    except ImportError:
        raise SettingsError(
            f"{purpose} needs onnx, which is not installed; run: pip install 'joint-contrastive-learning[onnx]'."
        ) from None
    return onnx


def _need_exporter() -> None:
    try:
        import onnxscript  # noqa: F401
    except ImportError:
        raise SettingsError(
            "writing ONNX files needs onnxscript, which is not installed; "
            "run: pip install 'joint-contrastive-learning[onnx]'."
        ) from None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's remarks on its own working."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _forget_the_machine(model: Any) -> None:
    """Drop the exporter's notes on each node, which name files and lines of whoever ran it."""
    for part in (*model.graph.node, *model.graph.input, *model.graph.output, *model.graph.value_info):
        del part.metadata_props[:]
        part.doc_string = ""
    for value in model.graph.initializer:
        del value.metadata_props[:]
    del model.graph.metadata_props[:]
    del model.metadata_props[:]


def _described(info: BackboneInfo) -> dict[str, str]:
    return {
        INFO_KEY: info.to_text(),
        "backbone": info.backbone,
        "image_size": str(info.image_size),
        "feature_width": str(info.feature_width),
        "input": "RGB in [0, 1], from which mean is subtracted and which is then divided by std, per channel",
        "mean": json.dumps(info.mean),
        "std": json.dumps(info.std),
    }


def _rest(onnx: Any, model: Any, network: nn.Module) -> dict[str, Tensor]:
    """What the network holds and the program does not, or not in the same bits."""
    held = _initial_values(onnx, model)
    return {
        name: value
        for name, value in weights_of(network).items()
        if name not in held or held[name].dtype != value.dtype or not torch.equal(held[name], value)
    }


def _initial_values(onnx: Any, model: Any) -> dict[str, Tensor]:
    values = {}
    for value in model.graph.initializer:
        if value.data_location == onnx.TensorProto.EXTERNAL:
            raise ValueError("weights in another file")  # whose path a stranger chose
        values[value.name] = torch.from_numpy(onnx.numpy_helper.to_array(value).copy())
    return values


def _as_text(tensors: dict[str, Tensor]) -> str:
    return base64.b64encode(save(tensors)).decode("ascii")


def _from_text(text: str) -> dict[str, Tensor]:
    return load(base64.b64decode(text, validate=True)) if text else {}
