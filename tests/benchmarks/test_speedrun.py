"""The benchmark that measures the time to 90 % kNN."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
TINY = ("model.backbone=tiny_cnn", "model.stem=imagenet", "train.batch_size=32", "method.queue_size=256")


@pytest.mark.slow
def test_a_run_is_trained_and_classified_and_its_seconds_count_both(tmp_path):
    labels = np.arange(160) % 4
    images = np.broadcast_to((labels * 60).astype(np.uint8)[:, None, None, None], (160, 32, 32, 3))
    np.savez(tmp_path / "data.npz", x_train=images, y_train=labels, x_test=images[:40], y_test=labels[:40])
    settings = [part for each in (*TINY, "model.bn_groups=1") for part in ("--set", each)]
    words = ["data.npz", "--epochs", "1", "--seeds", "3", "--out", "runs", "--json", "found.json", "--device", "cpu"]
    subprocess.run(
        [sys.executable, ROOT / "benchmarks/speedrun.py", *words, *settings],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        check=True,
    )
    [row] = json.loads((tmp_path / "found.json").read_text())["rows"]
    training = json.loads((tmp_path / "runs/seed-3-training.json").read_text())
    assert row["seed"] == training["seed"] == 3 and row["seconds"] > training["seconds"]
    assert 25 <= row["knn_10"] <= 100 and 25 <= row["knn_200"] <= 100
