"""The fused kernels against float64; without a GPU `test_triton.py` runs these tests."""

import copy

import pytest
import torch
from torch import nn

from jcl.core.batchnorm import (
    GroupedBatchNorm1d,
    GroupedBatchNorm2d,
    group_batch_norm,
    pop_batch_stats,
    set_batch_norm_groups,
)
from jcl.core.encoder import Encoder, build_backbone
from jcl.core.fusion import fuse_batch_norm
from kernel_tools import DEVICE, INTERPRETED, needs_kernels

pytest.importorskip("triton")


@pytest.mark.gpu
@needs_kernels
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize(
    ("shape", "groups"), [((8, 5, 4, 3), 2), ((16, 70, 3, 3), 4), ((3, 64, 9, 9), 1), ((4, 3, 5), 2)]
)
def test_values_statistics_and_gradients(shape, groups, added, relu, monkeypatch):
    from jcl.core import fused_norm

    monkeypatch.setattr(fused_norm, "_SPLITS", 4)  # less than (3, 64, 9, 9) has
    if INTERPRETED and shape[1] >= 64 and not (added and relu):
        pytest.skip("slow in the interpreter")
    draw = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=draw) * 2 + 30, torch.rand(shape[1], generator=draw) + 0.5]
    values += [torch.randn(shape[1], generator=draw)] + [torch.randn(shape, generator=draw)] * added
    own = [value.clone().to(DEVICE).requires_grad_() for value in values]
    exact = [value.double().requires_grad_() for value in values]
    layer = (GroupedBatchNorm2d if len(shape) == 4 else GroupedBatchNorm1d)(shape[1]).double()
    layer.groups = groups
    wanted = torch.func.functional_call(
        layer, {"weight": exact[1], "bias": exact[2]}, (exact[0], *exact[3:]), {"relu": relu}
    )
    found, *statistics = fused_norm.grouped_batch_norm(
        own[0], own[1], own[2], groups, layer.eps, residual=own[3] if added else None, relu=relu
    )
    gradient = torch.randn(shape, generator=draw)
    found.backward(gradient.to(DEVICE))
    wanted.backward(gradient.double())
    for one, other in [(found, wanted), *zip(statistics, layer.seen, strict=True)]:
        torch.testing.assert_close(one.double().cpu(), other, rtol=1e-5, atol=3e-5)
    for one, other in zip(own, exact, strict=True):
        torch.testing.assert_close(one.grad.double().cpu(), other.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@needs_kernels
def test_values_that_are_not_finite_stay_so():
    from jcl.core.fused_norm import grouped_batch_norm

    images = torch.randn(4, 3, 2, 2, device=DEVICE)
    images[0, 1, 0, 0] = torch.nan
    result, *_ = grouped_batch_norm(
        images, torch.ones(3, device=DEVICE), torch.zeros(3, device=DEVICE), 1, 1e-5, relu=True
    )
    assert result[:, 1].isnan().all() and result[:, [0, 2]].isfinite().all()


@pytest.mark.gpu
@needs_kernels
def test_one_value_per_channel_is_refused():
    from jcl.core.fused_norm import grouped_batch_norm

    with pytest.raises(ValueError, match="one value"):
        grouped_batch_norm(torch.randn(2, 3, 1, 1, device=DEVICE), *torch.ones(2, 3, device=DEVICE), 2, 1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu" or torch.cuda.mem_get_info()[0] < 2**34, reason="needs 16 GB on a GPU")
def test_a_tensor_of_more_than_two_to_the_31_values():
    from jcl.core.fused_norm import grouped_batch_norm

    images = torch.zeros(2**15 + 8, 64, 32, 32, dtype=torch.bfloat16, device=DEVICE)
    images = images.to(memory_format=torch.channels_last)
    images[-8:].normal_()
    found, mean, variance = grouped_batch_norm(images, *torch.ones(2, 64, device=DEVICE), 1, 1e-5)
    wanted = (images[-1].float() - mean.view(-1, 1, 1)) * (variance + 1e-5).rsqrt().view(-1, 1, 1) + 1
    torch.testing.assert_close(found[-1].float(), wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
@needs_kernels
def test_an_output_that_is_changed_in_place_is_not_recomputed():
    from jcl.core.fused_norm import RecomputedOutputs, grouped_batch_norm

    weight, bias = torch.ones(2, 3, device=DEVICE).requires_grad_().unbind()
    with RecomputedOutputs():
        output, *_ = grouped_batch_norm(torch.randn(4, 3, device=DEVICE), weight, bias, 1, 1e-5)
        output += 5
        wanted = 2 * output.detach()
        squares = output.square()
    (gradient,) = torch.autograd.grad(squares.sum(), output)
    torch.testing.assert_close(gradient, wanted)


@pytest.mark.gpu
@needs_kernels
def test_a_residual_may_have_another_shape():
    layer = group_batch_norm(nn.BatchNorm2d(3)).to(DEVICE)
    images, residual = torch.randn(4, 3, 2, 2, device=DEVICE), torch.randn(4, 3, 1, 1, device=DEVICE)
    wanted = layer(images, residual, relu=True)
    layer.kernels = lambda *_, **__: pytest.fail("the kernels would read beyond the residual")
    assert torch.equal(layer(images, residual, relu=True), wanted)


class Block(nn.Module):
    """A residual block of two convolutions; with more channels, the shortcut has a batch norm too."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs))
        self.last = nn.Sequential(nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs))
        self.relu = nn.ReLU(inplace=True)
        wider = nn.Sequential(nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs))
        self.shortcut = nn.Identity() if inputs == outputs else wider

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found = self.last(self.relu(self.first(images)))
        found += self.shortcut(images)
        return self.relu(found)


def small_resnet() -> nn.Module:
    stem = [nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    return nn.Sequential(*stem, Block(8, 8), Block(8, 12), nn.AdaptiveAvgPool2d(1), nn.Flatten())


@pytest.mark.gpu
@needs_kernels
@pytest.mark.parametrize("name", ["small", "resnet18", "timm/resnet18"])
@torch.backends.cudnn.flags(allow_tf32=False)
def test_a_fused_resnet_computes_the_same(name):
    if name != "small" and INTERPRETED:
        pytest.skip("slow in the interpreter")
    torch.manual_seed(0)
    size = 8 if INTERPRETED else 16
    backbone, width = (small_resnet(), 12) if name == "small" else build_backbone(name, stem="small", image_size=size)
    plain = group_batch_norm(Encoder(backbone, width)).to(DEVICE)
    set_batch_norm_groups(plain, 2)
    fused = copy.deepcopy(plain)
    assert fused.fuse() and list(fused.state_dict()) == list(plain.state_dict())
    fused = copy.deepcopy(fused)
    images = torch.randn(size, 3, size, size, device=DEVICE)
    weights = torch.randn(size, 128, device=DEVICE)
    embeddings, statistics = [], []
    for encoder in (plain, fused):
        embeddings.append(encoder.train()(images))
        statistics.append(pop_batch_stats(encoder).values())
        (embeddings[-1] * weights).sum().backward()
    torch.testing.assert_close(*embeddings, rtol=0, atol=1e-4)
    assert len(statistics[0]) == len(statistics[1]) >= 6
    for own, other in zip(*statistics, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-3, atol=1e-4)
    for own, other in zip(plain.parameters(), fused.parameters(), strict=True):
        assert (own.grad - other.grad).norm() <= 1e-3 * own.grad.norm() + 1e-6


@pytest.mark.parametrize(
    ("name", "drop_path"), [("mobilenet_v3_small", None), ("densenet121", None), ("timm/test_resnet", 0.2)]
)
def test_other_networks_are_left_to_the_compiler(name, drop_path):
    backbone, width = build_backbone(name, image_size=64, drop_path=drop_path)
    assert not group_batch_norm(Encoder(backbone, width)).fuse()


class Odd(nn.Module):
    """A layer called "relu" that is none, a sum of a batch norm with itself, and calls with keywords."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm, self.identity = group_batch_norm(nn.BatchNorm2d(3)), nn.Identity()
        self.relu = nn.LeakyReLU() if kind == "leaky" else nn.ReLU()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        norm = self.identity(input=self.norm(input=images))
        return self.relu(norm + norm if self.kind == "doubled" else norm)


@pytest.mark.parametrize(("kind", "fusible"), [("leaky", False), ("doubled", False), ("keywords", True)])
def test_unusual_networks_compute_the_same_or_are_left_to_the_compiler(kind, fusible):
    network, images = Odd(kind), torch.randn(4, 3, 2, 2)
    fused = fuse_batch_norm(network)
    assert (fused is not None) == fusible
    if fused is not None:
        assert torch.equal(fused(images), network(images))
