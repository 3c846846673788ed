"""Steps that are taken back when they went wrong, without the host ever looking (`train.on_nan: skip`)."""

from __future__ import annotations

from itertools import groupby

import torch
from torch import Tensor, nn

from jcl.distributed.group import Ranks

MAX_SKIPPED_IN_A_ROW = 100


class NonFiniteGuard:
    """Takes a step back if its loss, or anything of the state after it, is not finite.

    Such a step leaves everything that training reads as it was: the weights of both encoders, their running
    statistics, the queue and the optimiser's momentum, all bit for bit. What goes on is the count of steps: the batch
    is used up, and the learning rate and the covariance scale are those of the next step.

    The state is copied before each step and chosen from after it on the device (`torch.where`), so that a step has
    no branch and can be recorded as a CUDA graph. It costs one more copy of the state in memory, and another two while
    it is chosen. On several ranks all come to the same decision.
    """

    def __init__(self, learner: nn.Module, optimiser: torch.optim.Optimizer, ranks: Ranks) -> None:
        self._ranks = ranks
        _create_momentum(optimiser)
        state = [*learner.state_dict().values(), *_tensors(optimiser)]
        self._blocks = [_Block(list(tensors)) for _, tensors in groupby(sorted(state, key=_kind), key=_kind)]
        self.in_a_row = torch.zeros((), device=state[0].device)  # steps taken back since the last that was not

    @torch.no_grad()
    def remember(self) -> None:
        """Keep the state as it is before a step."""
        for block in self._blocks:
            block.keep()

    @torch.no_grad()
    def settle(self, loss: Tensor) -> Tensor:
        """Take the step back if it has to be; gives whether it was, as a scalar 0 or 1."""
        good = torch.isfinite(loss.detach())
        for block in self._blocks:
            good = good & block.is_finite()
        skipped = self._ranks.average((~good).float()).ceil()  # where one rank has to, all do
        for block in self._blocks:
            block.choose(skipped == 0)
        self.in_a_row.add_(1.0).mul_(skipped)
        return skipped


class _Block:
    """Tensors of one type on one device, handled as one: a few kernels for all of them."""

    def __init__(self, tensors: list[Tensor]) -> None:
        # Each as one row of numbers in the order in which they lie in memory, channels-last or not.
        self._rows = [tensor.detach().as_strided((tensor.numel(),), (1,)) for tensor in tensors]
        self._sizes = [row.numel() for row in self._rows]
        self._kept = torch.cat(self._rows)

    def keep(self) -> None:
        torch.cat(self._rows, out=self._kept)

    def is_finite(self) -> Tensor:
        """A norm is finite only if every number is (and none is beyond all reason)."""
        if not self._kept.is_floating_point():
            return torch.ones((), dtype=torch.bool, device=self._kept.device)
        return torch.isfinite(nn.utils.get_total_norm(self._rows))

    def choose(self, good: Tensor) -> None:
        """Leave the tensors as they are if `good`, else put back what was kept."""
        chosen = torch.where(good, torch.cat(self._rows), self._kept)
        torch._foreach_copy_(self._rows, list(torch.split(chosen, self._sizes)))


def _kind(tensor: Tensor) -> tuple[str, str]:
    return str(tensor.device), str(tensor.dtype)


def _create_momentum(optimiser: torch.optim.Optimizer) -> None:
    """SGD makes its momentum in the first step, of that step's gradients; from zero it comes to the same."""
    for group in optimiser.param_groups:
        for parameter in group["params"] if group.get("momentum") else []:
            optimiser.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))


def _tensors(optimiser: torch.optim.Optimizer) -> list[Tensor]:
    return [value for state in optimiser.state.values() for value in state.values() if isinstance(value, Tensor)]
