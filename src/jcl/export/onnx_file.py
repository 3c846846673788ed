"""ONNX files: images (batch, 3, S, S), normalized by the caller, to pooled features (batch, width)."""

from __future__ import annotations

import contextlib
import json
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from jcl.errors import RunError, SettingsError
from jcl.export.backbone_file import BackboneInfo

OPSET = 18
_TOLERANCE = 1e-4  # of features, relative to the largest


def onnx_bytes(network: nn.Module, info: BackboneInfo) -> bytes:
    """The network as the content of an ONNX file."""
    onnx = _import("onnx")
    _import("onnxscript")
    images = torch.zeros(2, 3, info.image_size, info.image_size)
    try:
        with _quiet():
            program = torch.onnx.export(
                network,
                (images,),
                dynamo=True,
                optimize=False,  # runtimes do that; weights keep their names and values
                verbose=False,
                opset_version=OPSET,
                input_names=["images"],
                output_names=["features"],
                dynamic_shapes=({0: torch.export.Dim("batch")},),
            )
    except torch.onnx.errors.OnnxExporterError as error:
        reason = str(error).strip().splitlines()[0]
        raise SettingsError(f"PyTorch cannot export {info.backbone} to ONNX ({reason}); choose another --to.") from None
    assert program is not None
    model = program.model_proto
    _remove_source_locations(model)
    metadata = {
        "backbone": info.backbone,
        "image_size": str(info.image_size),
        "feature_width": str(info.feature_width),
        "input": "RGB in [0, 1], then (image - mean) / std per channel",
        "mean": json.dumps(info.mean),
        "std": json.dumps(info.std),
    }
    for key, value in metadata.items():
        model.metadata_props.add(key=key, value=value)
    onnx.checker.check_model(model)
    content: bytes = model.SerializeToString()
    return content


def check_onnx(content: bytes, network: nn.Module, info: BackboneInfo) -> bool:
    """Compare the features of onnxruntime with PyTorch's; False if onnxruntime is not installed."""
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
    difference = float((torch.from_numpy(features) - wanted).abs().max() / wanted.abs().max().clamp(min=1e-12))
    if not difference <= _TOLERANCE:
        raise RunError(f"Features of onnxruntime and PyTorch differ by {difference:.1e}; nothing was written.")
    return True


def _import(library: str) -> Any:
    try:
        return __import__(library)
    except ImportError:
        raise SettingsError(
            f"Writing ONNX files needs {library}; run: pip install 'joint-contrastive-learning[onnx]'."
        ) from None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's logging and warnings."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _remove_source_locations(model: Any) -> None:
    """Drop the exporter's metadata, which names source files of this machine."""
    for part in (*model.graph.node, *model.graph.input, *model.graph.output, *model.graph.value_info):
        del part.metadata_props[:]
        part.doc_string = ""
    for part in (*model.graph.initializer, model.graph, model):
        del part.metadata_props[:]
