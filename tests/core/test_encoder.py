import pytest
import torch
import torchvision
from torch import nn
from torchvision.models.vision_transformer import VisionTransformer

from jcl.core.encoder import (
    OWN_BACKBONES,
    Encoder,
    Stem,
    backbone_traits,
    build_backbone,
    first_stages,
    fit_channels,
    projection_head,
)
from jcl.errors import SettingsError
from small_runs import networks_of_zeros


@pytest.fixture
def zeros():
    """For tests of shapes alone."""
    with networks_of_zeros():
        yield


@pytest.mark.usefixtures("zeros")
@pytest.mark.parametrize(
    ("name", "width", "size"),
    [
        ("resnet18", 512, 32),
        ("resnet50", 2048, 32),
        ("mobilenet_v3_small", 1024, 32),
        ("squeezenet1_1", None, 32),
        ("shufflenet_v2_x0_5", 1024, 32),
        ("googlenet", 1024, 32),
        ("timm/convnext_atto", 320, 32),
        ("convnext_atto", 320, 32),
        ("timm/resnet18", 512, 32),
        ("vit_tiny_patch16_224", 192, 32),
        ("vit_tiny_patch16_224", 192, 64),
        (next(iter(OWN_BACKBONES)), None, 32),
    ],
)
def test_backbones_by_name_give_pooled_features_of_the_width_they_say(name, width, size):
    if name.startswith("squeezenet"):
        with pytest.raises(SettingsError, match="linear classifier"):
            build_backbone(name, image_size=size)
        return
    network, found = build_backbone(name, image_size=size)
    assert width is None or found == width
    assert network.training
    assert network(torch.randn(2, 3, size, size)).shape == (2, found)
    assert network.eval()(torch.randn(1, 3, size, size)).shape == (1, found)


def test_torchvision_transformers_are_built_for_the_image_size(monkeypatch):
    def small(name: str, weights: None, **options: int) -> nn.Module:
        return VisionTransformer(patch_size=32, num_layers=1, num_heads=2, hidden_dim=12, mlp_dim=12, **options)

    monkeypatch.setattr("torchvision.models.get_model", small)
    network, width = build_backbone("vit_b_32", image_size=64)
    assert network(torch.randn(1, 3, 64, 64)).shape == (1, width) == (1, 12)


@pytest.mark.usefixtures("zeros")
@pytest.mark.parametrize(
    ("name", "size"),
    [("vit_b_16", 33), ("inception_v3", 33), ("timm/inception_v3", 33)],
)
def test_an_image_size_that_a_network_cannot_take_is_one_sentence(name, size):
    with pytest.raises(SettingsError, match=rf"does not take images of {size} px.*choose another"):
        build_backbone(name, image_size=size)


@pytest.mark.usefixtures("zeros")
def test_a_backbone_that_does_not_take_the_local_views():
    with pytest.raises(SettingsError, match=r"does not take images of 32 and 16 px.*choose another"):
        build_backbone("mixer_s16_224", image_size=32, local_size=16)


@pytest.mark.usefixtures("zeros")
def test_a_vision_transformer_takes_local_views_and_says_which_sizes_it_takes():
    network, width = build_backbone("vit_tiny_patch16_224", image_size=32, local_size=16)
    for size in (32, 16):
        assert network(torch.randn(2, 3, size, size)).shape == (2, width)
    with pytest.raises(SettingsError, match=r"images of 40 px.*patch size, 16.*such as 32 px"):
        build_backbone("vit_tiny_patch16_224", image_size=40)
    with pytest.raises(SettingsError, match=r"images of 24 px.*such as 32 px"):
        build_backbone("vit_tiny_patch16_224", image_size=32, local_size=24)


@pytest.mark.parametrize(
    ("name", "traits"),
    [
        ("resnet18", (True, False, 0)),
        ("tiny_cnn", (True, False, 0)),
        ("vit_small_patch16_224", (False, True, 16)),
        ("vit_b_32", (False, True, 32)),
        ("timm/convnext_atto", (False, True, 0)),
    ],
)
def test_traits_are_those_of_the_layers(name, traits):
    found = backbone_traits(name)
    assert (found.batch_norm, found.layer_norm, found.patch_size) == traits


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small"])
def test_backbones_start_as_torchvision_starts_them(name):
    torch.manual_seed(5)
    reference = torchvision.models.get_model(name, weights=None).state_dict()
    torch.manual_seed(5)
    found = build_backbone(name)[0].state_dict()
    assert found.keys() < reference.keys()
    assert all(torch.equal(reference[key], value) for key, value in found.items())


def test_the_last_batch_norm_of_a_block_is_not_zeroed():
    network, _ = build_backbone("resnet18")
    assert (network.layer1[0].bn2.weight == 1).all()


@pytest.mark.usefixtures("zeros")
@pytest.mark.parametrize("name", ["resnet18", "timm/resnet18"])
def test_small_stem_keeps_the_resolution(name):
    network, width = build_backbone(name, stem="small", image_size=32)
    assert (network.conv1.kernel_size, network.conv1.stride) == ((3, 3), (1, 1))
    sizes = []
    network.layer1.register_forward_hook(lambda module, inputs, output: sizes.append(inputs[0].shape[2:]))
    assert network(torch.randn(2, 3, 32, 32)).shape == (2, width)
    assert sizes == [(32, 32)]


@pytest.mark.usefixtures("zeros")
@pytest.mark.parametrize("name", ["mobilenet_v3_small", "timm/convnext_atto", "timm/resnet26d", "densenet121"])
def test_small_stem_is_refused_for_other_networks(name):
    with pytest.raises(SettingsError, match=r"model\.stem=imagenet"):
        build_backbone(name, stem="small", image_size=64)


@pytest.mark.parametrize(
    ("typed", "meant"), [("resnet5", "resnet50"), ("timm/convnext_ato", "convnext_atto"), ("resnet_18", "resnet18")]
)
def test_unknown_backbones_come_with_a_suggestion(typed, meant):
    with pytest.raises(SettingsError, match=f"'{typed}'.*did you mean.*{meant}") as error:
        build_backbone(typed)
    suggested = str(error.value).partition("did you mean ")[2].rstrip("?").split(" or ")
    assert len(suggested) == len(set(suggested)) == 3


def test_an_unknown_tag_of_timms_weights_is_named():
    with pytest.raises(SettingsError, match="no_such_tag"):
        backbone_traits("timm/resnet18.no_such_tag")


def test_a_network_of_timm_without_stochastic_depth_says_what_to_set():
    with pytest.raises(SettingsError, match=r"model\.drop_path=0"):
        build_backbone("timm/ghostnet_050", image_size=32, drop_path=0.1)


@pytest.mark.parametrize("name", ["mobilenet_v3_small", "timm/ghostnet_050"])
def test_features_in_training_do_not_depend_on_the_state_of_the_generator(name):
    """A resumed run would otherwise draw another dropout than an unbroken one."""
    network, _ = build_backbone(name, image_size=32, drop_path=0.0)
    images = torch.randn(4, 3, 32, 32)
    assert torch.equal(network(images), network(images))


def test_a_name_like_nothing_known_comes_with_an_example():
    with pytest.raises(SettingsError, match="for example resnet50"):
        build_backbone("qqqqqqqqqqqq")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_encoders_give_unit_rows_in_float32(dtype):
    backbone, width = build_backbone(next(iter(OWN_BACKBONES)))
    encoder = Encoder(backbone, width, embedding_dim=12)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        rows = encoder(torch.randn(4, 3, 32, 32))
    assert rows.dtype == torch.float32 and rows.shape == (4, 12)
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(4))


def test_heads_are_those_of_moco_v1_and_v2():
    linear, mlp = projection_head("linear", 24, 24, 7), projection_head("mlp", 24, 24, 7)
    assert [tuple(parameter.shape) for parameter in linear.parameters()] == [(7, 24), (7,)]
    assert [tuple(parameter.shape) for parameter in mlp.parameters()] == [(24, 24), (24,), (7, 24), (7,)]
    assert not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in mlp.modules())


def test_a_head_is_as_wide_as_asked_for():
    backbone, width = build_backbone(next(iter(OWN_BACKBONES)))
    hidden, _, last = Encoder(backbone, width, head_width=20, embedding_dim=12).head
    assert (hidden.out_features, last.in_features, last.out_features) == (20, 20, 12)


def test_encoders_without_more_layers_start_as_they_always_did():
    """Settings that came later must not change what a seed gives."""
    torch.manual_seed(3)
    first, last = nn.Linear(24, 24), nn.Linear(24, 7)
    torch.manual_seed(3)
    head = Encoder(nn.Identity(), 24, embedding_dim=7).head
    assert torch.equal(head[0].weight, first.weight) and torch.equal(head[2].bias, last.bias)


@pytest.mark.parametrize(
    ("name", "stem", "channels"),
    [("tiny_cnn", "imagenet", 1), ("tiny_cnn", "imagenet", 5), ("resnet18", "small", 5), ("test_vit", "imagenet", 1)],
)
def test_the_first_layer_fits_the_channels(name: str, stem: Stem, channels: int):
    size = 160 if "vit" in name else 32
    torch.manual_seed(0)
    usual, width = build_backbone(name, stem=stem, image_size=size)
    torch.manual_seed(0)
    network, same_width = build_backbone(name, stem=stem, image_size=size, channels=channels)
    assert same_width == width and network.eval()(torch.randn(2, channels, size, size)).shape == (2, width)
    before, after = usual.state_dict(), network.state_dict()
    first = next(part for part, value in before.items() if before[part].shape != after[part].shape)
    assert [part for part in before if not torch.equal(before[part], after[part])] == [first]
    assert after[first].shape[1] == channels
    assert 0.8 < float(after[first].std() / before[first].std()) / (3 / channels) ** 0.5 < 1.25


def test_a_network_with_several_first_layers_takes_three_channels_only():
    with pytest.raises(SettingsError, match="repvgg_a0 does not take images of 32 px with 1 channel"):
        build_backbone("timm/repvgg_a0", image_size=32, channels=1)


@pytest.mark.parametrize("channels", [1, 2, 5, 16])
def test_fitted_weights_give_gray_images_the_same_outputs(channels: int):
    weight, gray = torch.randn(8, 3, 3, 3, dtype=torch.float64), torch.randn(2, 1, 9, 9, dtype=torch.float64)
    fitted = fit_channels(weight, channels)
    outputs = (torch.conv2d(gray.expand(-1, each.shape[1], -1, -1), each) for each in (weight, fitted))
    torch.testing.assert_close(*outputs)


def test_the_first_stages_of_a_resnet_are_its_stem_and_layers():
    network, _ = build_backbone("resnet18", image_size=32)
    found = first_stages(network, 2)
    assert all(module in found for module in (network.conv1, network.bn1, network.layer1))
    assert not any(module in found for module in (network, network.relu, network.layer2, *network.layer2.modules()))
    for other, count in ((network, 6), (build_backbone("tiny_cnn", image_size=32)[0], 1)):
        with pytest.raises(SettingsError, match="freeze"):
            first_stages(other, count)
