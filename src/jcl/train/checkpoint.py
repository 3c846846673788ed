"""Checkpoints: everything a run needs to go on exactly, in one safetensors file, written atomically.

Safetensors holds tensors and plain text only, so reading a checkpoint can never run code. The file is written under
another name, flushed to the disk and then renamed: a reader sees the old file or the new one, never half of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from jcl.errors import RunError

FORMAT = "jcl-checkpoint-1"
_NAME = re.compile(r"step-(\d+)\.safetensors")


@dataclass
class Progress:
    """How far a run is; together with the weights this is all there is to restore."""

    step: int = 0  # steps done
    seconds: float = 0.0  # spent training, over all resumptions
    window: Tensor = field(default_factory=lambda: torch.zeros(0))  # sums since the last line of metrics
    window_steps: int = 0


def save_checkpoint(
    folder: Path, learner: nn.Module, optimiser: torch.optim.Optimizer, progress: Progress, keep: int
) -> Path:
    """Write the state after `progress.step` steps and remove all but the newest `keep` checkpoints."""
    tensors = {f"model.{name}": value for name, value in learner.state_dict().items()}
    optimiser_tensors, optimiser_rest = _split_optimiser(optimiser)
    tensors |= optimiser_tensors
    tensors["progress.window"] = progress.window
    metadata = {
        "format": FORMAT,
        "step": str(progress.step),
        "seconds": repr(progress.seconds),
        "window_steps": str(progress.window_steps),
        "optimiser": json.dumps(optimiser_rest),
    }
    path = folder / f"step-{progress.step:09d}.safetensors"
    write_atomically(path, save({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, metadata))
    # Files beyond this step are damaged, or the run would have gone on from them: they must not push this one out.
    for old in [found for found in list_checkpoints(folder) if found <= path][:-keep]:
        old.unlink(missing_ok=True)
    return path


def load_checkpoint(path: Path, learner: nn.Module, optimiser: torch.optim.Optimizer, device: torch.device) -> Progress:
    """Restore model and optimiser in place from `path`; returns how far the run was."""
    tensors, metadata = read_tensors(path)
    if metadata.get("format") != FORMAT:
        raise RunError(f"{path} is not a checkpoint of this tool; resume from a folder that `jcl pretrain` wrote.")
    model = {name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")}
    try:
        learner.load_state_dict(model)
        _restore_optimiser(optimiser, tensors, json.loads(metadata["optimiser"]))
        return Progress(
            step=int(metadata["step"]),
            seconds=float(metadata["seconds"]),
            window=tensors["progress.window"].to(device),
            window_steps=int(metadata["window_steps"]),
        )
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{path} does not fit the run's settings: {' '.join(str(error).split())}") from None


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first."""
    found = [
        (int(match[1]), path) for path in folder.glob("step-*.safetensors") if (match := _NAME.fullmatch(path.name))
    ]
    return [path for _, path in sorted(found)]


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that can be read; a torn or damaged one is passed over."""
    for path in reversed(list_checkpoints(folder)):
        with contextlib.suppress(RunError):
            read_tensors(path)
            return path
    return None


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All tensors of a safetensors file and the text stored with them."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path} cannot be read as a safetensors file: {error}.") from None


def write_atomically(path: Path, content: bytes) -> None:
    """Replace `path` by `content` in one step that survives a crash at any moment."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise RunError(f"{path} could not be written: {error.strerror}; what was there before is untouched.") from error


def _split_optimiser(optimiser: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The optimiser's state as tensors by name, and the rest as plain data."""
    state = optimiser.state_dict()
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {}
    for index, values in state["state"].items():
        for name, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"optimiser.{index}.{name}"] = value
            else:
                numbers[f"{index}.{name}"] = value
    groups = [
        {k: float(v) if isinstance(v, Tensor) else v for k, v in group.items()} for group in state["param_groups"]
    ]
    return tensors, {"groups": groups, "numbers": numbers}


def _restore_optimiser(optimiser: torch.optim.Optimizer, tensors: dict[str, Tensor], rest: dict[str, Any]) -> None:
    state: dict[int, dict[str, Any]] = {}
    entries = {name.removeprefix("optimiser."): v for name, v in tensors.items() if name.startswith("optimiser.")}
    for name, value in (entries | rest["numbers"]).items():
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = value
    optimiser.load_state_dict({"state": state, "param_groups": rest["groups"]})
