"""The comparison of methods: a file of results that grows, and the table made of it."""

import importlib
import json
import signal
import subprocess
import sys
import threading
import time
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest

from jcl.settings.schema import settings_text
from small_runs import drawn_pixels

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SMALL = {
    "views.image_size": 16,
    "model.embedding_dim": 16,
    "method.queue_size": 64,
    "train.batch_size": 8,
    "record.log_every": 4,
    "record.knn_every": 5,
    "record.knn_k": 5,
    "record.report": "false",
    "record.tensorboard": "false",
}
PATIENCE = 120  # seconds


@pytest.fixture
def compare(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("compare")


@pytest.fixture
def words(npz, tmp_path):
    """A small comparison on the command line."""
    options = ["--recipe", "demo", "--device", "cpu", "--epochs", "10", "--seeds", "0"]
    options += [part for name, value in SMALL.items() for part in ("--set", f"{name}={value}")]
    return [str(npz), "--out", str(tmp_path / "out"), "--json", str(tmp_path / "found.json"), *options]


@pytest.fixture
def compared(compare, monkeypatch, capsys):
    """Runs the benchmark in this process; gives what it ended with and what it printed."""

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
    monkeypatch.setattr(compare.Processes, "start", lambda *_: pytest.fail("a process was started"))


def result(knn: float, linear: float, *, keys: int = 1, epochs: int = 20, seconds: float | None = 10.0) -> dict:
    """Figures of a run, invented."""
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


def row_of(seeds: dict, words: str = "JCL", settings: dict | None = None) -> dict:
    return {"words": words, "settings": settings or {}, "seeds": seeds}


@pytest.mark.faults  # for its length: seven processes start
def test_asked_to_end_it_keeps_what_it_measured_and_goes_on_there(
    measured_before, words, compared, compare, tmp_path, monkeypatch
):
    folder, log = tmp_path / "out/moco-v2-twice-0", tmp_path / "out/moco-v2-twice-0-training.txt"
    first = json.loads(measured_before.read_text())["rows"]
    words = [*words, "--rows", "jcl", "moco-v2-twice"]
    with subprocess.Popen([sys.executable, str(BENCHMARKS / "compare.py"), *words]) as process:
        wait_for_metrics(folder, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 75
    assert json.loads(measured_before.read_text())["rows"] == first
    assert "SIGTERM received: stopped after step" in log.read_text()

    code, printed = compared(words)
    assert code == 0
    assert "Resuming from" in log.read_text()
    found = json.loads(measured_before.read_text())["rows"]
    assert found["jcl"] == first["jcl"]
    second = found["moco-v2-twice"]["seeds"]["0"]
    assert second["seconds"] is None and second["seconds_of_first_steps"] is None  # for it was resumed
    assert second["pretrain"]["epochs"] == 20
    assert (second["num_keys"], second["num_queries"]) == (1, 1)
    assert list(second["online_knn"]) == ["5", "10", "15", "20"]
    assert second["online_knn"]["20"] == second["pretrain"]["knn_top1"]
    assert second["linear"]["protocol"] == "fast" and {"lr", "weight_decay", "linear_top1"} <= second["linear"].keys()
    assert "compare.py" in second["measured_on"]["command"]
    assert found["moco-v2-twice"]["settings"]["model.head_width"] == 2048
    assert found["moco-v2-twice"]["settings"]["method.queue_size"] == 64  # what --set says holds in all rows
    assert "| not known |" in printed and "JCL minus MoCo v2, twice the epochs" in printed

    monkeypatch.setattr(compare.Processes, "start", lambda *_: pytest.fail("a process was started"))
    before = measured_before.read_bytes()
    assert compared(words) == (0, printed)
    assert measured_before.read_bytes() == before


def wait_for_metrics(folder: Path, process: subprocess.Popen) -> None:
    """Until the first steps of a run are written down."""
    file, end = folder / "metrics.jsonl", time.monotonic() + PATIENCE
    while not (file.exists() and file.stat().st_size):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.02)


def test_a_run_that_fails_is_told_and_others_go_on(compare, words, compared, tmp_path, monkeypatch):
    file, log = tmp_path / "found.json", tmp_path / "out/jcl-0-training.txt"
    failing = [sys.executable, "-c", "print('Reading.'); raise SystemExit('Error: no good.')"]
    monkeypatch.setattr(compare, "training_command", lambda *_: failing)
    real = compare.measured

    def measured(row, *rest):
        if row.name != "moco-v2":
            return (yield from real(row, *rest))
        return result(80.0, 85.0)

    monkeypatch.setattr(compare, "measured", measured)
    code, printed = compared(words, "--rows", "jcl", "moco-v2")
    assert code == f"1 of 2 runs failed: jcl, seed 0: {log} ends with: Error: no good."
    assert list(json.loads(file.read_text())["rows"]) == ["moco-v2"]
    assert "| MoCo v2 | 80.00 % |" in printed and "JCL" not in printed


@pytest.fixture
def measured_before(compare, words, tmp_path, monkeypatch):
    """A file with a result of JCL by these words."""
    monkeypatch.setattr(sys, "argv", ["compare.py", *words])
    arguments = compare.parse_arguments()
    found = compare.header_of(arguments)
    settings = compare.of_the_row(compare.settings_of(compare.ROWS["jcl"], 0, arguments))
    found["rows"]["jcl"] = row_of({"0": result(80.0, 85.0, keys=5)}, settings=settings)
    file = tmp_path / "found.json"
    file.write_text(json.dumps(found))
    return file


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--epochs 11", "epochs = 10 instead of 11"),
        ("--recipe folder", "recipe = demo instead of folder"),
        ("--set train.weight_decay=0.1", "train.weight_decay = nothing instead of 0.1"),
        ("--set method.queue_size=65", "method.queue_size = 64 instead of 65"),
    ],
)
@pytest.mark.parametrize("row", ["jcl", "multi-key"])
def test_other_settings_are_not_mixed_in(measured_before, words, compared, nothing_runs, more, message, row):
    before = measured_before.read_bytes()
    code, printed = compared(words, "--rows", row, *more.split())
    assert message in code and str(measured_before) in code and printed == ""
    assert measured_before.read_bytes() == before


def test_a_recipe_that_has_changed_since_is_noticed(measured_before, words, compared, nothing_runs):
    found = json.loads(measured_before.read_text())
    found["rows"]["jcl"]["settings"] |= {"views.min_scale": 0.5, "train.long_gone": 1}
    measured_before.write_text(json.dumps(found))
    code, _ = compared(words, "--rows", "jcl")
    assert "results of jcl with views.min_scale = 0.5 instead of 0.8;" in code


def test_a_setting_that_came_since_had_what_is_usual(
    measured_before, words, compared, nothing_runs, monkeypatch, compare
):
    found = json.loads(measured_before.read_text())
    del found["rows"]["jcl"]["settings"]["method.num_queries"]
    measured_before.write_text(json.dumps(found))
    assert compared(words, "--rows", "jcl")[0] == 0
    changed = compare.Row("jcl", "JCL", "jcl", ("method.num_queries=2",))
    monkeypatch.setitem(compare.ROWS, "jcl", changed)
    assert "method.num_queries = 1 instead of 2" in compared(words, "--rows", "jcl")[0]


def test_other_images_are_not_mixed_in(measured_before, words, compared, nothing_runs, tmp_path):
    other = tmp_path / "other.npz"
    np.savez(other, x_train=drawn_pixels(12, seed=5), y_train=np.arange(12) % 2)
    code, _ = compared([str(other), *words[1:]], "--rows", "jcl")
    assert "has results on other images" in code


def test_the_same_images_may_lie_elsewhere(measured_before, words, compared, nothing_runs, tmp_path, npz):
    elsewhere = tmp_path / "elsewhere.npz"
    elsewhere.write_bytes(npz.read_bytes())
    code, printed = compared([str(elsewhere), *words[1:]], "--rows", "jcl")
    assert code == 0 and "| JCL, M' = 5 | 80.00 % |" in printed


def test_a_run_begun_otherwise_is_not_gone_on_with(compare, words, compared, nothing_runs, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["compare.py", *words, "--epochs", "11"])
    other = compare.settings_of(compare.ROWS["jcl"], 0, compare.parse_arguments())
    folder = tmp_path / "out/jcl-0"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "settings.yaml").write_text(settings_text(other))
    code, _ = compared(words, "--rows", "jcl")
    assert f"{folder} holds a run with train.epochs = 11 instead of 10" in code


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"runs": []}', "holds no comparison"),
        ('{"recipe": "demo", "epochs": 10, "set": null, "images": {}, "rows": {}}', "holds no comparison"),
        ('{"recipe": "demo", "epochs": 10, "set": {}, "images": {}, "rows": {"jcl": {}}}', "holds no comparison"),
        (
            '{"recipe": "demo", "epochs": 10, "set": {}, "images": {}, '
            '"rows": {"jcl": {"words": "JCL", "settings": {}, "seeds": []}}}',
            "holds no comparison",
        ),
        (
            '{"recipe": "demo", "epochs": 10, "set": {}, "images": {}, '
            '"rows": {"jcl": {"words": "JCL", "method": "jcl", "settings": {}, "seeds": {"0": {}}}}}',
            "holds no comparison",
        ),
        ('{"recipe": "de', "restore it from a copy, or begin another with --json"),
    ],
)
def test_a_file_of_another_kind_or_half_a_file_is_left_alone(words, compared, nothing_runs, tmp_path, content, message):
    file = tmp_path / "found.json"
    file.write_text(content)
    code, _ = compared(words)
    assert message in code and "remove it" not in code and file.read_text() == content


def test_a_file_that_cannot_be_written_is_told_before_anything_is_trained(words, compared, nothing_runs):
    code, _ = compared(words, "--json", "/proc/found.json")
    assert "/proc/found.json could not be written" in code


@pytest.mark.parametrize("setting", ["train.epochs=3", "method.name=jcl", "method.covariance_scale=1"])
def test_what_rows_decide_cannot_be_set(words, compared, nothing_runs, setting):
    assert compared(words, "--set", setting)[0] == 2


@pytest.mark.parametrize("at_once", [1, 3])
def test_so_many_runs_share_the_device_as_are_allowed_to(compare, words, compared, tmp_path, monkeypatch, at_once):
    going, most = set(), []

    def measured(row, seed, arguments, processes):
        going.add(row.name)
        for _ in range(2):
            most.append(len(going))
            yield processes.start([sys.executable, "-S", "-c", ""], tmp_path / f"{row.name}.txt")
        going.remove(row.name)
        return result(80.0, 85.0)

    monkeypatch.setattr(compare, "measured", measured)
    code, printed = compared(words, "--at-once", str(at_once))
    assert code == 0 and max(most) == at_once
    assert list(json.loads((tmp_path / "found.json").read_text())["rows"]) == list(compare.ROWS)
    assert printed.count("| 80.00 % | 85.00 % |") == len(compare.ROWS)


def test_results_that_come_at_the_same_moment_are_both_kept(compare, words, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["compare.py", *words])
    arguments = compare.parse_arguments()
    header, read = compare.header_of(arguments), compare.kept

    def kept(*inputs):
        found = read(*inputs)
        time.sleep(0.2)  # in which the other one reads too, unless it waits
        return found

    monkeypatch.setattr(compare, "kept", kept)
    row, figures = compare.ROWS["jcl"], result(80.0, 85.0)
    threads = [
        threading.Thread(target=compare.keep, args=(row, seed, figures, arguments, deepcopy(header)))
        for seed in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(json.loads((tmp_path / "found.json").read_text())["rows"]["jcl"]["seeds"]) == ["0", "1"]


@pytest.mark.faults  # for its length: six processes start
def test_a_search_on_training_images_with_rows_of_ones_own(compare, words, compared, tmp_path, npz, monkeypatch):
    """Two at a time; the second call has the first one's variant in its table and does nothing again."""
    monkeypatch.setattr(importlib.import_module("held_out"), "HELD_OUT", 4)
    words = [*words, "--held-out", "--at-once", "2", "--epochs", "1", "--set", "record.knn_every=1"]
    first = ["--variant", "low", "jcl train.lr=0.01", "--variant", "high", "moco-v2 train.lr=0.02 method.num_queries=2"]
    code, printed = compared(words, *first)
    assert code == 0
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert sorted(rows) == ["high", "low"]
    assert (rows["low"]["settings"]["train.lr"], rows["high"]["settings"]["train.lr"]) == (0.01, 0.02)
    found = rows["high"]["seeds"]["0"]
    assert (found["num_queries"], found["num_keys"]) == (2, 1)
    assert found["seconds"] is None and found["images_per_second"] is None  # they shared the device
    assert "| moco-v2 train.lr=0.02 method.num_queries=2 |" in printed and "| not known | not known |" in printed
    assert "training images that were held out" in printed
    with np.load(npz) as whole, np.load(tmp_path / "out/held-out.npz") as split:
        assert len(split["x_test"]) == 4
        assert len(split["x_train"]) + 4 == len(whole["x_train"])
    code, printed = compared([word if word != "2" else "1" for word in words], "--rows", "moco-v2")
    assert code == 0
    assert "| jcl train.lr=0.01, M' = 5 |" in printed and "| MoCo v2 |" in printed
    alone = json.loads((tmp_path / "found.json").read_text())["rows"]["moco-v2"]["seeds"]["0"]
    assert 0 < alone["pretrain"]["seconds"] < alone["seconds"] < PATIENCE and alone["images_per_second"] > 0
    assert 0 < alone["seconds_of_first_steps"] <= alone["pretrain"]["seconds"]


def test_a_variant_of_other_settings_is_not_mixed_in(measured_before, words, compared, nothing_runs):
    found = json.loads(measured_before.read_text())
    found["rows"]["mine"] = found["rows"].pop("jcl") | {"words": "jcl"}
    measured_before.write_text(json.dumps(found))
    code, _ = compared(words, "--variant", "mine", "jcl train.lr=0.5")
    assert "results of mine with train.lr = " in code and "instead of 0.5" in code


@pytest.mark.parametrize(
    "variant", [("jcl", "jcl train.lr=1"), ("a/b", "jcl"), ("..", "jcl"), ("mine", "moco-v9 train.lr=1"), ("mine", "")]
)
def test_variants_without_a_name_or_a_method_are_refused(words, compared, nothing_runs, variant):
    assert compared(words, "--variant", *variant)[0] == 2


def test_two_variants_of_one_name_are_refused(words, compared, nothing_runs):
    """Both would be trained in one folder, and the second would have the first one's figures."""
    assert compared(words, "--variant", "mine", "jcl train.lr=0.1", "--variant", "mine", "jcl train.lr=0.3")[0] == 2


@pytest.mark.parametrize(
    "setting", ["train.seed=1", "data.location=other.npz", "train.device=cuda", "method.name=jcl", "views.image_size=8"]
)
def test_a_variant_is_what_its_words_say(words, compared, nothing_runs, setting):
    """--set has the image size, and would win."""
    assert compared(words, "--variant", "mine", f"jcl {setting}")[0] == 2


def test_runs_in_the_place_of_a_file_are_refused(words, compared, nothing_runs, npz):
    assert compared(words, "--out", str(npz))[0] == 2


def test_means_spreads_costs_and_leads(compare):
    many, twice = {"keys": 5, "seconds": None}, {"epochs": 40}
    found = {
        "epochs": 20,
        "rows": {
            "mine": row_of({"7": result(99, 99, **many)}, "multi-key train.lr=1"),
            "moco-v2": row_of({"2": result(80, 90), "0": result(77, 90, seconds=13.0), "5": result(10, 10)}, "MoCo v2"),
            "jcl": row_of({"0": result(80, 90, **many), "1": result(82, 91, **many), "2": result(87, 92, **many)}),
            "moco-v2-twice": row_of(
                {"1": result(83, 90.5, **twice), "3": result(3, 0.5, seconds=None, **twice)},
                "MoCo v2, twice the epochs",
            ),
        },
    }
    lines = compare.table(found).splitlines()
    assert lines[2:6] == [
        "| JCL, M' = 5 | 83.00 ± 3.61 % | 91.00 ± 1.00 % | not known | 5,000 | 5.00 GiB | 2.00 | 3 |",
        "| MoCo v2 | 55.67 ± 39.58 % | 63.33 ± 46.19 % | 11 s | 1,000 | 1.00 GiB | 1.00 | 3 |",
        "| MoCo v2, twice the epochs "
        "| 43.00 ± 56.57 % | 45.50 ± 63.64 % | 10 s (1 of 2) | 1,000 | 1.00 GiB | 2.00 | 2 |",
        "| multi-key train.lr=1, M' = 5 | 99.00 % | 99.00 % | not known | 5,000 | 5.00 GiB | 2.00 | 1 |",
    ]
    assert len({line.count("|") for line in lines[:6]}) == 1
    assert lines[7:9] == [
        "- JCL minus MoCo v2, in points: kNN +5.00 ± 2.83, linear +1.00 ± 1.41 (paired by seed: 0, 2)",
        "- JCL minus MoCo v2, twice the epochs, in points: kNN -1.00, linear +0.50 (seed 1)",
    ]
    assert lines[10] == "Measured on H200, torch 2.11, 2026-11-20; H200, torch 2.11, 2026-11-40."


@pytest.mark.parametrize(("method", "compute"), [("multi-key", "2.00"), ("multi-key-backprop", "4.50")])
def test_keys_with_gradients_cost_what_queries_do(compare, method, compute):
    row = row_of({"0": result(80, 90, keys=5)}, method, {"method.name": method})
    assert f"| {compute} | 1 |" in compare.table({"epochs": 20, "rows": {"mine": row}})


def test_rows_that_are_ahead_are_told_too(compare):
    rows = {
        "jcl": row_of({"0": result(80, 90)}),
        "multi-key": row_of({"0": result(81, 92)}, "vanilla multi-key"),
        "mine": row_of({"0": result(85, 90)}, "jcl train.lr=1"),
    }
    assert compare.table({"epochs": 20, "rows": rows}).splitlines()[6:8] == [
        "- JCL minus vanilla multi-key, in points: kNN -1.00, linear -2.00 (seed 0)",
        "- JCL minus jcl train.lr=1, in points: kNN -5.00, linear +0.00 (seed 0)",
    ]


def test_without_anything_measured_there_is_no_lead(compare):
    assert "minus" not in compare.table({"epochs": 20, "rows": {}})


def test_the_figure_names_the_lead_and_draws_every_row(compare, tmp_path, capsys, monkeypatch):
    figure = importlib.import_module("comparison_figure")
    found = {"recipe": "cifar10", "epochs": 20, "rows": {}}
    found["rows"]["jcl"] = row_of({"0": result(80.0, 85.0, keys=5), "1": result(82.0, 85.0, keys=5)})
    found["rows"]["moco-v2"] = row_of({"0": result(83.5, 80.0)}, "MoCo v2")
    found["rows"]["mine"] = row_of({"0": result(70.0, 80.0)}, "jcl train.lr=0.3")
    assert figure.title_of(found, found["rows"])[0] == "cifar10, 20 epochs: MoCo v2 leads JCL by 2.5 points"
    assert figure.title_of(found, found["rows"])[1].startswith("1 or 2 seeds a row")
    assert figure.label("jcl", found) == "JCL, M' = 5: 81.0 %"

    file, picture = tmp_path / "found.json", tmp_path / "figure.png"
    file.write_text(json.dumps(found))
    monkeypatch.setattr(sys, "argv", ["comparison_figure.py", str(file), "-o", str(picture)])
    figure.main()
    assert picture.read_bytes().startswith(b"\x89PNG") and str(picture) in capsys.readouterr().out

    file.write_text(json.dumps({"rows": {}}))
    with pytest.raises(SystemExit, match="holds no results of a comparison"):
        figure.main()
