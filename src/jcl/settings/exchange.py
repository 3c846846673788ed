"""Options of the commands that convert backbones, and that write and search features."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from jcl.settings.options import HARDWARE, DeviceOptions, ForceOptions, JsonOptions, WorkersOptions, argument, option
from jcl.settings.schema import PositiveInt

Target = Literal[
    "torchvision", "timm", "detectron2", "mmdetection", "ultralytics", "safetensors", "onnx", "hub-folder", "hf"
]
_WEIGHTS = "A run folder, a weights file or hf:USER/NAME."
_BACKBONE = "torchvision or timm name of the network, if the file does not state it."


class ImportOptions(ForceOptions):
    file: Path = argument("FILE", "Weights of MoCo, JCL, torchvision, timm, lightly, solo-learn or detectron2.")
    out: Path = option(..., "Backbone file to write.", "-o", "--out", metavar="OUT.safetensors")
    backbone: str | None = option(None, _BACKBONE)
    image_size: PositiveInt | None = option(None, "Image size in pixels (default: the usual one of the network).")


class ExportOptions(ForceOptions):
    weights: Path = argument("RUN_OR_WEIGHTS", _WEIGHTS)
    target: Target = option(..., "Library or format to write for.", "--to")
    out: Path = option(..., "File to write; for hub-folder a folder, for hf USER/NAME.", "-o", "--out")
    backbone: str | None = option(None, _BACKBONE)


class EmbedOptions(WorkersOptions, DeviceOptions, ForceOptions, JsonOptions):
    weights: Path = argument("RUN_OR_WEIGHTS", _WEIGHTS)
    data: str = argument("DATA", "Folder of images, .npz file, shards, or a data set's name.")
    out: Path = option(..., "File to write, .npz or .parquet.", "-o", "--out")
    split: str = option("all", "train, test or all.")
    batch_size: PositiveInt = option(256, "Images per forward pass.", panel=HARDWARE)
    precision: Literal["float32", "bfloat16"] = option("float32", "Precision of the network.", panel=HARDWARE)


class NeighboursOptions(DeviceOptions, ForceOptions, JsonOptions):
    images: tuple[str, ...] = argument("IMAGE", "Image files, or names of images in the index.", ())
    index: Path = option(..., "Features written by `jcl embed`.")
    row: tuple[int, ...] = option((), "Row of the index to use as a query; repeatable.")
    weights: Path | None = option(None, "Run or weights file (default: the one that made the index).")
    k: PositiveInt = option(8, "Neighbours of each image.", "-k")
    out: Path | None = option(None, "Also draw them to this .png file.", "-o", "--out")
