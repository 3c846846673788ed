"""`jcl import` and `jcl export` as they are typed."""

import json
import os
import re
from pathlib import Path
from typing import get_args

import pytest
import torch
import torchvision

import jcl
from jcl.export import TARGETS
from jcl.settings.commands import Target
from small_runs import networks_of_zeros


@pytest.fixture
def run(pretrained):
    return pretrained


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A ResNet-18 as the authors' script saves it."""
    torch.manual_seed(0)
    query, key = (torchvision.models.resnet18(num_classes=128).state_dict() for _ in range(2))
    state = {f"module.encoder_q.{name}": value for name, value in query.items()}
    state |= {f"module.encoder_k.{name}": value for name, value in key.items()}
    state |= {"module.queue": torch.randn(128, 16), "module.queue_ptr": torch.zeros(1, dtype=torch.long)}
    file = tmp_path_factory.mktemp("[released]") / "jcl_200.pth.tar"  # brackets are no markup
    torch.save({"epoch": 200, "arch": "resnet18", "state_dict": state}, file)
    with networks_of_zeros():  # from here on all weights come from files
        yield file


def test_the_targets_are_those_there_are():
    assert list(get_args(Target)) == list(TARGETS)


def test_a_released_checkpoint_is_imported_measured_and_exported(call, refused, checkpoint, npz):
    code, out, err = call("import", checkpoint, "-o", "jcl.safetensors", "--image-size", 32)
    assert code == 0, err
    assert "Format: torch file, torchvision's or timm's names, under module.encoder_q." in out
    assert "Loaded: 120 tensors of resnet18, for images of 32 px." in out
    assert "Unused: module.encoder_q.fc (2), module.encoder_k (122), module.queue (1), module.queue_ptr (1)." in out
    code, _, err = call("knn", "jcl.safetensors", npz, "-k", 1, "--json", "knn.json")
    assert code == 0 and "knn_top1" in json.loads(Path("knn.json").read_text()), err
    code, out, err = call("export", "jcl.safetensors", "--to", "detectron2", "-o", "r18.pkl")
    assert code == 0, err
    assert "FORMAT: RGB" in out and "PIXEL_MEAN: [123.675, 116.28, 103.53]" in out
    assert "already exists" in refused("export", "jcl.safetensors", "--to", "detectron2", "-o", "r18.pkl")
    assert call("export", "jcl.safetensors", "--to", "detectron2", "-o", "r18.pkl", "--force")[0] == 0


def test_a_run_is_exported(call, refused, run):
    code, out, err = call("export", run, "--to", "safetensors", "-o", "deep/out.safetensors")
    assert code == 0 and re.search(r"tiny_cnn: 24 tensors, 38\d\.\d KiB, written to deep/out\.safetensors\.", out), err
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(jcl.load_backbone("deep/out.safetensors")(images), jcl.load_backbone(run)(images))
    assert "tiny_cnn" in refused("export", run, "--to", "torchvision", "-o", "out.pth")


def test_wrong_input_is_a_sentence(call, refused, run, checkpoint):
    assert "no run or weights file" in refused("import", "missing.pth", "-o", "out.safetensors")
    assert "no run or weights file" in refused("export", "missing", "--to", "timm", "-o", "out.pth")
    Path("half.pth").write_bytes(checkpoint.read_bytes()[:100_000])
    assert "damaged, truncated" in refused("import", "half.pth", "-o", "out.safetensors")
    assert "do not match resnet34" in refused(
        "import", checkpoint, "-o", "out.safetensors", "--backbone", "resnet34", "--image-size", "32"
    )
    assert str(checkpoint) in refused("import", checkpoint, "-o", "out.safetensors", "--backbone", "resnet50")
    code, _, err = call("export", run, "--to", "caffe", "-o", "out")
    assert code == 2 and "caffe" in err and "--to" in err and "Traceback" not in err
    code, _, err = call("export", run, "--to", "timm")
    assert code == 2 and "Missing option" in err
    assert not Path("out.safetensors").exists()


class Harmful:
    def __reduce__(self):
        return os.system, ("touch marker",)


def test_a_harmful_file(refused):
    torch.save({"state_dict": {"conv1.weight": torch.zeros(1)}, "x": Harmful()}, "bad.pth.tar")
    assert "would run posix.system" in refused("import", "bad.pth.tar", "-o", "out.safetensors")
