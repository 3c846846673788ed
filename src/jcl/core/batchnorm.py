"""ShuffleBN in one process: batch norm statistics per group of the batch, as if each group were on its own GPU.

Without it, a query and its keys share batch statistics and can be matched by these alone. MoCo sends keys to other GPUs
than their queries; here they go to other groups. Queries form groups of N/G rows in batch order, keys form groups of
N·M'/G rows in a shuffled order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jcl.errors import SettingsError

ModuleType = TypeVar("ModuleType", bound=nn.Module)
FusedNorm = Callable[..., tuple[Tensor, Tensor, Tensor]]  # `fused_norm.grouped_batch_norm`


class GroupedBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch norm that normalizes each of `groups` equal, contiguous parts of the batch by its own statistics.

    Training leaves the statistics in `seen` until `update_running_stats` applies them. The eval mode and the state dict
    are those of plain batch norm.
    """

    groups: int = 1
    seen: tuple[Tensor, Tensor] | None = None  # means and unbiased variances (G, C) of the groups
    kernels: FusedNorm | None = None  # computes everything together on a GPU

    def forward(self, input: Tensor, residual: Tensor | None = None, relu: bool = False) -> Tensor:
        """Normalize, then add `residual`, and apply a ReLU if `relu` is true."""
        if self.training and input.shape[0] % self.groups:
            raise ValueError(f"a batch of {input.shape[0]} rows cannot be split into {self.groups} equal BN groups.")
        if self.training and self.kernels is not None and (residual is None or residual.shape == input.shape):
            output, mean, variance = self.kernels(
                input, self.weight, self.bias, self.groups, self.eps, residual=residual, relu=relu
            )
            self.seen = mean, variance
            return output
        if not self.training:
            output = super().forward(input)
        elif torch.compiler.is_compiling():
            output = self._forward_fused(input)
        else:
            output = self._forward_by_group(input)
        if residual is not None:
            output = output + residual
        return F.relu(output) if relu else output

    def _forward_by_group(self, input: Tensor) -> Tensor:
        assert self.running_mean is not None and self.running_var is not None
        outputs, means, variances = [], [], []
        for part in input.chunk(self.groups):
            # With momentum 1, batch_norm writes the group's mean and unbiased variance to the two buffers.
            mean, variance = torch.zeros_like(self.running_mean), torch.ones_like(self.running_var)
            outputs.append(F.batch_norm(part, mean, variance, self.weight, self.bias, True, 1.0, self.eps))
            means.append(mean)
            variances.append(variance)
        self.seen = torch.stack(means), torch.stack(variances)
        return torch.cat(outputs)

    def _forward_fused(self, input: Tensor) -> Tensor:
        """The same without a loop, so that the compiler fuses all groups into few kernels."""
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
    """Grouped batch norm of (N, C) inputs."""


class GroupedBatchNorm2d(GroupedBatchNorm, nn.BatchNorm2d):
    """Grouped batch norm of (N, C, H, W) inputs."""


class GroupedBatchNormAct2d(GroupedBatchNorm2d):
    """Grouped form of timm's `BatchNormAct2d`, which also drops values and applies an activation."""

    drop: nn.Module
    act: nn.Module

    def forward(self, input: Tensor, residual: Tensor | None = None, relu: bool = False) -> Tensor:
        output: Tensor = self.act(self.drop(super().forward(input, residual, relu)))
        return output


GROUPED: dict[type[nn.Module], type[GroupedBatchNorm]] = {
    nn.BatchNorm1d: GroupedBatchNorm1d,
    nn.BatchNorm2d: GroupedBatchNorm2d,
}


def has_batch_norm(module: nn.Module) -> bool:
    return any(isinstance(child, nn.modules.batchnorm._BatchNorm) for child in module.modules())


def group_batch_norm(module: ModuleType) -> ModuleType:
    """Turn every batch norm layer into its grouped form; kinds that have none raise."""
    for layer in module.modules():
        if not isinstance(layer, nn.modules.batchnorm._BatchNorm) or isinstance(layer, GroupedBatchNorm):
            continue
        of_timm = type(layer).__name__ == "BatchNormAct2d"
        kind = GroupedBatchNormAct2d if of_timm else GROUPED.get(type(layer))
        if kind is None or not layer.affine or not layer.track_running_stats or layer.momentum is None:
            problem = f"The backbone has a {type(layer).__name__} layer, which cannot be split into BN groups"
            raise SettingsError(f"{problem}; set model.bn_groups=1 or use a backbone with plain BatchNorm2d layers.")
        layer.__class__ = kind  # adds no attribute, and keeps parameters and hooks as they are
    return module


Statistics = dict[GroupedBatchNorm, tuple[Tensor, Tensor]]  # of the layers in one pass


def pop_batch_stats(encoder: nn.Module) -> Statistics:
    """Remove the statistics of the last pass from the grouped layers of an encoder and return them."""
    found: Statistics = {}
    for module in encoder.modules():
        if isinstance(module, GroupedBatchNorm) and module.seen is not None:
            found[module], module.seen = module.seen, None
    return found


@torch.no_grad()
def update_running_stats(passes: Sequence[Statistics]) -> None:
    """Move the running statistics towards the mean over the groups of all passes of a batch, in a few kernels."""
    layers = list(passes[0])
    if any(list(seen) != layers for seen in passes):
        raise SettingsError("The backbone uses a batch norm layer in only some passes of keys; set train.key_passes=1.")
    if not layers:
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
    change = torch._foreach_sub(means, running)
    torch._foreach_mul_(change, momenta)
    torch._foreach_add_(running, change)
    torch._foreach_add_(counts, 1)


def set_batch_norm_groups(module: nn.Module, groups: int) -> None:
    """Set the number of groups of every grouped batch norm in `module`."""
    for child in module.modules():
        if isinstance(child, GroupedBatchNorm):
            child.groups = groups


def unshuffle(rows: Tensor, order: Tensor) -> Tensor:
    """Undo a shuffle: row i moves to position `order[i]`. Differentiable."""
    return torch.empty_like(rows).index_copy(0, order, rows)
