"""Several processes that train one model together, as the arithmetic sees them.

A step on W ranks is the step of one process on the whole batch: each rank encodes its share of the queries and of the
shuffled keys, the keys are gathered, and the gradients are averaged. Everything else is computed from equal inputs by
every rank, so nothing needs to be broadcast.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from jcl.errors import RunError


class LostContact(RunError):
    """Another rank did not answer."""

    exit_code = 69  # the conventional "service unavailable"


class SilentRank(LostContact):
    """Another rank did not answer, and the message says what is known about it."""


@contextlib.contextmanager
def contact() -> Iterator[None]:
    """Around every exchange: when another rank is gone or silent for too long, say so instead of how."""
    try:
        yield
    except RuntimeError as error:  # the backends have no narrower type for it
        reason = re.sub(r"\[\S+:\d+\] ", "", " ".join(str(error).split()))  # without the place in the backend's source
        raise LostContact(f"contact with another rank was lost ({reason[:200].rstrip('.')}).") from error


@dataclass(frozen=True)
class Ranks:
    """Which of how many processes this is. One process alone needs no process group."""

    rank: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes files and speaks to people."""
        return self.rank == 0

    def share(self, rows: Tensor) -> Tensor:
        """This rank's part of rows that all ranks have: contiguous and of equal size."""
        return rows.view(self.count, -1, *rows.shape[1:])[self.rank] if self.count > 1 else rows

    def gather(self, rows: Tensor) -> Tensor:
        """The rows (n, ...) of every rank, in the order of the ranks: (count * n, ...). Keeps gradients."""
        if self.count == 1:
            return rows
        gathered: Tensor = _Gather.apply(rows, self)
        return gathered

    def from_first(self, content: bytes) -> bytes:
        """What the first rank gives, on every rank; what the others give does not matter."""
        if self.count == 1:
            return content
        length = self.total(torch.tensor(len(content) if self.first else 0))
        if length == 0:
            return b""
        block = torch.zeros(int(length), dtype=torch.uint8)
        if self.first:
            block[:] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        with contact():
            dist.broadcast(block, 0)
        return block.numpy().tobytes()

    def from_all(self, value: Any) -> list[Any]:
        """What each rank gives, of the kinds that JSON has, on every rank in the order of the ranks."""
        if self.count == 1:
            return [value]
        line = torch.frombuffer(bytearray(json.dumps(value).encode() + b"\n"), dtype=torch.uint8)
        return [json.loads(each) for each in self.gather_all(line).numpy().tobytes().splitlines()]

    def gather_all(self, rows: Tensor) -> Tensor:
        """The rows of every rank, in the order of the ranks, where each may have another number of them."""
        if self.count == 1:
            return rows
        counts = self.gather(torch.tensor([len(rows)])).tolist()
        filled = rows.new_zeros(max(counts), *rows.shape[1:])
        filled[: len(rows)] = rows
        parts = self.gather(filled).view(self.count, *filled.shape)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def total(self, values: Tensor) -> Tensor:
        """The sum over the ranks, in place."""
        if self.count > 1:
            with contact():
                dist.all_reduce(values)
        return values

    def any(self, wish: bool) -> bool:
        """Whether any rank wishes it. Asked of all ranks at the same point, it gives all of them the same answer."""
        return bool(self.total(torch.tensor(int(wish)))) if self.count > 1 else wish

    def average(self, values: Tensor) -> Tensor:
        """The mean over the ranks, in place."""
        if self.count > 1:
            self.total(values)
            values /= self.count
        return values


ALONE = Ranks()


class _Gather(torch.autograd.Function):
    """All ranks' rows; a row's gradient is the sum of what every rank has to say about it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        gathered = rows.new_empty(ranks.count * rows.shape[0], *rows.shape[1:])
        with contact():
            dist.all_gather_into_tensor(gathered, rows.contiguous())
        return gathered

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return ctx.ranks.share(ctx.ranks.total(gradient.contiguous().clone())), None


class SharedGradients:
    """The gradients of all parameters in one block of memory, which is averaged over the ranks in one exchange."""

    def __init__(self, parameters: Iterable[nn.Parameter], ranks: Ranks) -> None:
        self._ranks = ranks
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._block = torch.zeros(
            sum(parameter.numel() for parameter in self._parameters), device=self._parameters[0].device
        )

    def clear(self) -> None:
        """Zero the block and have every parameter collect its gradient there."""
        self._block.zero_()
        start = 0
        for parameter in self._parameters:
            place = self._block[start : start + parameter.numel()]
            # In the parameter's own memory order, which backward passes keep (channels-last on a GPU).
            parameter.grad = torch.as_strided(place, parameter.shape, parameter.stride())
            start += parameter.numel()

    def average(self) -> None:
        self._ranks.average(self._block)


@torch.no_grad()
def average_statistics(module: nn.Module, ranks: Ranks) -> None:
    """Make the running statistics of all ranks their mean, which is what one process with all groups arrives at."""
    if ranks.count == 1:
        return
    norms = [part for part in module.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    buffers = [buffer for norm in norms for buffer in (norm.running_mean, norm.running_var) if buffer is not None]
    if buffers:
        block = ranks.average(torch.cat([buffer.flatten() for buffer in buffers]))
        means = torch.split(block, [buffer.numel() for buffer in buffers])
        torch._foreach_copy_(buffers, [mean.view_as(buffer) for mean, buffer in zip(means, buffers, strict=True)])
