"""Backbones as files: what a run leaves behind, and what other libraries write and read."""

from jcl.export.backbone_file import BackboneInfo, backbone_info, save_backbone
from jcl.export.exporting import Exported, export_backbone
from jcl.export.importing import import_backbone
from jcl.export.loading import load_backbone
from jcl.export.recognising import Recognised
from jcl.export.targets import TARGETS

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
