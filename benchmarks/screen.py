"""Which settings matter: many varied together in few runs, judged on held-out training images.

    python benchmarks/screen.py cifar.npz --epochs 24 --at-once 4 --out screen-jcl \\
      --vary train.lr=0.1,0.3 --vary method.temperature=0.15,0.25 --vary views.min_scale=0.1,0.25

Every setting has a low and a high value. Eight runs for up to seven settings, or twelve for up to eleven, after
Plackett and Burman (Biometrika 33, 1946), set each of them high in half of the runs and low in the other half, balanced
against all others, so that every run tells about every setting: the effect of one is the mean of its high runs minus
that of its low ones. Columns of the design that are left over stand for nothing and show what chance alone does. 5,000
images of the training set, the same in every run, are held out and classified by kNN, with `--linear` also by a linear
probe; the test set is not opened. What was measured already in `--out` is kept (its files `*.json` suffice for that),
and a run that was stopped halfway is resumed, so a screening goes on when it is started again.
"""

import argparse
import contextlib
import json
from pathlib import Path
from statistics import fmean
from typing import Any

from held_out import hold_out
from machine import save
from processes import Commands, Processes, jcl_command, last_line, training_command

from jcl.cli.run_options import given_values, run_settings
from jcl.errors import JclError

FIRST_ROWS = ((1, 1, 1, 0, 1, 0, 0), (1, 1, 0, 1, 1, 1, 0, 0, 0, 1, 0))  # of the designs of 8 and 12 runs
Levels = dict[str, tuple[Any, Any]]  # low and high value of each setting


def main() -> None:
    arguments = parse_arguments()
    rows = design(len(arguments.vary))
    try:
        for row in rows:
            check(values_of(row, arguments.vary), arguments)
    except JclError as error:
        raise SystemExit(f"Error: {error}") from None
    split = prepare(arguments)
    run_all(rows, split, arguments)
    figures = report(rows, arguments)
    save(figures, arguments.json, arguments.device)
    failed = [file for file in result_files(len(rows), arguments) if not file.exists()]
    if failed:
        log = failed[0].with_suffix(".txt")
        raise SystemExit(f"{len(failed)} of {len(rows)} runs failed; {log} ends with: {last_line(log)}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="npz with x_train and y_train")
    parser.add_argument("--recipe", default="cifar10")
    parser.add_argument("--method", default="jcl")
    parser.add_argument("--epochs", type=int, default=24)
    parser.add_argument("--at-once", type=int, default=1, help="runs that share the GPU")
    parser.add_argument("--linear", action="store_true", help="also train a linear classifier on each run's features")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--vary", type=varied, action="append", default=[], metavar="SECTION.NAME=LOW,HIGH")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.NAME=VALUE", help="the same in all runs")
    arguments = parser.parse_args()
    if arguments.at_once < 1:
        parser.error(f"--at-once is {arguments.at_once}; at least one run goes on at a time")
    names = [name for name, _ in arguments.vary]
    if len(set(names)) < len(names):
        parser.error(f"--vary names a setting twice: {', '.join(names)}")
    if not 1 <= len(names) <= len(FIRST_ROWS[-1]):
        parser.error(f"{len(names)} settings to --vary; choose from 1 to {len(FIRST_ROWS[-1])}")
    arguments.vary = dict(arguments.vary)
    return arguments


def varied(text: str) -> tuple[str, tuple[Any, Any]]:
    """`train.lr=0.1,0.3` as a name and two values."""
    name, _, values = text.partition("=")
    levels = [plain(value.strip()) for value in values.split(",")]
    if not name or len(levels) != 2 or "" in levels or levels[0] == levels[1]:
        raise argparse.ArgumentTypeError(f"{text!r} is not a setting with a low and a high value, as train.lr=0.1,0.3")
    return name, (levels[0], levels[1])


def plain(text: str) -> int | float | str:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def prepare(arguments: argparse.Namespace) -> Path:
    """The folder with the split in it; results of another screening in it would be taken for this one's."""
    asked = {name: getattr(arguments, name) for name in ("recipe", "method", "epochs", "set")}
    asked["data"] = str(arguments.data.resolve())
    asked["vary"] = {name: list(levels) for name, levels in arguments.vary.items()}
    note = arguments.out / "screen.json"
    if note.exists() and (found := json.loads(note.read_text(encoding="utf-8"))) != asked:
        raise SystemExit(f"{arguments.out} holds another screening, {found}; choose another folder with --out.")
    split = hold_out(arguments.data, arguments.out / "held-out.npz")
    note.write_text(json.dumps(asked), encoding="utf-8")
    return split


def design(settings: int) -> list[tuple[int, ...]]:
    """Rows of 0 (low) and 1 (high), one a run; the first columns are the settings', the others are chance's."""
    first = next(row for row in FIRST_ROWS if len(row) >= settings)
    shifted = [first[-shift:] + first[:-shift] for shift in range(len(first))]
    return [*shifted, (0,) * len(first)]


def values_of(row: tuple[int, ...], vary: Levels) -> dict[str, Any]:
    return {name: levels[level] for (name, levels), level in zip(vary.items(), row, strict=False)}


def check(values: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Settings that do not work are told before anything is trained or written."""
    given = given_values({"data": str(arguments.data)}, all_settings(values, arguments))
    run_settings(arguments.recipe, arguments.method, given)


def all_settings(values: dict[str, Any], arguments: argparse.Namespace) -> list[str]:
    values = values | {"record.knn_every": 0, "record.report": False, "record.tensorboard": False}
    return [*arguments.set, *(f"{name}={value}" for name, value in values.items())]


def run_all(rows: list[tuple[int, ...]], split: Path, arguments: argparse.Namespace) -> None:
    with Processes() as processes:
        runs = (measured(number, row, split, arguments, processes) for number, row in enumerate(rows))
        processes.work_through(runs, arguments.at_once)


def measured(
    number: int, row: tuple[int, ...], split: Path, arguments: argparse.Namespace, processes: Processes
) -> Commands[None]:
    """Train a run and probe it at once, for a machine may be lost before the others are done."""
    result, probe = result_file(arguments, number), probe_file(arguments, number)
    if not result.exists():
        words = command(number, values_of(row, arguments.vary), split, arguments)
        yield processes.start(words, result.with_suffix(".txt"))
    if arguments.linear and result.exists() and not probe.exists():
        words = jcl_command("linear", arguments.out / f"run-{number}", "--device", arguments.device, "--json", probe)
        yield processes.start(words, probe.with_suffix(".txt"))


def command(number: int, values: dict[str, Any], split: Path, arguments: argparse.Namespace) -> list[str]:
    """What starts a run, or goes on with one that got as far as a checkpoint."""
    options = {name: getattr(arguments, name) for name in ("recipe", "method", "epochs", "device")}
    folder, result = arguments.out / f"run-{number}", result_file(arguments, number)
    return training_command(folder, result, split, options, all_settings(values, arguments))


def result_file(arguments: argparse.Namespace, number: int) -> Path:
    path: Path = arguments.out / f"run-{number}.json"
    return path


def probe_file(arguments: argparse.Namespace, number: int) -> Path:
    path: Path = arguments.out / f"run-{number}-linear.json"
    return path


def result_files(runs: int, arguments: argparse.Namespace) -> list[Path]:
    """What a screening that has ended well has written."""
    kinds = (result_file, probe_file) if arguments.linear else (result_file,)
    return [kind(arguments, number) for kind in kinds for number in range(runs)]


def report(rows: list[tuple[int, ...]], arguments: argparse.Namespace) -> dict[str, Any]:
    """Print the runs, best first, and the effects; a run that failed leaves the effects out."""
    runs = [found for number, row in enumerate(rows) if (found := figures_of(number, row, arguments))]
    for run in sorted(runs, key=lambda run: -run["knn_top1"]):
        values = "  ".join(f"{name.rpartition('.')[2]}={value}" for name, value in run["values"].items())
        linear = f"linear {run['linear_top1']:5.2f} %  " if "linear_top1" in run else ""
        print(f"{run['knn_top1']:6.2f} %  {linear}{values}")
    figures: dict[str, Any] = {"method": arguments.method, "epochs": arguments.epochs}
    accuracies = {"effects": "knn_top1"} | ({"linear_effects": "linear_top1"} if arguments.linear else {})
    for key, accuracy in accuracies.items():
        known = [run[accuracy] for run in runs if accuracy in run]
        figures[key] = effects_of(rows, known, list(arguments.vary)) if len(known) == len(rows) else {}
        print_effects(figures[key], accuracy, arguments.vary)
    return {**figures, "runs": runs}


def figures_of(number: int, row: tuple[int, ...], arguments: argparse.Namespace) -> dict[str, Any]:
    """What is known of a run; nothing if it failed."""
    if not result_file(arguments, number).exists():
        return {}
    found = json.loads(result_file(arguments, number).read_text(encoding="utf-8"))
    kept = {name: found[name] for name in ("knn_top1", "loss", "seconds")}
    if arguments.linear and probe_file(arguments, number).exists():
        kept["linear_top1"] = json.loads(probe_file(arguments, number).read_text(encoding="utf-8"))["linear_top1"]
    return {"run": number, "values": values_of(row, arguments.vary), **kept}


def print_effects(effects: dict[str, float], accuracy: str, vary: Levels) -> None:
    for name, effect in effects.items():
        levels = vary.get(name)
        print(f"{effect:+6.2f}  {accuracy}  {name}" + (f" from {levels[0]} to {levels[1]}" if levels else ""))


def effects_of(rows: list[tuple[int, ...]], accuracies: list[float], settings: list[str]) -> dict[str, float]:
    """High minus low for every setting, and for the columns that stand for nothing."""
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
