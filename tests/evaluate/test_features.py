"""Features equal those of each image by itself, and extracting them leaves the backbone as it was."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from jcl.data import ArrayImages, open_data
from jcl.evaluate.features import FeatureSettings
from jcl.views import center_views

CPU = torch.device("cpu")


def small_backbone() -> nn.Sequential:
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    nn.init.uniform_(network[1].running_mean, -0.2, 0.2)
    return network.train()


def random_images(count: int = 11, height: int = 20, width: int = 14) -> ArrayImages:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (count, 3, height, width), generator=generator, dtype=torch.uint8)
    return ArrayImages(pixels, torch.arange(count) % 4, ("a", "b", "c", "d"))


def test_features_equal_one_image_at_a_time() -> None:
    backbone, images = small_backbone(), random_images()
    features = FeatureSettings(96).extract(backbone, images, batch_size=4, device=CPU)
    backbone.eval()
    for row, pixels in enumerate(images.pixels):
        view = center_views(pixels[None], torch.tensor([[20, 14]]), 96, 0.875)
        torch.testing.assert_close(features.values[row], backbone(view)[0].detach(), rtol=1e-5, atol=1e-6)
    assert features.values.shape == (11, 6) and features.values.dtype == torch.float32
    assert features.labels is not None and images.labels is not None
    assert torch.equal(features.labels, images.labels)
    assert features.samples.tolist() == list(range(11))


def test_progress_is_told_after_each_batch() -> None:
    told: list[tuple[int, int]] = []
    FeatureSettings(8).extract(
        small_backbone(), random_images(), batch_size=4, device=CPU, progress=lambda *counts: told.append(counts)
    )
    assert told == [(4, 11), (8, 11), (11, 11)]


def test_backbone_is_left_as_it_was() -> None:
    backbone = small_backbone()
    backbone[1].eval()  # a part frozen by its owner stays frozen, the others go on training
    before = {name: value.clone() for name, value in backbone.state_dict().items()}
    FeatureSettings(8).extract(backbone, random_images(), device=CPU)
    assert [part.training for part in backbone] == [True, False, True, True, True, True]
    assert all(torch.equal(value, before[name]) for name, value in backbone.state_dict().items())


def test_mode_comes_back_after_an_error() -> None:
    class Failing(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            raise RuntimeError(f"no features for {len(images)} images")

    backbone = nn.Sequential(small_backbone(), Failing()).train()
    with pytest.raises(RuntimeError, match="no features"):
        FeatureSettings(8).extract(backbone, random_images(), device=CPU)
    assert all(part.training for part in backbone.modules())


def test_probe_can_be_trained_on_the_features() -> None:
    features = FeatureSettings(8).extract(small_backbone(), random_images(), device=CPU)
    probe = nn.Linear(6, 2)
    probe(features.values).sum().backward()
    assert probe.weight.grad is not None and not features.values.requires_grad


def test_unreadable_images_are_left_out_and_named(tmp_path: Path) -> None:
    for number in range(5):
        Image.new("RGB", (16, 16), (50 * number, 10, 200)).save(tmp_path / f"{number}.png")
    (tmp_path / "2.png").write_bytes(b"this is no picture")
    source = open_data(str(tmp_path)).train
    features = FeatureSettings(8).extract(small_backbone(), source, batch_size=2, device=CPU)
    assert features.samples.tolist() == [0, 1, 3, 4]
    assert len(features) == len(features.values) == 4
    assert len(features.skipped) == 1 and "2.png" in next(iter(features.skipped))
    assert features.labels.tolist() == [-1] * 4
    assert len(features.values.unique(dim=0)) == 4


def test_bfloat16_is_close_to_float32_and_stored_as_float32() -> None:
    images = random_images()
    single = FeatureSettings(12).extract(small_backbone(), images, device=CPU)
    half = FeatureSettings(12).extract(small_backbone(), images, precision=torch.bfloat16, device=CPU)
    assert half.values.dtype == torch.float32
    assert not torch.equal(half.values, single.values)
    torch.testing.assert_close(half.values, single.values, rtol=0.05, atol=0.02)


def test_small_views_are_not_cropped_and_normalized_as_asked() -> None:
    images = random_images()
    shown = FeatureSettings(10, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
    features = shown.extract(nn.Flatten(), images, device=CPU)
    sizes = torch.tensor([[20, 14]]).expand(11, 2)
    views = center_views(images.pixels, sizes, 10, 1.0, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
    torch.testing.assert_close(features.values, views.flatten(1))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_gpu_agrees_with_the_cpu() -> None:
    images = random_images()
    host = FeatureSettings(12).extract(small_backbone(), images, device=CPU)
    device = FeatureSettings(12).extract(small_backbone(), images, device=torch.device("cuda"))
    torch.testing.assert_close(host.values, device.values, rtol=1e-3, atol=1e-3)
