"""Backbones as files: what a run leaves behind, and what other libraries write and read."""

from jcl.exchange.backbone_file import BackboneInfo, backbone_info, save_backbone
from jcl.exchange.exporting import Exported, export_backbone
from jcl.exchange.importing import import_backbone
from jcl.exchange.loading import load_backbone
from jcl.exchange.recognising import Recognised
from jcl.exchange.targets import TARGETS

__all__ = [
    "TARGETS",
    "BackboneInfo",
    "Exported",
    "Recognised",
    "backbone_info",
    "export_backbone",
    "import_backbone",
    "load_backbone",
    "save_backbone",
]
