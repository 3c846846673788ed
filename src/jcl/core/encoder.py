"""Encoders: a backbone that gives pooled features, and a head that turns them into unit embeddings.

Backbones come by name from torchvision or timm and start as those libraries initialise them. One small ResNet of our
own is there for machines without a GPU.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Literal

import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.resnet import BasicBlock

from jcl.errors import SettingsError

Stem = Literal["imagenet", "small"]
Head = Literal["mlp", "linear"]


class Encoder(nn.Module):
    """Backbone, head and normalisation: images (n, 3, S, S) -> unit rows (n, embedding_dim) in float32."""

    def __init__(
        self, backbone: nn.Module, feature_width: int, *, head: Head = "mlp", embedding_dim: int = 128
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = projection_head(head, feature_width, embedding_dim)

    def forward(self, images: Tensor) -> Tensor:
        return F.normalize(self.head(self.backbone(images)).float(), dim=1)


def projection_head(kind: Head, feature_width: int, embedding_dim: int) -> nn.Module:
    """MoCo v2's two-layer perceptron as wide as the features, without batch norm, or MoCo v1's single layer."""
    if kind == "linear":
        return nn.Linear(feature_width, embedding_dim)
    return nn.Sequential(
        nn.Linear(feature_width, feature_width), nn.ReLU(inplace=True), nn.Linear(feature_width, embedding_dim)
    )


def build_backbone(name: str, *, stem: Stem = "imagenet", image_size: int = 224) -> tuple[nn.Module, int]:
    """The named network without its classifier, giving pooled features, and the width of those features.

    Plain names are torchvision's (`resnet50`) or ours (`resnet10_tiny`), then timm's; `timm/NAME` asks for timm's.
    The `small` stem, for images of about 32 px, is a 3×3 convolution of stride 1 without max-pooling.
    """
    if name in OWN_BACKBONES:
        network, width = OWN_BACKBONES[name]()
    elif name in torchvision.models.list_models(torchvision.models):
        network, width = _torchvision_backbone(name, image_size)
    else:
        network, width = _timm_backbone(name)
    if stem == "small":
        _use_small_stem(network, name)
    return network, width


class TinyResNet(nn.Module):
    """A network for small images on a CPU: four stages of one basic block each, a quarter as wide as ResNet-18's.

    Its own stem halves 32 px at once, which makes a forward pass 8 MFLOP, 1/140 of ResNet-18's with the small stem.
    """

    def __init__(self, widths: tuple[int, ...] = (16, 32, 64, 128)) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, widths[0], 3, stride=2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.Identity()
        self.layer1 = _stage(widths[0], widths[0], stride=1)
        self.layer2 = _stage(widths[0], widths[1], stride=2)
        self.layer3 = _stage(widths[1], widths[2], stride=2)
        self.layer4 = _stage(widths[2], widths[3], stride=2)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                _initialise_convolution(module)

    def forward(self, images: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        pooled: Tensor = x.mean(dim=(2, 3))
        return pooled


def _tiny_resnet() -> tuple[nn.Module, int]:
    return TinyResNet(), 128


OWN_BACKBONES: dict[str, Callable[[], tuple[nn.Module, int]]] = {"resnet10_tiny": _tiny_resnet}


def _stage(inputs: int, outputs: int, *, stride: int) -> nn.Module:
    shortcut = None
    if stride != 1 or inputs != outputs:
        convolution = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
        shortcut = nn.Sequential(convolution, nn.BatchNorm2d(outputs))
    return nn.Sequential(BasicBlock(inputs, outputs, stride, shortcut))


def _initialise_convolution(convolution: nn.Conv2d) -> None:
    """As torchvision's ResNets start."""
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")


def _torchvision_backbone(name: str, image_size: int) -> tuple[nn.Module, int]:
    # Vision transformers are built for one image size; the other networks take any.
    options = {"image_size": image_size} if name.startswith("vit_") else {}
    network = torchvision.models.get_model(name, weights=None, **options)
    linear_layers = [path for path, module in network.named_modules() if isinstance(module, nn.Linear)]
    if not linear_layers:
        raise SettingsError(f"torchvision's {name} does not end in a linear classifier and cannot serve as a backbone.")
    parent_path, _, last = linear_layers[-1].rpartition(".")
    parent = network.get_submodule(parent_path)
    width = int(getattr(parent, last).in_features)
    setattr(parent, last, nn.Identity())
    return network, width


def _timm_backbone(name: str) -> tuple[nn.Module, int]:
    plain = name.removeprefix("timm/")
    try:
        import timm
    except ImportError:
        if name.startswith("timm/"):
            raise SettingsError(
                f"the backbone {name!r} needs timm, which is not installed; "
                "run: pip install 'joint-contrastive-learning[timm]'."
            ) from None
        raise SettingsError(_unknown_backbone(name, [])) from None
    if not timm.is_model(plain):
        raise SettingsError(_unknown_backbone(name, timm.list_models()))
    network = timm.create_model(plain, pretrained=False, num_classes=0)
    # num_features is not always the width of the pooled output, so one image of the network's own size tells.
    with torch.no_grad():
        probe = torch.zeros(1, *network.pretrained_cfg["input_size"])  # type: ignore[index]
        width = int(network.eval()(probe).shape[1])
    return network.train(), width


def _unknown_backbone(name: str, timm_names: list[str]) -> str:
    known = [*OWN_BACKBONES, *torchvision.models.list_models(torchvision.models), *timm_names]
    nearest = difflib.get_close_matches(name.removeprefix("timm/"), known, n=3)
    hint = f"did you mean {' or '.join(nearest)}?" if nearest else "for example resnet50 or resnet18."
    return f"there is no backbone called {name!r} in torchvision or timm; {hint}"


def _use_small_stem(network: nn.Module, name: str) -> None:
    first = getattr(network, "conv1", None)
    if not isinstance(first, nn.Conv2d) or not hasattr(network, "maxpool"):
        raise SettingsError(f"the small stem is for ResNets; {name} has none to replace, so set model.stem=imagenet.")
    convolution = nn.Conv2d(3, first.out_channels, 3, stride=1, padding=1, bias=False)
    _initialise_convolution(convolution)
    network.conv1 = convolution
    network.maxpool = nn.Identity()
