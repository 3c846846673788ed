"""Checkpoints: everything a run needs to go on exactly, in one safetensors file, written atomically.

Safetensors holds tensors and plain text only, so reading a checkpoint can never run code. A checkpoint is made in two
parts: a snapshot, which copies the state to the host and is all that training waits for, and the writing of it, which
can happen in the background.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from jcl.errors import RunError
from jcl.runs.fitting import load_fitting
from jcl.runs.host_copy import HostCopy
from jcl.runs.sealed import read_tensors, verify_checksum, write_sealed

FORMAT = "jcl-checkpoint-2"
FORMAT_WITHOUT_CHECKSUM = "jcl-checkpoint-1"
_GROUP = "group."
_NAME = re.compile(r"step-(\d+)\.safetensors")


@dataclass
class Progress:
    """How far a run is; together with the weights this is all there is to restore."""

    step: int = 0  # steps done
    seconds: float = 0.0  # spent training, over all resumptions
    window: Tensor = field(default_factory=lambda: torch.zeros(0))  # sums since the last line of metrics
    window_steps: int = 0
    ranks: int = 1  # that took the last step
    skipped_steps: int = 0  # up to the last line of metrics; the window knows of those since
    steps_per_epoch: int = 0  # when the last step was taken; 0 where that is not known
    settings: dict[str, Any] = field(default_factory=dict)  # that it rested on, by dotted names; empty likewise
    images: dict[str, str] = field(default_factory=dict)  # fingerprints of those it was trained on; empty likewise


@dataclass(frozen=True)
class Snapshot:
    """The state after `step` steps, on its way to the host."""

    step: int
    copy: HostCopy
    metadata: dict[str, str]
    optimiser: dict[str, Any]  # what of it is no tensor


def take_snapshot(
    learner: nn.Module, optimiser: torch.optim.Optimizer, progress: Progress, before: Snapshot | None = None
) -> Snapshot:
    """Copy the state as it is now; training may go on at once. Memory of `before`, no longer needed, is used again."""
    tensors = {f"model.{name}": value for name, value in learner.state_dict().items()}
    optimiser_tensors, optimiser_rest = _split_optimiser(optimiser)
    tensors |= optimiser_tensors
    tensors["progress.window"] = progress.window
    metadata = {
        "format": FORMAT,
        "step": str(progress.step),
        "seconds": repr(progress.seconds),
        "window_steps": str(progress.window_steps),
        "skipped_steps": str(progress.skipped_steps),
        "ranks": str(progress.ranks),
        "steps_per_epoch": str(progress.steps_per_epoch),
        "settings": json.dumps(progress.settings),
        "images": json.dumps(progress.images),
    }
    copy = HostCopy(tensors, None if before is None else before.copy)
    return Snapshot(progress.step, copy, metadata, optimiser_rest)


def write_snapshot(folder: Path, snapshot: Snapshot, keep: int) -> Path:
    """Write a checkpoint, read it back, and only then remove all but the newest `keep`.

    A state with a weight that is not finite is refused, so that every checkpoint is one worth going back to.
    """
    tensors = snapshot.copy.finished()
    optimiser = _with_numbers_of_groups(snapshot.optimiser, tensors)
    for name, value in tensors.items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise RunError(f"the state after step {snapshot.step} was not saved, because {name} is not finite.")
    path = folder / f"step-{snapshot.step:09d}.safetensors"
    write_sealed(path, tensors, snapshot.metadata | {"optimiser": json.dumps(optimiser)})
    # Files beyond this step are damaged, or the run would have gone on from them: they must not push this one out.
    for old in [found for found in list_checkpoints(folder) if found <= path][:-keep]:
        with contextlib.suppress(OSError):  # it is tried again after the next one
            old.unlink()
    return path


def load_checkpoint(path: Path, learner: nn.Module, optimiser: torch.optim.Optimizer, device: torch.device) -> Progress:
    """Restore model and optimiser in place from `path`; returns how far the run was."""
    tensors, metadata = _read_good(path)
    model = {name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")}
    try:
        load_fitting(learner, model, path)
        _restore_optimiser(optimiser, tensors, json.loads(metadata["optimiser"]))
        return Progress(
            step=int(metadata["step"]),
            seconds=float(metadata["seconds"]),
            window=tensors["progress.window"].to(device),
            window_steps=int(metadata["window_steps"]),
            skipped_steps=int(metadata.get("skipped_steps", 0)),
            ranks=int(metadata.get("ranks", 1)),
            steps_per_epoch=int(metadata.get("steps_per_epoch", 0)),
            settings=dict(json.loads(metadata.get("settings", "{}"))),
            images=dict(json.loads(metadata.get("images", "{}"))),
        )
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{path} does not fit the run's settings: {' '.join(str(error).split())}") from None


def read_learner(path: Path) -> tuple[dict[str, Tensor], int]:
    """What a checkpoint holds of the learner (both encoders and the queue), and after how many steps that was."""
    tensors, metadata = _read_good(path)
    own = {name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")}
    return own, int(metadata["step"])


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first."""
    found = [
        (int(match[1]), path) for path in folder.glob("step-*.safetensors") if (match := _NAME.fullmatch(path.name))
    ]
    return [path for _, path in sorted(found)]


class Search(NamedTuple):
    """The newest checkpoint that is whole, and what is wrong with those after it, newest first."""

    newest: Path | None
    damaged: list[str]


def search_checkpoints(folder: Path) -> Search:
    """Find the newest good checkpoint; torn or damaged ones are passed over, each with a sentence that says why."""
    damaged = []
    for path in reversed(list_checkpoints(folder)):
        try:
            _read_good(path)
        except RunError as error:
            damaged.append(str(error))
        else:
            return Search(path, damaged)
    return Search(None, damaged)


def checkpoint_to_resume(folder: Path, say: Callable[[str], None]) -> Path | None:
    """The newest good checkpoint; says which it is and which ones are passed over for what reason."""
    found = search_checkpoints(folder)
    for reason in found.damaged:
        say(f"Passed over: {reason}")
    if found.newest is None and found.damaged:
        raise RunError(
            f"none of the checkpoints in {folder} is whole; put a good copy of one back, "
            "or remove them to train from the first step."
        )
    if found.newest is None:
        say(f"No checkpoint in {folder} yet: starting from the first step.")
    else:
        say(f"Resuming from {found.newest}.")
    return found.newest


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that is whole."""
    return search_checkpoints(folder).newest


def _read_good(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What a checkpoint holds, once its checksum has been found to be right; the first format had none."""
    sealed = verify_checksum(path)
    tensors, metadata = read_tensors(path)
    if metadata.get("format") not in (FORMAT, FORMAT_WITHOUT_CHECKSUM):
        raise RunError(f"{path} is not a checkpoint of this tool; resume from a folder that `jcl pretrain` wrote.")
    if metadata["format"] == FORMAT and not sealed:
        raise RunError(f"{path} is damaged: its checksum is missing.")
    return tensors, metadata


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
    groups = []
    for index, group in enumerate(state["param_groups"]):
        # A learning rate may be a tensor on the device: it travels with the others, since reading it would wait.
        tensors |= {f"{_GROUP}{index}.{name}": value for name, value in group.items() if isinstance(value, Tensor)}
        groups.append({name: value for name, value in group.items() if not isinstance(value, Tensor)})
    return tensors, {"groups": groups, "numbers": numbers}


def _with_numbers_of_groups(rest: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Move the numbers of the optimiser's groups that came as tensors back to where they belong."""
    groups = [dict(group) for group in rest["groups"]]
    for name in [name for name in tensors if name.startswith(_GROUP)]:
        index, _, key = name.removeprefix(_GROUP).partition(".")
        groups[int(index)][key] = float(tensors.pop(name))
    return rest | {"groups": groups}


def _restore_optimiser(optimiser: torch.optim.Optimizer, tensors: dict[str, Tensor], rest: dict[str, Any]) -> None:
    state: dict[int, dict[str, Any]] = {}
    entries = {name.removeprefix("optimiser."): v for name, v in tensors.items() if name.startswith("optimiser.")}
    for name, value in (entries | rest["numbers"]).items():
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = value
    optimiser.load_state_dict({"state": state, "param_groups": rest["groups"]})
