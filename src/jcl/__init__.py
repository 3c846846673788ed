"""Joint Contrastive Learning: self-supervised pre-training of vision backbones.

The names below are the public interface. They are imported on first use, so that `import jcl` and `jcl --help` do
not wait for PyTorch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jcl.commands.finetune import load_classifier as load_classifier
    from jcl.commands.pretrain import pretrain as pretrain
    from jcl.commands.pretrain import resume as resume
    from jcl.commands.run import Run as Run
    from jcl.core.loss import InfoNCELoss as InfoNCELoss
    from jcl.core.loss import JointContrastiveLoss as JointContrastiveLoss
    from jcl.core.loss import MultiKeyLoss as MultiKeyLoss
    from jcl.core.loss import info_nce_loss as info_nce_loss
    from jcl.core.loss import joint_contrastive_loss as joint_contrastive_loss
    from jcl.core.loss import multi_key_loss as multi_key_loss
    from jcl.core.queue import KeyQueue as KeyQueue
    from jcl.errors import JclError as JclError
    from jcl.export import load_backbone as load_backbone
    from jcl.settings.recipes import build_settings as build_settings
    from jcl.settings.schema import Settings as Settings

__version__ = "0.1.0"

_HOME = {
    "InfoNCELoss": "jcl.core.loss",
    "JointContrastiveLoss": "jcl.core.loss",
    "MultiKeyLoss": "jcl.core.loss",
    "info_nce_loss": "jcl.core.loss",
    "joint_contrastive_loss": "jcl.core.loss",
    "multi_key_loss": "jcl.core.loss",
    "KeyQueue": "jcl.core.queue",
    "JclError": "jcl.errors",
    "load_backbone": "jcl.export",
    "load_classifier": "jcl.commands.finetune",
    "Run": "jcl.commands.run",
    "pretrain": "jcl.commands.pretrain",
    "resume": "jcl.commands.pretrain",
    "build_settings": "jcl.settings.recipes",
    "Settings": "jcl.settings.schema",
}

__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> Any:
    if name == "evaluate":
        return importlib.import_module("jcl.evaluate")
    if name not in _HOME:
        raise AttributeError(f"module 'jcl' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
