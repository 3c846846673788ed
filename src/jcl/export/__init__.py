"""Backbone files: our own, those of other libraries, and the conversion between them."""

from jcl.export.backbone_file import BackboneInfo as BackboneInfo
from jcl.export.backbone_file import backbone_info as backbone_info
from jcl.export.backbone_file import save_backbone as save_backbone
from jcl.export.exporting import TARGETS as TARGETS
from jcl.export.exporting import export_backbone as export_backbone
from jcl.export.exporting import import_backbone as import_backbone
from jcl.export.loading import load_backbone as load_backbone
