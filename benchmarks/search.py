"""Searches for a recipe by successive halving, on held-out training images.

    python benchmarks/search.py caltech101/ candidates.yaml --epochs 50 200 --out search --json caltech101-search.json

`candidates.yaml` maps names to settings:

    base: {train.lr: 0.12, method.num_queries: 2, method.num_keys: 3}
    local: {train.lr: 0.12, method.num_queries: 2, method.num_keys: 3, method.num_local_queries: 4}

All candidates train for the first number of epochs, each with a schedule of this length; the better half by kNN, and by
the linear probe where kNN is equal, trains for the next. A folder of images has every sixth training image of a class
held out, an npz file 5,000 images. Rows that are in the JSON file are not measured again, so the search can be stopped
at any time and continued on another machine with this file alone.
"""

import argparse
import json
import math
import shutil
import threading
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from held_out import hold_out
from machine import save
from processes import Processes

from jcl.settings.commands import PretrainOptions

HELD_OUT_EVERY = 6  # images of a class
FIXED = {"record.knn_every": 0, "record.report": False, "record.tensorboard": False}
Row = dict[str, Any]


class Search:
    """The rows of a JSON file, and what is needed to measure more."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.candidates: dict[str, dict[str, Any]] = yaml.safe_load(arguments.candidates.read_text(encoding="utf-8"))
        self.processes = Processes()
        self.rows: list[Row] = []
        self._lock = threading.Lock()
        if arguments.json.exists():
            self.rows = json.loads(arguments.json.read_text(encoding="utf-8"))["rows"]

    def settings(self, name: str) -> list[str]:
        return [f"{key}={json.dumps(value)}" for key, value in self.candidates[name].items()]

    def find(self, name: str, epochs: int, seed: int) -> Row | None:
        """The row of a candidate, if its settings are still the same."""
        wanted = {"name": name, "settings": self.settings(name), "epochs": epochs, "seed": seed}
        return next((row for row in self.rows if all(row[key] == value for key, value in wanted.items())), None)

    def measure(self, data: Path, name: str, epochs: int, seed: int) -> None:
        """Train and probe a candidate, and write its row."""
        folder = self.arguments.out / f"{name}-{epochs}-seed{seed}"
        result, probe = folder.with_suffix(".json"), folder.with_suffix(".linear.json")
        options = {"epochs": epochs, "seed": seed, "device": self.arguments.device}
        if self.arguments.recipe:
            options["recipe"] = self.arguments.recipe
        if not result.exists():
            fixed = [f"{key}={json.dumps(value)}" for key, value in FIXED.items()]
            self.processes.train(folder, result, data, options, [*self.settings(name), *fixed])
        self.processes.jcl(probe, "linear", folder, "--no-untrained", "--device", self.arguments.device)
        run, probed = (json.loads(file.read_text(encoding="utf-8")) for file in (result, probe))
        found = {key: run[key] for key in ("knn_top1", "loss", "seconds")} | {"linear_top1": probed["linear_top1"]}
        self.add(name, epochs, seed, found)

    def add(self, name: str, epochs: int, seed: int, found: dict[str, float]) -> None:
        row = {"name": name, "settings": self.settings(name), "epochs": epochs, "seed": seed} | found
        with self._lock:
            self.rows.append(row)
            save({"data": str(self.arguments.data), "rows": self.rows}, self.arguments.json, self.arguments.device)
        accuracies = f"kNN {row['knn_top1']:.2f} %, linear {row['linear_top1']:.2f} %"
        print(f"{name}, {epochs} epochs, seed {seed}: {accuracies}, {row['seconds']:.0f} s", flush=True)

    def run(self) -> None:
        for name in self.candidates:  # invalid settings raise before anything is trained
            PretrainOptions.model_validate({"data": "x", "assignments": tuple(self.settings(name))}).settings()
        data = split(self.arguments.data, self.arguments.out)
        left = list(self.candidates)
        for epochs in self.arguments.epochs:
            wanted = [(name, seed) for name in left for seed in range(self.arguments.seeds)]
            tasks = [
                partial(self.measure, data, name, epochs, seed)
                for name, seed in wanted
                if self.find(name, epochs, seed) is None
            ]
            if failed := self.processes.run_tasks(tasks, self.arguments.at_once):
                raise SystemExit(f"{len(failed)} of {len(tasks)} runs failed; {failed[0]}")
            left = self.best(left, epochs)
            print(f"After {epochs} epochs: {', '.join(left)}", flush=True)

    def best(self, names: list[str], epochs: int) -> list[str]:
        """The better half of the candidates, best first."""

        def score(name: str) -> tuple[float, float]:
            rows = [row for seed in range(self.arguments.seeds) if (row := self.find(name, epochs, seed))]
            knn, linear = (sum(row[key] for row in rows) / len(rows) for key in ("knn_top1", "linear_top1"))
            return knn, linear

        return sorted(names, key=score, reverse=True)[: math.ceil(len(names) / 2)]


def split(data: Path, out: Path) -> Path:
    """The data with held-out training images in the place of its test images."""
    out.mkdir(parents=True, exist_ok=True)
    if data.is_file():
        return hold_out(data, out / "held-out.npz")
    train = data / "train" if (data / "train").is_dir() else data
    target = out / "held-out"
    for folder in sorted(path for path in train.iterdir() if path.is_dir()):
        for number, file in enumerate(sorted(folder.iterdir())):
            part = "train" if number % HELD_OUT_EVERY else "val"
            place = target / part / folder.name / file.name
            if not place.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, place)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder of images in classes, or npz with x_train and y_train")
    parser.add_argument("candidates", type=Path, help="YAML file of settings by name")
    parser.add_argument("--recipe", help="default: the one for the data")
    parser.add_argument("--epochs", type=int, nargs="+", default=[50, 200], help="of one round after the other")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs and the split")
    parser.add_argument("--json", type=Path, required=True, help="results file, read and continued")
    Search(parser.parse_args()).run()


if __name__ == "__main__":
    main()
