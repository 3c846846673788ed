"""Encoders: a backbone with pooled features and a projection head that maps them to unit embeddings.

Backbones come from torchvision or timm by name, with the initialization of these libraries.
"""

import contextlib
import difflib
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from jcl.console import pluralize
from jcl.core.batchnorm import GroupedBatchNorm, has_batch_norm
from jcl.core.blocks import replace_drop_path
from jcl.core.fusion import fuse_batch_norm
from jcl.errors import SettingsError, first_line, import_extra

Stem = Literal["imagenet", "medium", "small"]
Head = Literal["mlp", "linear"]


class Encoder(nn.Module):
    """Backbone, head and L2 normalization: images (n, channels, S, S) -> float32 unit vectors (n, embedding_dim)."""

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
        # The backbone and context that `fuse` made; a tuple, so that it is not registered as a sub-module.
        self.fused: tuple[Callable[[Tensor], Tensor], Callable[[], AbstractContextManager[None]]] | None = None
        self.head = projection_head(head, feature_width, head_width or feature_width, embedding_dim)

    def forward(self, images: Tensor) -> Tensor:
        backbone, context = self.fused if self.training and self.fused else (self.backbone, contextlib.nullcontext)
        with context():
            features = backbone(images)
        return F.normalize(self.head(features).float(), dim=1)

    def fuse(self) -> bool:
        """Use the kernels of `fused_norm` in training, if the backbone is a ResNet; returns whether it is."""
        network = fuse_batch_norm(self.backbone)
        if network is None:
            return False
        from jcl.core.fused_norm import RecomputedOutputs, grouped_batch_norm  # Triton is only there for GPUs

        for module in self.backbone.modules():
            if isinstance(module, GroupedBatchNorm):
                module.kernels = grouped_batch_norm
        self.fused = network, RecomputedOutputs
        return True


def projection_head(kind: Head, feature_width: int, width: int, embedding_dim: int) -> nn.Module:
    """The two-layer MLP of MoCo v2, without batch norm, or the linear layer of MoCo v1."""
    if kind == "linear":
        return nn.Linear(feature_width, embedding_dim)
    return nn.Sequential(nn.Linear(feature_width, width), nn.ReLU(inplace=True), nn.Linear(width, embedding_dim))


class TinyCNN(nn.Module):
    """Four 3×3 convolutions with stride 2, then average pooling: (n, 3, S, S) -> (n, 128). It trains on a CPU.

    There is no ReLU after the last layer, so features are centered around zero and momentum contrast starts to learn
    within a few hundred steps; positive features would all be similar to a queue of random keys.
    """

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 3
        for width in (16, 32, 64, 128):
            layers += [_convolution(inputs, width, stride=2), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            inputs = width
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, images: Tensor) -> Tensor:
        pooled: Tensor = self.layers(images).mean(dim=(2, 3))
        return pooled


OWN_BACKBONES: dict[str, type[nn.Module]] = {"tiny_cnn": TinyCNN}


def build_backbone(
    name: str,
    *,
    stem: Stem = "imagenet",
    image_size: int = 224,
    local_size: int | None = None,
    drop_path: float | None = None,
    channels: int = 3,
) -> tuple[nn.Module, int]:
    """Build a network without its classifier; returns it and the width of its pooled features.

    `name` is `tiny_cnn`, a name of torchvision (`resnet50`) or one of timm; `timm/NAME` is always timm's.
    The `small` stem, for images of about 32 px, is a 3×3 convolution with stride 1 and no max pooling; the `medium`
    stem, for images of about 64 px, is the same with stride 2. With `local_size` the network must take images of that
    size too. `drop_path` is the rate of stochastic depth in the last block (default: the library's). With `channels`
    other than 3 the network gets a new first layer.
    """
    sizes = [image_size] if local_size is None else [image_size, local_size]
    try:
        network = _create_network(name, image_size, len(sizes) > 1, drop_path)
        _refuse_partial_patches(network, name, sizes)
        if drop_path is not None:
            replace_drop_path(network, name, drop_path)
        if stem != "imagenet":
            _replace_stem(network, name, stem)
        if channels != 3:
            _replace_first_layer(network, name, channels)
        with torch.no_grad():  # no attribute holds the width for every network
            width, *_ = (int(network.eval()(torch.zeros(1, channels, size, size)).shape[1]) for size in sizes)
    except (ArithmeticError, AssertionError, RuntimeError, TypeError, ValueError) as error:
        advice = "choose another image size or another backbone"
        advice += "" if local_size is None else ", or set method.num_local_queries=0"
        advice += ", or set model.drop_path=0" if drop_path else ""  # which some networks of timm do not know
        raise SettingsError(
            f"The backbone {name} does not take images of {' and '.join(map(str, sizes))} px "
            f"with {pluralize(channels, 'channel')} ({' '.join(str(error).split())}); {advice}."
        ) from error
    return network.train(), width


def _replace_first_layer(network: nn.Module, name: str, channels: int) -> None:
    """Give the first layer random weights for this many channels; its outputs keep their spread."""
    first = first_convolution(network)
    if first is None:
        raise SettingsError(f"The backbone {name} takes only images of three channels; choose another backbone.")
    spread = float(first.weight.detach().std()) * (3 / channels) ** 0.5
    first.in_channels = channels
    first.weight = nn.Parameter(torch.randn(len(first.weight), channels, *first.kernel_size) * spread)


def first_convolution(network: nn.Module, channels: int = 3) -> nn.Conv2d | None:
    """The first convolution of a network that takes images of this many channels, or None."""
    convolutions = (module for module in network.modules() if isinstance(module, nn.Conv2d))
    return next((module for module in convolutions if module.in_channels == channels and module.groups == 1), None)


def fit_channels(weight: Tensor, channels: int) -> Tensor:
    """A first layer's weight (outputs, inputs, h, w) for another number of inputs.

    All inputs get the mean over the old ones, scaled so that an image with equal channels has the same outputs.
    """
    return weight.mean(dim=1, keepdim=True).mul(weight.shape[1] / channels).repeat(1, channels, 1, 1)


def _create_network(
    name: str, image_size: int, several_sizes: bool = False, drop_path: float | None = None
) -> nn.Module:
    if name in OWN_BACKBONES:
        return OWN_BACKBONES[name]()
    if name in torchvision_networks():
        return _torchvision_backbone(name, image_size)
    return _timm_backbone(name, image_size, several_sizes, drop_path)


@dataclass(frozen=True)
class BackboneTraits:
    """What automatic settings need to know about a backbone."""

    batch_norm: bool
    layer_norm: bool  # as transformers and ConvNeXt have
    patch_size: int  # of a vision transformer, 0 for other networks


class _Uninitialized(TorchFunctionMode):
    """Leaves parameters uninitialized, which takes no time. RegNets cannot be built on the device "meta"."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options, name = options or {}, function.__name__
        target = arguments[0] if arguments else options.get("tensor")  # as `torch.nn.init` names it
        if isinstance(target, nn.Parameter) and name.endswith("_") and not name.endswith("__"):  # in place
            return target
        return function(*arguments, **options)


@cache
def backbone_traits(name: str) -> BackboneTraits:
    """Look at the layers of a backbone without initializing it."""
    with torch.random.fork_rng(devices=[]), _Uninitialized():
        network = _create_network(name, 224)
    patches = patch_embedding(network)
    return BackboneTraits(
        batch_norm=has_batch_norm(network),
        layer_norm=any(isinstance(module, nn.LayerNorm) for module in network.modules()),
        patch_size=patches.kernel_size[0] if patches else 0,
    )


def patch_embedding(network: nn.Module, channels: int = 3) -> nn.Conv2d | None:
    """The layer of a vision transformer that embeds patches of 8 px or more, or None."""
    first = first_convolution(network, channels)
    return first if first is not None and first.kernel_size == first.stride and first.stride[0] >= 8 else None


def _refuse_partial_patches(network: nn.Module, name: str, sizes: list[int]) -> None:
    patches = patch_embedding(network)
    side = patches.kernel_size[0] if patches else 1
    for size in (size for size in sizes if size % side):
        raise SettingsError(
            f"The backbone {name} does not take images of {size} px, which is not a multiple of its patch size, "
            f"{side}; choose another image size, such as {max(1, round(size / side)) * side} px."
        )


def torchvision_networks() -> list[str]:
    """Names of torchvision's image classification networks."""
    from torchvision import models  # takes seconds to import

    names: list[str] = models.list_models(models)
    return names


def _torchvision_backbone(name: str, image_size: int) -> nn.Module:
    from torchvision import models

    options: dict[str, Any] = {}
    if name.startswith("vit_"):  # built for one image size; the other networks take any
        options = {"image_size": image_size}
    if name in ("googlenet", "inception_v3"):  # without the auxiliary classifier
        options = {"aux_logits": False, "init_weights": True}
    network: nn.Module = models.get_model(name, weights=None, **options)
    linear_layers = [path for path, module in network.named_modules() if isinstance(module, nn.Linear)]
    if not linear_layers:
        raise SettingsError(
            f"torchvision's {name} does not end in a linear classifier and cannot be used as a backbone."
        )
    parent_path, _, last = linear_layers[-1].rpartition(".")
    setattr(network.get_submodule(parent_path), last, nn.Identity())
    return network


def _timm_backbone(name: str, image_size: int, several_sizes: bool, drop_path: float | None) -> nn.Module:
    plain = name.removeprefix("timm/")
    timm: Any = import_extra("timm", "timm", f"The backbone {name!r}") if name != plain else None
    with contextlib.suppress(ImportError):
        timm = importlib.import_module("timm")
    if timm is None or not timm.is_model(plain):
        known = {*OWN_BACKBONES, *torchvision_networks(), *(timm.list_models() if timm else ())}  # many are in both
        nearest = difflib.get_close_matches(plain, known, n=3)
        hint = f"did you mean {' or '.join(nearest)}?" if nearest else "for example resnet50 or resnet18."
        raise SettingsError(f"Unknown backbone {name!r}, neither in torchvision nor in timm; {hint}")
    try:
        configuration = timm.get_pretrained_cfg(plain)
    except RuntimeError as error:  # such as resnet18.NO_SUCH_TAG
        raise SettingsError(f"Unknown backbone {name!r}: {first_line(error)}; leave out the tag.") from None
    options: dict[str, Any] = {"drop_path_rate": drop_path} if drop_path else {}
    if configuration and configuration.fixed_input_size:
        # A vision transformer interpolates its position embedding for images of another size.
        options |= {"img_size": image_size} | ({"dynamic_img_size": True} if several_sizes else {})
    network: nn.Module = timm.create_model(plain, pretrained=False, num_classes=0, **options)
    return network


def backbone_parts(network: nn.Module) -> dict[str, list[nn.Parameter]]:
    """The parameters of a backbone by part, from the image to the head; a part has the name of its module.

    They are its sub-modules with weights, in order; while there are fewer than four, the largest one is split into its
    sub-modules. So a ResNet has its stem and four stages, a vision transformer its embedding and its blocks. Norms, and
    parameters outside of sub-modules, belong to the part before them.
    """
    modules = _submodules("", network)
    while len(starts := [name for name, module in modules.items() if _has_weights(module)]) < 4:
        divisible = [name for name, module in modules.items() if len(_submodules(name, module)) > 1]
        if not divisible:
            break
        largest = max(divisible, key=lambda name: sum(value.numel() for value in modules[name].parameters()))
        modules |= _submodules(largest, modules.pop(largest))
    names, parameters = zip(*network.named_parameters(), strict=True)
    owners = [next((start for start in starts if name.startswith(f"{start}.")), "") for name in names]
    part, parts = next(filter(None, owners), ""), dict[str, list[nn.Parameter]]()
    for owner, parameter in zip(owners, parameters, strict=True):
        part = owner or part
        parts.setdefault(part, []).append(parameter)
    return parts


def _submodules(name: str, module: nn.Module) -> dict[str, nn.Module]:
    """The sub-modules that have parameters, by their full names."""
    children = {f"{name}.{child}".lstrip("."): value for child, value in module.named_children()}
    return {child: value for child, value in children.items() if next(value.parameters(), None) is not None}


def _has_weights(module: nn.Module) -> bool:
    return any(parameter.ndim > 1 for parameter in module.parameters())


def first_stages(network: nn.Module, count: int) -> list[nn.Module]:
    """The modules of the first `count` parts of a ResNet, the stem being the first."""
    parts = backbone_parts(network)
    if "conv1" not in parts or count > len(parts):
        raise SettingsError(f"model.freeze={count} is not possible: it takes up to five stages of a ResNet.")
    kept = {parameter for part in list(parts.values())[:count] for parameter in part}
    return [module for module in network.modules() if (own := set(module.parameters())) and own <= kept]


def _replace_stem(network: nn.Module, name: str, stem: Stem) -> None:
    first = getattr(network, "conv1", None)
    if not isinstance(first, nn.Conv2d) or not hasattr(network, "maxpool"):
        raise SettingsError(f"The {stem} stem is for ResNets only; set model.stem=imagenet for {name}.")
    network.conv1 = _convolution(3, first.out_channels, stride=1 if stem == "small" else 2)
    network.maxpool = nn.Identity()


def _convolution(inputs: int, outputs: int, stride: int) -> nn.Conv2d:
    """A 3×3 convolution, initialized as in torchvision's ResNets."""
    convolution = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return convolution
