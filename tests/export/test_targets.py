"""Exports for timm and for model hubs, opened by timm itself, and the model card."""

import pytest
import timm
import torch
import torchvision
from sample_networks import assert_features, assert_the_way_back_is_the_identity, open_source, sample_file

from jcl.errors import SettingsError
from jcl.export import export_backbone

pytestmark = pytest.mark.usefixtures("empty_starts")
SIZE = 64


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return open_source(tmp_path_factory.mktemp("small"), "timm/test_convnext")


@pytest.mark.parametrize("name", ["resnet18", "timm/test_convnext"])
def test_timm_loads_everything(small, tmp_path, name):
    source = small if name == small.name else open_source(tmp_path, name)
    out = tmp_path / "out.pth"
    written = export_backbone(source.file, "timm", out)
    name = source.name.removeprefix("timm/")
    model = timm.create_model(name, checkpoint_path=str(out), num_classes=0)  # strict
    assert_features(model, source)
    assert f"timm.create_model({name!r}, checkpoint_path=" in written.hints[0]
    assert_the_way_back_is_the_identity(out, source)


def test_timm_opens_the_hub_folder(small, tmp_path):
    source, out = small, tmp_path / "model"
    export_backbone(source.file, "hub-folder", out)
    assert {path.name for path in out.iterdir()} == {"README.md", "config.json", "model.safetensors"}
    model = timm.create_model(f"local-dir:{out}", pretrained=True)
    shown = timm.data.resolve_model_data_config(model)
    assert (list(shown["mean"]), list(shown["std"])) == ([0.5, 0.4, 0.3], [0.25, 0.2, 0.3])
    assert list(shown["input_size"]) == [3, SIZE, SIZE] and model.num_classes == 0
    assert (shown["crop_pct"], shown["interpolation"]) == (1.0, "bilinear")  # as small images are shown here
    assert_features(model, source)
    assert_the_way_back_is_the_identity(out, source)


def test_networks_built_for_one_image_size(tmp_path):
    source = open_source(tmp_path, "timm/test_vit")
    for target, out in (("timm", tmp_path / "out.pth"), ("hub-folder", tmp_path / "model")):
        written = export_backbone(source.file, target, out)
        assert_features(eval(written.hints[0], {"timm": timm}), source)
        assert_the_way_back_is_the_identity(out, source)


def test_torchvision_loads_a_network_that_knows_its_version(tmp_path):
    network = torchvision.models.mnasnet0_5()
    weights = tmp_path / "mnasnet.pth"
    torch.save(network.state_dict(), weights)
    export_backbone(weights, "torchvision", tmp_path / "out.pth", backbone="mnasnet0_5")
    other = torchvision.models.mnasnet0_5()
    other.load_state_dict(torch.load(tmp_path / "out.pth", weights_only=True), strict=False)
    assert torch.equal(other.layers[0].weight, network.layers[0].weight)


def test_networks_that_timm_has_not(tmp_path):
    source = sample_file(tmp_path, "shufflenet_v2_x0_5", SIZE)
    with pytest.raises(SettingsError, match="shufflenet_v2_x0_5"):
        export_backbone(source, "timm", tmp_path / "out.pth")
