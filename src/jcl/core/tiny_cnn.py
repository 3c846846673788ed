"""A backbone for small images on a machine without a GPU."""

from __future__ import annotations

from torch import Tensor, nn

_WIDTHS = (16, 32, 64, 128)


def initialise_convolution(convolution: nn.Conv2d) -> None:
    """Initialise as torchvision's ResNets do."""
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")


class TinyCNN(nn.Module):
    """Four 3×3 convolutions that each halve the image, then average pooling: (n, 3, S, S) -> (n, 128).

    The last layer has no ReLU, so that features spread around zero from the start. Positive features all look alike to
    a queue of random keys; without ReLU, momentum contrast starts to learn within a few hundred steps.
    """

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 3
        for width in _WIDTHS:
            convolution = nn.Conv2d(inputs, width, 3, stride=2, padding=1, bias=False)
            initialise_convolution(convolution)
            layers += [convolution, nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            inputs = width
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, images: Tensor) -> Tensor:
        pooled: Tensor = self.layers(images).mean(dim=(2, 3))
        return pooled


def tiny_cnn() -> tuple[nn.Module, int]:
    """The network and the width of its features."""
    return TinyCNN(), _WIDTHS[-1]
