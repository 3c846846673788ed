"""Grouped batch norm, an addition and a ReLU in one pass over memory, as Triton kernels.

A ResNet consists of convolutions, for which cuDNN is best, and of these operations. With these kernels it needs no
compilation by inductor, so training starts sooner.

Images are (N, C, H, W) in channels-last memory: a matrix of N·H·W rows and C columns, in which each group is a block of
rows. Statistics take two kernels: each program sums some rows of a group, then one combines the sums of a group. Sums
are of differences to the first row, because the variance of values far from zero would lose digits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_TILE = 2048  # values that a program holds at a time
_PROGRAMS = 1024  # enough to keep a GPU busy
_SPLITS = 128  # whose sums are combined at a time
_SIZES = ("rows", "splits", "split_rows")  # one kernel for all sizes, so that few are compiled
_MEAN, _VARIANCE, _RSTD, _SCALE, _SHIFT = (tl.constexpr(row) for row in range(5))  # of the statistics
_DWEIGHT, _DBIAS, _SLOPE, _CONSTANT = (tl.constexpr(row) for row in range(4))  # of the factors


@triton.jit(do_not_specialize=_SIZES)
def _sum_rows(x, sums, rows, channels, split_rows, R: tl.constexpr, C: tl.constexpr):
    """Sums of values and squares, relative to the first row, of one split of a group."""
    split, group = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    column = tl.program_id(1) * C + tl.arange(0, C)
    inside = column < channels
    x += group * rows * channels
    pivot = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    last = tl.minimum((split + 1) * split_rows, rows)
    total = tl.zeros((R, C), tl.float32)
    squares = tl.zeros((R, C), tl.float32)
    for start in range(split * split_rows, last, R):
        row = start + tl.arange(0, R)
        mask = (row < last)[:, None] & inside[None, :]
        value = tl.load(x + row[:, None] * channels + column[None, :], mask=mask, other=0.0).to(tl.float32)
        value = tl.where(mask, value - pivot[None, :], 0.0)
        total += value
        squares += value * value
    sums += (group * tl.num_programs(0) + split) * 2 * channels + column
    tl.store(sums, tl.sum(total, axis=0), mask=inside)
    tl.store(sums + channels, tl.sum(squares, axis=0), mask=inside)


@triton.jit
def _combined(sums, group, splits, channels, column, inside, S: tl.constexpr, C: tl.constexpr):
    """Both sums of a group over its splits."""
    first = tl.zeros((S, C), tl.float32)
    second = tl.zeros((S, C), tl.float32)
    for start in range(0, splits, S):
        split = start + tl.arange(0, S)
        mask = (split < splits)[:, None] & inside[None, :]
        offsets = (group * splits + split[:, None]) * 2 * channels + column[None, :]
        first += tl.load(sums + offsets, mask=mask, other=0.0)
        second += tl.load(sums + offsets + channels, mask=mask, other=0.0)
    return tl.sum(first, axis=0), tl.sum(second, axis=0)


@triton.jit(do_not_specialize=_SIZES)
def _finish_statistics(
    x, sums, weight, bias, statistics, rows, channels, splits, eps, S: tl.constexpr, C: tl.constexpr
):
    """The statistics of a group, with the scale and shift that normalize it."""
    group, groups = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    column = tl.program_id(0) * C + tl.arange(0, C)
    inside = column < channels
    total, squares = _combined(sums, group, splits, channels, column, inside, S, C)
    pivot = tl.load(x + group * rows * channels + column, mask=inside, other=0.0).to(tl.float32)
    offset = total / rows
    # Not tl.maximum, which would hide NaN.
    variance = squares / rows - offset * offset
    variance = tl.where(variance < 0, 0.0, variance)
    rstd = 1 / tl.sqrt(variance + eps)
    mean = pivot + offset
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) * rstd
    shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32) - mean * scale
    statistics += group * channels + column
    step = groups * channels
    tl.store(statistics + _MEAN * step, mean, mask=inside)
    tl.store(statistics + _VARIANCE * step, variance * (rows / (rows - 1.0)), mask=inside)
    tl.store(statistics + _RSTD * step, rstd, mask=inside)
    tl.store(statistics + _SCALE * step, scale, mask=inside)
    tl.store(statistics + _SHIFT * step, shift, mask=inside)


@triton.jit
def _tile(rows, channels, R: tl.constexpr, C: tl.constexpr):
    """Offsets and mask of the columns of one tile in the statistics, and of its values in memory."""
    group = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    column = tl.program_id(1) * C + tl.arange(0, C)
    inside = column < channels
    offsets = (group * rows + row[:, None]) * channels + column[None, :]
    return group * channels + column, inside, offsets, (row < rows)[:, None] & inside[None, :]


@triton.jit(do_not_specialize=_SIZES)
def _normalize(
    x, residual, y, statistics, rows, channels,
    RESIDUAL: tl.constexpr, RELU: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """y = ReLU(scale · x + shift + residual), of one tile."""
    columns, inside, offsets, mask = _tile(rows, channels, R, C)
    step = tl.num_programs(2) * channels
    statistics += columns
    scale = tl.load(statistics + _SCALE * step, mask=inside, other=0.0)
    shift = tl.load(statistics + _SHIFT * step, mask=inside, other=0.0)
    value = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32) * scale[None, :] + shift[None, :]
    if RESIDUAL:
        value += tl.load(residual + offsets, mask=mask, other=0.0).to(tl.float32)
    if RELU:
        value = tl.where(value < 0, 0.0, value)
    tl.store(y + offsets, value, mask=mask)


@triton.jit
def _load_gradient(dy, y, value, scale, shift, offsets, mask, RESIDUAL: tl.constexpr, RELU: tl.constexpr):
    """The gradient before the ReLU; y is only there with a residual, since otherwise x and the statistics give it."""
    gradient = tl.load(dy + offsets, mask=mask, other=0.0).to(tl.float32)
    if RELU:
        if RESIDUAL:
            before = tl.load(y + offsets, mask=mask, other=0.0).to(tl.float32)
        else:
            before = value * scale[None, :] + shift[None, :]
        gradient = tl.where(before <= 0, 0.0, gradient)
    return gradient


@triton.jit(do_not_specialize=_SIZES)
def _sum_gradients(
    dy, x, y, statistics, sums, rows, channels, split_rows,
    RESIDUAL: tl.constexpr, RELU: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Sums of gradients, and of gradients times centered values, of one split of a group."""
    split, group, groups = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64), tl.num_programs(2)
    column = tl.program_id(1) * C + tl.arange(0, C)
    inside = column < channels
    statistics += group * channels + column
    step = groups * channels
    mean = tl.load(statistics + _MEAN * step, mask=inside, other=0.0)
    scale = tl.load(statistics + _SCALE * step, mask=inside, other=0.0)
    shift = tl.load(statistics + _SHIFT * step, mask=inside, other=0.0)
    last = tl.minimum((split + 1) * split_rows, rows)
    total = tl.zeros((R, C), tl.float32)
    products = tl.zeros((R, C), tl.float32)
    for start in range(split * split_rows, last, R):
        row = start + tl.arange(0, R)
        mask = (row < last)[:, None] & inside[None, :]
        offsets = (group * rows + row[:, None]) * channels + column[None, :]
        value = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
        gradient = _load_gradient(dy, y, value, scale, shift, offsets, mask, RESIDUAL, RELU)
        total += gradient
        products += gradient * (value - mean[None, :])
    sums += (group * tl.num_programs(0) + split) * 2 * channels + column
    tl.store(sums, tl.sum(total, axis=0), mask=inside)
    tl.store(sums + channels, tl.sum(products, axis=0), mask=inside)


@triton.jit(do_not_specialize=_SIZES)
def _finish_gradients(sums, statistics, factors, rows, channels, splits, S: tl.constexpr, C: tl.constexpr):
    """The gradients of weight and bias of a group, and what dx = scale · gradient + slope · x + constant needs."""
    group, groups = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    column = tl.program_id(0) * C + tl.arange(0, C)
    inside = column < channels
    step = groups * channels
    total, products = _combined(sums, group, splits, channels, column, inside, S, C)
    statistics += group * channels + column
    mean = tl.load(statistics + _MEAN * step, mask=inside, other=0.0)
    rstd = tl.load(statistics + _RSTD * step, mask=inside, other=0.0)
    scale = tl.load(statistics + _SCALE * step, mask=inside, other=0.0)
    dweight = products * rstd
    slope = -scale * rstd * dweight / rows
    factors += group * channels + column
    tl.store(factors + _DWEIGHT * step, dweight, mask=inside)
    tl.store(factors + _DBIAS * step, total, mask=inside)
    tl.store(factors + _SLOPE * step, slope, mask=inside)
    tl.store(factors + _CONSTANT * step, -scale * total / rows - slope * mean, mask=inside)


@triton.jit(do_not_specialize=_SIZES)
def _spread_gradients(
    dy, x, y, dx, dresidual, statistics, factors, rows, channels,
    RESIDUAL: tl.constexpr, RELU: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The gradients of x and of the residual, of one tile."""
    columns, inside, offsets, mask = _tile(rows, channels, R, C)
    step = tl.num_programs(2) * channels
    statistics += columns
    factors += columns
    scale = tl.load(statistics + _SCALE * step, mask=inside, other=0.0)
    shift = tl.load(statistics + _SHIFT * step, mask=inside, other=0.0)
    slope = tl.load(factors + _SLOPE * step, mask=inside, other=0.0)
    constant = tl.load(factors + _CONSTANT * step, mask=inside, other=0.0)
    value = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    gradient = _load_gradient(dy, y, value, scale, shift, offsets, mask, RESIDUAL, RELU)
    if RESIDUAL:
        tl.store(dresidual + offsets, gradient, mask=mask)
    tl.store(dx + offsets, gradient * scale[None, :] + value * slope[None, :] + constant[None, :], mask=mask)


class _Layout:
    """How a matrix of groups · rows times channels is split over programs."""

    def __init__(self, x: Tensor, groups: int) -> None:
        self.channels = x.shape[1]
        self.groups = groups
        self.rows = x.numel() // (self.channels * groups)
        self.columns = min(triton.next_power_of_2(self.channels), 64)
        self.tile = _TILE // self.columns
        blocks = triton.cdiv(self.channels, self.columns)
        splits = min(triton.cdiv(_PROGRAMS, groups * blocks), triton.cdiv(self.rows, self.tile))
        self.split_rows = triton.cdiv(triton.cdiv(self.rows, splits), self.tile) * self.tile
        self.splits = triton.cdiv(self.rows, self.split_rows)
        self.reduce = (self.splits, blocks, groups)
        self.finish = (triton.cdiv(self.channels, 16), groups)
        self.tiles = (triton.cdiv(self.rows, self.tile), blocks, groups)
        self.sizes = {"R": self.tile, "C": self.columns}
        self.finish_sizes = {"S": _SPLITS, "C": 16}

    def buffer(self, x: Tensor, *shape: int) -> Tensor:
        return torch.empty(*shape, self.channels, dtype=torch.float32, device=x.device)


def _normalized(x: Tensor, residual: Tensor | None, statistics: Tensor, layout: _Layout, relu: bool) -> Tensor:
    y = torch.empty_like(x)
    added, size = residual is not None, (layout.rows, layout.channels)
    _normalize[layout.tiles](x, residual, y, statistics, *size, RESIDUAL=added, RELU=relu, **layout.sizes)
    return y


class _GroupedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        layout: _Layout,
        eps: float,
        relu: bool,
    ) -> tuple[Tensor, Tensor]:
        sums = layout.buffer(x, layout.groups, layout.splits, 2)
        statistics = layout.buffer(x, 5, layout.groups)
        size = (layout.rows, layout.channels)
        _sum_rows[layout.reduce](x, sums, *size, layout.split_rows, **layout.sizes)
        _finish_statistics[layout.finish](
            x, sums, weight, bias, statistics, *size, layout.splits, eps, **layout.finish_sizes
        )
        y = _normalized(x, residual, statistics, layout, relu)
        added = residual is not None
        ctx.layout, ctx.relu, ctx.added = layout, relu, added
        ctx.save_for_backward(x, y if added and relu else None, statistics)
        ctx.mark_non_differentiable(statistics)
        ctx.set_materialize_grads(False)  # no zeros for the statistics
        return y, statistics

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, _: None) -> tuple[Tensor | None, ...]:
        x, y, statistics = ctx.saved_tensors
        layout, kinds = ctx.layout, {"RESIDUAL": ctx.added, "RELU": ctx.relu}
        dy = _by_rows(dy)
        size = (layout.rows, layout.channels)
        sums = layout.buffer(x, layout.groups, layout.splits, 2)
        factors = layout.buffer(x, 4, layout.groups)
        dx, dresidual = torch.empty_like(x), torch.empty_like(x) if ctx.added else None
        _sum_gradients[layout.reduce](dy, x, y, statistics, sums, *size, layout.split_rows, **kinds, **layout.sizes)
        _finish_gradients[layout.finish](sums, statistics, factors, *size, layout.splits, **layout.finish_sizes)
        _spread_gradients[layout.tiles](dy, x, y, dx, dresidual, statistics, factors, *size, **kinds, **layout.sizes)
        dweight, dbias = factors[:2].sum(dim=1)  # over the groups
        return dx, dresidual, dweight, dbias, None, None, None


class RecomputedOutputs:
    """Within this context, layers that save the output of a fused norm for the backward pass save its input instead.

    The norm saves its input anyway, so this halves the memory of a ResNet's activations. The output is computed again
    from it when it is needed. Outputs with a residual are saved as they are.
    """

    _active: RecomputedOutputs | None = None

    def __init__(self) -> None:
        self._outputs: dict[int, tuple[weakref.ref[Tensor], int, Callable[[], Tensor]]] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def __enter__(self) -> None:
        self._outer, RecomputedOutputs._active = RecomputedOutputs._active, self
        self._hooks.__enter__()

    def __exit__(self, *_: object) -> None:
        RecomputedOutputs._active = self._outer
        self._hooks.__exit__()
        self._outputs.clear()

    @classmethod
    def add(cls, output: Tensor, compute: Callable[[], Tensor]) -> None:
        if cls._active is not None and output.requires_grad:
            cls._active._outputs[output.data_ptr()] = weakref.ref(output), output._version, compute

    def _pack(self, tensor: Tensor) -> Tensor | Callable[[], Tensor]:
        reference, version, compute = self._outputs.get(tensor.data_ptr(), (lambda: None, 0, None))
        output = reference()  # None: the memory is now used by something else
        if output is None or compute is None or output._version != version:  # or the output was changed in place
            return tensor
        return compute if output.shape == tensor.shape and output.stride() == tensor.stride() else tensor


def _unpack(saved: Tensor | Callable[[], Tensor]) -> Tensor:
    return saved if isinstance(saved, Tensor) else saved()


def _by_rows(images: Tensor) -> Tensor:
    """The tensor with channels last in memory."""
    if images.dim() == 4:
        return images.contiguous(memory_format=torch.channels_last)
    return images.movedim(1, -1).contiguous().movedim(-1, 1)


def grouped_batch_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    groups: int,
    eps: float,
    *,
    residual: Tensor | None = None,
    relu: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalize each group by its own statistics, add `residual`, apply a ReLU.

    Returns the result, and the means and unbiased variances (groups, C).
    """
    if x.numel() == x.shape[1] * groups:
        raise ValueError("each group of a batch norm needs more than one value per channel.")
    if residual is not None:
        residual = _by_rows(residual.to(x.dtype))
    x, layout = _by_rows(x), _Layout(x, groups)
    y, statistics = _GroupedNorm.apply(x, residual, weight, bias, layout, eps, relu)
    if residual is None:
        RecomputedOutputs.add(y, partial(_normalized, x.detach(), None, statistics, layout, relu))
    return y, statistics[_MEAN.value], statistics[_VARIANCE.value]
