"""Files from unknown sources: nothing in them runs, and whatever is wrong with them is a RunError."""

import argparse
import io
import json
import math
import os
import pickle
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sample_networks import Harmful, sample_file, sample_resnet

import jcl
from jcl.errors import RunError
from jcl.export.backbone_file import FORMAT
from jcl.export.loading import open_backbone
from jcl.export.reading import read_weights

SMALL = {"conv1.weight": torch.randn(4, 3, 3, 3), "bn1.running_mean": torch.randn(4)}
WAYS = ["system", "eval", "path"]


def torch_bytes(content: object, zipped: bool = True) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, _use_new_zipfile_serialization=zipped)
    return buffer.getvalue()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["a.pth", "a.pth.tar", "a.ckpt", "a.pkl", "a.bin", "a.safetensors", "a.onnx", "a.npz"])
@pytest.mark.parametrize("form", ["zip", "legacy", "pickle 2", "pickle 5"])
def test_nothing_in_a_file_runs(tmp_path, way, name, form):
    marker, file = tmp_path / "marker", tmp_path / name
    content = {"state_dict": SMALL, "model": {"x": np.zeros(3)}, "callback": Harmful(marker, way)}
    if form.startswith("pickle"):
        file.write_bytes(pickle.dumps(content, protocol=int(form[-1])))
    else:
        file.write_bytes(torch_bytes(content, form == "zip"))
    with pytest.raises(RunError) as refused:
        jcl.load_backbone(file)
    assert not marker.exists()
    assert str(file) in str(refused.value) and str(refused.value).endswith(".")
    if file.suffix != ".safetensors":
        assert ("never executes" if form.startswith("pickle") else "not opened") in str(refused.value)


def test_the_harm_is_real(tmp_path):
    """The files above do harm when they are unpickled."""
    for way in WAYS:
        marker = tmp_path / way
        pickle.loads(pickle.dumps(Harmful(marker, way)))
        assert marker.exists()


@pytest.mark.parametrize("way", WAYS)
def test_nothing_in_a_hub_folder_runs(tmp_path, way):
    (tmp_path / "config.json").write_text('{"architecture": "resnet18"}')
    (tmp_path / "pytorch_model.bin").write_bytes(torch_bytes(SMALL | {"x": Harmful(tmp_path / "marker", way)}))
    with pytest.raises(RunError, match="not opened"):
        jcl.load_backbone(tmp_path)
    assert not (tmp_path / "marker").exists()


def test_a_lightning_checkpoint_with_objects_says_why_and_what_to_do(tmp_path):
    file = tmp_path / "last.ckpt"
    torch.save({"state_dict": SMALL, "hyper_parameters": argparse.Namespace(lr=0.1)}, file)
    with pytest.raises(RunError, match=r"argparse\.Namespace.*weights_only=False\)\['state_dict'\].*\['teacher'\]"):
        jcl.load_backbone(file)


def test_things_that_hold_no_weights(tmp_path):
    contents = {
        "text.pth": b"hello",
        "empty.pth": b"",
        "list.pth": torch_bytes([1, 2, 3]),
        "numbers.pth": torch_bytes({"state_dict": {"a": 1}}),
        "whole.pth": torch_bytes(torch.nn.Linear(2, 2)),
        "plain.pkl": pickle.dumps({"model": {"a": "b"}}),
        "text.safetensors": b"hello",
        "text.onnx": b"hello",
        "image.png": b"\x89PNG\r\n\x1a\n" + bytes(100),
    }
    buffer = io.BytesIO()
    np.savez(buffer, x=np.zeros(3))
    contents["arrays.npz"] = buffer.getvalue()
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(RunError) as refused:
            jcl.load_backbone(tmp_path / name)
        assert name in str(refused.value) and str(refused.value).endswith("."), name
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RunError, match=r"model\.safetensors"):
        jcl.load_backbone(tmp_path)
    for text in (
        "[]",
        "{",
        '{"pretrained_cfg": {"input_size": [3, 1, Infinity]}}',
        '{"pretrained_cfg": {"mean": [1]}}',
        '{"pretrained_cfg": {"std": [0.5]}}',
        '{"pretrained_cfg": {"mean": [NaN, NaN, NaN]}}',
        '{"pretrained_cfg": {"input_size": [3, 5000, 5000]}}',
        '{"pretrained_cfg": {"input_size": [3, 0, 0]}}',
        '{"pretrained_cfg": {"input_size": [3, 64.5, 64.5]}}',
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(RunError, match=r"config\.json"):
            jcl.load_backbone(tmp_path)


@pytest.mark.parametrize("std", [[0, 1, 1], [-1, 1, 1], [math.nan, 1, 1]])
def test_images_could_not_be_normalized_as_the_file_says(tmp_path, std):
    file = sample_file(tmp_path, "tiny_cnn", 32)
    weights, info = load_file(file), open_backbone(file).info
    damaged = json.dumps(json.loads(info.to_text()) | {"std": std})
    save_file(weights, file, {"format": FORMAT, "info": damaged})
    with pytest.raises(RunError, match="damaged"):
        jcl.load_backbone(file)
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "resnet18", "std": std}))
    with pytest.raises(RunError, match=r"config\.json"):
        jcl.load_backbone(tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_tensors_that_are_no_plain_numbers_are_left_out(tmp_path):
    odd = {
        "sparse": torch.ones(2, 2).to_sparse(),
        "no values": torch.ones(2, device="meta"),
        "complex": torch.ones(2, dtype=torch.complex64),
        "quantized": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    }
    torch.save(SMALL | odd, tmp_path / "odd.pth")
    assert read_weights(tmp_path / "odd.pth").tensors.keys() == SMALL.keys()


def test_rounded_weights_are_refused(tmp_path):
    weights = sample_resnet("resnet18").state_dict()
    weights["layer1.0.conv1.weight"] = weights["layer1.0.conv1.weight"].to(torch.int8)
    torch.save(weights, tmp_path / "odd.pth")
    with pytest.raises(RunError, match=r"1 of integers \(layer1\.0\.conv1\.weight\)"):
        jcl.load_backbone(tmp_path / "odd.pth")


def test_a_torchscript_program(tmp_path):
    with pytest.warns(FutureWarning):
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "program.pt")
    with pytest.raises(RunError, match="TorchScript"):
        jcl.load_backbone(tmp_path / "program.pt")


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    """A small file of each kind that can be read."""
    folder = tmp_path_factory.mktemp("kinds")
    source = sample_file(folder, "tiny_cnn", 32)
    torch.save(SMALL, folder / "a.pth")
    torch.save(SMALL, folder / "old.pth", _use_new_zipfile_serialization=False)
    return [source, folder / "a.pth", folder / "old.pth"]


def test_half_a_file_is_a_sentence(kinds, tmp_path):
    for kind in kinds:
        content = kind.read_bytes()
        read_weights(kind)
        for share in (0.02, 0.3, 0.5, 0.9, 0.999):
            file = tmp_path / kind.name
            file.write_bytes(content[: int(share * len(content))])
            with pytest.raises(RunError) as refused:
                read_weights(file)
            assert str(file) in str(refused.value), (kind, share)


def test_damaged_bytes_are_a_sentence_or_do_no_harm(kinds, tmp_path):
    generator = np.random.default_rng(0)
    for kind in kinds:
        content = np.frombuffer(kind.read_bytes(), np.uint8)
        for _ in range(60):
            damaged = content.copy()
            # Where names, sizes and instructions lie: at the beginning and at the end.
            places = generator.integers(0, 600, 4) * generator.choice([1, -1])
            damaged[places % len(damaged)] = generator.integers(0, 256, 4)
            (tmp_path / kind.name).write_bytes(damaged.tobytes())
            try:
                read_weights(tmp_path / kind.name)
            except RunError as refused:
                assert str(refused).endswith(".")


def test_a_zip_file_that_says_it_is_torchs(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.pth", "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}.")
        archive.writestr("archive/version", b"3\n")
    with pytest.raises(RunError, match=r"a\.pth"):
        jcl.load_backbone(tmp_path / "a.pth")


def test_a_pipe_is_not_opened(tmp_path):
    """Nobody may ever write into it."""
    os.mkfifo(tmp_path / "weights.pth")
    with pytest.raises(RunError, match="not a regular file"):
        read_weights(tmp_path / "weights.pth")
