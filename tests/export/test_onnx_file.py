"""ONNX programs: the same features in onnxruntime, for any batch size."""

import json
import sys
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
from sample_networks import assert_close, images, sample_backbone, sample_file

import jcl
from jcl.errors import RunError, SettingsError
from jcl.export import export_backbone
from jcl.export.onnx_file import check_onnx

pytestmark = pytest.mark.usefixtures("empty_starts")


def assert_same_features(program: Path, file: Path, size: int) -> None:
    """For any number of images."""
    session = onnxruntime.InferenceSession(program, providers=["CPUExecutionProvider"])
    network = jcl.load_backbone(file)
    for count in (1, 2, 5):
        (found,) = session.run(["features"], {"images": images(size, count).numpy()})
        with torch.inference_mode():
            assert_close(torch.from_numpy(found), network(images(size, count)), 1e-4)


@pytest.mark.slow  # `tiny_cnn` is always tested
@pytest.mark.parametrize(
    ("name", "size", "stem"),
    [
        ("timm/test_convnext", 64, "imagenet"),
        ("timm/convnext_atto", 64, "imagenet"),
        ("resnet50", 64, "imagenet"),
        ("resnet18", 32, "small"),
    ],
)
def test_onnxruntime_gives_the_same_features_for_any_batch(tmp_path, name, size, stem):
    file = sample_file(tmp_path, name, size, stem)
    written = export_backbone(file, "onnx", tmp_path / "out.onnx")
    assert "onnxruntime gives the same" in written.hints[0]
    assert_same_features(tmp_path / "out.onnx", file, size)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return sample_file(tmp_path_factory.mktemp("onnx"), "tiny_cnn", 32)


@pytest.fixture(scope="module")
def written(source) -> Path:
    export_backbone(source, "onnx", source.parent / "out.onnx")
    return source.parent / "out.onnx"


def test_a_small_network_gives_the_same_features(written, source):
    assert_same_features(written, source, 32)
    with pytest.raises(RunError, match=r"out\.onnx cannot be read"):
        jcl.load_backbone(written)


def test_the_file_says_what_to_show_it_and_nothing_about_the_machine(written):
    model = onnx.load(written)
    texts = {entry.key: entry.value for entry in model.metadata_props}
    assert json.loads(texts["mean"]) == [0.5, 0.4, 0.3] and json.loads(texts["std"]) == [0.25, 0.2, 0.3]
    assert texts["image_size"] == "32" and texts["backbone"] == "tiny_cnn" and "RGB in [0, 1]" in texts["input"]
    assert [entry.version for entry in model.opset_import if entry.domain == ""] == [18]
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param
    assert b"site-packages" not in written.read_bytes() and b".py" not in written.read_bytes()


def test_a_program_that_computes_something_else_is_not_written(written):
    network, info = sample_backbone("tiny_cnn", 32)
    check_onnx(written.read_bytes(), network, info)
    network.layers[0].weight.data.mul_(1.5)
    with pytest.raises(RunError, match="onnxruntime"):
        check_onnx(written.read_bytes(), network, info)


@pytest.mark.parametrize("library", ["onnx", "onnxscript", "onnxruntime"])
def test_what_is_not_installed_is_named(library, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    source = sample_file(tmp_path, "tiny_cnn", 32)
    with pytest.raises(SettingsError, match=library):
        export_backbone(source, "onnx", tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()
