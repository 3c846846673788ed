"""What happens before the first step: each thing once, and the processes that decode images start early."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jcl.commands.inputs import data_facts
from jcl.commands.run import Run
from jcl.core.encoder import backbone_traits
from jcl.data import open_data
from jcl.runs.checkpoint import list_checkpoints
from launch_tools import settings_options, wait_until

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


def test_a_process_from_its_start_to_a_signal(photos, tmp_path):
    """Folders are listed once, workers are prepared while torch is imported, and a signal to all of them saves."""
    run, values = tmp_path / "run", {"record.knn_every": 0, "data.workers": 1}
    words = ["pretrain", photos, *OPTIONS, "--epochs", "1000", "--out", run, *settings_options(values)]
    command = [sys.executable, "-c", PROGRAM, *map(str, words)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    try:
        wait_until(lambda: (run / "metrics.jsonl").exists() and any("loss" in line for line in Run(run).metrics))
    finally:
        os.killpg(process.pid, signal.SIGUSR1)  # as a scheduler sends it: also to those that decode images
    printed, said = process.communicate(timeout=60)
    assert process.returncode == 75 and "SIGUSR1 received: stopped after step" in said and "Traceback" not in said
    assert list_checkpoints(run / "checkpoints")
    listed, started = json.loads(printed.splitlines()[-1])
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
