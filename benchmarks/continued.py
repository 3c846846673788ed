"""Continued pre-training: the kNN accuracy over epochs of four ways to train on the same images.

    jcl pretrain tiny100.npz --image-size 64 --out runs/tiny100
    python benchmarks/continued.py caltech101/ runs/tiny100 --epochs 100 --out continued --json continued.json

Each row is a run in OUT: `scratch` (no weights), `naive` (`--init` with the settings of a run from scratch), `careful`
(`--init` with its automatic settings), and one for every `--also NAME "SETTING=VALUE ..."`. The accuracy of the weights
themselves is that of epoch 0. Repeat the command to continue: finished rows are kept, a stopped one is resumed.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import machine
import torch
from rich.console import Console

import jcl
from jcl.commands.inputs import open_run_data
from jcl.errors import JclError
from jcl.evaluate.classification import classification_task
from jcl.export.loading import open_backbone
from jcl.settings.values import parse_yaml, values_of

QUALITY = ("rankme", "alpha_req", "lidar")  # of the last epoch; they need no labels
# What `--init` changes, apart from the weights themselves: the naive run has the values of a run from scratch.
RECIPE = ("train.lr", "train.warmup_epochs", "train.head_epochs", "train.layer_decay", "method.key_momentum")


def rows(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The settings of each row that differ from the recipe's."""
    weights = open_backbone(arguments.weights, arguments.backbone).info
    shared = {
        "data.location": str(arguments.data),
        "model.backbone": weights.backbone,
        "model.stem": weights.stem,
        "views.image_size": arguments.image_size or weights.image_size,
        "train.epochs": arguments.epochs,
        "train.seed": arguments.seed,
        "record.knn_every": max(1, arguments.epochs // 20),
        **assigned(arguments.set),
    }
    start = {"model.init": str(arguments.weights)}
    found = {"scratch": shared, "naive": shared | start, "careful": shared | start}
    return found | {name: shared | start | assigned(values.split()) for name, values in arguments.also}


def assigned(texts: list[str]) -> dict[str, Any]:
    return {name: parse_yaml(value) for name, _, value in (text.partition("=") for text in texts)}


def train(name: str, values: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Train a row, or take it from its folder, and return its figures."""
    if name == "naive":
        scratch = jcl.Run(arguments.out / "scratch").settings
        values = values_of(scratch, RECIPE) | values
    settings = jcl.build_settings("folder", values=values)
    run = jcl.pretrain(settings, arguments.out / name, resume="auto", label=name)
    knn, quality = ([line for line in run.metrics if line["kind"] == kind] for kind in ("knn", "quality"))
    return {
        "settings": values_of(run.settings, RECIPE),
        "epochs": [line["epoch"] for line in knn],
        "knn_top1": [line["knn_top1"] for line in knn],
        "test_images": knn[-1]["test_images"],
        "quality": {name: quality[-1][name] for name in QUALITY},
        "seconds": run.summary["seconds"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="labeled images: a folder or an .npz file")
    parser.add_argument("weights", type=Path, help="a run or a weights file")
    parser.add_argument("--backbone", help="if the weights file does not state it")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--image-size", type=int, help="of the views (default: that of the weights)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", nargs="*", default=[], metavar="SETTING=VALUE", help="in all rows")
    parser.add_argument("--also", nargs=2, action="append", default=[], metavar=("NAME", "VALUES"))
    parser.add_argument("--rows", nargs="+", metavar="NAME", help="only these; naive needs scratch")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    try:
        run(arguments)
    except JclError as error:  # also if the training was asked to stop
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def run(arguments: argparse.Namespace) -> None:
    """Train all rows, and write the file after each."""
    figures: dict[str, Any] = {"data": arguments.data.name, "weights": arguments.weights.name, "rows": {}}
    chosen = rows(arguments)
    shared = jcl.build_settings("folder", values=chosen["scratch"])
    classification_task(open_run_data(shared, Console(quiet=True)))  # kNN needs labels
    for name in arguments.rows or chosen:
        figures["rows"][name] = row = train(name, chosen[name], arguments)
        machine.save(figures, arguments.json, "cuda" if torch.cuda.is_available() else "cpu")
        print(f"{name:10} kNN top-1 {' '.join(f'{value:.1f}' for value in row['knn_top1'])}")


if __name__ == "__main__":
    main()
