"""Exports: what the other library makes of a file is what we have, and the way back loses nothing."""

import copy
import json
import pickle
import re
import warnings

import numpy as np
import pytest
import timm
import torch
import torchvision
from safetensors.torch import load_file
from sample_networks import (
    assert_features,
    assert_same_bits,
    assert_the_way_back_is_the_identity,
    body,
    open_source,
    sample_backbone,
    sample_file,
    sample_resnet,
)
from torch import nn

import jcl
from jcl.errors import JclError, RunError, SettingsError
from jcl.export import export_backbone, import_backbone
from jcl.export.backbone_file import same_features
from jcl.export.layouts import from_detectron2, to_detectron2

pytestmark = pytest.mark.usefixtures("empty_starts")
SIZE = 64
NAMES = {"torchvision": "out.pth", "timm": "out.pth", "detectron2": "out.pkl"}
NAMES |= {
    "mmdetection": "out.pth",
    "ultralytics": "out.pth",
    "safetensors": "out.safetensors",
    "onnx": "out.onnx",
    "hub-folder": "out",
}


@pytest.fixture(scope="module")
def resnet18(tmp_path_factory):
    return open_source(tmp_path_factory.mktemp("resnet18"), "resnet18")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A ResNet-18 with the small stem."""
    return open_source(tmp_path_factory.mktemp("small"), "resnet18", 32, "small")


def test_torchvision_loads_all_but_the_classifier(resnet18, tmp_path):
    out = tmp_path / "out.pth"
    written = export_backbone(resnet18.file, "torchvision", out)
    assert written.tensors == len(resnet18.network.state_dict())
    content = torch.load(out, weights_only=True)
    assert isinstance(content, dict) and all(isinstance(value, torch.Tensor) for value in content.values())
    model = torchvision.models.resnet18()
    assert list(content) == [name for name in model.state_dict() if not name.startswith("fc.")]
    result = model.load_state_dict(content, strict=False)
    assert result.missing_keys == ["fc.weight", "fc.bias"] and result.unexpected_keys == []
    model.fc = nn.Identity()
    assert_features(model, resnet18)
    import_backbone(out, tmp_path / "again.safetensors")
    assert_the_way_back_is_the_identity(tmp_path / "again.safetensors", resnet18)
    assert (tmp_path / "again.safetensors").stat().st_size == resnet18.file.stat().st_size


@pytest.mark.parametrize("target", ["torchvision", "timm"])
def test_state_dicts_as_safetensors(resnet18, tmp_path, target):
    out = tmp_path / "out.safetensors"
    written = export_backbone(resnet18.file, target, out)
    assert "checkpoint_path" in written.hints[0] or "safetensors.torch.load_file(" in written.hints[0]
    if target == "timm":
        assert_features(timm.create_model("resnet18", checkpoint_path=str(out), num_classes=0), resnet18)  # strict
    else:
        assert torchvision.models.resnet18().load_state_dict(load_file(out), strict=False).unexpected_keys == []
    assert_the_way_back_is_the_identity(out, resnet18)


@pytest.mark.parametrize("stem", ["small", "medium"])
def test_other_stems_go_to_torchvision_as_the_hint_says(stem, tmp_path):
    source = open_source(tmp_path, "resnet18", 32, stem)
    written = export_backbone(source.file, "torchvision", tmp_path / "out.pth")
    names = {"torch": torch, "torchvision": torchvision}
    exec(written.hints[0], names)
    model = names["model"]
    model.fc = nn.Identity()
    assert_features(model, source)
    assert_the_way_back_is_the_identity(written.path, source)


@pytest.mark.parametrize("target", ["timm", "hub-folder", "detectron2"])
def test_the_small_stem_is_refused_where_it_cannot_be_built(small, target, tmp_path):
    with pytest.raises(SettingsError, match="small stem"):
        export_backbone(small.file, target, tmp_path / NAMES[target])
    assert list(tmp_path.iterdir()) == []


def test_timms_resnet_is_torchvisions_too(tmp_path):
    source = open_source(tmp_path, "timm/resnet18")
    export_backbone(source.file, "torchvision", tmp_path / "out.pth")
    model = torchvision.models.resnet18()
    result = model.load_state_dict(torch.load(tmp_path / "out.pth", weights_only=True), strict=False)
    assert result.missing_keys == ["fc.weight", "fc.bias"] and result.unexpected_keys == []
    model.fc = nn.Identity()
    assert_features(model, source)


def test_equal_names_and_shapes_do_not_make_equal_networks():
    """A ResNet that strides in its first convolutions has the same weights and other features."""
    network, info = sample_backbone("resnet18", SIZE)
    other = copy.deepcopy(network)
    assert same_features(network, other, info)
    other.layer2[0].conv1.stride, other.layer2[0].conv2.stride = (1, 1), (2, 2)
    assert not same_features(network, other, info)


def expected_detectron2_names() -> set[str]:
    """Every tensor of a ResNet-50 as detectron2's BasicStem and BottleneckBlock name them."""
    norm = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    names = {"stem.conv1.weight"} | {f"stem.conv1.norm.{part}" for part in norm}
    for stage, blocks in ((2, 3), (3, 4), (4, 6), (5, 3)):
        for block in range(blocks):
            for layer in ("conv1", "conv2", "conv3", *(["shortcut"] if block == 0 else [])):
                names.add(f"res{stage}.{block}.{layer}.weight")
                names |= {f"res{stage}.{block}.{layer}.norm.{part}" for part in norm}
    return names


def test_detectron2_gets_its_own_names(resnet18, tmp_path, monkeypatch):
    with torch.device("meta"):
        names = body(torchvision.models.resnet50())
    assert {to_detectron2(name) for name in names} == expected_detectron2_names()
    written = export_backbone(resnet18.file, "detectron2", tmp_path / "out.pkl")
    raw = (tmp_path / "out.pkl").read_bytes()
    content = pickle.loads(raw, encoding="latin1")  # as detectron2 does
    assert b"_core" not in raw and b"multiarray" not in raw  # which numpy 1 and 2 have in different places
    assert content["matching_heuristics"] is True and isinstance(content["__author__"], str)
    weights = resnet18.network.state_dict()
    assert content["model"].keys() == {to_detectron2(name) for name in weights}
    for theirs, ours in {
        "stem.conv1.weight": "conv1.weight",
        "stem.conv1.norm.running_var": "bn1.running_var",
        "res3.0.shortcut.weight": "layer2.0.downsample.0.weight",
        "res3.0.shortcut.norm.bias": "layer2.0.downsample.1.bias",
        "res4.1.conv2.norm.weight": "layer3.1.bn2.weight",
        "res5.1.conv2.weight": "layer4.1.conv2.weight",
    }.items():
        assert isinstance(content["model"][theirs], np.ndarray)
        assert np.array_equal(content["model"][theirs], weights[ours].numpy())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.from_numpy(content["model"]["stem.conv1.weight"])  # as detectron2 does; warns of what is read-only
    assert "FORMAT: RGB" in written.hints[0] and "DEPTH: 18" in written.hints[0]
    assert "PIXEL_MEAN: [127.5, 102.0, 76.5]" in written.hints[0] and "STRIDE_IN_1X1: False" in written.hints[0]
    with pytest.raises(RunError, match="pickle") as refused:
        import_backbone(tmp_path / "out.pkl", tmp_path / "again.safetensors")
    conversion = str(refused.value).partition("convert it: ")[2].removesuffix(".")
    monkeypatch.chdir(tmp_path)
    exec(conversion, {"torch": torch, "pickle": pickle})
    assert_same_bits(import_backbone("weights.pth", "again.safetensors").network, weights)


def test_detectron2s_own_names_are_read(tmp_path):
    """By the rule of its converter, on all of MoCo's query encoder with its head."""
    network = sample_resnet("resnet18")
    model = {}
    for name, value in network.state_dict().items():
        theirs = name if "layer" in name else f"stem.{name}"
        for stage in (1, 2, 3, 4):
            theirs = theirs.replace(f"layer{stage}", f"res{stage + 1}")
        for layer in (1, 2, 3):
            theirs = theirs.replace(f"bn{layer}", f"conv{layer}.norm")
        theirs = theirs.replace("downsample.0", "shortcut").replace("downsample.1", "shortcut.norm")
        assert to_detectron2(name) == theirs and from_detectron2(theirs) == name
        model[theirs] = value
    torch.save({"model": model, "__author__": "MOCO", "matching_heuristics": True}, tmp_path / "moco.pth")
    taken = import_backbone(tmp_path / "moco.pth", tmp_path / "out.safetensors")
    assert_same_bits(taken.network, {name: v for name, v in network.state_dict().items() if not name.startswith("fc.")})
    assert taken.unused == {"fc": 2} and "RGB" in " ".join(taken.notes)


def test_networks_that_torchvision_has_not(tmp_path):
    source = sample_file(tmp_path, "timm/test_convnext", SIZE)
    for target in ("torchvision", "detectron2"):
        with pytest.raises(SettingsError, match="test_convnext"):
            export_backbone(source, target, tmp_path / NAMES[target])


def test_our_own_network_goes_only_where_it_is_known(tmp_path):
    file = sample_file(tmp_path, "tiny_cnn", 32)
    for target in ("torchvision", "timm", "detectron2", "hub-folder"):
        with pytest.raises(SettingsError, match="tiny_cnn"):
            export_backbone(file, target, tmp_path / NAMES[target])
    export_backbone(file, "safetensors", tmp_path / "out.safetensors")
    assert_same_bits(jcl.load_backbone(tmp_path / "out.safetensors"), sample_backbone("tiny_cnn", 32)[0].state_dict())


@pytest.mark.parametrize("target", NAMES)
def test_what_is_there_is_kept(resnet18, target, tmp_path):
    out = tmp_path / NAMES[target]
    if target == "hub-folder":
        out.mkdir()
        out = out / "mine.txt"
    out.write_text("precious")
    with pytest.raises(RunError, match="--force"):
        export_backbone(resnet18.file, target, tmp_path / NAMES[target])
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [out] and out.read_text() == "precious"


def test_what_is_there_is_overwritten_when_forced(tmp_path):
    out, folder, source = tmp_path / "out.pth", tmp_path / "model", open_source(tmp_path, "timm/test_resnet")
    folder.mkdir()
    for file in (out, folder / "mine.txt", folder / "README.md"):
        file.write_text("old")
    export_backbone(source.file, "timm", out, force=True)
    export_backbone(source.file, "hub-folder", folder, force=True)
    assert (folder / "mine.txt").read_text() == "old" and (folder / "README.md").read_text() != "old"
    for path in (out, folder):
        assert_the_way_back_is_the_identity(path, source)
    before = jcl.load_backbone(folder).info
    config = json.loads((folder / "config.json").read_text())
    config["pretrained_cfg"] |= {"mean": [0.1, 0.2, 0.3], "input_size": [3, 96, 96]}
    (folder / "config.json").write_text(json.dumps(config))
    info = jcl.load_backbone(folder).info
    assert (info.image_size, info.mean, info.std) == (96, (0.1, 0.2, 0.3), before.std), "as timm reads it"


def test_weights_that_are_no_numbers_are_not_handed_on(tmp_path):
    weights = sample_resnet("resnet18").state_dict()
    weights["layer3.0.conv1.weight"][0] = torch.nan
    torch.save(weights, tmp_path / "diverged.pth")
    with pytest.raises(RunError, match="NaN"):
        export_backbone(tmp_path / "diverged.pth", "torchvision", tmp_path / "out.pth")
    assert [file.name for file in tmp_path.iterdir()] == ["diverged.pth"]


def test_places_where_nothing_is_written(resnet18, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "settings.yaml").write_text("")
    before = resnet18.file.read_bytes()
    for target, out in (
        ("torchvision", tmp_path / "folder"),
        ("hub-folder", tmp_path / "file"),
        ("hub-folder", tmp_path / "run"),
        ("detectron2", tmp_path / "out.pth"),
        ("onnx", tmp_path / "out"),
        ("torchvision", tmp_path / "file" / "out.pth"),
    ):
        with pytest.raises(JclError, match=re.escape(str(out))):
            export_backbone(resnet18.file, target, out, force=True)
    with pytest.raises(RunError, match="missing"):
        export_backbone(tmp_path / "missing", "timm", tmp_path / "out.pth")
    assert resnet18.file.read_bytes() == before and (tmp_path / "file").read_text() == "mine"


def test_a_home_folder_is_one_wherever_it_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    home = f"~/{sample_file(tmp_path, 'tiny_cnn', 32).relative_to(tmp_path)}"
    assert export_backbone(home, "safetensors", "~/out.safetensors").path == tmp_path / "out.safetensors"
    import_backbone("~/out.safetensors", "~/in.safetensors")
    assert (tmp_path / "in.safetensors").is_file() and not (tmp_path / "~").exists()
