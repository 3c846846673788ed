"""What happens before the first step: each thing once, and the processes that decode images start early."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jcl.commands.inputs import data_facts
from jcl.core.encoder import backbone_traits
from jcl.data import open_data

ROOT = Path(__file__).parents[2]
OPTIONS = ["--backbone", "tiny_cnn", "--batch-size", "8", "--image-size", "16", "--device", "cpu"]

PROGRAM = """
import json, sys
from multiprocessing import forkserver
listed, started = [], []
def watch(event, arguments):
    if event == "os.scandir":
        listed.append(str(arguments[0]))
    if event == "import" and arguments[0] == "torch":
        started.append(forkserver._forkserver._forkserver_pid is not None)
sys.addaudithook(watch)
sys.argv = ["jcl", *sys.argv[1:]]
from jcl.cli import main
try: main()
finally: print(json.dumps([listed, started]))
"""


@pytest.fixture
def photos(tmp_path):
    for number in range(32):
        file = tmp_path / "photos" / f"class-{number % 2}" / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((20, 24, 3), number * 7, np.uint8)).save(file)
    return tmp_path / "photos"


def test_folders_are_listed_once_and_workers_prepared_while_torch_is_imported(photos, tmp_path):
    words = ["pretrain", photos, *OPTIONS, "--epochs", "1", "--out", tmp_path / "run", "--set", "record.report=false"]
    words += ["--set", "data.workers=1"]
    command = [sys.executable, "-c", PROGRAM, *map(str, words)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    listed, started = json.loads(ended.stdout.splitlines()[-1])
    counts = Counter(listed)
    assert counts[str(photos / "class-0")] == counts[str(photos / "class-1")] == 1
    assert started == [True]


def test_sizes_come_from_headers(photos, monkeypatch):
    source = open_data(str(photos)).train
    decoded = []
    read = type(source).read
    monkeypatch.setattr(type(source), "read", lambda *arguments: decoded.append(1) or read(*arguments))
    assert data_facts(source).short_side == 20 and len(decoded) == 1


@pytest.mark.parametrize(("name", "norm"), [("tiny_cnn", True), ("regnet_y_400mf", True), ("vit_b_16", False)])
def test_traits_of_networks_that_compute_their_widths_and_draw_weights(name, norm):
    import torch

    state = torch.random.get_rng_state()
    assert backbone_traits.__wrapped__(name).batch_norm is norm
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.slow
def test_the_benchmark_adds_up_its_phases(photos, tmp_path):
    words = ["--runs", "1", "--json", tmp_path / "found.json", photos, *OPTIONS]
    command = [sys.executable, ROOT / "benchmarks/startup.py", *map(str, words)]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT / "src")}, cwd=tmp_path, check=True)
    [row] = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert {"import torch", "open the data", "start of workers", "first step"} <= row.keys()
    assert row.pop("all") == pytest.approx(sum(row.values())) and min(row.values()) >= 0
