"""The losses and metrics of a step as one Triton kernel between two matrix products.

`torch.compile` makes kernels that are about as fast, but takes 10 seconds for it. The gradient of these losses is
known in closed form, so it is computed together with the loss and only scaled in the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_BLOCK = 1024  # negatives that a program holds at a time
_MAX_TILE = 16384  # values of the keys of one query
_LOWEST = tl.constexpr(-1e30)  # below every similarity


@triton.jit
def _contrast(
    query, keys, logits, scale, gradient, metrics, width, count, negatives, temperature,
    JOINT: tl.constexpr, GRADIENT: tl.constexpr, M: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Loss and metrics of one query; its row of `logits` becomes the gradient with respect to them."""
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    key, column, block = tl.arange(0, M), tl.arange(0, D), tl.arange(0, BLOCK)
    inside = (key < count)[:, None] & (column < width)[None, :]
    own = tl.load(query + row * width + column, mask=column < width, other=0.0)
    positives = tl.load(keys + (row * count + key[:, None]) * width + column[None, :], mask=inside, other=0.0)
    similarity = tl.sum(positives * own[None, :], axis=1)
    mean = tl.sum(similarity, axis=0) / count
    deviation = tl.where(key < count, similarity - mean, 0.0)
    variance = tl.sum(deviation * deviation, axis=0) / count

    logits += row * negatives
    highest = tl.full((BLOCK,), _LOWEST, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, negatives, BLOCK):
        column_mask = start + block < negatives
        logit = tl.load(logits + start + block, mask=column_mask, other=_LOWEST) / temperature
        higher = tl.maximum(highest, logit)
        total = total * tl.exp(highest - higher) + tl.where(column_mask, tl.exp(logit - higher), 0.0)
        highest = higher
    top = tl.max(highest, axis=0)
    log_sum = top + tl.log(tl.sum(total * tl.exp(highest - top), axis=0))

    # Of the positive key: its logit relative to the negatives, its share p of the softmax, -log p.
    joint = mean / temperature - log_sum
    if JOINT:
        weight = tl.load(scale)
        joint += weight / 2 * variance / (temperature * temperature)
    share = tl.sigmoid(joint)
    if JOINT:
        loss = _softplus(joint) + log_sum - mean / temperature
        repulsion = 1 - share
        slope = (share * (1 + weight * deviation / temperature) - 1) / count
    else:
        relative = similarity / temperature - log_sum
        repelled = tl.where(key < count, tl.sigmoid(-relative), 0.0) / count
        loss = tl.sum(tl.where(key < count, _softplus(-relative), 0.0), axis=0) / count
        repulsion = tl.sum(repelled, axis=0)
        slope = -repelled

    if GRADIENT:  # of the mean loss
        by_keys = tl.sum(slope[:, None] * positives, axis=0) / (temperature * rows)
        tl.store(gradient + row * width + column, by_keys, mask=column < width)
        for start in range(0, negatives, BLOCK):
            column_mask = start + block < negatives
            logit = tl.load(logits + start + block, mask=column_mask, other=_LOWEST) / temperature
            softmax = tl.exp(logit - log_sum) * repulsion / (temperature * rows)
            tl.store(logits + start + block, softmax, mask=column_mask)
    metrics += row
    tl.store(metrics, loss)
    tl.store(metrics + rows, (mean / temperature > top).to(tl.float32))
    tl.store(metrics + 2 * rows, mean)
    tl.store(metrics + 3 * rows, variance)
    tl.store(metrics + 4 * rows, share)


@triton.jit
def _softplus(x):
    """log(1 + exp(x))."""
    return tl.maximum(x, 0.0) + tl.log(1 + tl.exp(-tl.abs(x)))


class _Contrast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, keys: Tensor, negatives: Tensor, scale: Tensor | None, temperature: float
    ) -> tuple[Tensor, Tensor]:
        query, keys = query.contiguous(), keys.contiguous()
        (rows, count, width), differentiable = keys.shape, ctx.needs_input_grad[0]
        logits = query @ negatives.T
        gradient, metrics = torch.empty_like(query), query.new_empty(5, rows)
        _contrast[(rows,)](
            query, keys, logits, scale, gradient, metrics, width, count, len(negatives), temperature,
            JOINT=scale is not None, GRADIENT=differentiable, M=triton.next_power_of_2(count),
            D=triton.next_power_of_2(width), BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip
        if differentiable:
            ctx.save_for_backward(gradient.addmm_(logits, negatives))
        means = metrics.mean(dim=1)
        loss, others = means[0].clone(), means[1:]
        ctx.mark_non_differentiable(others)
        return loss, others

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * by_loss, None, None, None, None


def fits(num_keys: int, width: int) -> bool:
    """Whether the keys of a query are few enough for the kernel."""
    return bool(triton.next_power_of_2(num_keys) * triton.next_power_of_2(width) <= _MAX_TILE)


def contrast(
    query: Tensor,
    keys: Tensor,
    negatives: Tensor,
    *,
    temperature: float,
    covariance_scale: float | Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`joint_contrastive_loss`, or without a covariance scale `multi_key_loss`, of keys without gradient.

    Returns the loss and four metrics (4,): contrastive accuracy, and the means of qᵀμ, qᵀΣq and p₊ (see `core.loss`).
    """
    if isinstance(covariance_scale, int | float):
        covariance_scale = torch.full((), covariance_scale, device=query.device)
    with torch.autocast(query.device.type, enabled=False):
        values = query.float(), keys.detach().float(), negatives.float(), covariance_scale, temperature
        loss, metrics = _Contrast.apply(*values)
        return loss, metrics
