"""ONNX files: images (batch, channels, S, S), normalized by the caller, to pooled features (batch, width)."""

import contextlib
import json
import logging
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from jcl.errors import RunError, SettingsError, import_extra
from jcl.export.backbone_file import BackboneInfo, same_features

OPSET = 18
_TOLERANCE = 1e-4  # of features, relative to the largest


def onnx_bytes(network: nn.Module, info: BackboneInfo) -> bytes:
    """The network as the content of an ONNX file."""
    libraries = ("onnx", "onnxscript", "onnxruntime")
    onnx, *_ = (import_extra(library, "onnx", "Writing ONNX files") for library in libraries)
    images = torch.zeros(2, info.channels, info.image_size, info.image_size)
    try:
        with contextlib.ExitStack() as quiet:
            quiet.enter_context(warnings.catch_warnings(action="ignore"))
            quiet.callback(logging.disable, logging.root.manager.disable)
            logging.disable(logging.WARNING)
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
        "input": f"{info.values}, then (image - mean) / std per channel",
        "mean": json.dumps(info.mean),
        "std": json.dumps(info.std),
    }
    onnx.helper.set_model_props(model, metadata)
    onnx.checker.check_model(model)
    content: bytes = model.SerializeToString()
    return content


def check_onnx(content: bytes, network: nn.Module, info: BackboneInfo) -> None:
    """Raise if onnxruntime gives other features than PyTorch."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])

    def features(images: Tensor) -> Tensor:
        return torch.from_numpy(session.run(["features"], {"images": images.numpy()})[0])

    if not same_features(network, features, info, _TOLERANCE):
        raise RunError("onnxruntime gives other features than PyTorch; nothing was written.")


def _remove_source_locations(model: Any) -> None:
    """Drop the exporter's metadata, which names source files of this machine."""
    graph = model.graph
    for part in (*graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer, graph, model):
        part.ClearField("metadata_props")
        part.ClearField("doc_string")
