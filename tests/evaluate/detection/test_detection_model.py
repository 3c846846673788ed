"""Detectors: nothing frozen, batch norms everywhere they belong, weights where they should be."""

import pytest
import torch
import torchvision
from safetensors.torch import save_file
from torch import nn
from torchvision.models.convnext import CNBlockConfig, ConvNeXt

from jcl.commands.detect import build_body, open_body, open_initial_backbone
from jcl.core.encoder import build_backbone
from jcl.errors import RunError, SettingsError
from jcl.evaluate.detection.batches import DetectionBatch, Hardware
from jcl.evaluate.detection.model import LOSSES, DetectionTask, build_detector, build_optimizer
from jcl.export import BackboneInfo, save_backbone
from jcl.settings.detection import default_warmup, learning_rate, scaled_lr
from small_runs import networks_of_zeros


def tiny(task, make_settings, **changes):
    settings, body = make_settings(task, **changes), build_body("timm/test_resnet")
    for part in body.modules():
        if isinstance(part, nn.BatchNorm2d):
            nn.init.ones_(part.weight)  # timm starts the last one of a block at zero, which stops gradients
    return build_detector(body, settings, classes=2, keypoints=3), settings


def boxes_and_more(side=64):
    mask = torch.zeros(1, side, side, dtype=torch.uint8)
    mask[:, 10:50, 10:50] = 1
    points = torch.tensor([[[20.0, 20.0, 2.0], [30.0, 30.0, 2.0], [40.0, 40.0, 0.0]]])
    return {
        "boxes": torch.tensor([[10.0, 10.0, 50.0, 50.0]]),
        "labels": torch.tensor([1]),
        "masks": mask,
        "keypoints": points,
    }


@pytest.mark.parametrize("task", ["box", "mask", "keypoint"])
def test_everything_is_trained_and_every_norm_moves(task, make_settings):
    detector, settings = tiny(task, make_settings)
    norms = {name: part for name, part in detector.named_modules() if isinstance(part, nn.BatchNorm2d)}
    body = [part for part in build_body("timm/test_resnet").modules() if isinstance(part, nn.BatchNorm2d)]
    assert len(norms) == len(body) + 8  # of four levels' two convolutions in the pyramid
    assert len([name for name in norms if name.startswith("backbone.fpn.")]) == 8
    assert not any("Frozen" in type(part).__name__ for part in detector.modules())
    assert all(parameter.requires_grad for parameter in detector.parameters())
    before = {name: part.running_mean.clone() for name, part in norms.items()}
    weights = {name: value.detach().clone() for name, value in detector.named_parameters()}
    optimizer = build_optimizer(detector, settings)
    images = [torch.rand(3, 64, 64) for _ in range(2)]
    losses = detector.train()(images, [boxes_and_more() for _ in images])
    assert len(losses) == (4 if task == "box" else 5)
    sum(losses.values()).backward()
    assert all(parameter.grad is not None for parameter in detector.parameters())
    optimizer.step()
    assert all(not torch.equal(part.running_mean, before[name]) for name, part in norms.items())
    for stage in ("conv1", "bn1", "layer1", "layer4"):
        moved = [
            not torch.equal(value, weights[name])
            for name, value in detector.named_parameters()
            if name.startswith(f"backbone.body.{stage}")
        ]
        assert moved and all(moved)


def test_the_standard_detector_is_torchvisions_but_for_norms(make_settings):
    with networks_of_zeros():
        ours = build_detector(build_body("resnet50"), make_settings("mask", heads="standard"), classes=90, keypoints=0)
    with torch.device("meta"):
        theirs = torchvision.models.detection.maskrcnn_resnet50_fpn(weights=None, weights_backbone=None)
    shapes = {name: value.shape for name, value in ours.state_dict().items()}
    known = {name: value.shape for name, value in theirs.state_dict().items()}
    assert known.items() - shapes.items() == {
        (name, shape) for name, shape in known.items() if ".fpn." in name and name.endswith(".0.bias")
    }  # a convolution before a norm has no bias
    assert all(".1." in name or "num_batches" in name for name in shapes.keys() - known.keys())
    assert ours.rpn.anchor_generator.sizes == ((32,), (64,), (128,), (256,), (512,))


class Slope(nn.Module):
    """Each of its losses is a weight times the mean of the images."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, images, _targets):
        return {name: self.weight * torch.stack(images).mean() for name in LOSSES["box"]}


def test_a_step_averages_the_parts_of_a_batch(make_settings):
    network = Slope()
    optimizer = torch.optim.SGD(network.parameters(), lr=99.0)
    task = DetectionTask(network, optimizer, iter(()), make_settings(accumulate=2), Hardware(torch.device("cpu")))
    images = [torch.full((3, 4, 4), value, dtype=torch.uint8) for value in (51, 102)]  # 0.2 and 0.4
    losses = task.step([DetectionBatch.pack([{"image": image}]) for image in images], 0, 0.5)
    assert losses.tolist() == pytest.approx([4 * 0.3, *[0.3] * 4])
    assert network.weight.item() == pytest.approx(1 - 0.5 * 4 * 0.3)


def test_norms_have_no_weight_decay(make_settings):
    detector, settings = tiny("box", make_settings)
    decayed, plain = build_optimizer(detector, settings).param_groups
    assert decayed["weight_decay"] == 1e-4 and plain["weight_decay"] == 0
    assert len(plain["params"]) == 2 * sum(isinstance(part, nn.BatchNorm2d) for part in detector.modules())
    assert len(decayed["params"]) + len(plain["params"]) == len(list(detector.parameters()))


def halved(forward):
    """The same, but what it gives is in bfloat16, as under autocast."""

    def half(outputs):
        if isinstance(outputs, torch.Tensor):
            return outputs.bfloat16()
        if isinstance(outputs, dict):
            return type(outputs)((name, half(value)) for name, value in outputs.items())
        return type(outputs)(half(value) for value in outputs)

    return lambda *inputs: half(forward(*inputs))


def test_coordinates_stay_exact_in_half_precision(make_settings, monkeypatch):
    detector, _ = tiny("keypoint", make_settings, test_short_side=64)
    heads = detector.eval().roi_heads
    seen = []
    detector.rpn.anchor_generator.register_forward_hook(lambda _module, _inputs, anchors: seen.append(anchors[0]))
    image = torch.rand(3, 64, 64)
    with torch.inference_mode():
        detector([image])
        for part in (detector.backbone, detector.rpn.head, heads.box_predictor, heads.keypoint_predictor):
            monkeypatch.setattr(part, "forward", halved(part.forward))
        (found,) = detector([image])
    assert seen[1].dtype == torch.float32 and torch.equal(seen[0], seen[1])
    assert found["boxes"].dtype == found["keypoints"].dtype == torch.float32
    decoded = found["boxes"]
    assert len(decoded) and not torch.equal(decoded, decoded.bfloat16().float())


def test_detections_are_in_the_coordinates_of_the_image_as_given(make_settings):
    detector, _ = tiny("box", make_settings, test_short_side=64, max_side=100)
    transform = detector.eval().transform
    images, _ = transform([torch.rand(3, 128, 256)])
    assert images.image_sizes == [(50, 100)] and images.tensors.shape == (1, 3, 64, 128)
    transform.train()
    assert transform([torch.rand(3, 128, 256)], [boxes_and_more()])[0].image_sizes == [(128, 256)]


def test_a_backbone_file_ends_up_in_the_body(tmp_path, make_settings):
    torch.manual_seed(3)
    network = torchvision.models.resnet18(num_classes=10)
    classifier = tmp_path / "classifier.pth"
    torch.save(network.state_dict(), classifier)
    start = open_initial_backbone(str(classifier), None, 0)
    assert "120 tensors" in start.note and "fc (2)" in start.note
    detector = build_detector(start.body, make_settings(), classes=2, keypoints=0)
    body = detector.backbone.body.state_dict()
    expected = {name: value for name, value in network.state_dict().items() if not name.startswith("fc.")}
    assert body.keys() == expected.keys() and all(torch.equal(body[name], expected[name]) for name in expected)


def test_own_file_keeps_its_normalisation(tmp_path):
    network, width = build_backbone("timm/test_resnet")
    info = BackboneInfo("timm/test_resnet", "imagenet", 64, width, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    save_backbone(network, info, tmp_path / "b.safetensors")
    start = open_initial_backbone(str(tmp_path / "b.safetensors"), None, 0)
    assert (start.mean, start.std, start.label) == (info.mean, info.std, "b.safetensors")


def test_the_folder_one_is_in_is_called_by_its_name(tmp_path, monkeypatch):
    pytest.importorskip("timm")
    folder = tmp_path / "hub"
    folder.mkdir()
    save_file(build_backbone("timm/test_resnet")[0].state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text('{"architecture": "test_resnet"}')
    monkeypatch.chdir(folder)
    assert open_initial_backbone(".", None, 0).label == "hub"


def test_starts_that_do_not_serve(tmp_path):
    small = BackboneInfo("resnet18", "small", 32, 512, (0.5,) * 3, (0.5,) * 3)
    with networks_of_zeros():
        save_backbone(build_backbone("resnet18", stem="small", image_size=32)[0], small, tmp_path / "s.safetensors")
        weights = torchvision.models.resnet18().state_dict()
    with pytest.raises(SettingsError, match="stem"):
        open_initial_backbone(str(tmp_path / "s.safetensors"), None, 0)
    with pytest.raises(SettingsError, match="mobilenet_v2"):
        open_initial_backbone("random", "mobilenet_v2", 0)
    with pytest.raises(RunError, match="none"):
        open_initial_backbone(str(tmp_path / "none"), None, 0)
    weights["layer9.odd"] = weights.pop("layer4.1.conv2.weight")
    torch.save(weights, tmp_path / "odd.pth")
    with pytest.raises(RunError, match=r"layer4\.1\.conv2\.weight"):
        open_initial_backbone(str(tmp_path / "odd.pth"), None, 0)


def test_schedule(make_settings):
    paper = make_settings(iterations=90_000, lr=0.02, warmup=default_warmup(90_000), batch_size=16)
    assert paper.milestones == (60_000, 80_000)
    rates = [learning_rate(paper, iteration) for iteration in (0, 500, 1000, 59_999, 60_000, 80_000)]
    assert rates == pytest.approx([2e-5, 0.01001, 0.02, 0.02, 0.002, 0.0002])
    assert make_settings(iterations=180_000).milestones == (120_000, 160_000)
    assert make_settings(iterations=900).milestones == (600, 800) and default_warmup(900) == 90
    assert scaled_lr(4) == pytest.approx(0.005)
    assert make_settings(short_side=(640, 800)).short_sides == (640, 672, 704, 736, 768, 800)
    assert make_settings(short_side=(128, 160)).short_sides == (128, 160)
    assert make_settings(short_side=(96, 96)).short_sides == (96,)


def small_convnext(library: str) -> nn.Module:
    if library == "timm":
        timm = pytest.importorskip("timm")
        return timm.create_model("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16))
    widths = [(8, 8), (8, 16), (16, 16), (16, None)]
    return ConvNeXt([CNBlockConfig(*each, num_layers=1) for each in widths])


@pytest.mark.parametrize("library", ["torchvision", "timm"])
def test_a_convnext_has_a_pyramid_too(library, make_settings):
    network = small_convnext(library).eval()
    detector = build_detector(open_body(network, library, "imagenet", library), make_settings(), classes=2, keypoints=0)
    image = torch.rand(1, 3, 64, 96)
    with torch.inference_mode():
        last = list(detector.backbone.body.eval()(image).values())[-1]
        wanted = network.features(image) if library == "torchvision" else network.stages(network.stem(image))
        shapes = [tuple(level.shape[2:]) for level in detector.backbone.eval()(image).values()]
    assert torch.allclose(last, wanted, atol=1e-5)
    assert shapes == [(16, 24), (8, 12), (4, 6), (2, 3), (1, 2)]
    in_groups = sum(len(group["params"]) for group in build_optimizer(detector, make_settings()).param_groups)
    assert in_groups == len(list(detector.parameters()))


def test_a_vision_transformer_has_none():
    pytest.importorskip("timm")
    with pytest.raises(SettingsError, match="ConvNeXt"):
        open_initial_backbone("random", "timm/test_vit", 0)
