"""Exports for mmdetection and ultralytics: the names and values that these libraries look for."""

import pytest
import torch
import torchvision
from sample_networks import MEAN, STD, assert_the_way_back_is_the_identity, body, open_source, sample_file
from torch import nn

import jcl
from jcl.errors import SettingsError
from jcl.export import export_backbone

pytestmark = pytest.mark.usefixtures("empty_starts")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("resnet18", "'ResNet', depth=18"),
        pytest.param("timm/resnet50", "'ResNet', depth=50", marks=pytest.mark.slow),
    ],
)
def test_mmdetection_finds_a_backbone_with_the_names_of_torchvision(tmp_path, name, kind):
    source, out = open_source(tmp_path, name), tmp_path / "out.pth"
    (hint,) = export_backbone(source.file, "mmdetection", out).hints
    state = torch.load(out, weights_only=True)["state_dict"]
    expected = body(torchvision.models.get_model(name.removeprefix("timm/")))
    assert {part: value.shape for part, value in state.items()} == {
        f"backbone.{part}": value.shape for part, value in expected.items()
    }
    assert kind in hint and "prefix='backbone.'" in hint and "mean=[127.5, 102.0, 76.5]" in hint
    config = eval(hint.removeprefix("model = "))
    assert config["backbone"]["init_cfg"] == {"type": "Pretrained", "checkpoint": str(out), "prefix": "backbone."}
    assert_the_way_back_is_the_identity(out, source)


@pytest.mark.parametrize("name", ["resnet18", "convnext_tiny"])
def test_ultralytics_numbers_the_layers_and_does_not_normalize(tmp_path, name):
    source, out = sample_file(tmp_path, name), tmp_path / "out.pth"
    model, use = export_backbone(source, "ultralytics", out).hints
    assert f"{name}, null, True, 2, True]" in model and "load_state_dict" in use
    state = {part.removeprefix("model.0.m."): value for part, value in torch.load(out, weights_only=True).items()}
    layers = list(torchvision.models.get_model(name).children())
    if isinstance(layers[0], nn.Sequential):
        layers = [*layers[0], *layers[1:]]
    theirs = nn.Sequential(*layers[:-2]).eval()  # as the module TorchVision of ultralytics does
    theirs.load_state_dict(state)
    ours = jcl.load_backbone(source)
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    normalized = (images - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
    with torch.inference_mode():
        if name == "convnext_tiny":
            found, wanted = theirs(images), ours.features(normalized)
        else:  # zeros around the image mean black, not gray, so the border differs
            found = theirs[:2](images)[..., 2:-2, 2:-2]
            wanted = ours.bn1(ours.conv1(normalized))[..., 2:-2, 2:-2]
            assert all(
                torch.equal(state[f"{number + 3}.1.conv2.weight"], ours.state_dict()[f"layer{number}.1.conv2.weight"])
                for number in range(1, 5)
            )
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    if name == "resnet18":
        assert jcl.load_backbone(out).info.mean == (0, 0, 0)


@pytest.mark.parametrize(
    ("target", "name", "stem"),
    [
        ("mmdetection", "timm/convnext_atto", "imagenet"),
        ("mmdetection", "resnet18", "small"),
        pytest.param("mmdetection", "wide_resnet50_2", "imagenet", marks=pytest.mark.slow),
        ("ultralytics", "timm/convnext_atto", "imagenet"),
        ("ultralytics", "timm/vit_tiny_patch16_224", "imagenet"),
        ("ultralytics", "resnet18", "small"),
    ],
)
def test_what_they_cannot_hold(tmp_path, target, name, stem):
    with pytest.raises(SettingsError, match=r"--to "):
        export_backbone(sample_file(tmp_path, name, stem=stem), target, tmp_path / "out.pth")
    assert not (tmp_path / "out.pth").exists()
