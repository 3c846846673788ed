"""The search for a recipe: halving, and results that are kept."""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RATES = {"lr-0.01": 0.01, "lr-0.1": 0.1, "middle": 0.05}


@pytest.fixture
def data(tmp_path):
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / "data/train" / name).mkdir(parents=True)
        for number in range(18):
            pixels = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "data/train" / name / f"{number:02}.png")
    return tmp_path / "data"


@pytest.fixture
def search(monkeypatch, data, tmp_path, capsys):
    """Runs the search; instead of training, a candidate is as good as its learning rate."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    module, trained = importlib.import_module("search"), []

    def measure(row, seed, arguments, _processes):
        trained.append((row.name, arguments.epochs))
        settings = module.compare.row_settings(row, seed, arguments)
        return {
            "measured_on": module.compare.described("cpu"),
            "seconds": None,
            "images_per_second": None,
            "num_keys": 2,
            "num_queries": 1,
            "pretrain": {"knn_top1": 100 * settings.train.lr, "epochs": arguments.epochs, "peak_memory_bytes": 0},
            "linear": {"linear_top1": 0.0},
            "online_knn": {},
        }

    def run(rates):
        trained.clear()
        candidates = {name: {"train.lr": lr, "views.local_scale": [0.1, 0.4]} for name, lr in rates.items()}
        (tmp_path / "candidates.yaml").write_text(json.dumps(candidates))
        words = [data, tmp_path / "candidates.yaml", "--epochs", 1, 2, "--device", "cpu", "--out", tmp_path / "out"]
        words += ["--json", tmp_path / "found.json"]
        monkeypatch.setattr(sys, "argv", ["search.py", *map(str, words)])
        module.main()
        return trained, [line for line in capsys.readouterr().out.splitlines() if line.startswith("After")]

    monkeypatch.setattr(module.compare, "measure", measure)
    return run


def test_an_added_image_is_not_on_both_sides(search, data, tmp_path):
    search(RATES)
    (data / "train/cat/00.png").rename(data / "train/cat/a.png")
    with pytest.raises(SystemExit, match="other images"):
        search(RATES)
    links = list((tmp_path / "out/held-out").glob("*/*/*"))
    assert len(links) == len({link.resolve(strict=True) for link in links}) == 36


def test_it_halves_the_candidates_and_keeps_their_results(search, tmp_path):
    trained, printed = search(RATES)
    assert trained == [*((name, 1) for name in RATES), ("lr-0.1", 2), ("middle", 2)]
    assert printed == ["After 1 epochs: lr-0.1, middle", "After 2 epochs: lr-0.1"]
    held = tmp_path / "out/held-out"
    assert len(list(held.glob("val/*/*"))) == 6 and len(list(held.glob("train/*/*"))) == 30
    (row,) = json.loads((tmp_path / "found-2.json").read_text())["rows"]["middle"]["seeds"].values()
    assert row["pretrain"]["knn_top1"] == 5.0
    assert search(RATES) == ([], printed), "nothing is left to do"


def test_changed_candidates_are_not_mixed_with_earlier_results(search):
    search(RATES)
    with pytest.raises(SystemExit, match=r"results of lr-0\.1 with train\.lr"):
        search(RATES | {"lr-0.1": 0.2})
