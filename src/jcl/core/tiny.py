"""A backbone for small images on a machine without a GPU."""

from __future__ import annotations

from torch import Tensor, nn

_WIDTHS = (16, 32, 64, 128)


class TinyCNN(nn.Module):
    """Four 3×3 convolutions that each halve the image, then the mean over places: (n, 3, S, S) -> (n, 128).

    Two details let momentum contrast get going within a few hundred steps. The first layer is normalised image by
    image, so brightness, contrast and tint, by which images are told apart at once, are gone before anything is
    learned. The last layer has no ReLU, so features are spread around zero from the start instead of crowded into
    the positive corner, where all images look alike to a queue of random keys.
    """

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 3
        for width in _WIDTHS:
            convolution = nn.Conv2d(inputs, width, 3, stride=2, padding=1, bias=False)
            nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
            first = inputs == 3
            layers += [convolution, nn.InstanceNorm2d(width, affine=True) if first else nn.BatchNorm2d(width)]
            layers.append(nn.ReLU(inplace=True))
            inputs = width
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, images: Tensor) -> Tensor:
        pooled: Tensor = self.layers(images).mean(dim=(2, 3))
        return pooled


def tiny_cnn() -> tuple[nn.Module, int]:
    """The network and the width of its features."""
    return TinyCNN(), _WIDTHS[-1]
