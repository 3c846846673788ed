"""Backbones with weights and running statistics unlike any that a network starts with, and their files."""

import copy
import functools
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

import jcl
from jcl.core.encoder import build_backbone
from jcl.export import BackboneInfo, save_backbone
from jcl.export.loading import open_backbone

MEAN, STD = (0.5, 0.4, 0.3), (0.25, 0.2, 0.3)


def unlike_new(network: nn.Module, seed: int = 0) -> nn.Module:
    """All weights drawn, and different where they start equal in all layers: what is left out or mixed up shows."""
    generator = torch.Generator().manual_seed(seed)
    for name, value in network.state_dict().items():
        if name.endswith("num_batches_tracked"):
            value.fill_(int(torch.randint(1, 1000, (), generator=generator)))
        elif name.endswith("running_var"):
            value.uniform_(0.5, 1.5, generator=generator)
        elif value.dim() > 1:
            bound = math.sqrt(6 / value[0].numel())  # as many inputs as that make outputs of the same size
            value.uniform_(-bound, bound, generator=generator)
        else:
            value.add_(torch.randn(value.shape, generator=generator), alpha=0.1)
    return network.eval()


def sample_backbone(name: str, image_size: int = 64, stem: Any = "imagenet") -> tuple[nn.Module, BackboneInfo]:
    network, width = _backbone(name, image_size, stem)
    return copy.deepcopy(network), BackboneInfo(name, stem, image_size, width, MEAN, STD)


@functools.cache
def _backbone(name: str, image_size: int, stem: Any) -> tuple[nn.Module, int]:
    torch.manual_seed(0)
    network, width = build_backbone(name, stem=stem, image_size=image_size)
    return unlike_new(network), width


def sample_file(folder: Path, name: str, image_size: int = 64, stem: str = "imagenet") -> Path:
    network, info = sample_backbone(name, image_size, stem)
    file = folder / "source" / "backbone.safetensors"
    save_backbone(network, info, file, follow_links=True)
    return file


def sample_resnet(name: str = "resnet18", *, stem: str = "imagenet", seed: int = 0) -> nn.Module:
    """A torchvision ResNet as torchvision has it, with its classifier."""
    return copy.deepcopy(_resnet(name, stem, seed))


@functools.cache
def _resnet(name: str, stem: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    network = torchvision.models.get_model(name, weights=None)
    if stem == "small":
        network.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
        network.maxpool = nn.Identity()
    return unlike_new(network, seed)


def body(network: nn.Module) -> dict[str, Tensor]:
    """The weights without a ResNet's classifier."""
    return {name: value for name, value in network.state_dict().items() if not name.startswith("fc.")}


def images(size: int, count: int = 3) -> Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(7))


def assert_same_bits(network: nn.Module, wanted: dict[str, Tensor]) -> None:
    found = network.state_dict()
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


def assert_close(found: Tensor, wanted: Tensor, tolerance: float = 1e-5) -> None:
    """Equal to `tolerance` of the largest feature."""
    assert found.shape == wanted.shape
    assert float((found - wanted).abs().max()) <= tolerance * max(1.0, float(wanted.abs().max()))


@dataclass
class Source:
    """A backbone's file, its network and what the network makes of some images."""

    file: Path
    network: nn.Module
    features: torch.Tensor

    @property
    def name(self) -> str:
        return self.network.info.backbone


def open_source(folder: Path, name: str, size: int = 64, stem: str = "imagenet") -> Source:
    file = sample_file(folder, name, size, stem)
    network = jcl.load_backbone(file)
    with torch.inference_mode():
        return Source(file, network, network(images(size)))


def assert_the_way_back_is_the_identity(out: Path, source: Source) -> None:
    taken = open_backbone(out)
    assert_same_bits(taken.network, source.network.state_dict())
    assert taken.info == source.network.info and taken.unused == {}


def assert_features(model: nn.Module, source: Source) -> None:
    with torch.inference_mode():
        assert_close(model.eval()(images(source.network.info.image_size)), source.features)


class Harmful:
    """Unpickling it would write a file."""

    def __init__(self, marker: Path, way: str) -> None:
        self.marker, self.way = marker, way

    def __reduce__(self) -> tuple[Any, ...]:
        if self.way == "system":
            return os.system, (f"touch '{self.marker}'",)
        if self.way == "eval":
            return eval, (f"open({str(self.marker)!r}, 'w')",)
        return Path.touch, (self.marker,)
