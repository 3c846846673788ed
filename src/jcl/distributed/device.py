"""The machine: which device, in which precision, and how much memory was used."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from jcl.console import pluralize
from jcl.errors import SettingsError

Network = TypeVar("Network", bound=nn.Module)


def choose_device(name: str) -> torch.device:
    """`auto` is the first GPU when there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise SettingsError(f"there is no device called {name!r}; use auto, cpu, cuda or cuda:N.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SettingsError(f"the device {name} was asked for, but PyTorch sees no GPU here; use --device cpu or auto.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        gpus = torch.cuda.device_count()
        here = f"there {'is' if gpus == 1 else 'are'} only {pluralize(gpus, 'GPU')}"
        raise SettingsError(f"the device {name} was asked for, but {here}.")
    return device


def on_device(network: Network, device: torch.device) -> Network:
    """The network moved there; on a GPU in the layout in which tensor cores convolve."""
    network.to(device)
    return network.to(memory_format=torch.channels_last) if device.type == "cuda" else network


def choose_precision(wanted: str, device: torch.device) -> torch.dtype:
    """bfloat16 on GPUs that compute in it; on CPUs without matrix units for it, it is slower than float32."""
    if wanted not in ("auto", "float32", "bfloat16"):
        raise SettingsError(f"there is no precision called {wanted!r}; use auto, float32 or bfloat16.")
    if wanted == "auto":
        fast = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if fast else torch.float32
    return torch.bfloat16 if wanted == "bfloat16" else torch.float32


def autocast(device: torch.device, precision: torch.dtype) -> contextlib.AbstractContextManager[object]:
    """Run the encoders in `precision`; weights stay in float32. The losses opt out by themselves."""
    if precision == torch.float32:
        return contextlib.nullcontext()
    # Weights change every step, so caching their casts across forwards of a step is all that is safe to keep.
    return torch.autocast(device.type, dtype=precision)


class PeakMemory:
    """Peak memory in bytes since it was made: of the GPU's allocator, or of the whole process on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            _reset_process_peak()

    def read(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return _process_peak()


def _reset_process_peak() -> None:
    # Linux lets a process reset its own high-water mark; elsewhere the peak is that of the whole process so far.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _process_peak() -> int:
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
