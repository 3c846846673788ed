"""Whether the weights in a checkpoint fit the network that the settings ask for, and which settings do not if not.

Checkpoints of earlier versions hold no settings, but the parts of a learner follow from few of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from jcl.console import pluralize
from jcl.errors import RunError

# By what the names of a learner's tensors hold. A part decides about those after it, which are then not to blame.
_SETTINGS = {
    "_encoder.backbone.": "model.backbone, model.stem or views.image_size",
    "_encoder.head.": "model.head, model.head_width or model.embedding_dim",
    "queue.rows": "method.queue_size",
}


def load_fitting(network: nn.Module, held: Mapping[str, Tensor], path: Path) -> None:
    """Load the tensors that the checkpoint at `path` holds, or raise a sentence that says why they do not fit."""
    wanted = network.state_dict()
    names = [name for name in {**wanted, **held} if _shape(wanted, name) != _shape(held, name)]
    if names:
        raise RunError(_about(names, wanted, held, path))
    network.load_state_dict(held)


def _about(names: Sequence[str], wanted: Mapping[str, Tensor], held: Mapping[str, Tensor], path: Path) -> str:
    part = next((part for part in _SETTINGS if any(part in name for name in names)), "")
    first = next(name for name in names if part in name)
    changed = f"{_SETTINGS[part]} was changed since it was written" if part else "it is of another network"
    others = f", and {pluralize(len(names) - 1, 'more tensor')}" if len(names) > 1 else ""
    return (
        f"{path} does not fit the run's settings: {changed} ({first} is {_shape(held, first)} in the checkpoint "
        f"and {_shape(wanted, first)} by the settings{others}); set back what was changed, or begin a new run with it."
    )


def _shape(tensors: Mapping[str, Tensor], name: str) -> str:
    if name not in tensors:
        return "missing"
    return " × ".join(f"{size:,}" for size in tensors[name].shape) or "one number"
