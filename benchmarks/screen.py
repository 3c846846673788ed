"""Screens settings: varies many of them together in few runs, tested on held-out training images.

    python benchmarks/screen.py cifar.npz --epochs 24 --at-once 4 --out screen-jcl \\
      --vary train.lr=0.1,0.3 --vary method.temperature=0.15,0.25 --vary views.min_scale=0.1,0.25

Every setting has a low and a high value. A design of Plackett and Burman (Biometrika 33, 1946) with 8 runs for up to 7
settings, or 12 for up to 11, sets each of them high in half of the runs, balanced against all others. The effect of a
setting is the mean of its high runs minus that of its low runs; unused columns of the design show the noise. The same
5,000 training images are held out in every run and classified by kNN, with `--linear` also by a linear probe. Finished
runs in `--out` are kept (their `*.json` files suffice), and stopped runs are resumed.
"""

import argparse
import contextlib
import json
from pathlib import Path
from statistics import fmean
from typing import Any

from held_out import hold_out
from machine import save
from processes import Processes

from jcl.errors import JclError
from jcl.settings.commands import PretrainOptions

FIRST_ROWS = ((1, 1, 1, 0, 1, 0, 0), (1, 1, 0, 1, 1, 1, 0, 0, 0, 1, 0))  # of the designs with 8 and 12 runs
FIXED = {"record.knn_every": 0, "record.report": False, "record.tensorboard": False}


def main() -> None:
    arguments = parse_arguments()
    rows = design(len(arguments.vary))
    options = {name: getattr(arguments, name) for name in ("recipe", "method", "epochs", "device")}
    try:
        for row in rows:  # invalid settings raise before anything is trained
            values = options | {"data": str(arguments.data), "assignments": assignments(row, arguments)}
            PretrainOptions.model_validate(values).settings()
        split = prepare(arguments)
        processes = Processes()
        tasks = [
            lambda number=number, row=row: measure(number, row, split, options, arguments, processes)
            for number, row in enumerate(rows)
        ]
        failed = processes.run_tasks(tasks, arguments.at_once)
    except JclError as error:
        raise SystemExit(f"Error: {error}") from None
    save(report(rows, arguments), arguments.json, arguments.device)
    if failed:
        raise SystemExit(f"{len(failed)} of {len(rows)} runs failed; {failed[0]}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="npz with x_train and y_train")
    parser.add_argument("--recipe", default="cifar10")
    parser.add_argument("--method", default="jcl")
    parser.add_argument("--epochs", type=int, default=24)
    parser.add_argument("--at-once", type=int, default=1, help="runs at once")
    parser.add_argument("--linear", action="store_true", help="also train a linear probe on each run")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--vary", type=parse_levels, action="append", default=[], metavar="SECTION.NAME=LOW,HIGH")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.NAME=VALUE", help="for all runs")
    arguments = parser.parse_args()
    given, arguments.vary = len(arguments.vary), dict(arguments.vary)
    if given != len(arguments.vary) or not 1 <= given <= len(FIRST_ROWS[-1]):
        parser.error(f"--vary takes 1 to {len(FIRST_ROWS[-1])} different settings")
    return arguments


def parse_levels(text: str) -> tuple[str, tuple[Any, Any]]:
    """`train.lr=0.1,0.3` as a name and two values."""
    name, _, values = text.partition("=")
    levels = [parse_value(value.strip()) for value in values.split(",")]
    if not name or len(levels) != 2 or "" in levels or levels[0] == levels[1]:
        raise argparse.ArgumentTypeError(f"{text!r} is not a setting with a low and a high value, as train.lr=0.1,0.3")
    return name, (levels[0], levels[1])


def parse_value(text: str) -> int | float | str:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def prepare(arguments: argparse.Namespace) -> Path:
    """Write the split and the arguments to the folder; raises if it holds another screening."""
    wanted = {name: getattr(arguments, name) for name in ("recipe", "method", "epochs", "set")}
    wanted["data"] = str(arguments.data.resolve())
    wanted["vary"] = {name: list(levels) for name, levels in arguments.vary.items()}
    note = arguments.out / "screen.json"
    if note.exists() and (found := json.loads(note.read_text(encoding="utf-8"))) != wanted:
        raise SystemExit(f"{arguments.out} holds another screening, {found}; choose another folder with --out.")
    split = hold_out(arguments.data, arguments.out)
    note.write_text(json.dumps(wanted), encoding="utf-8")
    return split


def design(settings: int) -> list[tuple[int, ...]]:
    """One row of 0 (low) and 1 (high) per run; columns beyond the settings are unused."""
    first = next(row for row in FIRST_ROWS if len(row) >= settings)
    shifted = [first[-shift:] + first[:-shift] for shift in range(len(first))]
    return [*shifted, (0,) * len(first)]


def values_of(row: tuple[int, ...], arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: levels[level] for (name, levels), level in zip(arguments.vary.items(), row, strict=False)}


def assignments(row: tuple[int, ...], arguments: argparse.Namespace) -> tuple[str, ...]:
    values = values_of(row, arguments) | FIXED
    return (*arguments.set, *(f"{name}={value}" for name, value in values.items()))


def result_file(arguments: argparse.Namespace, number: int) -> Path:
    path: Path = arguments.out / f"run-{number}.json"
    return path


def probe_file(arguments: argparse.Namespace, number: int) -> Path:
    path: Path = arguments.out / f"run-{number}-linear.json"
    return path


def measure(
    number: int,
    row: tuple[int, ...],
    split: Path,
    options: dict[str, Any],
    arguments: argparse.Namespace,
    processes: Processes,
) -> None:
    """Train a run and probe it, unless that is done."""
    folder = arguments.out / f"run-{number}"
    result, probe = result_file(arguments, number), probe_file(arguments, number)
    if not result.exists():
        processes.train(folder, result, split, options, assignments(row, arguments))
    if arguments.linear and not probe.exists():
        processes.jcl(probe, "linear", folder, "--device", arguments.device)


def report(rows: list[tuple[int, ...]], arguments: argparse.Namespace) -> dict[str, Any]:
    """Print the runs, best first, and the effects; without all runs there are no effects."""
    runs = [found for number, row in enumerate(rows) if (found := read_run(number, row, arguments))]
    for run in sorted(runs, key=lambda run: -run["knn_top1"]):
        values = "  ".join(f"{name.rpartition('.')[2]}={value}" for name, value in run["values"].items())
        linear = f"linear {run['linear_top1']:5.2f} %  " if "linear_top1" in run else ""
        print(f"{run['knn_top1']:6.2f} %  {linear}{values}")
    results: dict[str, Any] = {"method": arguments.method, "epochs": arguments.epochs}
    accuracies = {"effects": "knn_top1"} | ({"linear_effects": "linear_top1"} if arguments.linear else {})
    for key, accuracy in accuracies.items():
        known = [run[accuracy] for run in runs if accuracy in run]
        results[key] = effects_of(rows, known, list(arguments.vary)) if len(known) == len(rows) else {}
        for name, effect in results[key].items():
            levels = arguments.vary.get(name)
            print(f"{effect:+6.2f}  {accuracy}  {name}" + (f" from {levels[0]} to {levels[1]}" if levels else ""))
    return {**results, "runs": runs}


def read_run(number: int, row: tuple[int, ...], arguments: argparse.Namespace) -> dict[str, Any]:
    """The results of a run; empty if it failed."""
    file, probe = result_file(arguments, number), probe_file(arguments, number)
    if not file.exists():
        return {}
    found = json.loads(file.read_text(encoding="utf-8"))
    kept = {name: found[name] for name in ("knn_top1", "loss", "seconds")}
    if arguments.linear and probe.exists():
        kept["linear_top1"] = json.loads(probe.read_text(encoding="utf-8"))["linear_top1"]
    return {"run": number, "values": values_of(row, arguments), **kept}


def effects_of(rows: list[tuple[int, ...]], accuracies: list[float], settings: list[str]) -> dict[str, float]:
    """High minus low for every setting and for the unused columns."""
    names = [*settings, *(f"chance {number}" for number in range(1, len(rows[0]) - len(settings) + 1))]
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
