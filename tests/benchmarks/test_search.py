"""The search for a recipe: halving, and rows that are kept."""

import argparse
import importlib
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def search(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("search")


def write_folder(place: Path) -> Path:
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (place / "train" / name).mkdir(parents=True)
        for number in range(18):
            pixels = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(place / "train" / name / f"{number:02}.png")
    return place


def test_it_halves_the_candidates_and_keeps_its_rows(search, tmp_path, monkeypatch, capsys):
    """Without training: a candidate is as good as its learning rate."""

    def measure(self, data, name, epochs, seed):
        self.add(name, epochs, seed, {"knn_top1": rates[name], "linear_top1": 0.0, "loss": 1.0, "seconds": 1.0})

    monkeypatch.setattr(search.Search, "measure", measure)
    rates = {"slow": 0.01, "fast": 0.1, "middle": 0.05}
    candidates = {name: {"train.lr": lr} for name, lr in rates.items()}
    (tmp_path / "candidates.yaml").write_text(json.dumps(candidates))
    arguments = argparse.Namespace(
        data=write_folder(tmp_path / "data"),
        candidates=tmp_path / "candidates.yaml",
        recipe=None,
        epochs=[1, 2],
        seeds=1,
        at_once=1,
        device="cpu",
        out=tmp_path / "out",
        json=tmp_path / "results.json",
    )
    search.Search(arguments).run()
    held = tmp_path / "out" / "held-out"
    assert len(list(held.glob("val/*/*"))) == 6 and len(list(held.glob("train/*/*"))) == 30
    rows = json.loads(arguments.json.read_text())["rows"]
    assert [(row["name"], row["epochs"]) for row in rows] == [
        *((name, 1) for name in rates),
        *((name, 2) for name in ("fast", "middle")),
    ]
    assert rows[0]["settings"] == ["train.lr=0.01"]
    written = capsys.readouterr().out
    search.Search(arguments).run()  # nothing is left to do
    assert json.loads(arguments.json.read_text())["rows"] == rows
    assert capsys.readouterr().out == "".join(
        line for line in written.splitlines(keepends=True) if line.startswith("After")
    )
