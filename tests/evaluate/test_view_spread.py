"""How alike views are: the closed form is the mean over all pairs, and extremes are what they should be."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from jcl.data import ArrayImages
from jcl.evaluate.view_spread import view_spread
from jcl.views import ViewMaker, view_recipe
from small_runs import drawn_pixels

VIEWS, SIZE = 6, 12


@pytest.fixture
def images() -> ArrayImages:
    return ArrayImages(torch.from_numpy(drawn_pixels(9)).permute(0, 3, 1, 2).contiguous())


def test_every_pair_by_hand(images: ArrayImages) -> None:
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE**2, 5))
    recipe = view_recipe("small", SIZE)
    found = view_spread(backbone, images, recipe, canvas=16, views=VIEWS, seed=3)
    sizes, samples = torch.full((9, 2), 16), torch.arange(9)
    maker = ViewMaker(recipe, 3, 0, images.pixels, sizes, samples)
    for row in range(9):
        own = maker(torch.full((VIEWS,), row), torch.arange(VIEWS))
        units = F.normalize(backbone(own).detach().double(), dim=1).numpy()
        pairs = [float(a @ b) for a in units for b in units]
        assert found.similarities[row] == pytest.approx(np.mean(pairs), abs=1e-6)
        assert found.variances[row] == pytest.approx(np.cov(units.T, bias=True).diagonal().mean(), abs=1e-6)
    assert found.views == VIEWS and found.similarities.shape == found.variances.shape == (9,)


def test_a_network_that_sees_nothing_finds_all_views_alike(images: ArrayImages) -> None:
    class Blind(nn.Module):
        def forward(self, views: torch.Tensor) -> torch.Tensor:
            return torch.ones(len(views), 4)

    found = view_spread(Blind(), images, view_recipe("moco-v2", SIZE), canvas=16, views=VIEWS)
    assert torch.allclose(found.similarities, torch.ones(9)) and found.variances.max() < 1e-7


def test_the_backbone_keeps_its_mode(images: ArrayImages) -> None:
    backbone = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten())
    view_spread(backbone.train(), images, view_recipe("small", SIZE), canvas=16, views=2)
    assert backbone.training and int(backbone[1].num_batches_tracked) == 0
