"""Backbones that other programs trained: taken bit for bit, from each way of naming them."""

from collections import OrderedDict

import pytest
import torch
import torchvision
from safetensors.torch import save_file
from sample_networks import assert_close, assert_same_bits, body, images, sample_resnet, unlike_new
from torch import nn
from torchvision.transforms.functional import normalize

import jcl
from jcl.core.encoder import build_backbone
from jcl.errors import RunError, SettingsError
from jcl.export import import_backbone
from jcl.export.backbone_file import BackboneInfo
from jcl.export.layouts import resnet_name
from jcl.runs.checkpoint import load_weights
from jcl.views import IMAGENET_MEAN, IMAGENET_STD

pytestmark = pytest.mark.usefixtures("empty_starts")


def moco_checkpoint(query: nn.Module, key: nn.Module, prefix: str, head: str) -> dict[str, object]:
    """As MoCo's and JCL's released scripts save: epoch, arch, state_dict and optimizer."""
    width = query.fc.in_features
    for network in (query, key):
        last = nn.Linear(width, 128)
        network.fc = nn.Sequential(nn.Linear(width, width), nn.ReLU(), last) if head == "mlp" else last
    state = OrderedDict({f"{prefix}encoder_q.{name}": value for name, value in query.state_dict().items()})
    state |= {f"{prefix}encoder_k.{name}": value for name, value in key.state_dict().items()}
    state |= {f"{prefix}queue": torch.randn(128, 64), f"{prefix}queue_ptr": torch.zeros(1, dtype=torch.long)}
    optimiser = torch.optim.SGD(query.parameters(), 0.03, momentum=0.9).state_dict()
    return {"epoch": 200, "arch": "resnet18", "state_dict": state, "optimizer": optimiser}


@pytest.mark.parametrize("name", ["mnasnet0_5", "timm/hrnet_w18_small"])
def test_networks_that_need_metadata_or_look_like_a_resnet(tmp_path, name: str):
    """MNASNets refuse a state dict without a version; an HRNet begins as a ResNet with a small stem."""
    network, _ = build_backbone(name, image_size=64)
    torch.save(network.state_dict(), tmp_path / "weights.pth")
    loaded = jcl.load_backbone(tmp_path / "weights.pth", name)
    assert_same_bits(loaded, network.state_dict())
    load_weights(build_backbone(name, image_size=64)[0], dict(loaded.state_dict()), tmp_path)


@pytest.mark.parametrize(
    ("name", "side"), [("googlenet", 224), pytest.param("inception_v3", 299, marks=pytest.mark.slow)]
)
def test_networks_that_torchvision_builds_to_convert_normalized_images(tmp_path, name: str, side: int):
    """With its own weights torchvision sets `transform_input`: from ImageNet's mean and std to 0.5."""
    torch.manual_seed(0)
    theirs = torchvision.models.get_model(name, weights=None, transform_input=True, init_weights=True).eval()
    torch.save(theirs.state_dict(), tmp_path / "weights.pth")
    theirs.fc = nn.Identity()
    ours = jcl.load_backbone(tmp_path / "weights.pth", name)
    pixels = torch.rand(2, 3, side, side)
    normalized = [
        normalize(pixels, *values) for values in ((IMAGENET_MEAN, IMAGENET_STD), (ours.info.mean, ours.info.std))
    ]
    with torch.no_grad():
        torch.testing.assert_close(ours(normalized[1]), theirs(normalized[0]), rtol=1e-4, atol=1e-5)
    assert ours.info.image_size == side


@pytest.mark.parametrize(
    ("prefix", "head", "zipped"),
    [("module.", "linear", False), ("", "mlp", True)],
    ids=["v1 of 2020", "v2 on one device"],
)
def test_the_authors_checkpoints(tmp_path, prefix, head, zipped):
    query, key = sample_resnet(seed=1), sample_resnet(seed=2)
    wanted = {name: value.clone() for name, value in body(query).items()}
    file, out = tmp_path / "checkpoint_0199.pth.tar", tmp_path / "out.safetensors"
    torch.save(moco_checkpoint(query, key, prefix, head), file, _use_new_zipfile_serialization=zipped)
    taken = import_backbone(file, out)
    assert_same_bits(taken.network, wanted)
    assert_same_bits(jcl.load_backbone(out), wanted)
    heads = 4 if head == "mlp" else 2
    assert taken.loaded == len(wanted) == 120
    assert taken.unused == {
        f"{prefix}encoder_q.fc": heads,
        f"{prefix}encoder_k": 120 + heads,
        f"{prefix}queue": 1,
        f"{prefix}queue_ptr": 1,
    }
    assert f"under {prefix}encoder_q" in taken.source
    assert "epoch, arch, optimizer" in " ".join(taken.notes)
    assert taken.info == BackboneInfo("resnet18", "imagenet", 224, 512, IMAGENET_MEAN, IMAGENET_STD)


def test_the_network_is_told_from_its_shapes(tmp_path):
    network = sample_resnet("resnet34")
    torch.save(network.state_dict(), tmp_path / "weights.pth")
    backbone = jcl.load_backbone(tmp_path / "weights.pth")
    assert backbone.info.backbone == "resnet34" and backbone.info.stem == "imagenet"
    assert_same_bits(backbone, body(network))
    network.fc = nn.Identity()
    with torch.inference_mode():
        assert torch.equal(backbone(images(64)), network(images(64)))


@pytest.mark.parametrize("prefix", ["", "module.backbone."])
def test_every_resnet_of_torchvision_is_told_from_the_others(prefix):
    names = [name for name in torchvision.models.list_models() if "resnet" in name or "resnext" in name]
    names = [name for name in names if name in torchvision.models.list_models(torchvision.models)]
    assert len(names) == 10
    for name in names:
        with torch.device("meta"):
            state = torchvision.models.get_model(name, weights=None).state_dict()
        assert resnet_name({f"{prefix}{part}": value for part, value in state.items()}, prefix) == name


def test_small_stems_are_told_from_the_first_convolution(tmp_path):
    network = sample_resnet(stem="small")
    state = {f"backbone.{name}": value for name, value in body(network).items()}  # as solo-learn has it
    state |= {f"momentum_backbone.{name}": value + 1 for name, value in body(network).items()}
    state |= {"projector.0.weight": torch.zeros(8, 8), "classifier.weight": torch.zeros(8, 8), "queue": torch.zeros(8)}
    torch.save({"state_dict": state, "epoch": 3, "hyper_parameters": {"lr": 0.1}}, tmp_path / "solo.ckpt")
    taken = import_backbone(tmp_path / "solo.ckpt", tmp_path / "out.safetensors")
    assert_same_bits(taken.network, body(network))
    assert (taken.info.stem, taken.info.image_size) == ("small", 32)
    assert taken.unused == {"momentum_backbone": 120, "projector": 1, "classifier": 1, "queue": 1}
    assert "solo-learn pads by 2" in " ".join(taken.notes)
    network.fc = nn.Identity()
    with torch.inference_mode():
        assert torch.equal(taken.network(images(32)), network(images(32)))


def test_numbered_parts_as_lightly_has_them(tmp_path):
    network = sample_resnet()
    parts = nn.Sequential(*list(network.children())[:-1])
    state = {f"backbone.{name}": value for name, value in parts.state_dict().items()}
    state |= {f"backbone_momentum.{name}": value + 1 for name, value in parts.state_dict().items()}
    state |= {"projection_head.layers.0.weight": torch.zeros(512, 512)}
    torch.save({"state_dict": state, "pytorch-lightning_version": "2.2.0"}, tmp_path / "lightly.ckpt")
    taken = import_backbone(tmp_path / "lightly.ckpt", tmp_path / "out.safetensors")
    assert_same_bits(taken.network, body(network))
    assert taken.unused == {"backbone_momentum": 120, "projection_head": 1}
    with torch.inference_mode():
        assert_close(taken.network(images(64)), parts(images(64)).flatten(1))


def test_numbered_parts_of_a_small_resnet_without_max_pool(tmp_path):
    network = sample_resnet(stem="small")
    parts = nn.Sequential(*[part for name, part in list(network.named_children())[:-1] if name != "maxpool"])
    torch.save(parts.state_dict(), tmp_path / "parts.pth")
    with torch.inference_mode():
        assert_close(jcl.load_backbone(tmp_path / "parts.pth")(images(32)), parts(images(32)).flatten(1))


def test_lightlys_own_resnet_in_parts_lacks_a_relu_and_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTLY_DID_VERSION_CHECK", "True")  # no call home
    lightly = pytest.importorskip("lightly.models")
    parts = nn.Sequential(*list(lightly.ResNetGenerator("resnet-18").children())[:-1], nn.AdaptiveAvgPool2d(1))
    torch.save(parts.state_dict(), tmp_path / "parts.pth")
    for name in (None, "resnet18"):
        with pytest.raises(RunError, match=r"parts\.pth"):
            jcl.load_backbone(tmp_path / "parts.pth", name)


def test_timms_file_with_its_classifier_by_name(tmp_path):
    import timm

    network = unlike_new(timm.create_model("convnext_atto", num_classes=5))
    save_file(network.state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(RunError, match="--backbone"):
        jcl.load_backbone(tmp_path / "model.safetensors")
    taken = import_backbone(tmp_path / "model.safetensors", tmp_path / "out.safetensors", backbone="timm/convnext_atto")
    assert taken.unused == {"head": 2} and taken.info.image_size == 224
    network.reset_classifier(0)
    with torch.inference_mode():
        assert torch.equal(jcl.load_backbone(tmp_path / "out.safetensors")(images(64)), network(images(64)))


@pytest.mark.parametrize("safe", [True, False])
def test_a_folder_that_timm_wrote(tmp_path, safe):
    import timm
    from timm.models import save_for_hf

    network = unlike_new(timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=5))
    shown = {"mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25]}
    network.pretrained_cfg = network.pretrained_cfg | shown
    save_for_hf(network, tmp_path / "model", safe_serialization=safe, model_args={"img_size": 64})
    found = jcl.load_backbone(tmp_path / "model")
    assert found.info == BackboneInfo(
        "timm/vit_tiny_patch16_224", "imagenet", 64, 192, tuple(shown["mean"]), tuple(shown["std"])
    )
    network.reset_classifier(0)
    with torch.inference_mode():
        assert torch.equal(found(images(64)), network(images(64)))
    save_for_hf(network, tmp_path / "odd", safe_serialization=safe, model_args={"depth": 3})
    with pytest.raises(RunError, match=r"config.json.* depth"):
        jcl.load_backbone(tmp_path / "odd")


def test_a_file_without_counts_of_batches_is_complete(tmp_path):
    """torch before 0.4.1 had none, nor has detectron2."""
    network = sample_resnet()
    state = {name: value for name, value in network.state_dict().items() if "num_batches" not in name}
    torch.save(state, tmp_path / "old.pth")
    found = jcl.load_backbone(tmp_path / "old.pth")
    network.fc = nn.Identity()
    with torch.inference_mode():
        assert torch.equal(found(images(64)), network(images(64)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
def test_half_precision_is_said(tmp_path, dtype):
    network = sample_resnet()
    save_file({name: value.to(dtype) for name, value in body(network).items()}, tmp_path / "half.safetensors")
    taken = import_backbone(tmp_path / "half.safetensors", tmp_path / "out.safetensors")
    assert str(dtype).removeprefix("torch.") in " ".join(taken.notes)


def test_the_wrong_network_is_named_with_keys(tmp_path):
    torch.save(sample_resnet("resnet18").state_dict(), tmp_path / "r18.pth")
    with pytest.raises(RunError, match=r"resnet34 at 224 px: 80 missing \(layer1.2.conv1.weight, "):
        jcl.load_backbone(tmp_path / "r18.pth", backbone="resnet34")
    torch.save(sample_resnet("resnet34").state_dict(), tmp_path / "r34.pth")
    with pytest.raises(RunError, match=r"96 unexpected \(layer1.2.conv1.weight, "):
        jcl.load_backbone(tmp_path / "r34.pth", backbone="resnet18")  # all of its tensors are there, and would fit
    with pytest.raises(RunError, match=r"layer1.0.conv1.weight is \(64, 64, 3, 3\) .* \(64, 64, 1, 1\)"):
        jcl.load_backbone(tmp_path / "r34.pth", backbone="resnet50")
    with pytest.raises(RunError, match=r"timm/convnext_atto.* 126 .* conv1.weight"):
        jcl.load_backbone(tmp_path / "r34.pth", backbone="timm/convnext_atto")
    with pytest.raises(SettingsError, match="resnet51"):
        jcl.load_backbone(tmp_path / "r34.pth", backbone="resnet51")


def test_missing_tensors_are_named_and_counted(tmp_path):
    state = sample_resnet().state_dict()
    for name in ("bn1.running_mean", "layer4.1.conv2.weight"):
        del state[name]
    torch.save({"state_dict": {f"module.{name}": value for name, value in state.items()}}, tmp_path / "part.pth")
    with pytest.raises(RunError, match=r"2 missing \(bn1.running_mean, layer4.1.conv2.weight\)"):
        import_backbone(tmp_path / "part.pth", tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


def test_a_resnet_of_unusual_depth_must_be_named(tmp_path):
    state = {name: value for name, value in sample_resnet().state_dict().items() if not name.startswith("layer4.1")}
    torch.save({"state_dict": state, "arch": "resnet16"}, tmp_path / "short.pth")
    with pytest.raises(RunError, match="resnet16"):
        jcl.load_backbone(tmp_path / "short.pth")


def test_two_networks_that_could_be_meant(tmp_path):
    state = {f"{part}.{name}": value for part in ("left", "right") for name, value in body(sample_resnet()).items()}
    torch.save(state, tmp_path / "two.pth")
    with pytest.raises(RunError, match=r"2 networks, under left\. and right\."):
        jcl.load_backbone(tmp_path / "two.pth")


def test_an_image_size_for_networks_built_for_one(tmp_path):
    import timm

    torch.save(timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=0).state_dict(), tmp_path / "v.pth")
    name, out = "timm/vit_tiny_patch16_224", tmp_path / "out.safetensors"
    with pytest.raises(RunError, match=r"at 224 px: 1 of another shape \(pos_embed\).* --image-size"):
        import_backbone(tmp_path / "v.pth", out, backbone=name)
    assert import_backbone(tmp_path / "v.pth", out, backbone=name, image_size=64).info.image_size == 64
    assert jcl.load_backbone(out)(images(64)).shape == (3, 192)


def test_what_is_there_is_kept(tmp_path):
    torch.save(sample_resnet().state_dict(), tmp_path / "weights.pth")
    out = tmp_path / "out.safetensors"
    out.write_bytes(b"precious")
    with pytest.raises(RunError, match="--force"):
        import_backbone(tmp_path / "weights.pth", out)
    with pytest.raises(SettingsError, match=r"\.safetensors"):
        import_backbone(tmp_path / "weights.pth", tmp_path / "out.pth")
    with pytest.raises(RunError, match="is a folder"):
        (tmp_path / "folder.safetensors").mkdir()
        import_backbone(tmp_path / "weights.pth", tmp_path / "folder.safetensors")
    assert out.read_bytes() == b"precious"
    import_backbone(tmp_path / "weights.pth", out, force=True)
    assert_same_bits(jcl.load_backbone(out), body(sample_resnet()))
