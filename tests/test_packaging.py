"""What people install: the wheel has all it needs, and torch.hub finds the backbone."""

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import jcl
from jcl.core.encoder import build_backbone
from jcl.export import BackboneInfo, save_backbone
from small_runs import drawn_pixels

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    (file,) = folder.glob("*.whl")
    return file


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    assert wheel.name.startswith(f"joint_contrastive_learning-{jcl.__version__}-")
    with zipfile.ZipFile(wheel) as content:
        names = content.namelist()
    source = [path for path in (ROOT / "src" / "jcl").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {str(path.relative_to(ROOT / "src")) for path in source} <= set(names)
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"jcl", "joint_contrastive_learning"}


@pytest.fixture
def installed(wheel, tmp_path):
    """Runs `jcl` from the unpacked wheel, with the repository out of reach; gives what is printed."""
    with zipfile.ZipFile(wheel) as content:
        content.extractall(tmp_path / "site")
    script = (
        "import jcl, sys; assert jcl.__file__.startswith(sys.argv.pop(1)), jcl.__file__; import jcl.cli; jcl.cli.main()"
    )

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path / "site"), *arguments],
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
            env=os.environ | {"PYTHONPATH": str(tmp_path / "site")},
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_the_wheel_finds_its_recipes_outside_the_repository(installed):
    assert "cifar10" in installed("recipes")


@pytest.mark.slow
def test_the_wheel_trains_outside_the_repository(installed, tmp_path):
    """What is needed at run time (recipes, templates) is in it."""
    np.savez(tmp_path / "images.npz", x_train=drawn_pixels(40))
    installed("pretrain", "images.npz", "--recipe", "demo", "--epochs", "1", "--batch-size", "8", "--out", "run")
    assert (tmp_path / "run" / "backbone.safetensors").is_file() and (tmp_path / "run" / "report.html").is_file()


def test_torch_hub_opens_a_backbone(tmp_path):
    torch.manual_seed(0)
    network, width = build_backbone("tiny_cnn")
    info = BackboneInfo("tiny_cnn", "imagenet", 64, width, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
    save_backbone(network, info, tmp_path / "b.safetensors")
    opened = torch.hub.load(str(ROOT), "backbone", str(tmp_path / "b.safetensors"), source="local")
    images = torch.rand(2, 3, 64, 64)
    torch.testing.assert_close(opened.eval()(images), jcl.load_backbone(tmp_path / "b.safetensors").eval()(images))


def test_the_version_is_written_once():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "version" not in project and "version" in project["dynamic"]
    assert f"## {jcl.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
