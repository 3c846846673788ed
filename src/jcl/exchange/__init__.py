"""Backbones as files: what a run leaves behind, and what other libraries write and read."""

from jcl.exchange.backbone_file import BackboneInfo, backbone_info, load_backbone, save_backbone

__all__ = ["BackboneInfo", "backbone_info", "load_backbone", "save_backbone"]
