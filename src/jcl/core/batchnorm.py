"""ShuffleBN in one process: batch-norm statistics per group of the batch, as if each group were its own GPU.

MoCo needs it because a query and keys that share batch statistics can be matched by these without learning anything.
On several GPUs the keys of a batch go to other GPUs than their queries; here they go to other groups. Queries form
groups of N/G rows in batch order, keys groups of N·M'/G rows in a shuffled order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jcl.errors import SettingsError

ModuleType = TypeVar("ModuleType", bound=nn.Module)


class GroupedBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch norm whose training statistics are taken over `groups` equal, contiguous parts of the batch.

    In training mode the statistics of the groups stay in `seen` until `update_running_stats` applies them. In eval mode
    it is plain batch norm, and it has the same state dict.
    """

    groups: int = 1
    seen: tuple[Tensor, Tensor] | None = None  # means and unbiased variances (G, C) of the last batch's groups

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        if input.shape[0] % self.groups:
            raise ValueError(f"a batch of {input.shape[0]} rows cannot be split into {self.groups} equal BN groups.")
        return self._forward_fused(input) if torch.compiler.is_compiling() else self._forward_by_group(input)

    def _forward_by_group(self, input: Tensor) -> Tensor:
        assert self.running_mean is not None and self.running_var is not None
        outputs, means, variances = [], [], []
        for part in input.chunk(self.groups):
            # With momentum 1, batch_norm leaves this group's own mean and unbiased variance in the two buffers.
            mean, variance = torch.zeros_like(self.running_mean), torch.ones_like(self.running_var)
            outputs.append(F.batch_norm(part, mean, variance, self.weight, self.bias, True, 1.0, self.eps))
            means.append(mean)
            variances.append(variance)
        self.seen = torch.stack(means), torch.stack(variances)
        return torch.cat(outputs)

    def _forward_fused(self, input: Tensor) -> Tensor:
        """The same in plain arithmetic, which the compiler fuses into few kernels for all groups."""
        assert self.weight is not None and self.bias is not None
        parts = input.view(self.groups, -1, *input.shape[1:]).float()  # (G, N/G, C) or (G, N/G, C, H, W)
        per_channel = (-1, *[1] * (parts.dim() - 3))
        variance, mean = torch.var_mean(parts, dim=(1, *range(3, parts.dim())), correction=0, keepdim=True)
        rows = parts.numel() // (self.groups * self.num_features)
        self.seen = mean.detach().flatten(1), variance.detach().flatten(1) * (rows / (rows - 1))
        scale = torch.rsqrt(variance + self.eps) * self.weight.view(per_channel)
        shift = self.bias.view(per_channel) - mean * scale
        output: Tensor = (parts * scale + shift).to(input.dtype).flatten(0, 1)
        return output


class GroupedBatchNorm1d(GroupedBatchNorm, nn.BatchNorm1d):
    """For rows (N, C), as in heads."""


class GroupedBatchNorm2d(GroupedBatchNorm, nn.BatchNorm2d):
    """For feature maps (N, C, H, W)."""


GROUPED: dict[type[nn.Module], type[GroupedBatchNorm]] = {
    nn.BatchNorm1d: GroupedBatchNorm1d,
    nn.BatchNorm2d: GroupedBatchNorm2d,
}


def group_batch_norm(module: ModuleType) -> ModuleType:
    """Replace every `BatchNorm1d` and `BatchNorm2d` inside `module` by its grouped form, with the same state.

    A shared layer stays shared. Other kinds of batch norm, and those without weights or running statistics, are
    refused.
    """
    grouped: dict[nn.Module, GroupedBatchNorm] = {}
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if _can_be_grouped(child):
                if child not in grouped:
                    grouped[child] = _grouped(child)
                setattr(parent, name, grouped[child])
            elif isinstance(child, nn.modules.batchnorm._BatchNorm) and not isinstance(child, GroupedBatchNorm):
                raise SettingsError(
                    f"the backbone has a {type(child).__name__} layer, which cannot be split into BN groups; "
                    "set model.bn_groups=1 or choose a backbone with plain BatchNorm2d layers."
                )
    return module


def _grouped(layer: nn.BatchNorm1d | nn.BatchNorm2d) -> GroupedBatchNorm:
    other = GROUPED[type(layer)](layer.num_features, layer.eps, layer.momentum).to(layer.weight)
    other.load_state_dict(layer.state_dict())
    return other


def _can_be_grouped(module: nn.Module | None) -> TypeGuard[nn.BatchNorm1d | nn.BatchNorm2d]:
    if module is None or type(module) not in GROUPED:
        return False
    return bool(module.affine and module.track_running_stats and module.momentum is not None)


Statistics = dict[GroupedBatchNorm, tuple[Tensor, Tensor]]
"""The statistics of each layer in one pass."""


def pop_batch_stats(encoder: nn.Module) -> Statistics:
    """Take the statistics of the last pass out of the grouped layers of an encoder."""
    found: Statistics = {}
    for module in encoder.modules():
        if isinstance(module, GroupedBatchNorm) and module.seen is not None:
            found[module], module.seen = module.seen, None
    return found


@torch.no_grad()
def update_running_stats(passes: Sequence[Statistics]) -> None:
    """Update the running statistics of all layers once, in a few kernels, from the passes of one batch.

    The update takes the mean of the group statistics, as G replicas would on average. It is the same whether the groups
    are in one process or on G ranks, and in one pass or in several.
    """
    layers = list(passes[0])
    if any(list(seen) != layers for seen in passes):
        raise SettingsError(
            "the backbone uses a batch norm layer in only some passes, so the keys' statistics cannot be combined; "
            "set train.key_passes=1."
        )
    if not layers:  # plain batch norm or none
        return
    running, momenta, counts = [], [], []
    for layer in layers:
        assert layer.running_mean is not None and layer.running_var is not None and layer.momentum is not None
        assert layer.num_batches_tracked is not None
        running += [layer.running_mean, layer.running_var]
        momenta += [layer.momentum] * 2
        counts.append(layer.num_batches_tracked)
    groups = torch.cat([torch.cat([part for pair in seen.values() for part in pair], dim=1) for seen in passes])
    means = torch.split(groups.mean(0), [buffer.numel() for buffer in running])
    ahead = torch._foreach_sub(means, running)
    torch._foreach_mul_(ahead, momenta)
    torch._foreach_add_(running, ahead)
    torch._foreach_add_(counts, 1)


def set_batch_norm_groups(module: nn.Module, groups: int) -> None:
    """Set the number of groups in one pass, for every grouped batch norm inside `module`."""
    for child in module.modules():
        if isinstance(child, GroupedBatchNorm):
            child.groups = groups


def unshuffle(rows: Tensor, order: Tensor) -> Tensor:
    """Undo a shuffle by `order`: row i goes back to place `order[i]`. Keeps gradients."""
    return torch.empty_like(rows).index_copy(0, order, rows)
