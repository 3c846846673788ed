"""Undoing steps whose loss is not finite, without synchronising with the host (`train.on_nan: skip`)."""

from __future__ import annotations

from itertools import groupby

import torch
from torch import Tensor, nn

from jcl.distributed.group import Ranks

MAX_SKIPPED_IN_A_ROW = 100


class NonFiniteGuard:
    """Undoes a step if its loss, or anything in the state after it, is not finite.

    The weights of both encoders, their running statistics, the queue and the optimizer's momentum are then what they
    were before the step, bit for bit. The step still counts: its batch is used up, and the schedules move on.

    The state is copied before each step and selected after it on the device (`torch.where`), so that a step has no
    branch and can be recorded as a CUDA graph. This takes one more copy of the state in memory, and another two during
    the selection. All ranks come to the same decision.
    """

    def __init__(self, learner: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks) -> None:
        self._ranks = ranks
        _create_momentum(optimizer)
        state = [*learner.state_dict().values(), *_tensors(optimizer)]
        self._blocks = [_Block(list(tensors)) for _, tensors in groupby(sorted(state, key=_kind), key=_kind)]
        self.in_a_row = torch.zeros((), device=state[0].device)  # steps undone since the last good one

    @torch.no_grad()
    def remember(self) -> None:
        """Copy the state before a step."""
        for block in self._blocks:
            block.keep()

    @torch.no_grad()
    def settle(self, loss: Tensor) -> Tensor:
        """Undo the step if necessary; return whether it was undone, as a scalar 0 or 1."""
        good = torch.isfinite(loss.detach())
        for block in self._blocks:
            good = good & block.is_finite()
        skipped = self._ranks.average((~good).float()).ceil()  # if any rank must, all do
        for block in self._blocks:
            block.choose(skipped == 0)
        self.in_a_row.add_(1.0).mul_(skipped)
        return skipped


class _Block:
    """Tensors of one dtype and device, handled together with a few kernels."""

    def __init__(self, tensors: list[Tensor]) -> None:
        # Flat views in memory order, channels-last or not.
        self._rows = [tensor.detach().as_strided((tensor.numel(),), (1,)) for tensor in tensors]
        self._sizes = [row.numel() for row in self._rows]
        self._kept = torch.cat(self._rows)

    def keep(self) -> None:
        torch.cat(self._rows, out=self._kept)

    def is_finite(self) -> Tensor:
        """A norm is finite only if every number is (and none overflows when squared)."""
        if not self._kept.is_floating_point():
            return torch.ones((), dtype=torch.bool, device=self._kept.device)
        return torch.isfinite(nn.utils.get_total_norm(self._rows))

    def choose(self, good: Tensor) -> None:
        """Keep the tensors if `good`, else restore the copy."""
        chosen = torch.where(good, torch.cat(self._rows), self._kept)
        torch._foreach_copy_(self._rows, list(torch.split(chosen, self._sizes)))


def _kind(tensor: Tensor) -> tuple[str, str]:
    return str(tensor.device), str(tensor.dtype)


def _create_momentum(optimizer: torch.optim.Optimizer) -> None:
    """SGD creates its momentum in the first step; starting from zeros gives the same result."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("momentum") else []:
            optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))


def _tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
