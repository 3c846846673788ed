"""The device, its precision, and how much memory was used."""

import contextlib
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from jcl.console import pluralize
from jcl.errors import SettingsError

Network = TypeVar("Network", bound=nn.Module)


def choose_device(name: str) -> torch.device:
    """`auto` is the first GPU if there is one, else the CPU. A GPU with a number becomes the current device."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise SettingsError(f"Unknown device {name!r}; use auto, cpu, cuda or cuda:N.")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        problem = f"Device {name} is not available: PyTorch finds {pluralize(count, 'GPU')} here"
        raise SettingsError(f"{problem}; use --device cpu or auto.")
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # Triton and CUDA graphs use the current device
    return device


def to_device(network: Network, device: torch.device) -> Network:
    """Move the network to the device, in channels-last format, which makes convolutions faster."""
    return network.to(device).to(memory_format=torch.channels_last)


def choose_precision(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on GPUs that support it, else float32."""
    if name == "auto":
        fast = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if fast else torch.float32
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def autocast(device: torch.device, precision: torch.dtype) -> contextlib.AbstractContextManager[object]:
    """Run the encoders in `precision`; weights stay in float32, and losses disable autocast themselves."""
    if precision == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=precision)


class SideStream:
    """A CUDA stream: kernels launched within `work` run concurrently with later ones, until `join`.

    They wait for what was launched before the construction. Tensors that they use must be kept until `join`. On a CPU,
    or without a device, everything runs in order.
    """

    def __init__(self, device: torch.device | None, number: int = 0) -> None:
        self._stream = None
        if device is not None and device.type == "cuda":
            self._stream = _side_stream(device, number)
            self._stream.wait_stream(torch.cuda.current_stream(device))

    @contextlib.contextmanager
    def work(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # another stream may not have cast a cached weight yet
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            torch.set_autocast_cache_enabled(cached)

    def join(self) -> None:
        """Let later kernels wait for the work."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


@cache
def _side_stream(device: torch.device, number: int) -> torch.cuda.Stream:
    """The same stream for all steps, because the allocator keeps memory for each stream."""
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)  # weights get gradients of several streams
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class PeakMemory:
    """Peak memory in bytes since construction: of the GPU's allocator, or of the process on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        with contextlib.suppress(OSError):  # only Linux can reset the peak of a process
            Path("/proc/self/clear_refs").write_text("5")

    def read(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        with contextlib.suppress(OSError):
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
