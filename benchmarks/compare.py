"""Compares JCL with other methods over several seeds. Results are added to one JSON file.

    python benchmarks/compare.py cifar.npz --out compare --json benchmarks/results/cifar10-compare.json \\
      --rows jcl moco-v2 --seeds 0 1 2 --epochs 200

Every row and seed missing from the file is trained, probed and added to it, so a comparison can be done in pieces on
several machines. A stopped run in `--out` is resumed. Settings, epochs and images must be those of the file. At the
end a table is printed: mean and standard deviation over the seeds.

Compute is in units of a forward pass: three for a query (forward and backward), one for a key. A local query counts by
its pixels. So JCL with one query and five keys costs as much as MoCo v2 with twice the epochs.

To search settings without the test images, add rows of your own and hold out training images:

    python benchmarks/compare.py cifar.npz --out search --json search.json --held-out --at-once 2 --seeds 0 \\
      --variant lr-0.1 "jcl train.lr=0.1" --variant lr-0.3 "jcl train.lr=0.3"
"""

import argparse
import contextlib
import fcntl
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from comparison import ROWS, Row, results_of, table
from held_out import hold_out
from machine import described
from processes import CommandFailed, Processes, has_checkpoints
from rich.console import Console

from jcl.commands.inputs import open_run_data, with_absolute_paths
from jcl.core.registry import METHODS
from jcl.data.source import fingerprint
from jcl.errors import JclError, RunError
from jcl.evaluate.classification import classification_task
from jcl.runs.folder import RunFolder
from jcl.runs.json_object import describe_differences, read_object, write_object
from jcl.runs.metrics import read_metrics
from jcl.settings.commands import PretrainOptions
from jcl.settings.schema import Settings, affects_results, setting_names
from jcl.settings.values import values_of

PER_RUN = ("data.location", "data.root", "train.seed", "train.device", "recipe")  # may differ within a row
SCALES = "0,1,4,10"  # of the covariance, for `jcl bound`
RESERVED = ("data.location", "method.name", "method.covariance_scale", "train.epochs", "train.seed", "train.device")


def main(words: Sequence[str] | None = None) -> None:
    """Run with these arguments, by default those of the command line."""
    try:
        arguments = parse_arguments(words)
        header = file_header(arguments)
        missing = missing_runs(arguments, header)
        failed = run_all(missing, arguments, header)
        print(table(read_results(arguments.json, header)))
        if arguments.held_out:
            print("Accuracies are on held-out training images, not on the test images.")
    except JclError as error:
        raise SystemExit(f"Error: {error}") from None
    if failed:
        raise SystemExit(f"{len(failed)} of {len(missing)} runs failed: {'; '.join(failed)}")


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="labeled images, as for `jcl pretrain`")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--json", type=Path, required=True, help="file of the results")
    parser.add_argument("--rows", nargs="+", choices=ROWS, metavar="ROW", help=f"default: all of {', '.join(ROWS)}")
    parser.add_argument(
        "--variant", nargs=2, action="append", default=[], metavar=("NAME", "WORDS"), help="a row of your own"
    )
    parser.add_argument("--held-out", action="store_true", help="test on held-out training images instead")
    parser.add_argument("--bound", action="store_true", help="also run `jcl bound`: how much the covariance does")
    parser.add_argument("--at-once", type=int, default=1, help="runs at once; several are not timed")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--recipe", default="cifar10")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.NAME=VALUE", help="for all rows")
    arguments = parser.parse_args(words)
    if reserved := by_name(arguments.set).keys() & set(RESERVED):
        parser.error(f"--set {min(reserved)}: use a row or another option")
    own = {name: Row.of_words(name, words) for name, words in arguments.variant if words.split()[:1]}
    if len(own) < len(arguments.variant) or own.keys() & ROWS.keys():
        parser.error("each --variant needs a name of its own and a method")
    for name, row in own.items():
        fixed = by_name(row.settings).keys() & {*PER_RUN, "method.name", *by_name(arguments.set)}
        if row.method not in METHODS or fixed or not re.fullmatch(r"[\w.-]*\w", name):
            parser.error(f"--variant {name}: invalid name, method or setting in {row.words!r}")
    chosen = arguments.rows if arguments.rows is not None else [] if own else ROWS
    arguments.rows = [*(ROWS[name] for name in chosen), *own.values()]
    if arguments.held_out:
        arguments.data = str(hold_out(Path(arguments.data), arguments.out))
    return arguments


def by_name(texts: Iterable[str]) -> dict[str, str]:
    """Such as {"train.lr": "0.1"} for "train.lr=0.1"."""
    parts = [text.partition("=") for text in texts]
    return {name.strip(): value.strip() for name, _, value in parts}


def file_header(arguments: argparse.Namespace) -> dict[str, Any]:
    """What a results file states about all its rows."""
    settings = row_settings(ROWS["jcl"], 0, arguments)
    task = classification_task(open_run_data(settings, Console(stderr=True)))
    return {
        "recipe": arguments.recipe,
        "epochs": arguments.epochs,
        "set": by_name(arguments.set),
        "images": {"train": fingerprint(task.train), "test": fingerprint(task.test)},
        "rows": {},
    }


def read_results(file: Path, header: dict[str, Any]) -> dict[str, Any]:
    """The results so far; another process may have added some."""
    if not file.exists():
        return header
    found = read_object(file)
    if not isinstance(found.get("rows"), dict) or not found.keys() >= header.keys():
        raise RunError(f"{file} holds no comparison; choose another file with --json.")
    return found


def missing_runs(arguments: argparse.Namespace, header: dict[str, Any]) -> list[tuple[Row, int]]:
    """The runs to do, seed by seed; raises if existing results or runs have other settings or images."""
    found = read_results(arguments.json, header)
    hint = "use the same, or another file with --json."
    if found["images"] != header["images"]:
        raise RunError(f"{arguments.json} has results on other images than {arguments.data}; {hint}")
    before, now = ({name: file[name] for name in ("epochs", "recipe")} | file["set"] for file in (found, header))
    if differences := describe_differences(before, now):
        raise RunError(f"{arguments.json} has results with {differences}; {hint}")
    requested = ROWS | {row.name: row for row in arguments.rows}
    for name, content in found["rows"].items():
        row = requested.get(name) or Row.of_words(name, content["words"])  # a variant of an earlier call
        # A setting that did not exist yet had its default.
        before = {each: content["settings"].get(each, value) for each, value in shared_settings(Settings()).items()}
        now = shared_settings(row_settings(row, 0, arguments))
        before, now = ({each: value for each, value in both.items() if affects_results(each)} for both in (before, now))
        if differences := describe_differences(before, now):
            raise RunError(f"{arguments.json} has results of {name} with {differences}; {hint}")
    runs = dict.fromkeys((row, seed) for seed in arguments.seeds for row in arguments.rows)
    missing = [(row, seed) for row, seed in runs if str(seed) not in results_of(found, row.name)]
    for row, seed in missing:
        require_same_run(run_folder(row, seed, arguments), row_settings(row, seed, arguments))
    return missing


def require_same_run(folder: Path, settings: Settings) -> None:
    """Raise if the folder holds a run with other settings."""
    if not has_checkpoints(folder):
        return
    wanted = {name: value for name, value in values_of(settings, setting_names()).items() if value != "auto"}
    if differences := describe_differences(values_of(RunFolder(folder).settings(), list(wanted)), wanted):
        raise RunError(f"{folder} holds a run with {differences}; remove it, or choose another folder with --out.")


def row_settings(row: Row, seed: int, arguments: argparse.Namespace) -> Settings:
    """The settings that `jcl pretrain` would use."""
    values = {"data": arguments.data, "assignments": (*row.settings, *arguments.set)}
    return with_absolute_paths(PretrainOptions.model_validate(values | run_options(row, seed, arguments)).settings())


def run_options(row: Row, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    options = {"recipe": arguments.recipe, "device": arguments.device, "method": row.method, "seed": seed}
    if "train.epochs" in by_name(row.settings):
        return options
    return options | {"epochs": row.times_epochs * arguments.epochs}


def shared_settings(settings: Settings) -> dict[str, Any]:
    """The settings that all seeds of a row share, by dotted name."""
    return values_of(settings, [name for name in setting_names() if name not in PER_RUN])


def run_folder(row: Row, seed: int, arguments: argparse.Namespace) -> Path:
    folder: Path = arguments.out / f"{row.name}-{seed}"
    return folder


def run_all(missing: list[tuple[Row, int]], arguments: argparse.Namespace, header: dict[str, Any]) -> list[str]:
    """Train and probe, and save each result at once; returns the errors."""
    if missing:  # fails early if the file cannot be written
        with locked(arguments.json):
            write_object(arguments.json, read_results(arguments.json, header))
    processes = Processes()

    def task(row: Row, seed: int) -> None:
        if str(seed) in results_of(read_results(arguments.json, header), row.name):
            return  # another process has added it since
        print(f"{row.name}, seed {seed}", file=sys.stderr, flush=True)
        try:
            result = measure(row, seed, arguments, processes)
        except CommandFailed as error:
            raise CommandFailed(f"{row.name}, seed {seed}: {error}") from None
        save_result(row, seed, result, arguments, header)

    return processes.run_tasks([lambda run=run: task(*run) for run in missing], arguments.at_once)  # type: ignore[misc]


def save_result(
    row: Row, seed: int, result: dict[str, Any], arguments: argparse.Namespace, header: dict[str, Any]
) -> None:
    content = {"words": row.words, "settings": shared_settings(row_settings(row, seed, arguments)), "seeds": {}}
    with locked(arguments.json):
        found = read_results(arguments.json, header)
        found["rows"].setdefault(row.name, content)["seeds"][str(seed)] = result
        write_object(arguments.json, found)


@contextlib.contextmanager
def locked(file: Path) -> Iterator[None]:
    """Lock the folder of the file (the file itself is replaced) between reading and writing, where locks exist."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(file.parent, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def measure(row: Row, seed: int, arguments: argparse.Namespace, processes: Processes) -> dict[str, Any]:
    """Train and probe one run; speed is only reported for runs that were alone on the device."""
    folder = run_folder(row, seed, arguments)
    training, probe = (folder.with_name(f"{folder.name}-{kind}.json") for kind in ("training", "linear"))
    metrics_file, resumed = RunFolder(folder).metrics_file, has_checkpoints(folder)
    before = max((line["step"] for line in read_metrics(metrics_file)), default=0) if metrics_file.exists() else 0
    options = run_options(row, seed, arguments)
    started = time.perf_counter()
    processes.train(folder, training, arguments.data, options, [*row.settings, *arguments.set])
    seconds = time.perf_counter() - started
    processes.jcl(probe, "linear", folder, "--device", arguments.device)
    bound = folder.with_name(f"{folder.name}-bound.json")
    if arguments.bound:
        processes.jcl(bound, "bound", folder, "--scales", SCALES, "--device", arguments.device)
    alone = arguments.at_once == 1
    lines, settings = read_metrics(metrics_file), RunFolder(folder).settings()
    method, views = settings.method, settings.views
    own = [line for line in lines if line["kind"] == "train" and (not resumed or line["step"] > before)]
    return {
        "measured_on": described(arguments.device),
        "seconds": seconds if alone and not resumed else None,
        "seconds_of_first_steps": own[0]["seconds"] if alone and own and not resumed else None,  # with compilation
        # The median ignores the first steps, which are slow because they compile.
        "images_per_second": median(line["images_per_second"] for line in own) if alone and own else None,
        "num_keys": method.num_keys,
        "num_queries": method.num_queries,
        "num_local_queries": method.num_local_queries,
        "local_share": (views.local_size / views.image_size) ** 2,  # of the pixels of a view
        "pretrain": read_object(training),
        "linear": read_object(probe),
        **({"bound": last_checkpoint(read_object(bound))} if arguments.bound else {}),
        "online_knn": {f"{line['epoch']:g}": line["knn_top1"] for line in lines if line["kind"] == "knn"},
    }


def last_checkpoint(found: dict[str, Any]) -> dict[str, Any]:
    """The figures of `jcl bound` without those of earlier checkpoints."""
    return {name: value for name, value in found.items() if not re.search(r"_step\d+$", name)}


if __name__ == "__main__":
    main()
