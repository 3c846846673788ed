"""Runs that start from existing weights."""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import jcl
from jcl.commands.detect import open_initial_backbone
from jcl.commands.run import Run
from jcl.core.encoder import OWN_BACKBONES, build_backbone
from jcl.errors import Interrupted, JclError, RunError, SettingsError
from jcl.export.loading import initial_facts, initial_tensors, read_initial
from jcl.runs.checkpoint import list_checkpoints, read_tensors
from jcl.settings.recipes import build_settings
from jcl.settings.resolve import resolve
from jcl.settings.resolved import DataFacts, ResolvedSettings
from jcl.settings.values import with_values
from jcl.train.build import build_learner
from launch_tools import forked_ranks
from page_tools import small_run
from run_tools import QUIET, assert_same, stop_after
from small_runs import networks_of_zeros, tiny_settings

MEAN, STD = (0.5, 0.4, 0.3), (0.25, 0.2, 0.3)
OPTIONS = ("--backbone", "tiny_cnn", "--image-size", 16, "--batch-size", 8, "--epochs", 1, "--device", "cpu")
OPTIONS += ("--set", "method.queue_size=32", "--set", "record.tensorboard=false", "--set", "record.knn_k=5")


def weights_of(run: Path | Run) -> dict[str, torch.Tensor]:
    return jcl.load_backbone(run if isinstance(run, Path) else run.path).state_dict()


def unlike_new(network: torch.nn.Module) -> torch.nn.Module:
    """Weights and statistics that no initialization gives."""
    for value in filter(torch.is_floating_point, network.state_dict().values()):
        value += 0.01 * (torch.rand(value.shape, generator=torch.Generator().manual_seed(value.numel())) - 0.5)
    return network


def loaded(
    init: object, backbone: str = "resnet18", **changes: object
) -> tuple[dict[str, torch.Tensor], str, ResolvedSettings]:
    """What a run takes from these weights, what it prints about them, and its resolved settings."""
    values = {"views__image_size": 32, "model__stem": "auto"} | changes
    asked = tiny_settings("photos", model__backbone=backbone, model__init=str(init), **values)
    initial = read_initial(asked)
    facts = DataFacts(images=1000, short_side=32, decoded=True, init=initial_facts(initial))
    settings, _ = resolve(asked, facts)
    with networks_of_zeros():
        network, _ = build_backbone(backbone, stem=settings.model.stem, image_size=settings.views.image_size)
    tensors, lines = initial_tensors(initial, settings, network)
    return tensors, "\n".join(lines), settings


@pytest.fixture(scope="module")
def resnet() -> dict[str, torch.Tensor]:
    """The state dict of torchvision's ResNet-18, with its classifier."""
    import torchvision

    with networks_of_zeros():
        return unlike_new(torchvision.models.resnet18()).state_dict()


def assert_taken(tensors: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], prefix: str = "") -> None:
    assert len(tensors) == 120
    assert all(torch.equal(value, wanted[prefix + name].float().to(value.dtype)) for name, value in tensors.items())


def test_a_run_continues_from_a_run_and_says_what_it_loaded(call, npz, tmp_path, pretrained):
    shutil.copytree(pretrained, tmp_path / "first")
    small_lr = ("--lr", "1e-9", "--set", "train.weight_decay=0")
    code, _, err = call("pretrain", npz, "--init", tmp_path / "first", *OPTIONS, *small_lr, "--out", tmp_path / "next")
    assert code == 0 and "projection head" in err and f"model.init = {tmp_path / 'first'}" in err
    first, after = weights_of(tmp_path / "first"), weights_of(tmp_path / "next")
    for name in first:
        if "running" not in name and "num_batches" not in name:
            torch.testing.assert_close(after[name], first[name], rtol=0, atol=1e-5)
    run = jcl.Run(tmp_path / "next")
    assert run.settings.model.init == str(tmp_path / "first") and run.settings.model.stem == "imagenet"
    # The accuracy of the weights at the start stands beside every later one.
    start, end = [line for line in run.metrics if line["kind"] == "knn"]
    assert start["step"] == 0 and start["start_knn_top1"] == start["knn_top1"] == end["start_knn_top1"]
    assert run.summary["start_knn_top1"] == start["knn_top1"] and "beats_start" in run.summary
    assert "untrained_knn_top1" not in run.summary
    assert "weights at the start" in err and "untrained" not in err
    page = (run.path / "report.html").read_text()
    assert "weights at the start" in page and "untrained network" not in page


def test_an_accuracy_during_training_is_not_that_of_the_weights_at_the_start(npz, tmp_path, pretrained, monkeypatch):
    """The first line of kNN may be missing, for example if the test images could not be read at first."""
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        stop_after(patch, 4, signal.SIGTERM)
        jcl.pretrain(tiny_settings(npz, model__init=str(pretrained), train__epochs=2), tmp_path / "run", console=QUIET)
    file = tmp_path / "run/metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if '"knn"' not in line))
    run = jcl.resume(tmp_path / "run", console=QUIET)
    found = [line for line in run.metrics if line["kind"] == "knn"]
    assert found and not any("start_knn_top1" in line for line in [*found, run.summary])


class TiedNetwork(torch.nn.Module):
    """Two layers with the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(3, 8, 3)
        self.second = self.third = torch.nn.Conv2d(8, 8, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(images)).relu()).mean((2, 3))


def test_layers_that_share_weights_are_saved_and_loaded(npz, tmp_path, monkeypatch):
    monkeypatch.setitem(OWN_BACKBONES, "tied", TiedNetwork)
    changes = {"model__backbone": "tied", "train__epochs": 1, "train__layer_decay": 0.5, "record__report": False}
    first = jcl.pretrain(tiny_settings(npz, **changes), tmp_path / "first", console=QUIET)
    after = jcl.pretrain(tiny_settings(npz, **changes, model__init=str(first.path)), tmp_path / "next", console=QUIET)
    network = after.backbone()
    assert network.second.weight is network.third.weight and after.summary["steps"] == first.summary["steps"]


@pytest.mark.parametrize("kind", ["safetensors", "moco", "dino", "timm"])
def test_files_of_other_programs(tmp_path, resnet, kind):
    file, prefix = tmp_path / "weights.pth", ""
    content: object = dict(resnet)
    if kind == "moco":
        content = {"arch": "resnet18", "epoch": 200, "state_dict": moco(resnet)}
        prefix = "module.encoder_q."
    elif kind == "dino":
        teacher = {f"backbone.{name}": value for name, value in resnet.items() if not name.startswith("fc.")}
        content = {"teacher": teacher, "student": {f"module.{name}": value + 1 for name, value in teacher.items()}}
    elif kind == "timm":
        import timm

        with networks_of_zeros():
            content = unlike_new(timm.create_model("resnet18", num_classes=7)).state_dict()
    if kind == "safetensors":
        file = tmp_path / "model.safetensors"
        save_file(resnet, file)
    else:
        torch.save(content, file)
    tensors, lines, settings = loaded(file)
    wanted = content if kind == "timm" else {f"{prefix}{name}": value for name, value in resnet.items()}
    assert_taken(tensors, wanted, prefix)
    assert "120 tensors" in lines and "projection head" in lines
    assert ("fc" in lines) == (kind != "dino")
    assert settings.model.stem == "imagenet"  # of the weights, also at 32 px


def moco(resnet: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The query and key encoders of MoCo v2, whose head is called fc."""
    state = {f"module.encoder_q.{name}": value for name, value in resnet.items()}
    state |= {f"module.encoder_k.{name}": value + 1 for name, value in resnet.items()}
    return state | {"module.queue": torch.zeros(128, 16)}


def test_stem_size_and_normalization_follow_the_weights(tmp_path):
    from jcl.export import BackboneInfo, save_backbone

    network, width = build_backbone("resnet18", stem="small", image_size=48)
    file = tmp_path / "backbone.safetensors"
    save_backbone(unlike_new(network), BackboneInfo("resnet18", "small", 48, width, MEAN, STD), file)
    _, _, settings = loaded(file, views__image_size="auto")
    assert (settings.model.stem, settings.views.image_size) == ("small", 48)
    assert (settings.views.mean, settings.views.std) == (MEAN, STD)
    tensors, lines, settings = loaded(file, model__stem="imagenet", views__mean=[0.5, 0.5, 0.5])
    assert "conv1.weight" not in tensors and len(tensors) == 119 and "conv1.weight" in lines
    assert settings.views.mean == (0.5, 0.5, 0.5)
    with pytest.raises(SettingsError, match=r"model\.stem=small"):  # a new first layer would stay random
        loaded(file, model__stem="imagenet", model__freeze=1)
    with pytest.raises(SettingsError, match="stem"):
        loaded(file, "tiny_cnn")


def test_resume_needs_the_weights_only_before_the_first_checkpoint(npz, tmp_path, pretrained, monkeypatch):
    first = shutil.copytree(pretrained, tmp_path / "first")
    short = {"train__epochs": 2, "record__checkpoint_every": 1}
    settings = tiny_settings(npz, model__init=str(first), train__layer_decay=0.7, **short)
    whole = jcl.pretrain(settings, tmp_path / "whole", console=QUIET)
    for step, out in ((1, "early"), (5, "late")):
        with monkeypatch.context() as patch:
            stop_after(patch, step, OSError)
            with pytest.raises(OSError):
                jcl.pretrain(settings, tmp_path / out, console=QUIET)
    assert_same(jcl.resume(tmp_path / "early", console=QUIET), whole)
    shutil.rmtree(first)
    assert_same(jcl.resume(tmp_path / "late", console=QUIET), whole)


def test_what_does_not_fit_is_refused_with_one_sentence(refused, npz, tmp_path, tmp_path_factory, resnet):
    class Malicious:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "hacked"),)

    weights = tmp_path_factory.mktemp("weights")  # not in the folder that is compared before and after
    torch.save(resnet, weights / "resnet18.pth")
    torch.save({name: value for name, value in resnet.items() if "layer3" not in name}, weights / "missing.pth")
    torch.save(resnet | {"layer4.1.conv2.weight": torch.zeros(512, 512, 1, 1)}, weights / "shape.pth")
    torch.save({"state_dict": resnet, "run": Malicious()}, weights / "malicious.pth")
    with networks_of_zeros():
        vit = build_backbone("timm/test_vit", image_size=160)[0]
    torch.save(vit.state_dict(), weights / "vit.pth")
    small = ("--image-size", 32, "--batch-size", 8, "--device", "cpu", "--out", tmp_path / "run")
    for (file, backbone), wanted in {
        ("resnet18.pth", "resnet50"): "--backbone",
        ("malicious.pth", "resnet18"): "mkdir",
        ("nothing.pth", "resnet18"): "nothing.pth",
    }.items():
        options = ("--init", weights / file, "--backbone", backbone)
        with networks_of_zeros():
            assert wanted in refused("pretrain", npz, *options, *small), file
    automatic = dict.fromkeys(("train__lr", "train__weight_decay", "train__warmup_epochs"), "auto")
    for (file, backbone), wanted in {
        ("missing.pth", "resnet18"): "missing.pth",
        ("shape.pth", "resnet18"): "layer4.1.conv2.weight",
        ("vit.pth", "timm/test_vit"): "--image-size",
        ("vit.pth", "resnet18"): "name it with --backbone",
    }.items():
        with pytest.raises(JclError) as error:
            loaded(weights / file, backbone, **automatic)
        assert wanted in str(error.value), file


def test_torchvisions_and_timms_weights_by_name(tmp_path, resnet, monkeypatch):
    """From their own caches, and without a network one sentence."""
    checkpoints, hub = tmp_path / "torch/hub/checkpoints", tmp_path / "hub/models--timm--resnet18.a1_in1k"
    for folder in (checkpoints, hub / "refs", hub / "snapshots/1234"):
        folder.mkdir(parents=True)
    torch.save(resnet, checkpoints / "resnet18-f37072fd.pth")
    (hub / "refs/main").write_text("1234")
    save_file(resnet, hub / "snapshots/1234/model.safetensors")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def read(init: str, backbone: str):
        return read_initial(build_settings("folder", values={"model.init": init, "model.backbone": backbone}))

    for init, tensors in (("imagenet", 122), ("timm", 120)):
        found = read(init, "resnet18")
        assert (len(found.tensors), found.mean[0]) == (tensors, 0.485)
        with pytest.raises(JclError, match=r"(?i)resnet34"):
            read(init, "resnet34")
        detector = open_initial_backbone(init, "resnet18", 0)
        assert torch.equal(detector.body.conv1.weight, resnet["conv1.weight"]) and detector.label == init
    with pytest.raises(JclError, match="torchvision has no x"):
        read("imagenet", "x")


def test_without_a_network_timms_weights_are_refused_within_seconds(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    started = time.monotonic()
    with pytest.raises(RunError, match="test_vit"):
        read_initial(tiny_settings("photos", model__backbone="test_vit", model__init="timm"))
    assert time.monotonic() - started < 15


def test_the_backbone_waits_for_the_head(npz, tmp_path, pretrained):
    run = small_run(npz, tmp_path / "run", model__init=str(pretrained), train__epochs=1, train__head_epochs=1)
    parameters = {name for name, _ in jcl.load_backbone(run.path).named_parameters()}
    first, after = weights_of(pretrained), weights_of(run)
    assert all(torch.equal(after[name], first[name]) for name in parameters)
    saved, _ = read_tensors(list_checkpoints(run.path / "checkpoints")[-1])
    keys = {name: saved[f"model.key_encoder.backbone.{name}"] for name in parameters}
    assert all(torch.allclose(keys[name], first[name]) for name in parameters)
    assert not all(torch.equal(after[name], first[name]) for name in first)  # statistics follow the new images


def test_a_missing_file_is_named_if_the_run_has_to_start_again(npz, tmp_path, pretrained):
    run = small_run(npz, tmp_path / "run", model__init=str(pretrained), train__epochs=1)
    shutil.rmtree(run.path / "checkpoints")
    (run.path / "summary.json").unlink()
    file = run.path / "settings.yaml"
    file.write_text(file.read_text().replace(f"init: {pretrained}", f"init: {tmp_path / 'gone.pth'}"))
    with pytest.raises(RunError, match=r"gone\.pth"):
        jcl.resume(run.path)


def test_frozen_stages_keep_weights_and_statistics():
    asked = tiny_settings("photos", model__backbone="resnet18", model__stem="small", model__freeze=2)
    settings, _ = resolve(asked, DataFacts(images=1000, short_side=32, decoded=True))
    with pytest.raises(SettingsError):  # they would be random
        build_learner(settings, torch.device("cpu"))
    learner, _ = build_learner(with_values(settings, {"model.init": "imagenet"}), torch.device("cpu"))
    before = {name: value.clone() for name, value in learner.state_dict().items() if "running_mean" in name}
    learner.train()
    learner(lambda rows, numbers: torch.rand(len(rows), 3, 16, 16), 4, 0, 1.0)
    frozen = ("conv1", "bn1", "layer1")
    for name, value in learner.state_dict().items():
        if name in before:
            assert torch.equal(value, before[name]) == (name.split(".")[2] in frozen), name
    for name, value in learner.query_encoder.backbone.named_parameters():
        assert value.requires_grad != name.startswith(frozen)


@pytest.mark.slow
def test_two_ranks_start_from_the_same_weights(npz, tmp_path, pretrained):
    """Only the first rank reads the file."""
    shutil.copytree(pretrained, tmp_path / "there/first")
    (tmp_path / "elsewhere").mkdir()
    options = [*map(str, OPTIONS), "--init", "first", "--lr", "1e-9", "--set", "train.weight_decay=0"]
    arguments = ["pretrain", str(npz), *options, "--out", str(tmp_path / "run")]
    places = [str(tmp_path / "there"), str(tmp_path / "elsewhere")]
    (played,) = forked_ranks([{"ranks": 2, "arguments": arguments, "places": places}])
    assert played["codes"] == [0, 0], played
    first, after = weights_of(pretrained), weights_of(tmp_path / "run")
    assert all(torch.allclose(after[name], first[name], atol=1e-5) for name in first if name.endswith("weight"))


def test_relatives_of_resnets_are_not_taken_for_them(tmp_path):
    import timm

    with networks_of_zeros():
        torch.save(timm.create_model("seresnet18", num_classes=0).state_dict(), tmp_path / "weights.pth")
    assert "projection head" in loaded(tmp_path / "weights.pth", "timm/seresnet18", model__stem="imagenet")[1]
