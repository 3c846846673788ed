"""The comparison of methods: a results file that grows, and the table and plot made of it."""

import importlib
import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jcl.settings.resolve import resolve
from jcl.settings.resolved import DataFacts
from jcl.settings.values import settings_text
from launch_tools import wait_until
from small_runs import drawn_pixels

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SMALL = (
    "views.image_size=16 model.embedding_dim=16 method.queue_size=64 train.batch_size=8 record.log_every=4 "
    "record.knn_every=5 record.knn_k=5 record.report=false record.tensorboard=false"
)


@pytest.fixture
def compare(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("compare")


@pytest.fixture
def words(npz, tmp_path):
    """A small comparison on the command line."""
    options = ["--recipe", "demo", "--device", "cpu", "--epochs", "10", "--seeds", "0"]
    options += [part for pair in SMALL.split() for part in ("--set", pair)]
    return [str(npz), "--out", str(tmp_path / "out"), "--json", str(tmp_path / "found.json"), *options]


@pytest.fixture
def compared(compare, monkeypatch, capsys):
    """Runs the benchmark in this process; returns the exit code or message and the output."""

    def run(words: list[str], *more: str) -> tuple[object, str]:
        monkeypatch.setattr(sys, "argv", ["compare.py", *words, *more])
        try:
            compare.main()
            code: object = 0
        except SystemExit as stop:
            code = stop.code
        return code, capsys.readouterr().out

    return run


@pytest.fixture
def nothing_runs(compare, monkeypatch):
    monkeypatch.setattr(compare.Processes, "run", lambda *_: pytest.fail("a process was started"))


def result(knn: float, linear: float, *, keys: int = 1, epochs: int = 20, seconds: float | None = 10.0) -> dict:
    """Invented results of a run."""
    return {
        "measured_on": {"gpu": "H200", "cpu": "16 cores", "torch": "2.11", "date": f"2026-11-{epochs}"},
        "seconds": seconds,
        "images_per_second": 1000.0 * keys,
        "num_keys": keys,
        "num_queries": 1,
        "pretrain": {"knn_top1": knn, "epochs": epochs, "peak_memory_bytes": keys * 2**30},
        "linear": {"linear_top1": linear},
        "online_knn": {"20": knn},
    }


@pytest.fixture
def file(compare, words, tmp_path, monkeypatch):
    """A results file with JCL, seed 0."""
    monkeypatch.setattr(sys, "argv", ["compare.py", *words])
    arguments = compare.parse_arguments()
    found = compare.file_header(arguments)
    settings = compare.shared_settings(compare.row_settings(compare.ROWS["jcl"], 0, arguments))
    del settings["method.num_queries"]  # as if it had been added since
    settings["record.log_every"] = 20  # has no effect on results
    found["rows"]["jcl"] = {"words": "JCL", "settings": settings, "seeds": {"0": result(80.0, 85.0, keys=5)}}
    (tmp_path / "found.json").write_text(json.dumps(found))
    return tmp_path / "found.json"


@pytest.mark.faults  # for its length
def test_a_stopped_comparison_keeps_its_results_and_resumes(file, words, compared, tmp_path):
    folder, log = tmp_path / "out/moco-v2-twice-0", tmp_path / "out/moco-v2-twice-0-training.txt"
    metrics, first = folder / "metrics.jsonl", json.loads(file.read_text())["rows"]["jcl"]
    words = [*words, "--rows", "jcl", "moco-v2-twice"]
    with subprocess.Popen([sys.executable, str(BENCHMARKS / "compare.py"), *words]) as process:
        wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 75
    assert list(json.loads(file.read_text())["rows"]) == ["jcl"]
    code, printed = compared(words)
    found = json.loads(file.read_text())["rows"]
    assert code == 0 and "Resuming from" in log.read_text() and found["jcl"] == first
    second = found["moco-v2-twice"]["seeds"]["0"]
    assert second["seconds"] is None and second["pretrain"]["epochs"] == 20  # resumed, so not timed
    assert list(second["online_knn"]) == ["0", "5", "10", "15", "20"]
    before = file.read_bytes()
    assert compared(words) == (0, printed) and file.read_bytes() == before


def test_a_result_that_another_process_has_added_meanwhile_is_kept(file, words, compare, nothing_runs):
    arguments, before = compare.parse_arguments(words), file.read_bytes()
    assert compare.run_all([(compare.ROWS["jcl"], 0)], arguments, compare.file_header(arguments)) == []
    assert json.loads(file.read_bytes()) == json.loads(before)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ("--epochs 11", "epochs"),
        ("--recipe folder", "recipe"),
        ("--set train.weight_decay=0.1", "train.weight_decay"),
        ("--set train.epochs=3", 2),
        ("--variant jcl jcl", 2),
        ("--variant a/b jcl", 2),
        ("--variant mine moco-v9", 2),
    ],
)
def test_other_settings_are_not_mixed_in(file, words, compared, nothing_runs, more, named):
    before = file.read_bytes()
    code, printed = compared(words, "--rows", "multi-key", *more.split())
    assert code == named if isinstance(named, int) else named in code
    assert printed == "" and file.read_bytes() == before


def test_images_are_recognized_by_their_content(file, words, compared, nothing_runs, tmp_path, npz):
    elsewhere = tmp_path / "elsewhere.npz"
    elsewhere.write_bytes(npz.read_bytes())
    code, printed = compared([str(elsewhere), *words[1:]], "--rows", "jcl")
    assert code == 0 and "80.00 %" in printed
    np.savez(elsewhere, x_train=drawn_pixels(12, seed=5), y_train=np.arange(12) % 2)
    assert "other images" in compared([str(elsewhere), *words[1:]], "--rows", "jcl")[0]


def test_a_run_with_other_settings_is_not_resumed(compare, words, compared, nothing_runs, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["compare.py", *words, "--epochs", "11"])
    other = compare.row_settings(compare.ROWS["jcl"], 0, compare.parse_arguments())
    resolved, _ = resolve(other, DataFacts(images=34, short_side=16, decoded=True))
    (tmp_path / "out/jcl-0/checkpoints").mkdir(parents=True)
    (tmp_path / "out/jcl-0/settings.yaml").write_text(settings_text(resolved))
    assert "train.epochs" in compared(words, "--rows", "jcl")[0]


@pytest.mark.parametrize("content", ['{"runs": []}', '{"recipe": "de'])
def test_another_file_is_left_alone(words, compared, nothing_runs, tmp_path, content):
    (tmp_path / "found.json").write_text(content)
    assert "found.json" in compared(words)[0] and (tmp_path / "found.json").read_text() == content


def test_results_are_saved_as_they_come_and_failures_reported(compare, words, compared, tmp_path, monkeypatch):
    def measure(row, *_):
        if row.name == "jcl":
            raise compare.CommandFailed("no good")
        return result(80.0, 85.0)

    monkeypatch.setattr(compare, "measure", measure)
    code, printed = compared(words, "--at-once", "3")
    assert "jcl, seed 0: no good" in code
    assert sorted(json.loads((tmp_path / "found.json").read_text())["rows"]) == sorted(compare.ROWS.keys() - {"jcl"})
    assert printed.count("| 80.00 % | 85.00 % |") == len(compare.ROWS) - 1


def test_table_pairs_seeds_and_has_a_plot(compare, tmp_path, monkeypatch):
    seeds = {
        "moco-v2": {"2": result(80, 90), "0": result(77, 90, seconds=13.0), "5": result(10, 10)},
        "jcl": {"0": result(80, 90, keys=5), "1": result(82, 91, keys=5), "2": result(87, 92, keys=5, seconds=None)},
    }
    rows = {name: {"words": compare.ROWS[name].words, "settings": {}, "seeds": own} for name, own in seeds.items()}
    found = {"recipe": "cifar10", "epochs": 20, "rows": rows}
    jcl, moco, *_ = compare.table(found).splitlines()[2:]
    assert "| 83.00 ± 3.61 % | 91.00 ± 1.00 % |" in jcl and "| 5.00 GiB | 2.00 | 3 |" in jcl
    assert "| 55.67 ± 39.58 % | 63.33 ± 46.19 % | 11 s |" in moco and "| 1.00 GiB | 1.00 | 3 |" in moco
    assert "kNN +5.00 ± 2.83, linear +1.00 ± 1.41 (paired by seed: 0, 2)" in compare.table(found)
    (tmp_path / "found.json").write_text(json.dumps(found))
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "found.json"), "-o", str(tmp_path / "figure.png")])
    importlib.import_module("comparison_figure").main()
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("file", sorted((BENCHMARKS / "results").glob("*compare.json")), ids=lambda file: file.name)
def test_kept_results_are_readable(compare, file):
    assert "| JCL" in compare.table(json.loads(file.read_text()))


@pytest.mark.parametrize(
    ("name", "row", "options"),
    [
        ("cifar10", "jcl", []),
        ("cifar10-two-queries", "jcl-two-queries", ["--set", "method.num_local_queries=0"]),
    ],
)
def test_kept_results_can_be_continued_with_the_settings_of_today(compare, tmp_path, name, row, options):
    file = BENCHMARKS / f"results/{name}-compare.json"
    words = ["cifar.npz", "--out", str(tmp_path), "--json", str(file), "--rows", row, "--seeds", "0", "9", *options]
    arguments = compare.parse_arguments(words)
    header = json.loads(file.read_text()) | {"rows": {}, "set": compare.by_name(arguments.set)}
    assert [(row.name, seed) for row, seed in compare.missing_runs(arguments, header)] == [(row, 9)]


@pytest.mark.parametrize(
    "name", ["cifar10-compare", "cifar10-two-queries-compare", "caltech101-compare", "tiny100-covariance"]
)
def test_committed_results_can_be_added_to(compare, name, tmp_path):
    """A setting that has become "auto" since is to be changed in the file, if the value is the same."""
    file = BENCHMARKS / f"results/{name}.json"
    found = json.loads(file.read_text())
    words = ["x.npz", "--out", str(tmp_path), "--json", str(file), "--recipe", found["recipe"], "--seeds", "7"]
    words += ["--epochs", str(found["epochs"])]
    words += [part for setting in found["set"].items() for part in ("--set", "=".join(setting))]
    assert compare.missing_runs(compare.parse_arguments(words), found | {"rows": {}})
