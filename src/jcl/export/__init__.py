"""Backbone files: our own, those of other libraries, and the conversion between them."""

from jcl.export.backbone_file import BackboneInfo, backbone_info, save_backbone
from jcl.export.exporting import TARGETS, Exported, export_backbone, import_backbone
from jcl.export.loading import LoadedBackbone, load_backbone

__all__ = [
    "TARGETS",
    "BackboneInfo",
    "Exported",
    "LoadedBackbone",
    "backbone_info",
    "export_backbone",
    "import_backbone",
    "load_backbone",
    "save_backbone",
]
