"""Fine-tuning: learning rates by layer, few labels, and a stop that changes nothing."""

import json
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from jcl.commands.finetune import load_classifier, resume_finetuning
from jcl.core.encoder import backbone_parts, build_backbone
from jcl.errors import Interrupted, RunError, SettingsError
from jcl.evaluate.folders import FinetuneFolder, ProbeFolder
from jcl.evaluate.supervised import Classifier, FinetuneSettings, default_batch_size, finetune_optimizer
from jcl.export import BackboneInfo, load_backbone, save_backbone
from jcl.runs import saver
from jcl.runs.checkpoint import list_checkpoints, read_tensors
from jcl.runs.lock import lock_folder
from jcl.settings.values import validated
from jcl.views import IMAGENET_MEAN, IMAGENET_STD
from small_runs import networks_of_zeros
from supervised_tools import finetune, same_tensors, stop_after, untrained_weights

QUIET = Console(quiet=True)
SHORT = {"epochs": 3, "batch_size": 8, "device": "cpu", "workers": 0, "console": QUIET}


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    return untrained_weights(tmp_path_factory.mktemp("weights") / "tiny.safetensors")


@pytest.fixture(scope="module")
def unbroken(weights, npz, tmp_path_factory) -> FinetuneFolder:
    """Three epochs of four steps."""
    return finetune(weights, str(npz), out=tmp_path_factory.mktemp("unbroken") / "run", **SHORT)


def settings(**changes):
    train = {"epochs": 2, "batch_size": 8, "lr": 0.1, "weight_decay": 0.02} | changes.pop("train", {})
    return validated(FinetuneSettings, {"weights": "w", "head_lr": 0.5, "train": train, **changes}, "the test")


def assert_same(folder: FinetuneFolder, other: FinetuneFolder) -> None:
    for name in ("backbone_file", "classifier_file"):
        assert same_tensors(getattr(folder, name), getattr(other, name))
    clock = {"seconds", "images_per_second"}
    for one, two in zip(lines(folder), lines(other), strict=True):
        assert {k: v for k, v in one.items() if k not in clock} == {k: v for k, v in two.items() if k not in clock}
    assert without_clock(folder) == without_clock(other)
    assert same_tensors(*(list_checkpoints(each.checkpoints)[-1] for each in (folder, other)))


def lines(folder: FinetuneFolder) -> list[dict]:
    return [json.loads(line) for line in folder.metrics_file.read_text().splitlines()]


def without_clock(folder: FinetuneFolder) -> dict:
    return {name: value for name, value in folder.summary().items() if name != "seconds"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tiny_cnn", ["layers.0", "layers.3", "layers.6", "layers.9"]),
        ("resnet18", ["conv1", "layer1", "layer2", "layer3", "layer4"]),
        ("timm/vit_tiny_patch16_224", ["patch_embed", *(f"blocks.{number}" for number in range(12))]),
    ],
)
def test_the_parts_of_backbones(name, expected):
    with networks_of_zeros():
        backbone, _ = build_backbone(name)
    parts = backbone_parts(backbone)
    assert list(parts) == expected
    listed = [id(parameter) for part in parts.values() for parameter in part]
    assert sorted(listed) == sorted(id(parameter) for parameter in backbone.parameters())


@pytest.mark.parametrize(("name", "width"), [("tiny_cnn", 128), ("resnet18", 512)])
def test_learning_rates_fall_from_the_head_down_and_vectors_do_not_decay(name, width):
    with networks_of_zeros():
        backbone, _ = build_backbone(name)
    network = Classifier(backbone, width, 5, frozen=False, seed=0)
    optimizer = finetune_optimizer(network, settings(train={"layer_decay": 0.5}))
    found = {
        id(parameter): (group["lr_scale"] * 0.1, group["weight_decay"])
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    names = {parameter: name for name, parameter in network.named_parameters()}
    assert len(found) == len(names)
    stages = ["layers.9", "layers.6", "layers.3", "layers.0"]
    if name == "resnet18":
        stages = ["layer4", "layer3", "layer2", "layer1", "conv1"]
    for parameter, full_name in names.items():
        lr, decay = found[id(parameter)]
        assert decay == (0.0 if parameter.ndim == 1 else 0.02)
        if full_name.startswith("fc."):
            assert lr == pytest.approx(0.5)
        for depth, stage in enumerate(stages):
            if full_name.startswith(f"backbone.{stage}."):
                assert lr == pytest.approx(0.1 * 0.5**depth)


def test_long_features_lower_the_default_learning_rate_of_the_new_layer(weights, npz, tmp_path):
    network = load_backbone(weights)
    norm = [module for module in network.modules() if isinstance(module, torch.nn.BatchNorm2d)][-1]
    with torch.no_grad():
        norm.weight.mul_(100)
        norm.bias.mul_(100)
    save_backbone(network, network.info, long := tmp_path / "long.safetensors")

    def head_lr(file: Path, **rates: float) -> float:
        folder = finetune(file, str(npz), out=tmp_path / f"{file.stem}{len(rates)}", **SHORT | {"epochs": 1}, **rates)
        return folder.stored_settings()["head_lr"]

    usual = 0.3 * (8 / 256) ** 0.5
    assert head_lr(weights) == pytest.approx(usual, abs=1e-6) and 0 < head_lr(long) < usual / 10
    assert head_lr(long, head_lr=0.2) == 0.2


def test_the_optimiser_steps_by_these_rates(weights, npz, tmp_path):
    """After a run the groups hold the last step's learning rate times their scale; cosine has brought it down."""
    folder = finetune(weights, str(npz), out=tmp_path / "run", lr=0.1, head_lr=0.4, layer_decay=0.5, **SHORT)
    metadata = read_tensors(list_checkpoints(folder.checkpoints)[-1])[1]
    rates = {group["part"]: group["lr"] for group in json.loads(metadata["optimiser"])["groups"]}
    last = lines(folder)[-1]["lr"]
    assert last == pytest.approx(0.1 * 0.5 * (1 + np.cos(np.pi * 11 / 12)))
    wanted = {"layers.9": 1, "layers.6": 0.5, "layers.3": 0.25, "layers.0": 0.125, "fc": 4}
    assert rates == {part: pytest.approx(last * scale) for part, scale in wanted.items()}


def test_it_learns_writes_everything_and_can_be_loaded(weights, tmp_path):
    rng = np.random.default_rng(0)
    labels = np.arange(96) % 4
    pixels = rng.integers(0, 120, (96, 16, 16, 3), dtype=np.uint8)
    pixels[np.arange(96), :, :, :] += (labels * 40).astype(np.uint8)[:, None, None, None]  # brightness is the class
    file = tmp_path / "bright.npz"
    np.savez(file, x_train=pixels[:64], y_train=labels[:64], x_test=pixels[64:], y_test=labels[64:])
    options = {"epochs": 8, "device": "cpu", "workers": 0, "console": QUIET}
    folder = finetune(weights, str(file), out=tmp_path / "run", label_smoothing=0.1, **options)
    summary = folder.summary()
    assert summary["finetune_top1"] > 80 and summary["finetune_top5"] == 100
    assert summary["labels_used"] == 64 and summary["batch_size"] == 8 and summary["steps"] == 64
    losses = [line["loss"] for line in lines(folder)]
    assert len(losses) == 64 and sum(losses[:8]) > sum(losses[-8:])
    network, names = load_classifier(folder.path)
    assert names == ("0", "1", "2", "3") and not network.training
    views = torch.from_numpy(pixels[64:]).permute(0, 3, 1, 2) / 255
    views = (views - torch.tensor(IMAGENET_MEAN)[:, None, None]) / torch.tensor(IMAGENET_STD)[:, None, None]
    with torch.no_grad():
        share = (network(views).argmax(1) == torch.from_numpy(labels[64:])).double().mean().item()
        features = load_backbone(folder.backbone_file)(views)
    assert 100 * share == pytest.approx(summary["finetune_top1"]) and features.shape == (32, 128)
    assert not torch.equal(features, load_backbone(weights)(views))


def test_a_folder_without_a_finished_classifier_is_explained(unbroken, tmp_path):
    with pytest.raises(RunError, match="holds no fine-tuning"):
        load_classifier(tmp_path)
    folder = FinetuneFolder(shutil.copytree(unbroken.path, tmp_path / "run"))
    folder.classifier_file.unlink()
    folder.summary_file.unlink()
    with pytest.raises(RunError, match="has not finished"):
        load_classifier(folder.path)


def test_a_linear_probe_is_no_fine_tuning(tmp_path):
    ProbeFolder(tmp_path).save_classifier(torch.nn.Linear(4, 2), ("cats", "dogs"))
    with pytest.raises(RunError, match="holds no fine-tuning"):
        load_classifier(tmp_path)


def test_few_labels_are_listed_by_name(weights, image_folder, tmp_path):
    options = SHORT | {"batch_size": 4, "labels": "3-per-class"}
    folder = finetune(weights, str(image_folder), out=tmp_path / "run", **options)
    names = folder.labels_file.read_text().splitlines()
    assert len(names) == 6 == folder.summary()["labels_used"] and folder.summary()["test_held_out"]
    assert all((image_folder / name).is_file() for name in names)
    assert sum(name.startswith("cats/") for name in names) == 3
    assert folder.load_classifier()[1] == ("cats", "dogs")


def test_labels_of_images_that_cannot_be_read_are_not_counted_as_used(weights, image_folder, tmp_path):
    options = SHORT | {"batch_size": 4, "labels": "3-per-class"}
    names = finetune(weights, str(image_folder), out=tmp_path / "whole", **options).labels_file.read_text().splitlines()
    for name in names[:2]:
        (image_folder / name).write_bytes(b"no image")
    folder = finetune(weights, str(image_folder), out=tmp_path / "run", **options)
    assert folder.labels_file.read_text().splitlines() == names
    assert (folder.summary()["labels_used"], folder.summary()["skipped"]) == (4, 2)
    assert [line.split("\t")[0] for line in folder.skipped_file.read_text().splitlines()] == sorted(names[:2])


def test_from_scratch_forgets_the_weights_and_keeps_the_architecture(weights, npz, tmp_path):
    other = tmp_path / "other.safetensors"
    network = load_backbone(weights)
    info = network.info
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(1.0)
    save_backbone(network, info, other)
    folders = [
        finetune(file, str(npz), out=tmp_path / file.stem, from_scratch=True, **SHORT) for file in (weights, other)
    ]
    assert same_tensors(folders[0].backbone_file, folders[1].backbone_file)
    assert folders[0].summary()["from_scratch"] and folders[0].summary()["layer_decay"] == 1.0
    assert load_backbone(folders[0].backbone_file).info == info


def test_same_seed_same_figures(weights, npz, unbroken, tmp_path):
    assert_same(finetune(weights, str(npz), out=tmp_path / "again", **SHORT), unbroken)
    other = finetune(weights, str(npz), out=tmp_path / "other", seed=1, **SHORT)
    assert not same_tensors(other.backbone_file, unbroken.backbone_file)


@pytest.mark.parametrize("stops", [[1], [2, 3, 8, 11]])
def test_stopped_and_resumed_ends_as_if_it_had_not(weights, npz, unbroken, tmp_path, monkeypatch, stops):
    def start() -> FinetuneFolder:
        if (tmp_path / "run").exists():
            return resume_finetuning(tmp_path / "run", workers=0, console=QUIET)
        return finetune(weights, str(npz), out=tmp_path / "run", **SHORT)

    for number, step in enumerate(stops):
        with monkeypatch.context() as patch:
            stop_after(patch, step, (signal.SIGINT, signal.SIGTERM)[number % 2])
            with pytest.raises(Interrupted, match=rf"after step {step}\..*jcl finetune --resume"):
                start()
        assert not (tmp_path / "run" / "summary.json").exists()
    assert_same(start(), unbroken)


def test_a_checkpoint_that_cannot_be_written_does_not_end_training(
    weights, npz, unbroken, tmp_path, monkeypatch, capsys
):
    write, failing = saver.write_snapshot, [True]

    def write_from_the_second_on(*arguments):
        if failing and failing.pop():
            raise RunError("the disk is full.")
        return write(*arguments)

    monkeypatch.setattr("jcl.evaluate.supervised.CHECKPOINT_SECONDS", 1e-9)
    monkeypatch.setattr(saver, "write_snapshot", write_from_the_second_on)
    found = finetune(weights, str(npz), out=tmp_path / "run", **SHORT | {"console": Console(stderr=True)})
    assert_same(found, unbroken)
    assert "the disk is full. Training continues" in capsys.readouterr().err


def test_layers_that_draw_do_so_by_the_step(npz, tmp_path, monkeypatch):
    """With dropout in the network, a resumed run still ends in the same bits."""
    torch.manual_seed(0)
    backbone, width = build_backbone("mobilenet_v3_small", image_size=32)
    file = tmp_path / "dropout.safetensors"
    info = BackboneInfo("mobilenet_v3_small", "imagenet", 32, width, IMAGENET_MEAN, IMAGENET_STD)
    save_backbone(backbone, info, file)
    whole = finetune(file, str(npz), out=tmp_path / "whole", **SHORT | {"epochs": 1})
    with monkeypatch.context() as patch:
        stop_after(patch, 2, signal.SIGTERM)
        with pytest.raises(Interrupted):
            finetune(file, str(npz), out=tmp_path / "run", **SHORT | {"epochs": 1})
    torch.manual_seed(12345)
    assert_same(resume_finetuning(tmp_path / "run", workers=0, console=QUIET), whole)


def test_finished_work_is_not_done_again(unbroken):
    before = {path: path.read_bytes() for path in unbroken.path.rglob("*") if path.is_file()}
    assert resume_finetuning(unbroken.path, workers=0, console=QUIET).summary() == unbroken.summary()
    assert before == {path: path.read_bytes() for path in unbroken.path.rglob("*") if path.is_file()}


def test_checkpoints_that_are_all_damaged_are_not_trained_over(weights, npz, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        stop_after(patch, 2, signal.SIGTERM)
        with pytest.raises(Interrupted):
            finetune(weights, str(npz), out=tmp_path / "run", **SHORT)
    (file,) = list_checkpoints(tmp_path / "run/checkpoints")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(RunError, match=r"checkpoints in .* are damaged"):
        resume_finetuning(tmp_path / "run", workers=0, console=QUIET)


def test_one_process_at_a_time(weights, npz, unbroken, tmp_path, monkeypatch):
    path = tmp_path / "run"
    with monkeypatch.context() as patch:
        stop_after(patch, 2, signal.SIGTERM)
        with pytest.raises(Interrupted):
            finetune(weights, str(npz), out=path, **SHORT)
    with lock_folder(path, warn=print), pytest.raises(RunError, match=r"Process \d+ on"):
        resume_finetuning(path, workers=0, console=QUIET)
    assert_same(resume_finetuning(path, workers=0, console=QUIET), unbroken)


def test_data_that_changed_in_between_is_noticed(weights, image_folder, tmp_path, monkeypatch):
    options = SHORT | {"batch_size": 4}
    with monkeypatch.context() as patch:
        stop_after(patch, 2, signal.SIGTERM)
        with pytest.raises(Interrupted):
            finetune(weights, str(image_folder), out=tmp_path / "run", **options)
    (image_folder / "cats" / "000.png").rename(image_folder / "cats" / "new.png")
    with pytest.raises(RunError, match="images or labels have changed"):
        resume_finetuning(tmp_path / "run", workers=0, console=QUIET)
    (image_folder / "cats" / "new.png").rename(image_folder / "cats" / "000.png")
    labels = tmp_path / "run" / "labels.txt"  # the checksums of the images cover only some of many
    labels.write_text(labels.read_text().replace("000.png", "other.png"))
    with pytest.raises(RunError, match="images or labels have changed"):
        resume_finetuning(tmp_path / "run", workers=0, console=QUIET)


def test_labels_that_changed_in_between_are_noticed(weights, npz, tmp_path, monkeypatch):
    data, path = dict(np.load(npz)), tmp_path / "data.npz"
    np.savez(path, **data)
    with monkeypatch.context() as patch:
        stop_after(patch, 2, signal.SIGTERM)
        with pytest.raises(Interrupted):
            finetune(weights, str(path), out=tmp_path / "run", **SHORT)
    np.savez(path, **data | {"y_train": np.roll(data["y_train"], 1)})
    with pytest.raises(RunError, match="images or labels have changed"):
        resume_finetuning(tmp_path / "run", workers=0, console=QUIET)
    np.savez(path, **data)
    assert resume_finetuning(tmp_path / "run", workers=0, console=QUIET).summary_file.exists()


def test_weights_that_the_last_step_ruins_are_no_result(weights, npz, tmp_path):
    options = SHORT | {"labels": "1-per-class", "epochs": 1, "lr": 1e38, "warmup_epochs": 0.0}
    with pytest.raises(RunError, match="Training diverged"):
        finetune(weights, str(npz), out=tmp_path / "run", **options)
    assert not (tmp_path / "run/summary.json").exists()


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"train": {"layer_decay": 0.0}}, "layer_decay"),
        ({"train": {"layer_decay": 1.5}}, "layer_decay"),
        ({"head_lr": -1.0}, "head_lr"),
        ({"label_smoothing": 1.0}, "label_smoothing"),
        ({"train": {"lr": 0.0}}, "train.lr"),
    ],
)
def test_settings_that_make_no_sense(values, sentence):
    with pytest.raises(SettingsError, match=sentence):
        settings(**values)


def test_batches_follow_the_number_of_labels(weights, npz, tmp_path):
    assert [default_batch_size(images) for images in (2, 7, 20, 100, 500, 5000)] == [2, 7, 8, 8, 32, 128]
    folder = finetune(weights, str(npz), out=tmp_path / "run", **SHORT | {"batch_size": 4096, "labels": "1-per-class"})
    train = folder.stored_settings()["train"]
    assert train["batch_size"] == folder.summary()["labels_used"]
    assert train["lr"] == pytest.approx(0.1 * (train["batch_size"] / 256) ** 0.5, abs=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_gpu_fine_tunes_and_resumes(weights, npz, tmp_path, monkeypatch, compiled):
    options = SHORT | {"device": "cuda", "compile": compiled}
    with monkeypatch.context() as patch:
        stop_after(patch, 6, signal.SIGTERM)
        with pytest.raises(Interrupted):
            finetune(weights, str(npz), out=tmp_path / "run", **options)
    assert resume_finetuning(tmp_path / "run", workers=0, console=QUIET).summary()["steps"] == 12
