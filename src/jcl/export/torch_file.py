"""Files of `torch.save`, read so that nothing in them runs."""

from __future__ import annotations

import io
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from jcl.errors import RunError
from jcl.export.backbone_file import BackboneInfo, weights_of
from jcl.export.weights import INFO_KEY

LEGACY_START = bytes.fromhex("80028a0a6cfc9c46f9206aa85019")  # the number with which torch began files before 1.6
_NAMED_GLOBAL = re.compile(r"GLOBAL (\S+)")


def read_torch_file(path: Path) -> Any:
    """What `torch.save` wrote, if it is tensors and plain containers."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the file's age or kind; what cannot be read is said below
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise RunError(_refusal(path, str(error))) from None
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}.") from None
    except Exception as error:  # where a file was cut off or damaged decides what its reader trips over
        if "TorchScript" in str(error):
            raise RunError(
                f"{path} is a TorchScript program, not weights; save the weights alone with "
                "torch.save(model.state_dict(), 'weights.pth')."
            ) from None
        raise RunError(_damaged(path)) from None


def torch_file_content(network: nn.Module, info: BackboneInfo) -> bytes:
    """The network's state dict as `torch.save` writes it: tensors by name and nothing else to be seen.

    State dicts carry the versions of their modules in an attribute; what the network is goes there too, where
    `load_state_dict` does not mind it and `load_backbone` finds it.
    """
    state: Any = network.state_dict()
    state.update(weights_of(network))
    state._metadata[INFO_KEY] = {"info": info.to_text()}
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def noted_info(content: object) -> BackboneInfo | None:
    """What a state dict of ours says about its network."""
    note = getattr(content, "_metadata", None)
    note = note.get(INFO_KEY) if isinstance(note, dict) else None
    return BackboneInfo.from_text(note.get("info")) if isinstance(note, dict) else None


def _refusal(path: Path, reason: str) -> str:
    """Why a file was not opened: the thing it wants made or called, or that it makes no sense."""
    named = _NAMED_GLOBAL.search(reason)
    if not named:
        return _damaged(path)
    return (
        f"{path} holds more than tensors: opening it would run {named[1]}, so it was not opened and nothing in it ran. "
        "If you trust where it comes from, save its weights alone, in the environment it was made in: torch.save("
        f"torch.load({path.name!r}, map_location='cpu', weights_only=False)['state_dict'], 'weights.pth'), with "
        ".state_dict() in the place of ['state_dict'] where it is a whole network."
    )


def _damaged(path: Path) -> str:
    return (
        f"{path} cannot be read as a file of torch.save; it is damaged, cut short or something else. "
        "Copy or download it again."
    )
