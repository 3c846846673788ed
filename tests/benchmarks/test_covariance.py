"""The study of the covariance: its rows and seeds, and what continues from a JSON file alone."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from jcl.settings.schema import Settings
from jcl.studies.cells import Cell

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SMALL = (
    "model.backbone=tiny_cnn model.stem=imagenet views.image_size=16 model.embedding_dim=16 model.bn_groups=1 "
    "train.batch_size=8 record.knn_every=0 record.knn_k=5 data.workers=0"
)


@pytest.fixture
def study(monkeypatch, npz, tmp_path):
    """Runs parts of the study with one epoch."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    covariance = importlib.import_module("covariance")

    def run(*parts: str) -> None:
        words = [str(npz), "--out", str(tmp_path / "out"), "--results", str(tmp_path / "results")]
        words += ["--epochs", "1", "--figure-2-epochs", "1", "--device", "cpu", "--parts", *parts]
        words += [part for pair in SMALL.split() for part in ("--set", pair)]
        monkeypatch.setattr(sys, "argv", ["covariance.py", *words])
        covariance.main()

    run.module = covariance
    return run


def test_rows_and_seeds(study, monkeypatch, tmp_path):
    """Without training."""
    result = {
        "measured_on": {"gpu": "H200", "cpu": "", "torch": "2.11", "date": "2026-11-17"},
        "seconds": None,
        "images_per_second": None,
        "num_keys": 5,
        "num_queries": 1,
        "pretrain": {"knn_top1": 50.0, "epochs": 1, "peak_memory_bytes": 1},
        "linear": {"linear_top1": 60.0},
    }
    monkeypatch.setattr(study.module.compare, "measure", lambda *_: result)
    study("covariance", "--rows", "scale-1", "--seeds", "2")
    only = json.loads((tmp_path / "results/tiny100-covariance.json").read_text())["rows"]
    assert {name: list(row["seeds"]) for name, row in only.items()} == {"scale-1": ["2"]}
    study("covariance", "queue-256")
    rows = json.loads((tmp_path / "results/tiny100-covariance.json").read_text())["rows"]
    named = ("method.name", "method.covariance_scale", "method.num_keys", "train.epochs")
    found = {name: (*(row["settings"][each] for each in named), len(row["seeds"])) for name, row in rows.items()}
    assert found == {
        "jcl": ("jcl", 4.0, 5, 1, 3),
        "jcl-scale-0": ("jcl", 0.0, 5, 1, 3),
        "scale-1": ("jcl", 1.0, 5, 1, 3),
        "scale-10": ("jcl", 10.0, 5, 1, 1),
        "multi-key": ("multi-key", 4.0, 5, 1, 3),
        "moco-100": ("moco-v2", 4.0, 1, 1, 3),
        "moco-200": ("moco-v2", 4.0, 1, 2, 3),
    }
    paper = rows["jcl"]["settings"]
    assert (paper["train.lr"], paper["method.temperature"], paper["method.queue_size"]) == (0.1, 0.2, 16384)
    small_queue = json.loads((tmp_path / "results/tiny100-queue-256.json").read_text())["rows"]
    assert {row["settings"]["method.queue_size"] for row in small_queue.values()} == {256}
    assert small_queue.keys() == {"jcl", "jcl-scale-0", "scale-1", "multi-key"}


@pytest.mark.slow
def test_figure_2_continues_from_its_json_file_alone(study, monkeypatch, tmp_path):
    monkeypatch.setattr(study.module, "FIGURE_2", ("covariance_scale=4",))
    kept = tmp_path / "results/tiny100-figure-2-cells.json"
    kept.parent.mkdir()
    cell = Cell(values={"method.covariance_scale": 4.0}, seed=0, settings=Settings())
    measured = {"knn_top1": 12.5, "linear_top1": 25.0, "seconds": 1.0, "test_images": 8, "test_held_out": False}
    kept.write_text(json.dumps({cell.name: measured}))
    study("figure-2")
    assert json.loads(kept.read_text()) == {cell.name: measured}  # nothing was trained
    found = json.loads((tmp_path / "results/tiny100-figure-2.json").read_text())
    assert found["cells_done"] == 1 and found["linear_top1_covariance_scale_4"] == 25.0
    assert (tmp_path / "results/tiny100-figure-2.png").exists()
