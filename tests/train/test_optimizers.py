"""AdamW, gradient clipping and stochastic depth for transformers and ConvNeXt."""

import copy
import math
import signal
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torchvision.models.convnext import CNBlockConfig, ConvNeXt

import jcl
from jcl.core.blocks import DropPath, draw_drop_paths
from jcl.core.encoder import patch_embedding
from jcl.data import ImageBatch
from jcl.errors import Interrupted, SettingsError
from jcl.settings.recipes import build_settings
from jcl.settings.resolve import resolve
from jcl.settings.resolved import DataFacts, ResolvedSettings
from jcl.train.build import build_learner, build_optimizer, is_undecayed, run_view_recipe, step_options
from jcl.train.step import TrainingStep
from run_tools import QUIET, assert_same, stop_after
from small_runs import TINY_VALUES, networks_of_zeros

CPU = torch.device("cpu")
VIT, CONVNEXT = "test_vit", "test_convnext"  # of timm
DROP_PATH = {"model__drop_path": 0.3}
OWN = {"views.image_size": 32, "model.bn_groups": "auto", "train.lr": "auto", "train.key_passes": "auto"}


def modern_values(backbone: str, **changes: object) -> dict[str, object]:
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    return TINY_VALUES | OWN | {"model.backbone": backbone, "record.knn_every": 0, "train.epochs": 1} | changes


def resolved(backbone: str, **changes: object) -> ResolvedSettings:
    settings = build_settings("folder", values=modern_values(backbone, **changes))
    return resolve(settings, DataFacts(images=34, short_side=16, decoded=True))[0]


@pytest.mark.parametrize("backbone", [VIT, CONVNEXT])
def test_automatic_settings_are_those_of_moco_v3(backbone):
    settings = resolved(backbone, train__epochs=300)
    train = settings.train
    assert (train.optimizer, train.weight_decay, train.warmup_epochs) == ("adamw", 0.1, 40)
    assert train.lr == pytest.approx(1.5e-4 * 8 / 256)
    assert (train.clip_grad > 0) == settings.model.freeze_patch_embed == (backbone == VIT)
    assert settings.model.bn_groups == 1


def test_networks_with_batch_norm_keep_sgd():
    train = resolved("tiny_cnn").train
    assert (train.optimizer, train.clip_grad) == ("sgd", 0.0)


@pytest.mark.parametrize(
    ("backbone", "plain"),
    [
        (VIT, {"cls_token", "pos_embed", "norm.weight", "blocks.0.attn.qkv.bias"}),
        (CONVNEXT, {"stages.0.blocks.0.gamma", "stem.1.weight"}),
    ],
)
def test_adamw_decays_weight_matrices_only(backbone, plain):
    settings = resolved(backbone, train__optimizer="adamw", views__image_size=64)
    with networks_of_zeros():
        learner, _ = build_learner(settings, CPU)
    decayed, undecayed = build_optimizer(settings, learner, CPU).param_groups
    assert (decayed["weight_decay"], undecayed["weight_decay"]) == (0.1, 0.0)
    names = {parameter: name for name, parameter in learner.query_encoder.named_parameters()}
    assert {names[parameter].removeprefix("backbone.") for parameter in undecayed["params"]} >= plain
    assert all(names[parameter].endswith("weight") and parameter.ndim > 1 for parameter in decayed["params"])
    trained = [parameter for parameter in names if parameter.requires_grad]
    assert len(trained) == len(decayed["params"]) + len(undecayed["params"])


@pytest.mark.parametrize("name", ["features.1.0.layer_scale", "blocks.0.attn.relative_position_bias_table"])
def test_adamw_decays_no_scales_and_positions(name):
    assert is_undecayed(name, torch.zeros(4, 1, 1)) and not is_undecayed("blocks.0.attn.qkv.weight", torch.zeros(4, 4))


@pytest.mark.parametrize(
    ("backbone", "changes"),
    [
        (VIT, {"method__num_local_queries": 2, "train__on_nan": "skip", "train__layer_decay": 0.7} | DROP_PATH),
        (CONVNEXT, {"method__num_queries": 2} | DROP_PATH),
    ],
)
def test_a_stopped_run_continues_bit_for_bit(backbone, changes, npz, tmp_path, monkeypatch):
    values = modern_values(backbone, train__lr=1e-3, **changes) | {"data.location": str(npz)}
    settings = build_settings("folder", values=values)
    whole = jcl.pretrain(settings, tmp_path / "whole", console=QUIET)
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        stop_after(patch, 2, signal.SIGTERM)
        jcl.pretrain(settings, tmp_path / "stopped", console=QUIET)
    assert_same(jcl.resume(tmp_path / "stopped", console=QUIET), whole)
    assert whole.settings.train.optimizer == "adamw"
    assert_patches_stay(settings, whole.path, frozen=backbone == VIT)


HEAD = "the head of the encoder"
# Distances from the head, by the start of a parameter's name.
DISTANCES = {
    "test_resnet": {"layer4": 1, "layer3": 2, "layer2": 3},  # the stem and layer1 are frozen
    VIT: {"norm": 1, **{f"blocks.{block}": 6 - block for block in range(6)}, "cls_token": 7, "pos_embed": 7},
    CONVNEXT: {"head": 1, **{f"stages.{stage}": 4 - stage for stage in range(4)}, "stem": 5},
}


def first_move(settings: ResolvedSettings) -> dict[str, tuple[float, torch.Tensor]]:
    """The learning rate of each parameter that is trained, and how far the first step moves it."""
    learner, _ = build_learner(settings, CPU)
    optimizer = build_optimizer(settings, learner, CPU)
    step = TrainingStep(learner, optimizer, run_view_recipe(settings), 0, step_options(settings, CPU))
    before = copy.deepcopy(learner.query_encoder.state_dict())
    draw = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (8, 3, 32, 32), dtype=torch.uint8, generator=draw)
    step(ImageBatch(pixels, torch.full((8, 2), 32), torch.arange(8)), 0, 0.01, 1.0, backbone_share=0.25)
    rates = {value: group["lr"] for group in optimizer.param_groups for value in group["params"]}
    trained = {name: value for name, value in learner.query_encoder.named_parameters() if value.requires_grad}
    assert len(rates) == len(trained)
    return {name: (rates[value], value.detach() - before[name]) for name, value in trained.items()}


@pytest.mark.parametrize(("backbone", "distances"), DISTANCES.items())
def test_a_layer_moves_less_by_its_distance_from_the_head(backbone, distances):
    frozen = {"model__init": "imagenet", "model__freeze": 2} if backbone == "test_resnet" else {}
    changes = {"train__head_epochs": 1.0, "train__clip_grad": 0.0} | frozen
    plain, decayed = (first_move(resolved(backbone, train__layer_decay=decay, **changes)) for decay in (1.0, 0.5))
    assert plain.keys() == decayed.keys()
    furthest = dict.fromkeys([*distances, HEAD], 0.0)
    for name, (rate, move) in plain.items():
        part = next((part for part in distances if f"{name}.".startswith(f"backbone.{part}.")), HEAD)
        furthest[part] = max(furthest[part], float(move.abs().max()))
        scale = 0.5 ** distances.get(part, 0)
        assert (rate, decayed[name][0]) == ((0.0025, 0.0025 * scale) if part in distances else (0.01, 0.01))
        torch.testing.assert_close(decayed[name][1], move * scale, rtol=1e-3, atol=2e-7)
    assert min(furthest.values()) > 2e-5


def assert_patches_stay(settings: jcl.Settings, run: Path, *, frozen: bool) -> None:
    """A frozen patch embedding is in the trained backbone as it started, and something else has changed."""
    start, _ = build_learner(jcl.Run(run).settings, CPU)
    trained = jcl.load_backbone(run)
    if frozen:
        before, after = (patch_embedding(network) for network in (start.query_encoder, trained))
        assert before is not None and after is not None and torch.equal(before.weight, after.weight)
    changed = [
        name
        for name, value in start.query_encoder.backbone.state_dict().items()
        if not torch.equal(value, trained.state_dict()[name])
    ]
    assert len(changed) > 20


@pytest.mark.parametrize(
    ("backbone", "changes", "words"),
    [
        (VIT, {"train__lr": 0.06}, r"train\.lr=0\.06 is too high for AdamW.*--lr auto"),
        ("tiny_cnn", {"model__drop_path": 0.1}, r"model\.drop_path=0"),
        ("tiny_cnn", {"model__freeze_patch_embed": True}, r"model\.freeze_patch_embed=false"),
    ],
)
def test_what_cannot_work_is_refused(backbone, changes, words):
    with pytest.raises(SettingsError, match=words):
        build_learner(resolved(backbone, **changes), CPU)


def test_gradients_are_clipped(npz, tmp_path, monkeypatch):
    norms = []
    step = torch.optim.AdamW.step

    def noting(self, *arguments):
        gradients = [parameter.grad for group in self.param_groups for parameter in group["params"]]
        norms.append(float(torch.nn.utils.get_total_norm(gradients)))
        return step(self, *arguments)

    monkeypatch.setattr(torch.optim.AdamW, "step", noting)
    values = TINY_VALUES | {"data.location": str(npz), "train.optimizer": "adamw", "train.lr": 1e-3}
    settings = build_settings("folder", values=values | {"train.clip_grad": 0.01, "train.epochs": 1})
    jcl.pretrain(settings, tmp_path / "run", console=QUIET)
    assert norms and all(norm <= 0.0101 for norm in norms)


def test_a_bad_step_of_adamw_is_undone(npz):
    settings = resolved("tiny_cnn", train__optimizer="adamw", train__on_nan="skip", views__image_size=16)
    learner, _ = build_learner(settings, CPU)
    step = TrainingStep(
        learner,
        build_optimizer(settings, learner, CPU),
        run_view_recipe(settings),
        0,
        step_options(settings, CPU),
    )
    pixels = torch.randint(0, 256, (8, 3, 16, 16), dtype=torch.uint8)
    batch = ImageBatch(pixels, torch.full((8, 2), 16), torch.arange(8))
    for number in range(2):
        assert step(batch, number, 1e-3, 1.0)[-1] == 0
        before = copy.deepcopy((learner.state_dict(), step.optimizer.state_dict()["state"]))
        assert step(batch, number, 1e-3, math.nan)[-1] == 1
        after = learner.state_dict(), step.optimizer.state_dict()["state"]
        torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert {int(state["step"]) for state in step.optimizer.state.values()} == {2}


@pytest.mark.parametrize("backbone", [VIT, CONVNEXT, "convnext_tiny"])
def test_drop_path_rises_to_its_rate_and_only_queries_skip_blocks(backbone, monkeypatch):
    if backbone == "convnext_tiny":  # a smaller one of torchvision, whose blocks do more
        blocks = [CNBlockConfig(8, 16, 2), CNBlockConfig(16, None, 2)]
        monkeypatch.setattr("torchvision.models.get_model", lambda *_, **__: ConvNeXt(blocks, 0.1, 1.0))
    learner, _ = build_learner(resolved(backbone, model__drop_path=0.4, views__image_size=32), CPU)
    layers = [module for module in learner.query_encoder.modules() if isinstance(module, DropPath)]
    rates = [layer.rate for layer in layers]
    assert rates[-1] == pytest.approx(0.4) and all(a <= b + 1e-9 for a, b in pairwise(rates))
    views = torch.randn(16, 3, 32, 32)
    rows, numbers = torch.arange(16), torch.zeros(16, dtype=torch.int64)
    plain = learner.query_encoder(views)
    torch.testing.assert_close(learner.key_encoder(views), plain)
    draw_drop_paths(learner.query_encoder, 0, 1, [(rows, numbers)])
    dropped = learner.query_encoder(views)
    assert not torch.allclose(dropped, plain)
    kept, zero = layers[-1].factors[16], torch.zeros(16)
    torch.testing.assert_close(kept, torch.where(kept > 0, 1 / 0.6, zero))
    # A view is dropped by its own row, whatever else is in the batch.
    draw_drop_paths(learner.query_encoder, 0, 1, [(rows[4:8], numbers[4:8])])
    torch.testing.assert_close(learner.query_encoder(views[4:8]), dropped[4:8], rtol=1e-4, atol=1e-5)
