"""Checkpoints: the full state of a run in one safetensors file, written atomically and with a checksum.

Safetensors holds tensors and text only, so reading a checkpoint never runs code. A checkpoint is made in two parts: a
snapshot copies the state to the host, which is all that training waits for, and is then written in the background.
"""

import contextlib
import errno
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from jcl.errors import Diverged, RunError
from jcl.runs.atomic import atomic_open, make_folder, refuse_links
from jcl.runs.folder import read_run_id

FORMAT = "jcl-checkpoint-2"
_NAME = re.compile(r"step-(\d+)\.safetensors")

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_CHECKSUM = "sha256"
_ZEROS = b"0" * 64
_DIGEST = re.compile(rb'"sha256":"([0-9a-f]{64})"')  # quotes inside a value are escaped, so only the key matches
_LENGTH_BYTES = 8  # a safetensors file starts with the length of its header
_HEADER_LIMIT = 8 << 20  # about 80,000 tensors


@dataclass
class Progress:
    """The progress of a run. With weights and optimizer state, this is all that a checkpoint restores."""

    step: int = 0  # steps done
    seconds: float = 0.0  # spent training, over all resumptions
    window: Tensor = field(default_factory=lambda: torch.zeros(0))  # sums since the last line of metrics
    window_steps: int = 0
    ranks: int = 1  # at the last step
    skipped_steps: int = 0  # up to the last line of metrics; `window` counts those since
    steps_per_epoch: int = 0  # at the last step; 0 if unknown
    settings: dict[str, Any] = field(default_factory=dict)  # by dotted names; empty if unknown
    images: dict[str, str] = field(default_factory=dict)  # fingerprints of the images; empty if unknown
    run: str = ""  # the id of the run


@dataclass(frozen=True)
class Snapshot:
    """A copy of the state after `step` steps, on its way to the host."""

    step: int
    tensors: dict[str, Tensor]
    copied: torch.cuda.Event | None  # after which the tensors may be read
    metadata: dict[str, str]


def take_snapshot(
    learner: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress, previous: Snapshot | None = None
) -> Snapshot:
    """Copy the state as it is now; training may continue at once.

    From a GPU it is copied into pinned memory on the current stream: after the last step that was launched and before
    the next one, even if that replays a CUDA graph. Pinned memory is slow to allocate, so the memory of `previous` is
    reused; it must no longer be needed.
    """
    tensors = {f"model.{name}": value for name, value in learner.state_dict().items()}
    optimizer_tensors, optimizer_rest = _split_optimizer(optimizer)
    tensors |= optimizer_tensors | {"progress.window": progress.window}
    metadata = {name: json.dumps(getattr(progress, name)) for name in _progress_fields()}
    metadata |= {"format": FORMAT, "optimiser": json.dumps(optimizer_rest)}
    pinned = {} if previous is None else previous.tensors
    with torch.no_grad():
        copies = {name: _copy_to_host(value, pinned.get(name)) for name, value in tensors.items()}
    copied: torch.cuda.Event | None = None
    device = next((value.device for value in tensors.values() if value.is_cuda), None)
    if device is not None:
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        copied.record(torch.cuda.current_stream(device))
    return Snapshot(progress.step, copies, copied, metadata)


def _progress_fields() -> list[str]:
    return [each.name for each in fields(Progress) if each.name != "window"]


def _copy_to_host(value: Tensor, pinned: Tensor | None) -> Tensor:
    if not value.is_cuda:
        return value.detach().clone()
    layout = (value.shape, value.stride(), value.dtype)
    if pinned is None or (pinned.shape, pinned.stride(), pinned.dtype) != layout:
        pinned = torch.empty_like(value, device="cpu", pin_memory=True)  # same strides, so a plain copy
    return pinned.copy_(value, non_blocking=True)


def write_snapshot(folder: Path, snapshot: Snapshot, keep: int) -> Path:
    """Write a checkpoint, and only then remove all but the newest `keep`.

    On a full disk older checkpoints are removed first, but never the newest valid one. A state that is not finite is
    refused, so that every checkpoint is worth resuming from.
    """
    if snapshot.copied is not None:
        snapshot.copied.synchronize()
    tensors = {name: value.contiguous() for name, value in snapshot.tensors.items()}
    for name, value in tensors.items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise Diverged(f"Step {snapshot.step} was not saved: {name} is not finite.")
    refuse_links(folder)
    make_folder(folder, parents=False)  # a run folder that was removed is not created again
    path = folder / f"step-{snapshot.step:09d}.safetensors"
    while True:
        try:
            save_with_checksum(path, tensors, snapshot.metadata)
            break
        except RunError as error:
            if getattr(error.__cause__, "errno", 0) not in _DISK_FULL or not _make_room(folder):
                raise
    # Files of later steps are damaged, or the run would have resumed from them: they must not displace this one.
    for older in [found for found in list_checkpoints(folder) if found.name <= path.name][:-keep]:
        with contextlib.suppress(OSError):  # or after the next checkpoint
            older.unlink()
    return path


def _make_room(folder: Path) -> bool:
    """Remove the oldest checkpoint other than the newest valid one; returns whether there was one."""
    newest = newest_checkpoint(folder)
    others = [path for path in list_checkpoints(folder) if path != newest]
    if newest is None or not others:
        return False
    with contextlib.suppress(OSError):
        others[0].unlink()
        return True
    return False


def load_checkpoint(path: Path, learner: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> Progress:
    """Restore model and optimizer in place from `path`; returns how far the run was."""
    tensors, metadata = _read_checkpoint(path)
    load_weights(learner, select_prefix(tensors, "model."), path)
    try:
        _restore_optimizer(optimizer, tensors, json.loads(metadata["optimiser"]))
        progress = Progress(window=tensors["progress.window"].to(device))
        for name in _progress_fields():
            setattr(progress, name, type(getattr(progress, name))(json.loads(metadata[name])))
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{path} does not fit the run's settings: {' '.join(str(error).split())}") from None
    return progress


def read_learner(path: Path) -> tuple[dict[str, Tensor], int]:
    """The weights of the learner (both encoders and the queue) in a checkpoint, and its step."""
    tensors, metadata = _read_checkpoint(path)
    return select_prefix(tensors, "model."), int(metadata["step"])


def load_weights(network: nn.Module, weights: Mapping[str, Tensor], path: Path) -> None:
    """Load weights from the checkpoint at `path`."""
    wanted = network.state_dict()
    for name in {**wanted, **weights}:
        found, expected = _shape(weights, name), _shape(wanted, name)
        if found != expected:
            problem = f"{name} is {found} in the checkpoint and {expected} in the network"
            remedy = "Restore the settings of model, method.queue_size and views.image_size, or start a new run"
            raise RunError(f"{path} does not fit the run's settings: {problem}. {remedy}.")
    load_tensors(network, weights)


def load_tensors(network: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load all or some of the weights. They are put into the network's own state dict because it has metadata, which
    torchvision's MNASNets need."""
    state = network.state_dict()
    state.update(tensors)
    network.load_state_dict(state)


def _shape(tensors: Mapping[str, Tensor], name: str) -> str:
    return str(list(tensors[name].shape)) if name in tensors else "missing"


def select_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names start with `prefix`, without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first."""
    paths = [(int(match[1]), path) for path in folder.glob("step-*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(paths)]


def search_checkpoints(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest valid checkpoint, and what is wrong with those after it, newest first."""
    damaged = []
    for path in reversed(list_checkpoints(folder)):
        try:
            _read_checkpoint(path)
        except RunError as error:
            damaged.append(str(error))
        else:
            return path, damaged
    return None, damaged


def newest_checkpoint(folder: Path) -> Path | None:
    return search_checkpoints(folder)[0]


def checkpoint_to_resume(folder: Path, log: Callable[[str], None]) -> Path | None:
    """The newest valid checkpoint; reports which it is and which were skipped."""
    newest, damaged = search_checkpoints(folder)
    for reason in damaged:
        log(f"Skipped checkpoint: {reason}")
    if newest is None and damaged:
        remedy = "restore one from a backup, or remove them to train from the first step"
        raise RunError(f"All checkpoints in {folder} are damaged or of another run; {remedy}.")
    log(f"Resuming from {newest}." if newest else f"No checkpoint in {folder} yet: starting from the first step.")
    return newest


def save_with_checksum(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file with a checksum, atomically."""
    with atomic_open(path) as file:
        file.writelines(_safetensors_parts(tensors, metadata))


def to_safetensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """A safetensors file with a checksum; equal content, equal bytes."""
    return b"".join(_safetensors_parts(tensors, metadata))


def _safetensors_parts(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> tuple[bytes, memoryview]:
    """The header, and the tensors without another copy.

    The SHA-256 is part of the metadata. It covers every byte of the file, with zeros in place of its own digits.
    """
    content = memoryview(save(dict(tensors), dict(metadata) | {_CHECKSUM: _ZEROS.decode()}))
    end = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
    # safetensors writes the metadata in random order
    text = json.dumps(json.loads(bytes(content[_LENGTH_BYTES:end])), sort_keys=True, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    digest = hashlib.sha256(header)
    digest.update(content[end:])
    return _DIGEST.sub(b'"sha256":"%b"' % digest.hexdigest().encode(), header), content[end:]


def has_valid_checksum(file: BufferedReader) -> bool:
    """Whether an open safetensors file has a checksum that its content matches."""
    length = file.read(_LENGTH_BYTES)
    header = file.read(min(int.from_bytes(length, "little"), _HEADER_LIMIT))
    digits = _DIGEST.search(header)
    if digits is None:
        return False
    start = length + header[: digits.start(1)] + _ZEROS + header[digits.end(1) :]
    return hashlib.file_digest(file, lambda: hashlib.sha256(start)).hexdigest().encode() == digits[1]


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a safetensors file, whose checksum is verified if it has one."""
    if not path.is_file():  # reading a named pipe would block forever
        raise RunError(f"{path} cannot be read: {'not a regular file' if path.exists() else 'no such file'}.")
    try:
        with path.open("rb") as file:
            with safe_open(path, framework="pt") as opened:  # compares the header with the size of the file
                tensors, metadata = {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata() or {}  # noqa: SIM118
            intact = _CHECKSUM not in metadata or has_valid_checksum(file)
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path} cannot be read as a safetensors file ({error}); copy it again.") from None
    if not intact:
        raise RunError(f"{path} is damaged: its content does not match its checksum. Restore it from a backup.")
    return tensors, metadata


def _read_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    tensors, metadata = read_tensors(path)
    if _CHECKSUM not in metadata:
        raise RunError(f"{path} is damaged or not a checkpoint of this tool: it has no checksum.")
    if metadata.get("format") != FORMAT:
        raise RunError(f"{path} is not a checkpoint of this tool; resume from a folder that `jcl pretrain` wrote.")
    if (named := _NAME.fullmatch(path.name)) and str(int(named[1])) != metadata.get("step"):
        raise RunError(f"{path} holds step {metadata.get('step')}, not the step in its name; rename it.")
    owner, run = metadata.get("run", "").strip('"'), read_run_id(path.parent.parent)
    if owner and run and owner != run:
        raise RunError(f"{path} is a checkpoint of another run (id {owner}, this run has {run}); remove it.")
    return tensors, metadata


def _split_optimizer(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The optimizer's state as named tensors, and the rest as plain data."""
    state = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {}
    for index, values in state["state"].items():
        for name, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"optimiser.{index}.{name}"] = value
            else:
                numbers[f"{index}.{name}"] = value
    # A learning rate on the device, which every step sets, is left out: reading it would synchronize.
    plain = [{name: v for name, v in group.items() if not isinstance(v, Tensor)} for group in state["param_groups"]]
    return tensors, {"groups": plain, "numbers": numbers}


def _restore_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], rest: dict[str, Any]) -> None:
    """Load the state of each parameter and the learning rate. Other options (weight decay, ...) keep their values."""
    state: dict[int, dict[str, Any]] = {}
    for name, value in (select_prefix(tensors, "optimiser.") | rest["numbers"]).items():
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = value
    saved, own = ([len(group["params"]) for group in groups] for groups in (rest["groups"], optimizer.param_groups))
    if saved != own:
        changed = "train.optimizer, train.layer_decay, train.head_epochs or model.freeze has changed"
        raise ValueError(f"{changed}. Restore the settings, or start a new run.")
    both = zip(optimizer.param_groups, rest["groups"], strict=True)
    groups = [group | {name: before[name] for name in ("params", "lr") if name in before} for group, before in both]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
