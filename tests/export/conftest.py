from collections.abc import Iterator

import pytest
import timm.layers.weight_init
import torch
from torch import Tensor


@pytest.fixture(scope="module")
def empty_starts() -> Iterator[None]:
    """Networks start as zeros, which takes no time, where all weights come from files or from `unlike_new`.

    A weight that was meant to come from a file and did not is zero, which no sample network's is.
    """

    def zeros(tensor: Tensor, *ways: object, **named_ways: object) -> Tensor:
        with torch.no_grad():
            return tensor.zero_()

    with pytest.MonkeyPatch.context() as patch:
        for name in ("kaiming_normal_", "kaiming_uniform_", "trunc_normal_", "normal_", "uniform_"):
            patch.setattr(torch.nn.init, name, zeros)
        patch.setattr(timm.layers.weight_init, "_trunc_normal_", zeros)
        yield
