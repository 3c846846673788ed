"""The benchmark of continued pre-training: its rows, that repeating it keeps them, and its figure."""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

SMALL = ("method.queue_size=32", "record.tensorboard=false", "record.report=false", "train.device=cpu")


def test_rows_start_alike_and_are_kept(npz, pretrained, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    continued = importlib.import_module("continued")
    options = ["--epochs", "1", "--out", tmp_path / "out", "--json", tmp_path / "rows.json"]
    options += ["--also", "head only", "train.head_epochs=1", "--set", *SMALL]
    monkeypatch.setattr(sys, "argv", ["continued.py", *map(str, [npz, pretrained, *options])])
    found = []
    for _ in range(2):
        continued.main()
        found.append(json.loads((tmp_path / "rows.json").read_text())["rows"])
    rows, repeated = found
    assert rows == repeated and list(rows) == ["scratch", "naive", "careful", "head only"]
    assert len({row["knn_top1"][0] for name, row in rows.items() if name != "scratch"}) == 1
    assert all(row["epochs"] == [0, 1] for row in rows.values())
    assert rows["naive"]["settings"] == rows["scratch"]["settings"]
    assert rows["careful"]["settings"]["train.lr"] < rows["naive"]["settings"]["train.lr"]
    assert rows["head only"]["settings"]["train.head_epochs"] == 1
    plot = tmp_path / "rows.png"
    monkeypatch.setattr(sys, "argv", ["continued_figure.py", str(tmp_path / "rows.json"), "-o", str(plot)])
    importlib.import_module("continued_figure").main()
    assert plot.read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(sys, "argv", ["continued_figure.py", str(pretrained / "summary.json"), "-o", str(plot)])
    with pytest.raises(SystemExit, match=r"summary\.json"):
        importlib.import_module("continued_figure").main()


def test_images_without_labels_are_refused_before_training(pretrained, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    continued = importlib.import_module("continued")
    np.save(tmp_path / "unlabeled.npy", np.zeros((32, 16, 16, 3), dtype=np.uint8))
    options = [tmp_path / "unlabeled.npy", pretrained, "--epochs", "1", "--out", tmp_path / "out", "--set", *SMALL]
    monkeypatch.setattr(sys, "argv", ["continued.py", *map(str, options)])
    with pytest.raises(SystemExit) as stopped:
        continued.main()
    assert stopped.value.code == 1 and "unlabeled.npy" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
