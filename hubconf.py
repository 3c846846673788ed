"""Entry point for `torch.hub`: `torch.hub.load("clone", "backbone", "runs/photos", source="local")`.

`path` is a run folder or any file that `jcl.load_backbone` opens. Nothing in the file is executed.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "src"))

from torch import nn

dependencies = ["torch", "torchvision", "numpy", "PIL", "pydantic", "yaml", "safetensors", "rich"]


def backbone(path: str) -> nn.Module:
    """A pre-trained network that gives pooled features."""
    import jcl

    return jcl.load_backbone(path)
