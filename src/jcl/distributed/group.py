"""Several processes that train one model together.

A step on W ranks equals the step of one process on the whole batch: each rank encodes its share of the queries and of
the shuffled keys, the keys are gathered, and the gradients are averaged. Everything else is computed from equal inputs
on every rank, so a step broadcasts nothing.
"""

import contextlib
import datetime
import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from jcl.console import list_some, pluralize
from jcl.distributed.device import choose_device
from jcl.distributed.launch import launch_environment
from jcl.errors import JclError, OtherRankFailed, RunError, SettingsError

Value = TypeVar("Value")
ANSWER_SECONDS = 5.0  # for a rank that has lost contact to report that


class LostContact(RunError):
    """Another rank did not answer."""

    exit_code = 69  # the conventional "service unavailable"


class SilentRank(LostContact):
    """Another rank did not answer, and the message names it."""


@contextlib.contextmanager
def catch_lost_contact() -> Iterator[None]:
    """Wrap a collective operation: an error of the backend becomes `LostContact`."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # the backends have no narrower type
        reason = re.sub(r"\[\S+:\d+\] ", "", " ".join(str(error).split()))  # without the backend's source line
        raise LostContact(f"contact with another rank was lost ({reason[:200].rstrip('.')}).") from error


@dataclass(frozen=True)
class Ranks:
    """The rank of this process and the number of ranks. One process alone needs no process group."""

    rank: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes files and prints."""
        return self.rank == 0

    def share(self, rows: Tensor) -> Tensor:
        """This rank's part of rows that all ranks hold: contiguous and of equal size."""
        return rows.view(self.count, -1, *rows.shape[1:])[self.rank] if self.count > 1 else rows

    def gather(self, rows: Tensor) -> Tensor:
        """Gather rows (n, ...) of every rank into (count * n, ...), in rank order. Keeps gradients."""
        if self.count == 1:
            return rows
        gathered: Tensor = _Gather.apply(rows, self)
        return gathered

    def gather_uneven(self, rows: Tensor) -> Tensor:
        """Gather rows of every rank, in rank order, where ranks may have different numbers of rows."""
        if self.count == 1:
            return rows
        counts = self.gather(torch.tensor([len(rows)])).tolist()
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = self.gather(padded).view(self.count, *padded.shape)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def gather_objects(self, value: Any) -> list[Any]:
        """Gather a value that JSON can hold from every rank, in rank order."""
        if self.count == 1:
            return [value]
        line = torch.frombuffer(bytearray(json.dumps(value).encode() + b"\n"), dtype=torch.uint8)
        return [json.loads(each) for each in self.gather_uneven(line).numpy().tobytes().splitlines()]

    def broadcast(self, value: Value) -> Value:
        """The value of the first rank, on every rank; what the others pass is ignored."""
        received = [value]
        if self.count > 1:
            with catch_lost_contact():
                dist.broadcast_object_list(received)  # on the CPU, with gloo
        return received[0]

    def total(self, values: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        if self.count > 1:
            with catch_lost_contact():
                dist.all_reduce(values)
        return values

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return bool(self.total(torch.tensor(int(flag)))) if self.count > 1 else flag

    def average(self, values: Tensor) -> Tensor:
        """Average over the ranks, in place."""
        if self.count > 1:
            self.total(values)
            values /= self.count
        return values


ALONE = Ranks()


class _Gather(torch.autograd.Function):
    """All-gather whose backward pass sums the gradients of a row over the ranks."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        gathered = rows.new_empty(ranks.count * rows.shape[0], *rows.shape[1:])
        with catch_lost_contact():
            dist.all_gather_into_tensor(gathered, rows.contiguous())
        return gathered

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return ctx.ranks.share(ctx.ranks.total(gradient.contiguous().clone())), None


class GradientBuffer:
    """The gradients of all parameters in one buffer, averaged over the ranks by one all-reduce."""

    def __init__(self, parameters: Iterable[nn.Parameter], ranks: Ranks) -> None:
        self._ranks = ranks
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._sizes = [parameter.numel() for parameter in self._parameters]
        self._buffer = torch.zeros(sum(self._sizes), device=self._parameters[0].device)

    def clear(self) -> None:
        """Zero the buffer and make every parameter's gradient a view of it."""
        self._buffer.zero_()
        for parameter, part in zip(self._parameters, torch.split(self._buffer, self._sizes), strict=True):
            # In the parameter's memory format, which backward passes keep (channels-last on a GPU).
            parameter.grad = torch.as_strided(part, parameter.shape, parameter.stride())

    def average(self) -> None:
        self._ranks.average(self._buffer)


@torch.no_grad()
def average_statistics(module: nn.Module, ranks: Ranks) -> None:
    """Average the running statistics of batch norms over the ranks, as one process with all groups would."""
    if ranks.count == 1:
        return
    norms = [part for part in module.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    buffers = [buffer for norm in norms for buffer in (norm.running_mean, norm.running_var) if buffer is not None]
    if buffers:
        block = ranks.average(torch.cat([buffer.flatten() for buffer in buffers]))
        means = torch.split(block, [buffer.numel() for buffer in buffers])
        torch._foreach_copy_(buffers, [mean.view_as(buffer) for mean, buffer in zip(means, buffers, strict=True)])


@contextlib.contextmanager
def fail_together(ranks: Ranks) -> Iterator[None]:
    """A `JclError` in this block on one rank ends all ranks, which enter it at the same point.

    The first rank that failed raises its own error, the others `OtherRankFailed`, so it is reported once.
    """
    if ranks.count == 1:
        yield
        return
    error = None
    try:
        yield
    except JclError as raised:
        error = raised
    codes = ranks.gather(torch.tensor([0 if error is None else error.exit_code])).tolist()
    first = next((rank for rank, code in enumerate(codes) if code), None)
    if error is not None and first == ranks.rank:
        raise error
    if first is not None:
        raise OtherRankFailed(codes[first])


@contextlib.contextmanager
def process_group(device_name: str, timeout_seconds: float) -> Iterator[tuple[Ranks, torch.device]]:
    """Join the process group, if a launcher started several processes; yield the ranks and this rank's device."""
    joins = not dist.is_initialized() and launch_environment().world_size > 1
    if not joins and not dist.is_initialized():
        yield ALONE, choose_device(device_name)
        return
    device = _rank_device(device_name)
    if joins:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        with catch_lost_contact():
            _init_process_group(device, datetime.timedelta(seconds=timeout_seconds))
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size()), device
    finally:
        if joins:
            dist.destroy_process_group()


def _init_process_group(device: torch.device, timeout: datetime.timedelta) -> None:
    try:
        store, rank, count = next(dist.rendezvous("env://", timeout=timeout))  # type: ignore[attr-defined]
    except ValueError as error:  # MASTER_ADDR or MASTER_PORT is missing or invalid
        raise SettingsError(f"Cannot initialize the process group: {error}. Use torchrun or --devices.") from None
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        # The launcher's store outlives the ranks: restarted ranks must not find old addresses.
        # With several launchers, whose counts may differ, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 does the same.
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"start-{start}", store)  # type: ignore[attr-defined]
    # Gloo next to NCCL, because CPU tensors are exchanged on every device.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=timeout)


def _rank_device(name: str) -> torch.device:
    """Each rank of a machine has its own GPU; on CPUs they share."""
    device, environment, gpus = choose_device(name), launch_environment(), torch.cuda.device_count()
    if device.type != "cuda":
        return device
    if ":" in name:
        raise SettingsError(f"Every rank needs its own GPU, so the device cannot be {name}; use --device cuda.")
    if environment.local_rank >= gpus:
        problem = f"{environment.local_world_size} ranks were started on a machine with {pluralize(gpus, 'GPU')}"
        raise SettingsError(f"{problem}; start one per GPU, or use --device cpu.")
    return torch.device("cuda", environment.local_rank)


class RollCall:
    """Names the ranks that do not answer, once contact is lost.

    Each rank writes its host to the launcher's store, and reports there when it loses contact itself. A rank that does
    not report is stopped, lost with its machine, or busy, for example with a slow disk.
    """

    def __init__(self, ranks: Ranks, store: Any = None) -> None:
        self._ranks = ranks
        if ranks.count > 1:
            start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # the store may outlive the ranks
            store = store or dist.distributed_c10d._get_default_store().clone()
            self._store: Any = dist.PrefixStore(f"jcl-roll-call-{start}", store)  # type: ignore[attr-defined]
            self._store.set(f"host of {ranks.rank}", socket.gethostname())

    def report(self) -> None:
        """Tell the other ranks that this one has lost contact and ends."""
        with contextlib.suppress(RuntimeError):  # the store is gone
            self._store.set(f"report of {self._ranks.rank}", "lost contact")

    def describe_other_ranks(self) -> str:
        """Report, and return a sentence that names the ranks that do not; takes a few seconds."""
        silent: list[list[str]] = []
        # In a thread, because a store whose process is stopped never answers.
        thread = threading.Thread(target=self._call, args=(silent,), daemon=True)
        thread.start()
        thread.join(timeout=3 * ANSWER_SECONDS)
        if not silent:
            return "The state of the other ranks is unknown: the machine of rank 0 does not answer."
        return f"No answer from {list_some(silent[0], 4)}." if silent[0] else "All ranks are alive."

    def _call(self, silent: list[list[str]]) -> None:
        """Append the names of the silent ranks, unless the store does not answer."""
        self.report()
        time.sleep(ANSWER_SECONDS)
        with contextlib.suppress(RuntimeError):
            ranks = [rank for rank in range(self._ranks.count) if not self._store.check([f"report of {rank}"])]
            known = [rank for rank in ranks if self._store.check([f"host of {rank}"])]
            hosts = {rank: f" (on {self._store.get(f'host of {rank}').decode()})" for rank in known}
            silent.append([f"rank {rank}{hosts.get(rank, '')}" for rank in ranks])
