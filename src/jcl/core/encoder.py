"""Encoders: a backbone that gives pooled features, and a head that turns them into unit embeddings.

Backbones come by name from torchvision or timm, with those libraries' initialisation; `tiny_cnn` is a small network for
machines without a GPU.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jcl.core.tiny_cnn import initialise_convolution, tiny_cnn
from jcl.errors import SettingsError

Stem = Literal["imagenet", "small"]
Head = Literal["mlp", "linear"]


class Encoder(nn.Module):
    """Backbone, head and normalisation: images (n, 3, S, S) -> unit rows (n, embedding_dim) in float32."""

    def __init__(
        self,
        backbone: nn.Module,
        feature_width: int,
        *,
        head: Head = "mlp",
        head_width: int | None = None,
        embedding_dim: int = 128,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = projection_head(head, feature_width, head_width or feature_width, embedding_dim)

    def forward(self, images: Tensor) -> Tensor:
        return F.normalize(self.head(self.backbone(images)).float(), dim=1)


def projection_head(kind: Head, feature_width: int, width: int, embedding_dim: int) -> nn.Module:
    """MoCo v2's two-layer perceptron without batch norm, or MoCo v1's single layer."""
    if kind == "linear":
        return nn.Linear(feature_width, embedding_dim)
    return nn.Sequential(nn.Linear(feature_width, width), nn.ReLU(inplace=True), nn.Linear(width, embedding_dim))


def build_backbone(name: str, *, stem: Stem = "imagenet", image_size: int = 224) -> tuple[nn.Module, int]:
    """The named network without its classifier, giving pooled features, and the width of those features.

    Plain names are torchvision's (`resnet50`) or ours (`tiny_cnn`), then timm's; `timm/NAME` asks for timm's.
    The `small` stem, for images of about 32 px, is a 3×3 convolution of stride 1 without max-pooling.
    """
    if name in OWN_BACKBONES:
        network, width = OWN_BACKBONES[name]()
    elif name in torchvision_networks():
        network, width = _torchvision_backbone(name, image_size)
    else:
        network, width = _timm_backbone(name, image_size)
    if stem == "small":
        _use_small_stem(network, name)
    return network, width


OWN_BACKBONES: dict[str, Callable[[], tuple[nn.Module, int]]] = {"tiny_cnn": tiny_cnn}


def torchvision_networks() -> list[str]:
    """Names of torchvision's image classification networks."""
    from torchvision import models  # takes seconds to import

    names: list[str] = models.list_models(models)
    return names


def _torchvision_backbone(name: str, image_size: int) -> tuple[nn.Module, int]:
    from torchvision import models

    options: dict[str, Any] = {}
    if name.startswith("vit_"):  # built for one image size; the other networks take any
        options = {"image_size": image_size}
    if name in ("googlenet", "inception_v3"):  # without the auxiliary classifier
        options = {"aux_logits": False, "init_weights": True}
    with _fitting(name, image_size):
        network = models.get_model(name, weights=None, **options)
    linear_layers = [path for path, module in network.named_modules() if isinstance(module, nn.Linear)]
    if not linear_layers:
        raise SettingsError(
            f"torchvision's {name} does not end in a linear classifier and cannot be used as a backbone."
        )
    parent_path, _, last = linear_layers[-1].rpartition(".")
    parent = network.get_submodule(parent_path)
    setattr(parent, last, nn.Identity())
    return network, _feature_width(network, name, image_size)


def _timm_backbone(name: str, image_size: int) -> tuple[nn.Module, int]:
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
    configuration = timm.get_pretrained_cfg(plain)
    options: dict[str, Any] = {"img_size": image_size} if configuration and configuration.fixed_input_size else {}
    with _fitting(name, image_size):
        network = timm.create_model(plain, pretrained=False, num_classes=0, **options)
    return network, _feature_width(network, name, image_size)


def _feature_width(network: nn.Module, name: str, image_size: int) -> int:
    """Measured on one image, since no attribute gives it for every network; also checks that the size is accepted."""
    with _fitting(name, image_size), torch.no_grad():
        width = int(network.eval()(torch.zeros(1, 3, image_size, image_size)).shape[1])
    network.train()
    return width


@contextlib.contextmanager
def _fitting(name: str, image_size: int) -> Iterator[None]:
    """Turn the various errors of networks that do not accept an image size into one message."""
    try:
        yield
    except (ArithmeticError, AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise SettingsError(
            f"the backbone {name} does not take images of {image_size} px ({' '.join(str(error).split())}); "
            "choose another views.image_size or another backbone."
        ) from error


def _unknown_backbone(name: str, timm_names: list[str]) -> str:
    known = {*OWN_BACKBONES, *torchvision_networks(), *timm_names}  # many are in both
    nearest = difflib.get_close_matches(name.removeprefix("timm/"), known, n=3)
    hint = f"did you mean {' or '.join(nearest)}?" if nearest else "for example resnet50 or resnet18."
    return f"unknown backbone {name!r}, neither in torchvision nor in timm; {hint}"


def _use_small_stem(network: nn.Module, name: str) -> None:
    first = getattr(network, "conv1", None)
    if not isinstance(first, nn.Conv2d) or not hasattr(network, "maxpool"):
        raise SettingsError(f"the small stem is for ResNets only; set model.stem=imagenet for {name}.")
    convolution = nn.Conv2d(3, first.out_channels, 3, stride=1, padding=1, bias=False)
    initialise_convolution(convolution)
    network.conv1 = convolution
    network.maxpool = nn.Identity()
