"""ShuffleBN in one process: batch-norm statistics per group of the batch, as if each group were its own GPU.

MoCo needs it because a query and its keys that share batch statistics can be matched by them without learning
anything. On many GPUs the keys of a batch are dealt to other GPUs than their queries'; here they are dealt to other
groups. Queries form groups of N/G rows in batch order, keys groups of N·M'/G rows in a shuffled order.
"""

from __future__ import annotations

from typing import TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jcl.errors import SettingsError

ModuleType = TypeVar("ModuleType", bound=nn.Module)


class GroupedBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch norm whose training statistics are taken over `groups` equal, contiguous parts of the batch.

    The running statistics become what G replicas' statistics would average to: one update with the mean of the group
    statistics. That is the same whether the groups live in one process or on G ranks. In eval mode it is plain batch
    norm, and its state dict is plain batch norm's.
    """

    groups: int = 1
    passes: int = 1
    later_passes: Tensor | None = None  # how many of the passes are still to come; shared by the encoder's layers

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or (self.groups == 1 and self.later_passes is None):
            return super().forward(input)
        if input.shape[0] % self.groups:
            raise ValueError(f"a batch of {input.shape[0]} rows cannot be split into {self.groups} equal BN groups.")
        if torch.compiler.is_compiling():
            return self._in_one_piece(input)
        assert self.running_mean is not None and self.running_var is not None
        outputs, means, variances = [], [], []
        for part in input.chunk(self.groups):
            # With momentum 1, batch_norm leaves this group's own mean and unbiased variance in the two buffers.
            mean, variance = torch.zeros_like(self.running_mean), torch.ones_like(self.running_var)
            outputs.append(F.batch_norm(part, mean, variance, self.weight, self.bias, True, 1.0, self.eps))
            means.append(mean)
            variances.append(variance)
        self._update_running_statistics(torch.stack(means).mean(0), torch.stack(variances).mean(0))
        return torch.cat(outputs)

    def _in_one_piece(self, input: Tensor) -> Tensor:
        """The same in plain arithmetic, which a compiler fuses into few kernels for all groups together."""
        assert self.weight is not None and self.bias is not None
        parts = input.view(self.groups, -1, *input.shape[1:]).float()  # (G, N/G, C) or (G, N/G, C, H, W)
        per_channel = (-1, *[1] * (parts.dim() - 3))
        variance, mean = torch.var_mean(parts, dim=(1, *range(3, parts.dim())), correction=0, keepdim=True)
        rows = parts.numel() // (self.groups * self.num_features)
        self._update_running_statistics(mean.mean(0).flatten(), variance.mean(0).flatten() * (rows / (rows - 1)))
        scale = torch.rsqrt(variance + self.eps) * self.weight.view(per_channel)
        shift = self.bias.view(per_channel) - mean * scale
        output: Tensor = (parts * scale + shift).to(input.dtype).flatten(0, 1)
        return output

    @torch.no_grad()
    def _update_running_statistics(self, mean: Tensor, variance: Tensor) -> None:
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        assert self.momentum is not None
        momentum: float | Tensor = self.momentum
        if self.later_passes is not None:
            momentum = momentum_of_pass(self.later_passes, self.passes, self.momentum)
        for running, new in ((self.running_mean, mean), (self.running_var, variance)):
            running.add_((new - running) * momentum)
        # All passes of a step are one batch.
        self.num_batches_tracked += 1 if self.later_passes is None else (self.later_passes == 0).long()


class GroupedBatchNorm1d(GroupedBatchNorm, nn.BatchNorm1d):
    """For rows (N, C), as in heads."""


class GroupedBatchNorm2d(GroupedBatchNorm, nn.BatchNorm2d):
    """For feature maps (N, C, H, W)."""


GROUPED: dict[type[nn.Module], type[GroupedBatchNorm]] = {
    nn.BatchNorm1d: GroupedBatchNorm1d,
    nn.BatchNorm2d: GroupedBatchNorm2d,
}


def group_batch_norm(module: ModuleType) -> ModuleType:
    """Replace every `BatchNorm1d` and `BatchNorm2d` inside `module` by its grouped form, keeping what it holds.

    Batch norms of another kind, and those without weights or a moving average, are refused.
    """
    for name, child in module.named_children():
        if _can_be_grouped(child):
            grouped = GROUPED[type(child)](child.num_features, child.eps, child.momentum).to(child.weight)
            grouped.load_state_dict(child.state_dict())
            setattr(module, name, grouped)
        elif isinstance(child, nn.modules.batchnorm._BatchNorm) and not isinstance(child, GroupedBatchNorm):
            raise SettingsError(
                f"the backbone holds a {type(child).__name__} layer, which cannot be split into BN groups; "
                "set model.bn_groups=1 or choose a backbone with BatchNorm2d layers as PyTorch makes them."
            )
        else:
            group_batch_norm(child)
    return module


def _can_be_grouped(module: nn.Module) -> TypeGuard[nn.BatchNorm1d | nn.BatchNorm2d]:
    if type(module) not in GROUPED:
        return False
    return bool(module.affine and module.track_running_stats and module.momentum is not None)


def set_batch_norm_groups(module: nn.Module, groups: int, passes: int = 1, later_passes: Tensor | None = None) -> None:
    """Tell every grouped batch norm inside `module` how many groups the rows of one pass hold, and of how many passes.

    `later_passes` is a scalar tensor that the caller sets before each pass to the number of passes still to come.
    """
    for child in module.modules():
        if isinstance(child, GroupedBatchNorm):
            child.groups, child.passes, child.later_passes = groups, passes, later_passes


def momentum_of_pass(later: Tensor, passes: int, momentum: float) -> Tensor:
    """The momentum of the pass that `later` others follow, so that all `passes` end as one update with their mean.

    Every pass must end with weight momentum / passes, although each later pass shrinks it once more.
    """
    return momentum / (passes - later * momentum)


def unshuffle(rows: Tensor, order: Tensor) -> Tensor:
    """Undo `order`: what was computed i-th goes back to place `order[i]`. Keeps gradients."""
    return torch.empty_like(rows).index_copy(0, order, rows)
