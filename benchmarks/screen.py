"""Which settings matter: many varied together in few runs, judged on held-out training images.

    python benchmarks/screen.py cifar.npz --method jcl --epochs 24 --at-once 4 --out screen-jcl [--json FILE]

Every setting below has a low and a high value. Twelve runs after Plackett and Burman (Biometrika 33, 1946) set each of
them high in six runs and low in six, balanced against all others, so that every run tells about every setting: the
effect of one is the mean of its six high runs minus that of its six low ones. 5,000 images of the training set, the
same in every run, are held out and classified by kNN; the test set is not opened. What was measured already in `--out`
is kept, so a screening that was stopped goes on when it is started again.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from machine import save

HELD_OUT = 5000
FACTORS: dict[str, tuple[Any, Any]] = {  # low and high values
    "train.lr": (0.1, 0.3),
    "train.weight_decay": (3e-4, 1e-3),
    "method.key_momentum": (0.97, 0.99),
    "method.queue_size": (4096, 16384),
    "method.temperature": (0.15, 0.25),
    "method.covariance_scale": (0.5, 3.0),
    "views.min_scale": (0.1, 0.25),
    "model.embedding_dim": (128, 256),
}
FIRST_ROW = (1, 1, 0, 1, 1, 1, 0, 0, 0, 1, 0)


def main() -> None:
    arguments = parse_arguments()
    arguments.out.mkdir(parents=True, exist_ok=True)
    split = arguments.out / "held-out.npz"
    if not split.exists():
        hold_out(arguments.data, split)
    rows = design()
    run_all(rows, split, arguments)
    figures = report(rows, arguments)
    save(figures, arguments.json, arguments.device)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="npz with x_train and y_train")
    parser.add_argument("--recipe", default="cifar10")
    parser.add_argument("--method", default="jcl")
    parser.add_argument("--epochs", type=int, default=24)
    parser.add_argument("--at-once", type=int, default=1, help="runs that share the GPU")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def hold_out(data: Path, split: Path) -> None:
    """Training images in two parts, the second in the place of a test set."""
    with np.load(data) as arrays:
        images, labels = arrays["x_train"], arrays["y_train"]
    order = np.random.default_rng(0).permutation(len(images))
    held, kept = np.sort(order[:HELD_OUT]), np.sort(order[HELD_OUT:])
    np.savez(split, x_train=images[kept], y_train=labels[kept], x_test=images[held], y_test=labels[held])


def design() -> list[tuple[int, ...]]:
    """Twelve rows of 0 (low) and 1 (high); the first columns are the settings', the others tell how large chance is."""
    shifted = [FIRST_ROW[-shift:] + FIRST_ROW[:-shift] for shift in range(len(FIRST_ROW))]
    return [*shifted, (0,) * len(FIRST_ROW)]


def values_of(row: tuple[int, ...]) -> dict[str, Any]:
    return {name: levels[level] for (name, levels), level in zip(FACTORS.items(), row, strict=False)}


def run_all(rows: list[tuple[int, ...]], split: Path, arguments: argparse.Namespace) -> None:
    waiting = [number for number in range(len(rows)) if not result_file(arguments, number).exists()]
    running: list[subprocess.Popen[bytes]] = []
    while waiting or running:
        running = [process for process in running if process.poll() is None]
        while waiting and len(running) < arguments.at_once:
            number = waiting.pop(0)
            running.append(start(number, values_of(rows[number]), split, arguments))
        time.sleep(0.2)


def start(number: int, values: dict[str, Any], split: Path, arguments: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Begin a run, or go on with what there is of it."""
    folder = arguments.out / f"run-{number}"
    if (folder / "settings.yaml").exists():
        words = ["resume", folder]
    else:
        if arguments.method != "jcl":  # settings of JCL's loss mean nothing to the others
            values = {name: value for name, value in values.items() if name != "method.covariance_scale"}
        values |= {"record.knn_every": 0, "record.report": False, "record.tensorboard": False}
        words = ["pretrain", split, "--recipe", arguments.recipe, "--method", arguments.method, "--out", folder]
        words += ["--epochs", arguments.epochs, "--device", arguments.device]
        words += [part for name, value in values.items() for part in ("--set", f"{name}={value}")]
    words += ["--json", result_file(arguments, number)]
    with (arguments.out / f"run-{number}.txt").open("ab") as log:
        command = [sys.executable, "-m", "jcl", *map(str, words)]
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def result_file(arguments: argparse.Namespace, number: int) -> Path:
    path: Path = arguments.out / f"run-{number}.json"
    return path


def report(rows: list[tuple[int, ...]], arguments: argparse.Namespace) -> dict[str, Any]:
    """Print the runs, best first, and the effects; a run that failed leaves the effects out."""
    runs = []
    for number, row in enumerate(rows):
        if not result_file(arguments, number).exists():
            print(f"Run {number} has no result; {arguments.out / f'run-{number}.txt'} says why.")
            continue
        found = json.loads(result_file(arguments, number).read_text(encoding="utf-8"))
        kept = {name: found[name] for name in ("knn_top1", "loss", "seconds")}
        runs.append({"run": number, "values": values_of(row), **kept})
    for run in sorted(runs, key=lambda run: -run["knn_top1"]):
        print(f"{run['knn_top1']:6.2f} %  " + "  ".join(f"{n.split('.')[1]}={v:g}" for n, v in run["values"].items()))
    effects: dict[str, float] = {}
    if len(runs) == len(rows):
        effects = effects_of(rows, [run["knn_top1"] for run in runs])
        for name, effect in effects.items():
            low_and_high = f" from {FACTORS[name][0]} to {FACTORS[name][1]}" if name in FACTORS else ""
            print(f"{effect:+6.2f}  {name}{low_and_high}")
    return {"method": arguments.method, "epochs": arguments.epochs, "effects": effects, "runs": runs}


def effects_of(rows: list[tuple[int, ...]], accuracies: list[float]) -> dict[str, float]:
    """High minus low for every setting, and for columns that stand for nothing, which show what chance alone does."""
    names = [*FACTORS, *(f"chance {number}" for number in range(1, len(FIRST_ROW) - len(FACTORS) + 1))]
    effects = {}
    for column, name in enumerate(names):
        low, high = (
            fmean(accuracy for row, accuracy in zip(rows, accuracies, strict=True) if row[column] == level)
            for level in (0, 1)
        )
        effects[name] = high - low
    return effects


if __name__ == "__main__":
    main()
