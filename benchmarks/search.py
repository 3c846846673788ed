"""Searches for a recipe by successive halving, on held-out training images.

    python benchmarks/search.py caltech101/ candidates.yaml --epochs 50 200 --out search --json caltech101-search.json

`candidates.yaml` maps names to settings:

    base: {train.lr: 0.12, method.num_queries: 2, method.num_keys: 3}
    local: {train.lr: 0.12, method.num_queries: 2, method.num_keys: 3, method.num_local_queries: 4}

All candidates train for the first number of epochs, each with a schedule of this length; the better half by kNN, and by
the linear probe where kNN is equal, trains for the next. Each round is a comparison of `benchmarks/compare.py` with a
results file of its own, such as `caltech101-search-50.json`, from which a stopped search continues.
"""

import argparse
import json
import math
from pathlib import Path
from statistics import fmean
from typing import Any

import compare
from comparison import ACCURACIES, accuracies, results_of
from held_out import hold_out

from jcl.errors import JclError
from jcl.runs.json_object import read_object
from jcl.settings.values import read_yaml

FIXED = ("record.knn_every=0", "record.report=false", "record.tensorboard=false")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder of images in classes, or npz with x_train and y_train")
    parser.add_argument("candidates", type=Path, help="YAML file of settings by name")
    parser.add_argument("--recipe", default="folder", help="default: folder")
    parser.add_argument("--epochs", type=int, nargs="+", default=[50, 200], help="of one round after the other")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs and the split")
    parser.add_argument("--json", type=Path, required=True, help="results files: NAME-EPOCHS.json")
    arguments = parser.parse_args()
    try:
        candidates = {name: settings or {} for name, settings in read_yaml(arguments.candidates).items()}
    except JclError as error:
        raise SystemExit(f"Error: {error}") from None
    arguments.data = hold_out(arguments.data, arguments.out)
    for epochs in arguments.epochs:
        candidates = better_half(candidates, epochs, arguments)
        print(f"After {epochs} epochs: {', '.join(candidates)}", flush=True)


def better_half(candidates: dict[str, dict[str, Any]], epochs: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train and probe all candidates; returns the better ones, best first."""
    file = arguments.json.with_name(f"{arguments.json.stem}-{epochs}.json")
    words = [arguments.data, "--json", file, "--out", arguments.out / str(epochs), "--epochs", epochs]
    words += ["--recipe", arguments.recipe, "--device", arguments.device, "--at-once", arguments.at_once]
    words += ["--seeds", *range(arguments.seeds), *(part for pair in FIXED for part in ("--set", pair))]
    for name, settings in candidates.items():
        others = {key: value for key, value in settings.items() if key != "method.name"}
        pairs = [f"{key}={json.dumps(value, separators=(',', ':'))}" for key, value in others.items()]
        words += ["--variant", name, " ".join([settings.get("method.name", "jcl"), *pairs])]
    compare.main([str(word) for word in words])
    found = read_object(file)

    def score(name: str) -> list[float]:
        results = [results_of(found, name)[str(seed)] for seed in range(arguments.seeds)]
        return [fmean(accuracies(results, measure)) for measure in ACCURACIES]

    best = sorted(candidates, key=score, reverse=True)[: math.ceil(len(candidates) / 2)]
    return {name: candidates[name] for name in best}


if __name__ == "__main__":
    main()
