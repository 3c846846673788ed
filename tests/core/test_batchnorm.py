import copy

import pytest
import timm
import torch
from torch import nn
from torchvision.models import resnet18

from jcl.core.batchnorm import (
    GroupedBatchNorm2d,
    group_batch_norm,
    pop_batch_stats,
    set_batch_norm_groups,
    unshuffle,
    update_running_stats,
)
from jcl.errors import SettingsError
from jcl.random import KEY_SHUFFLE, permutation


def small_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Sequential(nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4))
    ).double()


def settled(network: nn.Module, *passes: torch.Tensor) -> torch.Tensor:
    """A batch in one pass or several, and the running statistics moved once."""
    rows, seen = [], []
    for images in passes:
        rows.append(network(images))
        seen.append(pop_batch_stats(network))
    update_running_stats(seen)
    return torch.cat(rows)


def network_with_head() -> nn.Module:
    """Batch norm of both kinds: of feature maps, and of rows."""
    return nn.Sequential(
        small_network(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 9, bias=False), nn.BatchNorm1d(9)
    ).double()


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("network", [small_network, network_with_head])
def test_groups_equal_separate_replicas(groups, channels_last, network):
    """Outputs, gradients and running statistics are those of G replicas, each with its own part of the batch."""
    plain = network()
    grouped = group_batch_norm(copy.deepcopy(plain))
    set_batch_norm_groups(grouped, groups)
    replicas = [copy.deepcopy(plain) for _ in range(groups)]
    for step in range(3):
        images = torch.randn(8, 3, 7, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        if channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        found = settled(grouped, images)
        parts = [replica(part) for replica, part in zip(replicas, images.chunk(groups), strict=True)]
        torch.testing.assert_close(found, torch.cat(parts), rtol=1e-12, atol=1e-12)
        found.pow(2).mean().backward()
        (sum(part.pow(2).sum() for part in parts) / found.numel()).backward()
    for name, parameter in grouped.named_parameters():
        total = sum(dict(replica.named_parameters())[name].grad for replica in replicas)
        torch.testing.assert_close(parameter.grad, total, rtol=1e-10, atol=1e-12)
    for name, buffer in grouped.named_buffers():
        mean = torch.stack([dict(replica.named_buffers())[name].double() for replica in replicas]).mean(0)
        torch.testing.assert_close(buffer.double(), mean, rtol=1e-12, atol=1e-14)


def test_passes_make_one_update_of_the_running_statistics():
    whole = group_batch_norm(small_network())
    in_passes = copy.deepcopy(whole)
    set_batch_norm_groups(whole, 4)
    images = torch.randn(8, 3, 7, 7, dtype=torch.float64)
    torch.testing.assert_close(settled(in_passes, *images.chunk(4)), settled(whole, images))
    for name, buffer in whole.named_buffers():
        torch.testing.assert_close(dict(in_passes.named_buffers())[name], buffer, rtol=1e-12, atol=1e-14)


def test_layers_that_had_nothing_to_do_stay_as_they_are():
    network = group_batch_norm(small_network())
    idle = group_batch_norm(nn.Sequential(nn.BatchNorm2d(5)))
    network(torch.randn(4, 3, 7, 7, dtype=torch.float64))
    update_running_stats([pop_batch_stats(nn.ModuleList([network, idle]))])
    assert int(network[1].num_batches_tracked) == 1 and int(idle[0].num_batches_tracked) == 0
    assert network[1].running_mean.any() and not idle[0].running_mean.any()


def test_a_layer_left_out_of_some_passes_is_told_instead_of_guessed_at():
    network = group_batch_norm(small_network())
    images = torch.randn(4, 3, 7, 7, dtype=torch.float64)
    network(images)
    whole = pop_batch_stats(network)
    network[:2](images)
    with pytest.raises(SettingsError, match=r"train\.key_passes=1"):
        update_running_stats([whole, pop_batch_stats(network)])


def test_a_layer_that_stands_in_several_places_stays_one():
    shared = nn.BatchNorm2d(3)
    network = nn.Sequential(shared, nn.Conv2d(3, 3, 1), shared, nn.Sequential(shared))
    grouped = group_batch_norm(network)
    assert grouped[0] is grouped[2] is grouped[3][0] and isinstance(grouped[0], GroupedBatchNorm2d)


def test_conversion_keeps_weights_statistics_and_eval_output():
    plain = resnet18(weights=None)
    plain(torch.randn(4, 3, 32, 32))
    grouped = group_batch_norm(copy.deepcopy(plain))
    assert plain.state_dict().keys() == grouped.state_dict().keys()
    images = torch.randn(3, 3, 32, 32)
    assert torch.equal(plain.eval()(images), grouped.eval()(images))
    assert sum(isinstance(module, GroupedBatchNorm2d) for module in grouped.modules()) == 20


@pytest.mark.parametrize("name", ["test_efficientnet", "mobilenetv3_small_050", "regnety_002"])
def test_batch_norm_with_an_activation_keeps_it(name):
    plain = timm.create_model(name, num_classes=4)
    grouped = group_batch_norm(copy.deepcopy(plain))
    assert plain.state_dict().keys() == grouped.state_dict().keys()
    images = torch.randn(8, 3, 32, 32)
    set_batch_norm_groups(grouped, 2)
    whole = torch.cat([plain(images[:4]), plain(images[4:])])
    torch.testing.assert_close(grouped(images), whole, rtol=1e-4, atol=1e-4)
    grouped.load_state_dict(plain.state_dict())
    assert torch.equal(plain.eval()(images), grouped.eval()(images))


def test_batch_that_cannot_be_split_is_named():
    layer = group_batch_norm(nn.Sequential(nn.BatchNorm2d(3)))
    set_batch_norm_groups(layer, 3)
    with pytest.raises(ValueError, match="4 rows cannot be split into 3"):
        layer(torch.randn(4, 3, 2, 2))


def test_other_batch_norms_are_refused():
    with pytest.raises(SettingsError, match="BatchNorm3d"):
        group_batch_norm(nn.Sequential(nn.BatchNorm3d(3)))
    for odd in ({"affine": False}, {"momentum": None}, {"track_running_stats": False}):
        with pytest.raises(SettingsError, match="cannot be split into BN groups"):
            group_batch_norm(nn.Sequential(nn.BatchNorm2d(3, **odd)))


def test_shuffling_is_undone_exactly():
    rows, order = torch.randn(40, 5), permutation(7, KEY_SHUFFLE, 3, 40)
    assert torch.equal(unshuffle(rows[order], order), rows)


@pytest.mark.parametrize(("groups", "channels_last"), [(2, True), (4, False)])
def test_the_form_for_compilers_equals_the_loop_over_groups(groups, channels_last):
    loop = group_batch_norm(network_with_head())
    set_batch_norm_groups(loop, groups)
    compiled = copy.deepcopy(loop)
    compiled.compile(backend="eager")
    for step in range(2):
        images = torch.randn(8, 3, 7, 7, dtype=torch.float32, generator=torch.Generator().manual_seed(step))
        if channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        wanted, found = settled(loop.float(), images), settled(compiled.float(), images)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        wanted.pow(2).sum().backward()
        found.pow(2).sum().backward()
    for (name, parameter), other in zip(loop.named_parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(other.grad, parameter.grad, rtol=1e-4, atol=1e-3, msg=name)
    for (name, buffer), other in zip(loop.named_buffers(), compiled.buffers(), strict=True):
        torch.testing.assert_close(other, buffer, rtol=1e-5, atol=1e-6, msg=name)
