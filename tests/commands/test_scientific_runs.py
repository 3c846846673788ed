"""Runs on images with other than three channels or more than 8 bits, from `jcl check` to the report."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from jcl.commands.inputs import data_facts
from jcl.commands.pretrain import pretrain, resume
from jcl.core.encoder import build_backbone, fit_channels
from jcl.data import open_data
from jcl.errors import Interrupted
from jcl.export.backbone_file import BackboneInfo, save_backbone
from jcl.export.loading import initial_tensors, load_backbone, read_initial
from jcl.settings.resolve import resolve
from jcl.train.build import build_learner
from jcl.views import IMAGENET_MEAN, IMAGENET_STD
from run_tools import QUIET, stop_after
from small_runs import tiny_settings

sys.path.append(str(Path(__file__).parents[1] / "data"))
from scientific_files import KINDS, write_folder


@pytest.mark.parametrize("kind", ["tiff-channels", "dicom-ct"])
def test_images_go_through_every_command(kind: str, tmp_path: Path, call, monkeypatch: pytest.MonkeyPatch):
    images, run, features = write_folder(tmp_path / "images", kind, 16), tmp_path / "run", tmp_path / "features.npz"
    figures = tmp_path / "check.json"
    assert call("check", images, "--json", figures)[0] == 0
    assert json.loads(figures.read_text())["train_readable"] == 16
    settings = tiny_settings(images, train__epochs=2, train__batch_size=8, record__report=False)
    with monkeypatch.context() as patch:
        stop_after(patch, 3, 15)
        with pytest.raises(Interrupted):
            pretrain(settings, run, console=QUIET)
    finished = resume(run, console=QUIET)
    channels = KINDS[kind][0]
    assert finished.settings.data.channels == len(finished.settings.views.mean) == channels
    assert not finished.settings.views.color
    assert call("embed", run, images, "-o", features)[0] == 0
    assert np.load(features)["features"].shape == (16, 128)
    backbone = load_backbone(run)
    assert backbone.info.channels == channels  # type: ignore[union-attr]
    assert backbone(torch.randn(2, channels, 16, 16)).shape == (2, 128)
    assert call("report", run)[0] == 0 and "data:image/png" in (run / "report.html").read_text()


def test_the_first_layer_is_fitted_from_pretrained_weights(tmp_path: Path):
    network, width = build_backbone("tiny_cnn")
    info = BackboneInfo("tiny_cnn", "imagenet", 16, width, IMAGENET_MEAN, IMAGENET_STD)
    save_backbone(network, info, tmp_path / "weights.safetensors")
    source = open_data(str(write_folder(tmp_path / "images", "tiff-channels", 16))).train
    asked = tiny_settings(tmp_path / "images", model__init=str(tmp_path / "weights.safetensors"))
    facts = data_facts(source, read_initial(asked))
    settings, choices = resolve(asked, facts)
    assert settings.views.mean == facts.mean and {"data.channels", "views.mean"} <= {choice.name for choice in choices}
    learner, _ = build_learner(settings, torch.device("cpu"))
    weights = read_initial(asked)
    assert weights is not None
    tensors, lines = initial_tensors(weights, settings, learner.query_encoder.backbone)
    assert any(line.startswith("fitted: layers.0.weight from 3 to 5 channels") for line in lines)
    wanted = network.state_dict() | {"layers.0.weight": fit_channels(network.state_dict()["layers.0.weight"], 5)}
    assert tensors.keys() == wanted.keys() and all(torch.equal(tensors[part], wanted[part]) for part in wanted)
    learner.query_encoder.backbone.load_state_dict(tensors)


def test_the_fitted_layer_is_not_a_position_embedding(tmp_path: Path):
    network, width = build_backbone("timm/pit_ti_224")  # its position embedding, of four dimensions too, comes first
    info = BackboneInfo("timm/pit_ti_224", "imagenet", 224, width, IMAGENET_MEAN, IMAGENET_STD)
    save_backbone(network, info, tmp_path / "weights.safetensors")
    source = open_data(str(write_folder(tmp_path / "images", "tiff-channels", 2))).train
    changes = dict.fromkeys(("train__lr", "train__weight_decay", "train__warmup_epochs", "model__bn_groups"), "auto")
    changes |= {"model__backbone": "timm/pit_ti_224", "views__image_size": 224}
    asked = tiny_settings(tmp_path / "images", model__init=str(tmp_path / "weights.safetensors"), **changes)
    weights = read_initial(asked)
    assert weights is not None
    settings, _ = resolve(asked, data_facts(source, weights))
    learner, _ = build_learner(settings, torch.device("cpu"))
    tensors, lines = initial_tensors(weights, settings, learner.query_encoder.backbone)
    assert any(line.startswith("fitted: patch_embed.conv.weight from 3 to 5 channels") for line in lines)
    assert torch.equal(tensors["pos_embed"], network.state_dict()["pos_embed"])
    learner.query_encoder.backbone.load_state_dict(tensors)


def test_a_wrong_mix_is_refused(tmp_path: Path, refused):
    for kind in ("png", "tiff-channels"):
        write_folder(tmp_path / "images", kind, 2, (kind,))
    assert "has 5; use one kind" in refused("pretrain", tmp_path / "images", "--backbone", "tiny_cnn", exit_code=1)
