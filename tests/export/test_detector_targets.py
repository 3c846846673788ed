"""Exports for mmdetection and ultralytics: the names and values that these libraries look for."""

import io

import pytest
import torch
import torchvision
from sample_networks import MEAN, STD, assert_the_way_back_is_the_identity, body, open_source, sample_file, unlike_new
from torch import nn
from torchvision.models.convnext import CNBlockConfig, ConvNeXt

import jcl
from jcl.errors import SettingsError
from jcl.export import BackboneInfo, export_backbone
from jcl.export.exporting import ExportJob, for_ultralytics

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


def numbered_layers(network: nn.Module) -> nn.Sequential:
    """The layers without pooling and classifier, as the module TorchVision of ultralytics has them."""
    layers = list(network.children())
    if isinstance(layers[0], nn.Sequential):
        layers = [*layers[0], *layers[1:]]
    return nn.Sequential(*layers[:-2]).eval()


def pictures() -> tuple[torch.Tensor, torch.Tensor]:
    """Images in [0, 1], and the same normalized."""
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    return images, (images - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


def numbered_weights(content: object) -> dict[str, torch.Tensor]:
    return {part.removeprefix("model.0.m."): value for part, value in torch.load(content, weights_only=True).items()}


def test_ultralytics_numbers_the_layers_and_does_not_normalize(tmp_path):
    source, out = sample_file(tmp_path, "resnet18"), tmp_path / "out.pth"
    model, use = export_backbone(source, "ultralytics", out).hints
    assert "resnet18, null, True, 2, True]" in model and "load_state_dict" in use
    ours, theirs = jcl.load_backbone(source), numbered_layers(torchvision.models.resnet18())
    state = numbered_weights(out)
    theirs.load_state_dict(state)
    images, normalized = pictures()
    with torch.inference_mode():  # zeros around the image mean black, not gray, so the border differs
        found = theirs[:2](images)[..., 2:-2, 2:-2]
        wanted = ours.bn1(ours.conv1(normalized))[..., 2:-2, 2:-2]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    for number in range(1, 5):
        part = "1.conv2.weight"
        assert torch.equal(state[f"{number + 3}.{part}"], ours.state_dict()[f"layer{number}.{part}"])
    assert jcl.load_backbone(out).info.mean == (0, 0, 0)


def test_ultralytics_gets_a_convnext(tmp_path):
    """A small one under a name that torchvision has."""
    blocks = [CNBlockConfig(width, following, 1) for width, following in ((8, 16), (16, 32), (32, 64), (64, None))]
    ours = unlike_new(ConvNeXt(blocks))
    info = BackboneInfo("convnext_tiny", "imagenet", 64, 64, MEAN, STD)
    content, model, _ = for_ultralytics(ExportJob(ours, info, tmp_path, tmp_path / "out.pth"))
    assert "convnext_tiny, null, True, 2, True]" in model
    theirs = numbered_layers(ConvNeXt(blocks))
    theirs.load_state_dict(numbered_weights(io.BytesIO(content)))
    images, normalized = pictures()
    with torch.inference_mode():
        torch.testing.assert_close(theirs(images), ours.features(normalized), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("target", "name", "stem"),
    [
        ("mmdetection", "timm/test_convnext", "imagenet"),
        ("mmdetection", "resnet18", "small"),
        pytest.param("mmdetection", "wide_resnet50_2", "imagenet", marks=pytest.mark.slow),
        ("ultralytics", "timm/test_convnext", "imagenet"),
        ("ultralytics", "timm/test_vit", "imagenet"),
        ("ultralytics", "resnet18", "small"),
    ],
)
def test_what_they_cannot_hold(tmp_path, target, name, stem):
    with pytest.raises(SettingsError, match=r"--to "):
        export_backbone(sample_file(tmp_path, name, stem=stem), target, tmp_path / "out.pth")
    assert not (tmp_path / "out.pth").exists()
