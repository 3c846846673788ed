"""JCL beside the methods it is compared with: several seeds each, in a file that grows from call to call.

    python benchmarks/compare.py cifar.npz --out compare --json benchmarks/results/cifar10-compare.json \\
      --rows jcl moco-v2 --seeds 0 1 2 --epochs 200

Every row and seed that the file does not have yet is trained and probed and put into the file at once; so a comparison
may be made in many pieces, on machines that keep nothing but this file. A run that was stopped in the middle in `--out`
is resumed. Settings, epochs and images of the file's rows have to be those that are asked for. JCL encodes an image's
query forward and backward (three units) and M' keys forward (one each), MoCo one key, so MoCo with twice the epochs
costs what JCL with one query and five keys does; keys with gradients cost three units as well. In the end the table is
printed, without training where all is there: mean and standard deviation over the seeds (n - 1).

To search before a comparison is made, give rows of your own and leave the test images alone:

    python benchmarks/compare.py cifar.npz --out search --json search.json --held-out --at-once 2 --seeds 0 \\
      --variant lr-0.1 "jcl train.lr=0.1" --variant lr-0.3 "jcl train.lr=0.3"
"""

import argparse
import contextlib
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from comparison_rows import LEADING, ROWS, Row
from comparison_table import seeds_of, table
from held_out import HELD_OUT, hold_out
from machine import described
from processes import Commands, Processes, begun, jcl_command, last_line, training_command
from rich.console import Console

from jcl.cli.run_options import given_values, run_settings
from jcl.commands.run_data import open_run_data, with_absolute_location
from jcl.core.method import METHODS
from jcl.data.source import fingerprint
from jcl.errors import JclError, RunError
from jcl.evaluate.classification import classification_task
from jcl.runs.folder import RunFolder
from jcl.runs.json_object import named_differences, read_object, write_object
from jcl.runs.lock import try_lock
from jcl.runs.metrics import read_metrics
from jcl.settings.schema import Settings, setting_names, values_of

DECIDED = (  # by the rows, or by options of their own
    "data.location",
    "method.name",
    "method.covariance_scale",
    "train.epochs",
    "train.seed",
    "train.device",
)
OF_ONE_RUN = ("data.location", "data.root", "train.seed", "train.device", "recipe")  # may differ within a row


PARTS = {"words": str, "settings": dict, "seeds": dict}  # of a row in the file
PARTS_OF_RESULT = {"measured_on": dict, "num_keys": int, "num_queries": int, "pretrain": dict, "linear": dict}


class CommandFailed(Exception):
    """A command did not do what it was to do; the sentence says how it ended."""


def main() -> None:
    arguments = parse_arguments()
    try:
        header = header_of(arguments)
        missing = missing_runs(arguments, header)
        failed = run_all(missing, arguments, header)
        print(table(kept(arguments.json, header)))
        if arguments.held_out:
            print(f"Accuracies are of {HELD_OUT:,} training images that were held out, not of the test images.")
    except JclError as error:
        raise SystemExit(f"Error: {error}") from None
    if failed:
        raise SystemExit(f"{len(failed)} of {len(missing)} runs failed: {'; '.join(failed)}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="labelled images to train and to test with, as `jcl pretrain` takes them")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--json", type=Path, required=True, help="the results, also of earlier calls")
    parser.add_argument("--rows", nargs="+", choices=ROWS, metavar="ROW", help=f"all unless given: {', '.join(ROWS)}")
    parser.add_argument(
        "--variant", nargs=2, action="append", default=[], metavar=("NAME", "WORDS"), help="a row of your own"
    )
    parser.add_argument("--held-out", action="store_true", help=f"measure on {HELD_OUT:,} training images instead")
    parser.add_argument("--at-once", type=int, default=1, help="runs that share the device, and so are not timed")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--recipe", default="cifar10")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.NAME=VALUE", help="the same in all rows")
    arguments = parser.parse_args()
    if arguments.at_once < 1:
        parser.error(f"--at-once is {arguments.at_once}; at least one run goes on at a time")
    for name in named(arguments.set):
        if name in DECIDED:
            parser.error(f"--set {name}: that is for the rows to say, or for an option of its own")
    if arguments.out.exists() and not arguments.out.is_dir():
        parser.error(f"--out {arguments.out}: that is a file; runs need a folder")
    own = own_rows(arguments, parser)
    chosen = arguments.rows if arguments.rows is not None else [] if own else ROWS
    arguments.rows = [*(ROWS[name] for name in chosen), *own]
    if arguments.held_out:
        arguments.data = str(hold_out(Path(arguments.data), arguments.out / "held-out.npz"))
    return arguments


def own_rows(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> list[Row]:
    """The variants; what would be another run than its words say is refused."""
    rows: dict[str, Row] = {}
    for name, words in arguments.variant:
        if name in ROWS or name in rows or not re.fullmatch(r"[\w.-]*\w", name):
            parser.error(f"--variant {name}: choose a name of letters, digits, - and . that no other row has")
        if words.partition(" ")[0] not in METHODS:
            parser.error(f"--variant {name}: {words!r} does not begin with a method ({', '.join(METHODS)})")
        rows[name] = Row.of_words(name, words)
        for setting in named(rows[name].settings):
            if setting in (*OF_ONE_RUN, "method.name"):
                parser.error(f"--variant {name}: {setting} is for an option of its own, or the first word, to say")
            if setting in named(arguments.set):
                parser.error(f"--variant {name}: {setting} is in --set too, which holds in all rows")
    return list(rows.values())


def named(texts: Iterable[str]) -> dict[str, str]:
    """`train.lr=0.1` and so on by names."""
    parts = [text.partition("=") for text in texts]
    return {name.strip(): value.strip() for name, _, value in parts}


def header_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """What a file of results says of all its rows."""
    settings = settings_of(ROWS[LEADING], 0, arguments)
    task = classification_task(open_run_data(settings, Console(stderr=True)))
    return {
        "recipe": arguments.recipe,
        "epochs": arguments.epochs,
        "set": named(arguments.set),
        "images": {"train": fingerprint(task.train), "test": fingerprint(task.test)},
        "rows": {},
    }


def kept(file: Path, header: dict[str, Any]) -> dict[str, Any]:
    """The results so far; read anew each time, since another process may have added some."""
    if not file.exists():
        return header
    try:
        found = read_object(file)
    except RunError as error:  # it may hold days of work, so it must not be thrown away lightly
        raise RunError(
            f"{str(error).partition(';')[0].rstrip('.')}; restore it from a copy, or begin another with --json."
        ) from None
    if not is_comparison(found, header):
        raise RunError(f"{file} holds no comparison; choose another file with --json.")
    return found


def is_comparison(found: dict[str, Any], header: dict[str, Any]) -> bool:
    """Whether a file has the parts that all of them have."""
    if any(not isinstance(found.get(name), type(value)) for name, value in header.items()):
        return False
    return all(
        has_parts(row, PARTS) and all(has_parts(result, PARTS_OF_RESULT) for result in row["seeds"].values())
        for row in found["rows"].values()
    )


def has_parts(value: Any, parts: Mapping[str, type]) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(part), kind) for part, kind in parts.items())


def missing_runs(arguments: argparse.Namespace, header: dict[str, Any]) -> list[tuple[Row, int]]:
    """The runs to do, seed by seed, so that rows can be compared early; what does not fit together is refused."""
    found = kept(arguments.json, header)
    refuse_others(found, header, arguments)
    asked = dict.fromkeys((row, seed) for seed in arguments.seeds for row in arguments.rows)
    missing = [(row, seed) for row, seed in asked if str(seed) not in seeds_of(found, row.name)]
    for row, seed in missing:
        refuse_other_run(run_folder(row, seed, arguments), settings_of(row, seed, arguments))
    return missing


def refuse_others(found: dict[str, Any], header: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Results of other settings, epochs or images have no place in the same table."""
    way_out = "ask for the same, or begin another file with --json."
    if found["images"] != header["images"]:
        raise RunError(f"{arguments.json} has results on other images than those of {arguments.data}; {way_out}")
    before, now = ({name: file[name] for name in ("epochs", "recipe")} | file["set"] for file in (found, header))
    if other := named_differences(before, now):
        raise RunError(f"{arguments.json} has results with {other}; {way_out}")
    asked = ROWS | {row.name: row for row in arguments.rows}
    for name, content in found["rows"].items():
        row = asked.get(name) or Row.of_words(name, content["words"])  # a variant that is not asked for this time
        now = of_the_row(settings_of(row, 0, arguments))
        # A setting that there was not yet had what is usual.
        before = {setting: content["settings"].get(setting, value) for setting, value in of_the_row(Settings()).items()}
        if other := named_differences(before, now):
            raise RunError(f"{arguments.json} has results of {name} with {other}; {way_out}")


def refuse_other_run(folder: Path, settings: Settings) -> None:
    """A run that was begun otherwise must not be gone on with under this name."""
    if not begun(folder):
        return
    asked = {name: value for name, value in by_name(settings).items() if value != "auto"}
    found = by_name(RunFolder(folder).settings())
    if other := named_differences({name: found[name] for name in asked}, asked):
        raise RunError(f"{folder} holds a run with {other}; remove it, or choose another folder with --out.")


def settings_of(row: Row, seed: int, arguments: argparse.Namespace) -> Settings:
    """As `jcl pretrain` makes them of the same words."""
    parameters = {"data": arguments.data, **options_of(row, seed, arguments)}
    values = given_values(parameters, [*row.settings, *arguments.set])
    return with_absolute_location(run_settings(arguments.recipe, row.method, values))


def options_of(row: Row, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    return {"seed": seed, "epochs": row.times_epochs * arguments.epochs, "device": arguments.device}


def by_name(settings: Settings) -> dict[str, Any]:
    """All values by their dotted names."""
    return values_of(settings, setting_names())


def of_the_row(settings: Settings) -> dict[str, Any]:
    return {name: value for name, value in by_name(settings).items() if name not in OF_ONE_RUN}


def run_folder(row: Row, seed: int, arguments: argparse.Namespace) -> Path:
    folder: Path = arguments.out / f"{row.name}-{seed}"
    return folder


def run_all(missing: list[tuple[Row, int]], arguments: argparse.Namespace, header: dict[str, Any]) -> list[str]:
    """Train and probe, and keep each result as soon as it is there; gives what failed, in sentences."""
    if missing:  # a file that cannot be written is told before anything is trained
        with held(arguments.json):
            write_object(arguments.json, kept(arguments.json, header))
    failed: list[str] = []

    def told(row: Row, seed: int) -> Commands[None]:
        print(f"{row.name}, seed {seed}", file=sys.stderr, flush=True)
        try:
            keep(row, seed, (yield from measured(row, seed, arguments, processes)), arguments, header)
        except (CommandFailed, JclError) as failure:
            failed.append(f"{row.name}, seed {seed}: {failure}")
            print(failed[-1], file=sys.stderr, flush=True)

    with Processes() as processes:
        processes.work_through((told(row, seed) for row, seed in missing), arguments.at_once)
    return failed


def keep(row: Row, seed: int, result: dict[str, Any], arguments: argparse.Namespace, header: dict[str, Any]) -> None:
    """Add a result to the file."""
    content = {"words": row.words, "settings": of_the_row(settings_of(row, seed, arguments)), "seeds": {}}
    with held(arguments.json):
        found = kept(arguments.json, header)
        found["rows"].setdefault(row.name, content)["seeds"][str(seed)] = result
        write_object(arguments.json, found)


@contextlib.contextmanager
def held(file: Path) -> Iterator[None]:
    """Nobody else adds a result between reading and writing: it would be lost.

    The lock is on the folder, for the file is another one after each writing. Where there are no locks there is none.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(file.parent, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            while not try_lock(descriptor):
                time.sleep(0.01)
        yield


def measured(row: Row, seed: int, arguments: argparse.Namespace, processes: Processes) -> Commands[dict[str, Any]]:
    """All figures of one run; how fast it was is only known of what was trained here, alone on the device."""
    folder = run_folder(row, seed, arguments)
    resumed = begun(folder)
    before = last_step(folder) if resumed else 0
    training = folder.with_name(f"{folder.name}-training.json")
    probe = folder.with_name(f"{folder.name}-linear.json")
    options = {"recipe": arguments.recipe, "method": row.method, **options_of(row, seed, arguments)}
    words = training_command(folder, training, arguments.data, options, [*row.settings, *arguments.set])
    seconds = yield from run(words, training.with_suffix(".txt"), processes)
    words = jcl_command("linear", folder, "--device", arguments.device, "--json", probe)
    yield from run(words, probe.with_suffix(".txt"), processes)
    alone = arguments.at_once == 1
    lines, method = read_metrics(RunFolder(folder).metrics_file), RunFolder(folder).settings().method
    own = [line for line in lines if line["kind"] == "train" and line["step"] > before]
    paces = [line["images_per_second"] for line in own]
    return {
        "measured_on": described(arguments.device),
        "seconds": seconds if alone and not resumed else None,
        "seconds_of_first_steps": own[0]["seconds"] if alone and own and not resumed else None,  # compiling included
        # The median leaves out what is compiled in the first steps, which depends on what the machine did before.
        "images_per_second": median(paces) if alone and paces else None,
        "num_keys": method.num_keys,
        "num_queries": method.num_queries,
        "pretrain": read_object(training),
        "linear": read_object(probe),
        "online_knn": {f"{line['epoch']:g}": line["knn_top1"] for line in lines if line["kind"] == "knn"},
    }


def last_step(folder: Path) -> int:
    """How far a run has got, as its metrics say."""
    file = RunFolder(folder).metrics_file
    return max((line["step"] for line in read_metrics(file)), default=0) if file.exists() else 0


def run(words: list[str], log: Path, processes: Processes) -> Commands[float]:
    """Start a command and look at how it ended; returns the seconds it took."""
    started = time.perf_counter()
    process = processes.start(words, log)
    yield process
    if process.returncode != 0:
        raise CommandFailed(f"{log} ends with: {last_line(log)}")
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
