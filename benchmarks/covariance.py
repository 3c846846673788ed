"""What the covariance does on Tiny-ImageNet-100: the paper's ablation settings on 100 ImageNet classes of 64 px.

    python benchmarks/covariance.py tiny100.npz --out covariance --results benchmarks/results --at-once 2

`tiny100.npz` has x_train, y_train, x_test and y_test. The parts, in this order:

- covariance: scale 0, 1, 4 and 10, multi-key, MoCo v2, and MoCo v2 with twice the epochs
- queue-256, temperature-0.1: scale 0, 1, 4 and multi-key where the covariance is a large part of the gradient
- figure-2: accuracy over the number of keys, the scale and the temperature, 60 epochs
- figure-3: similarity of an image's views, nine keys against MoCo v2

Every run is trained, tested on the test images (kNN, linear probe, `jcl bound`) and added to a JSON file in
`--results`. Runs that are in these files are not repeated, so the study can be stopped at any time (SIGTERM or Ctrl-C)
and continued on another machine with these files alone. A stopped run in `--out` is resumed.
"""

import argparse
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import compare
from processes import Processes, jcl_command

from jcl.runs.json_object import read_object, write_object

RECIPE = "imagenet100-ablation"
SETTINGS = ("data.subset=''", "views.image_size=64", "model.stem=medium", "method.queue_size=16384")
QUIET = ("record.report=false", "record.tensorboard=false")
SCALES = ["jcl", "jcl-scale-0", "multi-key", "scale-1"]  # JCL has the paper's scale, 4
ALL = [*SCALES, "moco-100", "moco-200"]
VARIANTS = {
    "scale-1": "jcl method.covariance_scale=1",
    "scale-10": "jcl method.covariance_scale=10",
    "moco-100": "moco-v2",  # the row moco-v2 has a head for CIFAR-10
    "moco-200": "moco-v2 train.epochs={twice}",
}
FIGURE_2 = ("num_keys=1,2,3,5,7,9,11", "covariance_scale=0,0.2,1,2,4,10", "temperature=0.05,0.07,0.1,0.2,0.3,0.5")


def main() -> None:
    arguments = parse_arguments()
    arguments.results.mkdir(parents=True, exist_ok=True)
    failed = []
    for part in arguments.parts:
        print(f"{part}:", flush=True)
        try:
            PARTS[part](arguments)
        except SystemExit as stop:
            if isinstance(stop.code, int):  # stopped by a signal
                raise
            print(stop.code, flush=True)
            failed.append(part)
    if failed:
        raise SystemExit(f"Some runs failed: {', '.join(failed)}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--results", type=Path, required=True, help="folder of the JSON files")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rows", nargs="+", choices=[*ALL, "scale-10"], help="not of the figures")
    parser.add_argument("--seeds", nargs="+", type=int, help="default: 0 1 2 of `covariance` (scale 10: 0), else 0")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--figure-2-epochs", type=int, default=60)
    parser.add_argument("--at-once", type=int, default=1, help="runs at once")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.NAME=VALUE", help="for all runs")
    arguments = parser.parse_args()
    arguments.data = arguments.data.resolve()
    return arguments


def covariance(arguments: argparse.Namespace) -> None:
    """Seed by seed; scale 10, which may diverge, last."""
    seeds = arguments.seeds or [0, 1, 2]
    run_rows(arguments, "covariance", ALL, seeds)
    run_rows(arguments, "covariance", ["scale-10"], seeds[:1])


def large_term(name: str, setting: str, arguments: argparse.Namespace) -> None:
    run_rows(arguments, name, SCALES, arguments.seeds or [0], setting)


def run_rows(arguments: argparse.Namespace, name: str, rows: list[str], seeds: list[int], *settings: str) -> None:
    """Run `compare.py` with rows of this study."""
    rows = [row for row in rows if row in (arguments.rows or rows)]
    if not rows:
        return
    words = [arguments.data, "--recipe", RECIPE, "--epochs", arguments.epochs, "--bound"]
    words += ["--out", arguments.out / name, "--json", results_file(arguments, name), "--device", arguments.device]
    words += ["--at-once", arguments.at_once, "--seeds", *seeds]
    if known := [row for row in rows if row not in VARIANTS]:
        words += ["--rows", *known]
    for row in rows:
        if row in VARIANTS:
            words += ["--variant", row, VARIANTS[row].format(twice=2 * arguments.epochs)]
    for each in (*SETTINGS, *QUIET, *settings, *arguments.set):
        words += ["--set", each]
    try:
        compare.main(list(map(str, words)))
    finally:
        print_shares(results_file(arguments, name))


def print_shares(file: Path) -> None:
    """What the covariance of the keys does in each run of JCL, at its end and with its own scale."""
    for name, row in read_object(file)["rows"].items() if file.exists() else ():
        scale = row["settings"]["method.covariance_scale"]
        for seed, result in row["seeds"].items() if row["settings"]["method.name"] == "jcl" else ():
            bound = {key.removesuffix(f"_scale{scale:g}"): value for key, value in result.get("bound", {}).items()}
            if "covariance_share" in bound:
                print(
                    f"{name}, seed {seed}: p+ {bound['positive_share']:.4f}, covariance "
                    f"{100 * bound['covariance_share']:.2f} %, keys pushed away {100 * bound['repelled_keys']:.2f} %"
                )


def figure_2(arguments: argparse.Namespace) -> None:
    """`jcl ablate`; the results of its cells are kept in one file."""
    folder, kept, processes = arguments.out / "figure-2", results_file(arguments, "figure-2-cells"), Processes()
    settings = [part for each in (*SETTINGS, *QUIET, *arguments.set) for part in ("--set", each)]
    over = [part for axis in FIGURE_2 for part in ("--over", axis)]
    words = ["ablate", arguments.data, "--recipe", RECIPE, "--epochs", arguments.figure_2_epochs, "--each-alone"]
    words += [*over, *settings, "--device", arguments.device, "--at-once", arguments.at_once, "--out", folder]

    def ablate() -> None:
        processes.run(jcl_command(*words, "--plan-only"), folder.with_suffix(".plan.txt"))
        for name, result in (read_object(kept) if kept.exists() else {}).items():
            if (place := folder / "cells" / name).is_dir():
                write_object(place / "result.json", result)
        processes.run(jcl_command(*words), folder.with_suffix(".txt"))

    try:
        failed = processes.run_tasks([ablate], 1)
    finally:
        cells = {file.parent.name: read_object(file) for file in sorted(folder.glob("cells/*/result.json"))}
        if cells:
            write_object(kept, cells)
    for file in folder.glob("ablation.*"):
        shutil.copy(file, results_file(arguments, "figure-2").with_suffix(file.suffix))
    stop_if_failed(failed)
    print((folder / "ablation.csv").read_text(encoding="utf-8"), flush=True)


def figure_3(arguments: argparse.Namespace) -> None:
    """Train JCL with nine keys and MoCo v2, and compare the views of an image."""
    result, processes = results_file(arguments, "figure-3"), Processes()
    if result.exists():
        return
    runs = {"jcl-nine-keys": ("jcl", "method.num_keys=9"), "moco-v2": ("moco-v2",)}
    folders = {name: arguments.out / "figure-3" / name for name in runs}

    def train(name: str) -> None:
        method, *own = runs[name]
        options = {"recipe": RECIPE, "method": method, "epochs": arguments.epochs, "device": arguments.device}
        settings = [*SETTINGS, *QUIET, *own, *arguments.set]
        processes.train(folders[name], folders[name].with_suffix(".json"), arguments.data, options, settings)

    def distribution() -> None:
        outputs = ["--device", arguments.device, "--force", "-o", result.with_suffix(".png"), "--json", result]
        processes.run(jcl_command("distribution", *folders.values(), *outputs), arguments.out / "figure-3.txt")

    stop_if_failed(processes.run_tasks([partial(train, name) for name in runs], arguments.at_once))
    stop_if_failed(processes.run_tasks([distribution], 1))
    print(json.dumps(read_object(result), indent=2), flush=True)


def results_file(arguments: argparse.Namespace, name: str) -> Path:
    file: Path = arguments.results / f"tiny100-{name}.json"
    return file


def stop_if_failed(failed: list[str]) -> None:
    if failed:
        raise SystemExit(f"Error: {failed[0]}")


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {
    "covariance": covariance,
    "queue-256": partial(large_term, "queue-256", "method.queue_size=256"),
    "temperature-0.1": partial(large_term, "temperature-0.1", "method.temperature=0.1"),
    "figure-2": figure_2,
    "figure-3": figure_3,
}


if __name__ == "__main__":
    main()
