"""The command line as a whole: help, results as tables and JSON, and one sentence for each thing that can be wrong."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import jcl
from jcl.cli import app
from jcl.cli.printing import write_json
from jcl.cli.train import run_table
from jcl.commands.run import Run
from jcl.errors import RunError
from jcl.settings.commands import ReportOptions
from small_runs import drawn_pixels, snapshot, write_image_folder

COMMANDS = [
    "pretrain",
    "resume",
    "demo",
    "compare",
    "knn",
    "linear",
    "finetune",
    "detect",
    "detect-table",
    "recipes",
    "check",
    "shard",
    "embed",
    "neighbours",
    "views",
    "report",
    "ablate",
    "ablate-cell",
    "distribution",
    "bound",
    "cost",
    "import",
    "export",
]


def test_version(call):
    assert call("--version") == (0, f"jcl {jcl.__version__}\n", "")


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_every_command_has_help(call, command):
    code, out, err = call(*([command] if command else []), "--help")
    assert code == 0 and err == "" and "Usage" in out
    if command is None:
        assert all(name in out for name in COMMANDS)
        assert all(group in out for group in ("Train", "Evaluate", "Data"))


def test_every_command_is_listed_here():
    assert sorted(COMMANDS) == sorted(info.name or info.callback.__name__ for info in app.registered_commands)


def test_help_does_not_wait_for_pytorch():
    program = (
        "import sys; sys.argv = ['jcl', '--help']\n"
        "from jcl.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'torchvision', 'numpy', 'matplotlib'} & sys.modules.keys()\n"
        "print(sorted(heavy), file=sys.stderr)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stderr.strip() == "[]" and "pretrain" in ended.stdout


def test_completion_for_bash():
    environment = os.environ | {"_JCL_COMPLETE": "source_bash"}
    command = [sys.executable, "-c", "import sys; sys.argv = ['jcl']; from jcl.cli import app; app(prog_name='jcl')"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 0 and "_JCL_COMPLETE=complete_bash" in ended.stdout and "complete " in ended.stdout


def test_missing_inputs_of_other_commands(refused, npz, tmp_path):
    assert "no run folder" in refused("resume", tmp_path / "missing")
    assert "no run or weights file" in refused("knn", tmp_path / "missing")
    assert "no recipe called" in refused("recipes", "cifar")
    assert "There is no folder" in refused("check", tmp_path / "missing")


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("finetune.json", "`jcl finetune --resume "),
        ("detect.json", "`jcl detect --resume "),
        ("probe.json", "linear probe"),
        ("study.json", "`jcl ablate`"),
    ],
)
def test_resume_names_the_command_that_continues_other_trainings(refused, tmp_path, file, said):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / file).write_text("{}")
    assert said in refused("resume", tmp_path / "out")


def test_results_of_other_commands_do_not_hide_a_run(call, pretrained):
    shutil.copytree(pretrained, "run")
    Path("run/finetune.json").write_text("{}")
    code, _, err = call("resume", "run")
    assert code == 0 and "has finished" in err


def test_the_table_of_a_run_has_the_values_of_the_json(call, pretrained):
    code, out, _ = call("resume", pretrained, "--json", "figures.json")
    figures = json.loads(Path("figures.json").read_text())
    rows = {
        cells[0]: cells[1] for line in out.splitlines() if len(cells := re.findall(r"[│┃] +(.*?) +(?=[│┃])", line)) == 2
    }
    assert code == 0 and out.splitlines()[0].strip() == "jcl on small.npz"
    low, high = figures["knn_top1_interval_low"], figures["knn_top1_interval_high"]
    assert rows["kNN top-1"] == f"{figures['knn_top1']:.1f} %" and rows["95 % interval"] == f"{low:.1f} to {high:.1f} %"
    assert rows["contrastive accuracy"] == f"{figures['contrastive_accuracy']:.1f} %"
    assert re.fullmatch(r"[\d.]+ (MiB|GiB)", rows["peak memory"]) and re.fullmatch(r"[\d.]+ s", rows["training time"])
    assert rows["steps"] == "4" and "ranks" not in rows and not any("_" in name for name in rows)
    assert max(map(len, out.splitlines()[:-1])) <= 60


def test_a_finished_run_has_nothing_to_resume(call, pretrained):
    before = snapshot(pretrained)
    code, out, err = call("resume", pretrained, "--json", "figures.json")
    assert code == 0 and "nothing to resume" in err and "kNN top-1" in out
    assert json.loads(Path("figures.json").read_text()) == Run(pretrained).summary
    assert snapshot(pretrained) == before


def test_knn_on_a_run_and_on_weights(call, pretrained, npz, refused):
    code, out, _ = call("knn", pretrained, "-k", 5, "-k", 1, "--json", "knn.json")
    figures = json.loads(Path("knn.json").read_text())
    assert code == 0 and "The bank has 34 images. Tested on 10 images." in out
    assert figures["knn_top1"] == figures["knn_top1_k5_t0.1"] == pytest.approx(Run(pretrained).summary["knn_top1"])
    of_each = {f"knn_top{top}_k{k}_t0.1" for top in (1, 5) for k in (5, 1)}
    of_each |= {"untrained_knn_top1_k5_t0.1", "untrained_knn_top1_k1_t0.1"}
    compared = {"knn_top1_interval_low", "knn_top1_interval_high", "chance_top1", "untrained_knn_top1"}
    compared |= {"beats_chance", "beats_untrained"}
    about = {"test_images", "test_held_out", "unseen_class_images", "classes", "finished"}
    about |= {"knn_k", "knn_temperature", "data"}
    assert (figures["knn_k"], figures["data"]) == (5, str(npz))
    assert set(figures) == {"knn_top1", "knn_top5"} | about | of_each | compared
    assert figures["untrained_knn_top1"] == Run(pretrained).metrics[0]["knn_top1"] and figures["chance_top1"] == 40
    assert figures["test_images"] == 10 and figures["unseen_class_images"] == 0
    weights = pretrained / "backbone.safetensors"
    assert call("knn", weights, npz, "-k", 5, "--json", "again.json")[0] == 0
    assert json.loads(Path("again.json").read_text())["knn_top1"] == figures["knn_top1"]
    assert re.search(r"│ 5 +│ 0.1 ", call("knn", pretrained, npz)[1]), "as in the run"
    shutil.copytree(pretrained, "run")
    settings = Path("run/settings.yaml")
    settings.write_text(settings.read_text().replace("knn_temperature: 0.1", "knn_temperature: 0.5"))
    assert re.search(r"│ 5 +│ 0.5 ", call("knn", "run")[1]), "as in the run"
    shutil.copy(npz, "other.npz")
    assert re.search(r"│ 3 +│ 0.1 ", call("knn", "run", "other.npz")[1]), "as usual for other data"
    out = call("knn", weights, npz)[1]
    assert re.search(r"│ 3 +│ 0.1", out), "a tenth of 34 images vote where nothing is said"
    assert "weights file" in refused("knn", weights)
    assert "0 for -k" in refused("knn", pretrained, "-k", 0, exit_code=2)
    assert "0 for --temperature" in refused("knn", pretrained, "--temperature", 0, exit_code=2)


@pytest.mark.parametrize("option", [["--batch-size", "0"], ["--workers", "-1"]])
def test_knn_options_out_of_range(call, pretrained, option):
    code, _, err = call("knn", pretrained, *option)
    least = {"--batch-size": 1, "--workers": 0}[option[0]]
    problem = f"Invalid value {option[1]} for {option[0]}: must be at least {least}."
    assert (code, err) == (2, f"Error: {problem} See `jcl knn --help`.\n")


def test_knn_needs_labels(refused, pretrained, tmp_path):
    np.savez(tmp_path / "bare.npz", x_train=drawn_pixels(20))
    assert "has no labels" in refused("knn", pretrained, tmp_path / "bare.npz")


def test_the_table_of_a_run_has_units():
    console = Console(file=io.StringIO(), width=100)
    figures = {"peak_memory_bytes": 3 * 2**30, "seconds": 100.0, "steps": 12_000, "seed": 12_345}
    console.print(run_table({"method": "jcl", "data": "photos"} | figures))
    rows = [[cell.strip() for cell in line.split("│")[1:3]] for line in console.file.getvalue().splitlines()]
    assert ["peak memory", "3.00 GiB"] in rows and ["training time", "1 min 40 s"] in rows
    assert ["steps", "12,000"] in rows and ["seed", "12345"] in rows


def test_demo_refuses_a_file_as_its_folder(call, tmp_path):
    (tmp_path / "file").write_text("mine")
    code, _, err = call("demo", "--out", tmp_path / "file")
    assert code == 1 and "not an empty folder" in err
    assert (tmp_path / "file").read_text() == "mine"


def test_results_that_cannot_be_written_are_noticed_first(refused, pretrained, tmp_path):
    (tmp_path / "file").write_text("mine")
    said = refused("knn", pretrained, "--json", tmp_path / "file" / "knn.json", exit_code=2)
    assert said.endswith(f"{tmp_path / 'file'} is not a folder that you may write to.")
    assert (tmp_path / "file").read_text() == "mine"
    (tmp_path / "link").symlink_to(tmp_path / "missing" / "folder")
    said = refused("knn", pretrained, "--json", tmp_path / "link" / "knn.json", exit_code=2)
    assert said.endswith(f"{tmp_path / 'link'} is not a folder that you may write to.")


def test_a_full_disk_leaves_the_old_results(tmp_path, no_room_for):
    file = tmp_path / "knn.json"
    file.write_text("old")
    no_room_for(file)
    with pytest.raises(RunError, match="could not be written: No space left"):
        write_json({"knn_top1": 1.0}, file)
    assert file.read_text() == "old"


def test_results_replace_only_results(refused, call, npz, pretrained):
    copy = Path("copy.npz")
    copy.write_bytes(Path(npz).read_bytes())
    assert "already exists" in refused("check", copy, "--json", copy)
    assert "already exists" in refused("knn", pretrained, "--json", Path(pretrained) / "settings.yaml")
    assert "must end in .html" in refused("report", pretrained, "-o", Path(pretrained) / "settings.yaml")
    for foreign in ('{"images": [{"id": 1}]}', '{"editor": {"tabSize": 4}}', "[1, 2]", "notes, not JSON"):
        Path("mine.json").write_text(foreign)
        assert "does not hold results of jcl" in refused("check", copy, "--json", "mine.json")
    for free in ("", "{}"):
        Path("old.json").write_text(free)
        for _ in range(2):  # the second time over figures
            assert call("check", copy, "--json", "old.json")[0] == 0
        assert "train_images" in Path("old.json").read_text()


@pytest.mark.parametrize("arguments", [["knn", "a run", ""], ["pretrain", "photos", "--out="], ["check", ""]])
def test_an_empty_argument_is_not_the_current_folder(refused, arguments):
    write_image_folder(Path("photos"))
    assert "is empty" in refused(*arguments)


def test_options_with_an_equals_sign_expand_the_home_folder(call, npz, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ReportOptions(runs=["~/a", "b"]).runs == (tmp_path / "a", Path("b"))
    code, _, _ = call("check", npz, "--json=~/found.json")
    assert code == 0 and (tmp_path / "found.json").is_file() and not Path("~").exists()


def test_results_do_not_replace_files_of_a_run(refused, npz, pretrained, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(pretrained, run)
    (run / "probe.json").write_text('{"lr": 30.0}')
    for name in ("summary.json", "probe.json"):
        assert f"{name} is the run's own file" in refused("knn", run, "--json", run / name)
    (run / "summary.json").unlink()  # of an unfinished run, which would then pass for a finished one
    assert "summary.json is the run's own file" in refused("knn", run, "--json", run / "summary.json")
    assert "takes the name of a file" in refused("knn", run, "--json", "-")


def test_a_terminal_without_unicode_gets_all_results(call, pretrained, monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    assert call("bound", pretrained, "--images", 4, "--keys", 20)[0] == 0
    stream.flush()
    assert b"sd: of q\\xb7k/t" in stream.buffer.getvalue()
