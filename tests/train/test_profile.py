"""Options that make a long run faster."""

import pytest
import torch

from jcl.settings.recipes import build_settings
from jcl.settings.resolve import resolve
from jcl.settings.resolved import DataFacts
from jcl.train.profile import faster_options


@pytest.mark.parametrize(
    ("side", "values", "offered"),
    [
        (300, {}, {"--image-size 96": "about 5x", "--epochs 50": "about 4x", "--method moco-v2": "about 2x"}),
        (300, {"views.local_size": 224}, {"--image-size 96": "about 9x"}),  # local queries as large as the others
        (300, {"views.image_size": 64}, {"--image-size 96": "about 6x"}),
        (300, {"model.backbone": "resnet50"}, {"--backbone resnet18": "about 2x"}),
        (
            300,
            {"model.backbone": "timm/vit_small_patch14_dinov2", "views.image_size": 224},
            {"--epochs 50": "about 4x"},
        ),
        (300, {"views.image_size": 96, "train.epochs": 20, "method.name": "moco-v2"}, {}),
    ],
)
def test_only_options_that_make_the_run_faster_are_offered(side, values, offered):
    values = {"data.location": "photos", "method.covariance_scale": 1.0, **values}
    settings, _ = resolve(build_settings("folder", values=values), DataFacts(300, side, decoded=False))
    found = faster_options(settings, torch.device("cuda"))
    assert all(f"{flag} ({factor})" in found for flag, factor in offered.items())
    assert bool(found) == bool(offered) and ("resnet18" in found) == (settings.model.backbone != "resnet18")
    assert "tiny_cnn" in faster_options(settings, torch.device("cpu"))
